"""Bounds from one threshold, for many independent models with and without a record.

For many canaries of one model, these are heuristics, because the canaries share the model and its errors.
"""

import math

from flsim.base.statistics import lower_bound, upper_bound


def epsilon_of_threshold(
    detected: int, members: int, alarms: int, others: int, delta: float = 0.0, significance: float = 0.05
) -> float:
    """Return ln((TPR - delta) / FPR) at the ends of exact intervals, or its counterpart for misses (0 if negative).

    See Jagielski, Ullman and Oprea, "Auditing Differentially Private Machine Learning" (2020), section 4. `detected` of
    the members and `alarms` of the others are above a threshold fixed before scores were known; `significance` is that
    of both intervals together.
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
