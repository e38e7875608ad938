"""Exact bounds of a probability (Clopper and Pearson, 1934), and of sums of unlike coins."""

from collections.abc import Sequence

import numpy as np
import scipy


def lower(successes: int, trials: int, tail: float) -> float:
    """Return the lower bound that is above the true probability with probability at most `tail`.

    >>> round(lower(14, 48, 0.025), 4)
    0.1695
    """
    return float(scipy.special.betaincinv(successes, trials - successes + 1, tail)) if successes else 0.0


def upper(successes: int, trials: int, tail: float) -> float:
    """Return the upper bound that is below the true probability with probability at most `tail`.

    >>> round(upper(0, 100, 0.05), 6)
    0.029513
    """
    return 1.0 - lower(trials - successes, trials, tail)


def at_least(probabilities: Sequence[float], successes: int) -> float:
    """Return the probability of `successes` or more of independent coins with these probabilities (Poisson-binomial).

    Equal coins take the binomial law, others the convolution of all [n] coins.
    """
    coins = np.asarray(probabilities, dtype=np.float64)
    if successes <= 0:
        return 1.0
    if successes > len(coins):
        return 0.0
    if (coins == coins[0]).all():
        return float(scipy.special.betainc(successes, len(coins) - successes + 1, coins[0]))
    law = np.ones(1)
    for coin in coins:
        law = np.convolve(law, (1 - coin, coin))
    return float(min(1.0, law[successes:].sum()))


def difference(
    hits: int, trials: int, other_hits: int, other_trials: int, confidence: float = 0.95
) -> tuple[float, float]:
    """Return the interval of the difference of two independent probabilities, the first less the second.

    Newcombe, "Interval estimation for the difference between independent proportions" (1998), method 10, from the score
    intervals (Wilson, 1927) of both. It is approximate, and neither empty nor beyond -1 and 1 where rates are 0 or 1.

    >>> [round(end, 4) for end in difference(56, 70, 48, 80)]
    [0.0524, 0.3339]
    """
    sides = [(hits, trials), (other_hits, other_trials)]
    first, second = (hits / trials for hits, trials in sides)
    one, two = (scipy.stats.binomtest(*side).proportion_ci(confidence, method="wilson") for side in sides)
    below, above = (first - one.low, two.high - second), (one.high - first, second - two.low)
    return first - second - float(np.hypot(*below)), first - second + float(np.hypot(*above))
