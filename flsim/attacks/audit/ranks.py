"""Exact tests from ranks: a canary among R references from the same distribution, independent of training.

For a canary that was not trained on, all ranks from 1 to R + 1 are equally likely. Therefore the test rank <= t has the
false-positive rate t / (R + 1) exactly, without a shadow model and without text that was not trained on.
"""

import math
from collections.abc import Sequence

import numpy as np
import scipy

from flsim.base.arrays import Floats
from flsim.base.statistics import lower_bound, share_interval, upper_bound

LEVELS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # false-positive rates


def ranks_among(scores: Floats, references: Floats) -> Floats:
    """Return 1 + the number of references that score at least as high: float64 [n], from 1 to R + 1."""
    below = np.searchsorted(np.sort(references), scores, side="left")
    return (1 + len(references) - below).astype(np.float64)


def p_values(ranks: Floats, references: int) -> Floats:
    """Return the p-value rank / (R + 1) of each canary [n], conservative because ties count for the reference."""
    return np.asarray(ranks, dtype=np.float64) / (references + 1)


def detection_at(ranks: Floats, references: int, threshold: int) -> dict[str, float]:
    """Return the canaries that the test rank <= t finds, by the names of columns of an audit.

    ``fpr`` is the mean over references, and ``fpr_high`` the end of its 95% interval. The share found is ``estimate``,
    whose interval ``low`` to ``high`` treats canaries as independent; NaN without canaries.
    """
    detected, canaries = int((ranks <= threshold).sum()), len(ranks)
    low, high = share_interval(detected, canaries)
    return {
        "threshold": threshold,
        "fpr": threshold / (references + 1),
        "fpr_high": float(scipy.special.betaincinv(threshold, references - threshold + 1, 0.975)),
        "detected": detected,
        "trials": canaries,
        "estimate": detected / canaries if canaries else math.nan,
        "low": low,
        "high": high,
    }


def detections_by_level(
    ranks: Floats, references: int, levels: Sequence[float] = LEVELS
) -> dict[float, dict[str, float]]:
    """Return the detections at each false-positive rate; rates below 1 / (R + 1) are omitted."""
    thresholds = {level: math.floor(level * (references + 1)) for level in levels}
    return {level: detection_at(ranks, references, threshold) for level, threshold in thresholds.items() if threshold}


def epsilon_of_threshold(
    detected: int, members: int, alarms: int, others: int, delta: float = 0.0, significance: float = 0.05
) -> float:
    """Return ln((TPR - delta) / FPR) at the ends of exact intervals, or its counterpart for misses (0 if negative).

    See Jagielski, Ullman and Oprea, "Auditing Differentially Private Machine Learning" (2020), section 4. For many
    canaries of one model, it is a heuristic. `detected` of the members and `alarms` of the others are above a threshold
    fixed before scores were known; `significance` is that of both intervals together.
    """
    tail = significance / 2
    bounds = [0.0]
    for hits, trials, errors, rest in (
        (detected, members, alarms, others),
        (others - alarms, others, members - detected, members),
    ):
        gain = lower_bound(hits, trials, tail) - delta
        if gain > 0:
            bounds.append(math.log(gain / upper_bound(errors, rest, tail)))
    return max(bounds)
