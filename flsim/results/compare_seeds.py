"""Comparison over seeds of counts of memorized canaries; for exposure see `flsim.results.worlds`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flsim.base.statistics import sign_flip_p, t_interval
from flsim.measures.quantity import flags
from flsim.results.compare import PairedCounts, counts_of
from flsim.results.pairing import compared_in, paired_canaries
from flsim.results.store import RunResults
from flsim.results.worlds import pairs_of_seeds


@dataclass(frozen=True)
class CountsOverSeeds:
    """Memorized canaries in setting a and in setting b, over the seeds that have a run of both.

    Attributes:
        a, b: means over seeds.
        differences: a - b of each seed.
        ci_low, ci_high: 95% interval of the mean difference, from Student's t over seeds, which treats them as normal.
        NaN
            below two seeds, and if all differences are equal: whole numbers often are, which says nothing of their
            spread.
        p: exact p-value, `flsim.base.statistics.sign_flip_p`; NaN below two seeds.
    """

    a: float
    b: float
    differences: tuple[int, ...]
    ci_low: float
    ci_high: float
    p: float


def counts_over_seeds(
    a: Sequence[RunResults], b: Sequence[RunResults], round: int | None = None, epoch: float | None = None
) -> dict[str, CountsOverSeeds]:
    """Compare the counts of two series seed by seed, for each flag that was measured in all runs.

    Seeds are the independent unit, not canaries: those of one model are memorized or not together.

    Raises:
        InputError: as for `flsim.results.worlds.paired_over_seeds`.
    """
    pairs = [paired_canaries(run_a, run_b, round, epoch).canaries for _, run_a, run_b in pairs_of_seeds(a, b)]
    names = [flag.name for flag in flags(compared_in([*a, *b]))]
    counted = {metric: [counts_of(canaries, metric) for canaries in pairs] for metric in names}
    return {metric: _over([count for count in counts if count]) for metric, counts in counted.items() if all(counts)}


def _over(counts: Sequence[PairedCounts]) -> CountsOverSeeds:
    differences = np.array([count.a - count.b for count in counts])
    low, high = t_interval(differences.astype(float)) if np.ptp(differences) else (math.nan, math.nan)
    return CountsOverSeeds(
        a=float(np.mean([count.a for count in counts])),
        b=float(np.mean([count.b for count in counts])),
        differences=tuple(differences.tolist()),
        ci_low=low,
        ci_high=high,
        p=sign_flip_p(differences.tolist()),
    )
