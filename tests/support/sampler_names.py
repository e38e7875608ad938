"""Names of built-in samplers with valid options, for tests of all of them."""

import json

from flsim.privacy.sampling import SAMPLERS


def with_valid_options(sampler: str, cohort: int) -> str:
    """Return a built-in sampler's name with options that fit a cohort of this size."""
    options = {"truncated-poisson": {"limit": cohort + 3}}.get(sampler)
    return f"{sampler}{json.dumps(options)}" if options else sampler


def of_one_user() -> list[str]:
    return [with_valid_options(sampler, 1) for sampler in SAMPLERS]
