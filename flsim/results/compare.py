"""Two runs over the same canaries, compared canary by canary.

The runs plant the same phrases, so each canary is its own control: every statistic is about the differences.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from flsim.errors import InputError
from flsim.results.store import RunResults, refuse_two_points

ROUNDING = 9  # decimals of a bit: far below any exposure's resolution, so that equal differences tie


@dataclass(frozen=True)
class PairedExposure:
    """Exposure of each canary in run a less that in run b.

    Attributes:
        a, b: the runs' settings, each followed by the run's name.
        round_a, round_b: the evaluated rounds.
        n: number of canaries.
        mean_difference: mean over canaries, in bits; positive where a exposes them more.
        ci_low, ci_high: 95% confidence interval of the mean difference, from Student's t.
        p_wilcoxon: two-sided p-value of the Wilcoxon signed-rank test.
        p_t: two-sided p-value of the paired t test.
    """

    a: str
    b: str
    round_a: int
    round_b: int
    n: int
    mean_difference: float
    ci_low: float
    ci_high: float
    p_wilcoxon: float
    p_t: float

    def __str__(self) -> str:
        return (
            f"Exposure of {self.n} canaries, paired:\n"
            f"  a: {self.a}, round {self.round_a}\n"
            f"  b: {self.b}, round {self.round_b}\n"
            f"  mean of a - b: {self.mean_difference:+.2f} bits (95% CI {self.ci_low:+.2f} to {self.ci_high:+.2f})\n"
            f"  p = {self.p_wilcoxon:.2g} (Wilcoxon signed-rank), p = {self.p_t:.2g} (paired t), two-sided"
        )


def paired_exposure(
    a: RunResults, b: RunResults, round: int | None = None, epoch: float | None = None
) -> PairedExposure:
    """Compare two runs' exposures canary by canary.

    Zero differences, which are common where both runs reach the ceiling log2(|R|), take part in the ranking and then
    drop out (Pratt, 1959; scipy's ``zero_method="pratt"``, its more conservative choice). Differences are rounded to
    1e-9 bits first, as scipy advises, so that rounding error breaks no tie. The t interval and both tests take
    canaries as independent, and say nothing about other seeds of the training.

    Args:
        a: one run.
        b: another over the same canaries.
        round: the evaluated round of both; default each run's last, as in a table.
        epoch: instead of a round: after how many epochs.

    Raises:
        InputError: fewer than two canaries, other canaries, another |R|, a run that diverged, one not evaluated there,
            or both a round and an epoch.
    """
    refuse_two_points(round, epoch)
    _refuse_other_canaries(a, b)
    round_a, round_b = _round_of(a, round, epoch), _round_of(b, round, epoch)
    references = a.of_model("references", round_a), b.of_model("references", round_b)
    if references[0] != references[1] or references[0] is None:
        sizes = " and ".join("unknown" if size is None else f"{size:.0f}" for size in references)
        raise InputError(
            f"runs {a.name} and {b.name}: ranked among different numbers of references ({sizes}), so their exposures "
            f"do not compare; evaluate both with the same evaluation.references"
        )
    joined = pd.concat([_exposure(a, round_a), _exposure(b, round_b)], axis=1, join="inner", keys=["a", "b"])
    differences = np.round((joined["a"] - joined["b"]).to_numpy(), ROUNDING)
    low, high = t_interval(differences)
    return PairedExposure(
        a=f"{a.setting} ({a.name})",
        b=f"{b.setting} ({b.name})",
        round_a=round_a,
        round_b=round_b,
        n=len(differences),
        mean_difference=float(differences.mean()),
        ci_low=low,
        ci_high=high,
        p_wilcoxon=signed_rank_p(differences),
        p_t=paired_t_p(differences),
    )


def t_interval(values: NDArray[np.floating[Any]], confidence: float = 0.95) -> tuple[float, float]:
    """Student's t confidence interval of the mean of float64 [n] values; NaN below two of them."""
    if len(values) < 2:
        return math.nan, math.nan
    half = float(stats.t.ppf((1 + confidence) / 2, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values)))
    return float(values.mean()) - half, float(values.mean()) + half


def paired_t_p(differences: NDArray[np.floating[Any]]) -> float:
    """Two-sided p-value of the t test that float64 [n] differences have mean zero; 1 where all are zero."""
    if not differences.any():
        return 1.0
    # The spread of equal differences is rounding error, which must not become a statistic.
    if np.ptp(differences) == 0:
        return 0.0
    return float(stats.ttest_1samp(differences, 0.0).pvalue)


def signed_rank_p(differences: NDArray[np.floating[Any]]) -> float:
    """Two-sided p-value of the signed-rank test that float64 [n] differences lie symmetric about zero; 1 if all are 0.

    Exact up to 50 differences without ties or zeros and up to 13 with them, else the tie-corrected normal
    approximation.
    """
    if not differences.any():
        return 1.0
    return float(stats.wilcoxon(differences, zero_method="pratt", correction=False, method="auto").pvalue)


def _refuse_other_canaries(a: RunResults, b: RunResults) -> None:
    phrases_a, phrases_b = (
        {canary: tuple(tokens) for canary, tokens in zip(run.roster["canary"], run.roster["tokens"], strict=True)}
        for run in (a, b)
    )
    differing = sorted(c for c in {*phrases_a, *phrases_b} if phrases_a.get(c) != phrases_b.get(c))
    if differing:
        raise InputError(
            f"runs {a.name} and {b.name}: planted different canaries, the first {differing[0]}; compare runs with the "
            f"same corpus, seed and [canaries]"
        )
    if len(phrases_a) < 2:
        raise InputError(f"runs {a.name} and {b.name}: one canary has no spread; plant at least two")


def _round_of(run: RunResults, round: int | None, epoch: float | None) -> int:
    if run.status == "diverged":
        raise InputError(f"run {run.name}: diverged, so there is nothing to compare; lower its learning rate")
    return run.at(round, epoch)


def _exposure(run: RunResults, round: int) -> "pd.Series[float]":
    exposure = run.of_canaries("exposure", round)
    if exposure is None:
        raise InputError(f"run {run.name}, round {round}: exposure was not measured; evaluate that checkpoint again")
    return exposure
