"""What a run measured whose canaries have given exposures, and differences with their quantities beside each other."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from flsim.results.differences import Pair, differences, to_wide


def measured(level: float) -> dict[str, Sequence[float] | float]:
    """Canary i of 9 has `level` + i / 2 bits; RS has those of 4 bits and more, BS those of 6."""
    bits = [level + index / 2 for index in range(9)]
    memorized = {metric: [float(each >= least) for each in bits] for metric, least in (("rs", 4), ("bs", 6))}
    return {"exposure": bits, **memorized, "references": 10_000, "accuracy": 0.2, "perplexity": 60 - level}


def beside_of(pairs: Sequence[Pair], **point: Any) -> pd.DataFrame:
    return to_wide(differences(pairs, **point))
