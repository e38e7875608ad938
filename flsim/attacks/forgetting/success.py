"""Success of attacks on canaries (Jagielski et al., 2022, section 3.2), and forgetting times."""

import math
from typing import NamedTuple

import numpy as np
import pandas as pd
import scipy

from flsim.base.arrays import Flags, Floats
from flsim.base.statistics import AtLevel, roc, share_interval, upper_bound

LEVEL = 0.1  # false-positive rate of the paper's precision
TAIL = 0.05  # level of the one-sided upper bound of a success


def accuracy(members: Floats, others: Floats, chooses: Flags) -> tuple[float, float, int]:
    """Return the balanced accuracy of a threshold that half of the canaries choose and the rest test.

    Then its one-sided 95% upper bound (Clopper and Pearson), and the number of tested arms; NaN without arms. The arms
    of a canary are not independent. However, if harder canaries score higher in both arms or in neither, the variance
    of outcomes is at most that of independent trials with the mean accuracy.
    """
    if not chooses.any():
        return math.nan, math.nan, 0
    threshold = best_threshold(members[chooses], others[chooses])
    correct = int((members[~chooses] > threshold).sum() + (others[~chooses] <= threshold).sum())
    trials = 2 * int((~chooses).sum())
    return (correct / trials, upper_bound(correct, trials, TAIL), trials) if trials else (math.nan, math.nan, 0)


def halves(observed: pd.DataFrame) -> "pd.Series[bool]":
    """Return whether the canary of each row is in the half that chooses thresholds, at all k: every second used one."""
    used = observed[observed["last_use"].notna()]
    chooses = used.groupby(["seed", "run", "canary"], dropna=False).ngroup() % 2 == 0
    return chooses.reindex(observed.index, fill_value=False)


def best_threshold(members: Floats, others: Floats) -> float:
    """Return the largest threshold with the largest balanced accuracy, halfway between two scores or infinite."""
    distinct = np.unique(np.concatenate([members, others]))
    cuts = np.concatenate([[-np.inf], (distinct[:-1] + distinct[1:]) / 2, [np.inf]])
    missed = np.searchsorted(np.sort(members), cuts, side="right")
    passed = np.searchsorted(np.sort(others), cuts, side="right")
    gain = passed * len(members) - missed * len(others)  # integers, so that equal accuracies are exactly equal
    return float(cuts[np.flatnonzero(gain == gain.max())[-1]])


def at_level(members: Floats, others: Floats) -> AtLevel | None:
    """Return the true-positive rate at a false-positive rate of `LEVEL`; None with fewer than ten scores in arm OUT."""
    return None if not len(members) or LEVEL * len(others) < 1 else roc(members, others).at(LEVEL)


def precision_at(at: AtLevel, members: int, others: int) -> tuple[float, float, float]:
    """Return the precision TPR / (TPR + FPR) for equal numbers of members and non-members, with its 95% interval.

    The threshold and its FPR, `LEVEL` if no non-member is above, count as known: the interval is that of the TPR.
    """
    fpr = _rate(at, others)
    estimate, low, high = (tpr / (tpr + fpr) for tpr in (at.tpr, *share_interval(at.detected, members)))
    return estimate, low, high


def heuristic_epsilon(at: AtLevel, others: int) -> float:
    """Return ln(TPR / FPR), at least 0: the paper's heuristic (footnote 2), which is no bound."""
    return max(0.0, math.log(at.tpr / _rate(at, others))) if at.tpr else 0.0


def _rate(at: AtLevel, others: int) -> float:
    return at.alarms / others if at.alarms else at.level


def least_alpha(trials: int) -> float:
    """Return the upper bound at an accuracy of one half, the smallest alpha that so many trials (n canaries) show."""
    return upper_bound(trials // 2, trials, TAIL) if trials else math.nan


# Forgetting times: the number of rounds after which a canary, or a group of canaries, is forgotten.
#
# Jagielski et al. (2022), Definition 3.1: an example is (A, alpha, k)-forgotten if the success of attack A is at most
# alpha k steps after the example's last use. T(alpha) of a group counts from the last use, times of single canaries
# from the end of their window. A time after the last evaluation is censored: only a lower bound is known.

SIGNIFICANCE = 0.05  # p-value of ranks up to which a canary counts as memorized: log2 20 = 4.32 bits of exposure


def grid(longest: int) -> list[int]:
    """Return 0, 1, 2, 5, 10, 20, 50, ... up to three quarters of `longest`, and `longest` itself."""
    steps = [digit * 10**power for power in range(len(str(longest))) for digit in (1, 2, 5)]
    return sorted({0, longest, *(step for step in steps if step <= 0.75 * longest)})


def forgetting_time(ks: list[int], bounds: list[float], alpha: float) -> int | None:
    """Return T(alpha): the smallest k from which on all bounds of the success are at most alpha; None if censored.

    The attack at k is the threshold that half of the canaries chose at k, and the one-sided 95% upper bounds are those
    of its success on the other half, NaN without trials. In at most 5% of groups, its success is above alpha at some
    evaluated k from T(alpha) on: the bound at the last such k, which depends only on the first half, is then too low.

    >>> forgetting_time([0, 1, 2, 5], [0.9, 0.58, 0.7, 0.55], 0.6)
    5
    """
    first = max((index + 1 for index, bound in enumerate(bounds) if not bound <= alpha), default=0)  # nor is NaN
    return ks[first] if first < len(ks) else None


class CanaryTime(NamedTuple):
    """Rounds from the window's end until a canary's rank is not surprising, or evaluated without that if censored."""

    rounds: int
    is_censored: bool


def p_after_window(observed: pd.DataFrame) -> pd.DataFrame:
    """Return the p-value of each used canary's rank in arm IN at each evaluation after its window.

    All canaries of a window have the same distances from its end; since the last use, the time before would count as
    memorized. The table has a row per canary and run, and a column for each number of rounds since the window's end,
    ascending. Canaries without a window's end or such a rank are excluded.
    """
    after = observed["round"] - observed["last_round"].astype("float64")
    known = observed.assign(after=after)[(after >= 0) & observed["last_use"].notna() & observed["p_in"].notna()]
    return known.astype({"after": "int64"}).pivot(index=["run", "canary"], columns="after", values="p_in")


def canary_times(p: pd.DataFrame) -> list[CanaryTime]:
    """Return the first evaluation of each canary (row) at which the p-value of its rank is above 0.05.

    Times do not depend on later evaluations, so those in shorter and longer trainings are censored independently.
    """
    rounds, values = p.columns.to_numpy("int64"), p.to_numpy("float64")
    times = []
    for of_canary in values:
        forgotten = np.flatnonzero(of_canary > SIGNIFICANCE)
        if len(forgotten):
            times.append(CanaryTime(int(rounds[forgotten[0]]), is_censored=False))
        elif np.isfinite(of_canary).any():
            times.append(CanaryTime(int(rounds[np.isfinite(of_canary)][-1]), is_censored=True))
    return times


def median_time(times: list[CanaryTime]) -> CanaryTime | None:
    """Return the time by which half of the canaries are forgotten (Kaplan and Meier, 1958); None without canaries."""
    if not times:
        return None
    rounds, is_censored = zip(*times, strict=True)
    survival = scipy.stats.ecdf(scipy.stats.CensoredData.right_censored(rounds, is_censored)).sf
    below = np.flatnonzero(survival.probabilities <= 0.5 + 1e-12)
    if not len(below):
        return CanaryTime(max(rounds), is_censored=True)
    return CanaryTime(int(survival.quantiles[below[0]]), is_censored=False)
