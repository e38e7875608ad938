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
