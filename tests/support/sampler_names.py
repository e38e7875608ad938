"""Names of built-in samplers with valid options, for tests of all of them."""

import json
from typing import Any

OPTIONS: dict[str, dict[str, Any]] = {
    "min-separation": {"separation": 1},
    "cyclic-poisson": {"separation": 1},
    "available": {"separation": 1},
    "fedbuff": {"concurrency": 1},
}


def with_valid_options(sampler: str, cohort: int) -> str:
    """Return a built-in sampler's name with options that fit a cohort of this size."""
    options = {"truncated-poisson": {"limit": cohort + 3}, **OPTIONS}.get(sampler)
    return f"{sampler}{json.dumps(options)}" if options else sampler
