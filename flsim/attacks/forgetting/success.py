"""Success of an attack that separates arms IN and OUT by calibrated scores (Jagielski et al., 2022, section 3.2).

All intervals treat canaries as independent, but canaries of one model are not independent.
"""

import math

import numpy as np
import pandas as pd

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
    if not len(members) or LEVEL * len(others) < 1:
        return None
    return roc(members, others).at(LEVEL)


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
