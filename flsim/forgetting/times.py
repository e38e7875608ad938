"""Forgetting times: after how many rounds since its last use is a canary, or a group of them, forgotten for good.

Jagielski et al. (2022), Definition 3.1: an example is (A, alpha, k)-forgotten if the success of attack A is at most
alpha k steps after the example's last use. A time that training did not last to see is censored: it is known to be
above some k.
"""

import math
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
SIGNIFICANCE = 0.05  # p-value of ranks up to which a canary counts as remembered: log2 20 = 4.32 bits of exposure


def grid(longest: int) -> list[int]:
    """Return 0, 1, 2, 5, 10, 20, 50, ... up to three quarters of `longest`, and `longest` itself.

    >>> grid(30)
    [0, 1, 2, 5, 10, 20, 30]
    """
    steps = [digit * 10**power for power in range(len(str(longest))) for digit in (1, 2, 5)]
    return sorted({0, longest, *(step for step in steps if step <= 0.75 * longest)})


def reached(since: Floats, canaries: Ints) -> int | None:
    """Return the largest k that at least half of the canaries were evaluated at or after; None without evaluations.

    Beyond it a group would be measured on a few canaries, those whose last use was early.

    Args:
        since: rounds since last use of each evaluation, float64 [n]; NaN before it.
        canaries: the canary of each evaluation, int64 [n].
    """
    known = np.isfinite(since)
    if not known.any():
        return None
    last = np.full(int(canaries.max()) + 1, -1.0)
    np.maximum.at(last, canaries[known], since[known])
    present = np.sort(last[np.unique(canaries[known])])
    return int(present[(len(present) - 1) // 2])


def evaluated_by(since: Floats, canaries: Ints, ks: list[int]) -> Ints:
    """Return at which k of a grid each evaluation counts, int64 [n]; -1 for those that count nowhere.

    An evaluation counts at the first k that is not below its rounds since last use. Of several evaluations of a canary
    at one k the last counts. So success at k is that of k rounds or fewer: it is not flattered.

    Args:
        since: rounds since last use of each evaluation, float64 [n]; NaN before it.
        canaries: the canary of each evaluation, int64 [n].
        ks: the grid, ascending.
    """
    place = np.full(len(since), len(ks), np.int64)
    known = np.isfinite(since)
    place[known] = np.searchsorted(ks, since[known])
    at = np.append(np.asarray(ks, np.int64), -1)[place]
    last: dict[tuple[int, int], int] = {}
    for index in np.lexsort((since, canaries)).tolist():
        last[int(canaries[index]), int(at[index])] = index
    counts = np.zeros(len(since), bool)
    counts[list(last.values())] = True
    return np.where(counts, at, -1)


def forgetting_time(ks: list[int], bounds: list[float], alpha: float) -> int | None:
    """Return T(alpha): the least k from which on all upper bounds of the success are at most alpha; None if censored.

    A claim that is too early is wrong about the last k whose true success is above alpha. So at most 5% of claims are,
    although k is searched for.

    Args:
        ks: evaluated k, ascending.
        bounds: one-sided 95% upper bound of the success at each; NaN where there were no trials.
        alpha: success that counts as forgotten.

    >>> forgetting_time([0, 1, 2, 5], [0.9, 0.58, 0.7, 0.55], 0.6)
    5
    """
    time = None
    for k, bound in zip(reversed(ks), reversed(bounds), strict=True):
        if not bound <= alpha:  # nor is NaN
            return time
        time = k
    return time


@dataclass(frozen=True)
class CanaryTime:
    """The time after which a canary's rank is never again surprising.

    Attributes:
        rounds: rounds since last use; the largest evaluated k where the time is censored.
        is_censored: whether the canary was not forgotten by then.
    """

    rounds: int
    is_censored: bool


def canary_time(since: Floats, p: Floats) -> CanaryTime | None:
    """Return the first evaluated k from which on the p-value of the ranks stays above 0.05; None without evaluations.

    A canary that was never memorized is forgotten at its first evaluation, as Definition 3.1 has it.

    Args:
        since: rounds since last use of each evaluation, float64 [n], ascending; NaN before it.
        p: exact p-values of its ranks, float64 [n], NaN where it was not ranked; see `flsim.audits.ranks.p_values`.
    """
    is_known = np.isfinite(since) & np.isfinite(p)
    since, p = since[is_known], p[is_known]
    if not len(since):
        return None
    remembered = np.flatnonzero(p <= SIGNIFICANCE)
    first = int(remembered[-1]) + 1 if len(remembered) else 0
    if first == len(since):
        return CanaryTime(int(since[-1]), is_censored=True)
    return CanaryTime(int(since[first]), is_censored=False)


def median_time(times: list[CanaryTime]) -> CanaryTime | None:
    """Return the time by which half of the canaries are forgotten (Kaplan and Meier, 1958); None without canaries."""
    if not times:
        return None
    survival = scipy.stats.ecdf(_censored(times)).sf
    below = np.flatnonzero(survival.probabilities <= 0.5 + 1e-12)
    if not len(below):
        return CanaryTime(max(time.rounds for time in times), is_censored=True)
    return CanaryTime(int(survival.quantiles[below[0]]), is_censored=False)


def log_rank_p(one: list[CanaryTime], other: list[CanaryTime]) -> float:
    """Return the two-sided p-value that two groups of canaries have the same law of times (Mantel, 1966).

    It is NaN where a group is empty, and 1 where no canary of either was forgotten, or all at once.
    """
    if not one or not other:
        return math.nan
    with np.errstate(invalid="ignore"):  # a variance of zero, 0 / 0
        p = float(scipy.stats.logrank(_censored(one), _censored(other)).pvalue)
    return 1.0 if math.isnan(p) else p


def _censored(times: list[CanaryTime]) -> "scipy.stats.CensoredData":
    return scipy.stats.CensoredData.right_censored(
        [time.rounds for time in times], [time.is_censored for time in times]
    )
