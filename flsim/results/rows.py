"""What an evaluation says: one number per (run, round, metric, canary)."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import pandas as pd
import pyarrow as pa

SCHEMA = pa.schema(
    [
        ("run", pa.string()),
        ("round", pa.int64()),
        ("metric", pa.string()),
        ("canary", pa.string()),
        ("value", pa.float64()),
    ]
)
KEY = ["run", "round", "metric", "canary"]
IDENTITY = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}")
DIVERGED = "diverged"  # the only metric of a model that is not finite; 1


def identity_of(config: str, corpus: str) -> str:
    """What rows call a run: the first 16 digits of the digests of its settings (with the seed) and of its corpus."""
    return f"{config[:16]}-{corpus[:16]}"


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        run: the run's identity, see `identity_of`; of a foreign model its name.
        round: number of completed rounds of the evaluated model; of central training, steps.
        metric: of each canary: ``log_perplexity`` (nats), ``rank``, ``exposure`` (bits), ``rs``, ``bs`` (memorized: 1);
            of the model: ``references`` (|R|), ``accuracy``, ``accuracy_all_tokens`` (fractions), ``perplexity``; where
            training added noise to users' updates also ``delta`` and, for each convention that is reported,
            ``epsilon NAME``; where it added noise to records' gradients ``record delta`` and ``record epsilon NAME``;
            of a model that is not finite ``diverged`` (1) and nothing else.
        canary: its id; empty for a metric of the model.
        value: the number.
    """

    run: str
    round: int
    metric: str
    canary: str
    value: float


def frame(rows: Iterable[Row]) -> pd.DataFrame:
    """Rows as a table with the columns of `SCHEMA`."""
    return pd.DataFrame([asdict(row) for row in rows], columns=SCHEMA.names).astype(
        {"round": "int64", "value": "float64"}
    )
