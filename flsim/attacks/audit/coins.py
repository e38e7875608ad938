"""Lower bounds on epsilon from one run whose canaries are planted by independent fair coins.

[S] Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run" (2023), Theorem 5.2 and Algorithm 1.
[M] Mahloujifar, Melis and Chaudhuri, "Auditing f-Differential Privacy in One Run" (2024), Theorem 3.2 and Algorithm 3.

The attacker guesses the coins of r of m canaries, with the highest and the lowest scores, and v guesses are right. The
number of guesses is fixed before scores are known.
"""

import math
from collections.abc import Callable

import numpy as np
import scipy
from numpy.typing import NDArray

from flsim.attacks.audit.guesses import HIGHEST, SIGNIFICANCE
from flsim.attacks.audit.trade_off import LeastProbability, gaussian

LARGEST_MU = 30.0


def correct_guesses(scores: NDArray[np.float64], planted: NDArray[np.bool_], guesses_each: int) -> int:
    """Return the number of right guesses of the highest scores as planted and the lowest as not, in stable order."""
    order = np.argsort(scores, kind="stable")
    return int(planted[order[len(order) - guesses_each :]].sum() + (~planted[order[:guesses_each]]).sum())


def p_value(epsilon: float, delta: float, canaries: int, guesses: int, right: int) -> float:
    """Return a bound on the probability of these right guesses under (epsilon, delta)-DP, by [S] Theorem 5.2."""
    if right <= 0:
        return 1.0
    q = float(scipy.special.expit(epsilon))
    counts = np.arange(guesses + 1)
    below = scipy.special.bdtr(counts, guesses, q)  # P[Bin <= count]
    under = np.concatenate([[0.0], below])  # P[Bin < count]
    beta = 1.0 - under[right]
    steps = np.arange(1, right + 1)
    alpha = float(((under[right] - under[right - steps]) / steps).max())
    return float(min(1.0, beta + 2 * canaries * delta * alpha))


def epsilon_of_coins(
    canaries: int, guesses: int, right: int, delta: float, significance: float = SIGNIFICANCE, users: int = 1
) -> float:
    """Return the lower bound on epsilon of one user at its delta that the right guesses prove, by [S], or 0.

    A canary of g <= `users` users has g epsilon and delta (e^(g epsilon) - 1) / (e^epsilon - 1) (Vadhan, 2017, Lemma
    2.2).
    """

    def probability(epsilon: float) -> float:
        return p_value(users * epsilon, _delta_of_group(delta, epsilon, users), canaries, guesses, right)

    return _largest_refuted(lambda epsilon: probability(epsilon) < significance, HIGHEST)


def _delta_of_group(delta: float, epsilon: float, users: int) -> float:
    if users * epsilon > 700:  # e^(g epsilon) overflows
        return 1.0 if delta else 0.0
    return min(1.0, delta * (math.expm1(users * epsilon) / math.expm1(epsilon) if epsilon else users))


def of_one(least: LeastProbability, alternatives: float = 2.0) -> LeastProbability:
    """Return (k - 1) T, the smallest probability of a wrong guess among k values ([M] Theorem 3.2); coins have two."""
    return lambda right: (alternatives - 1) * least(right)


def of_set(least: LeastProbability, share: float) -> LeastProbability:
    """Return the smallest probability that a set of share f misses the value, as a function of that of a hit.

    It is T(x) / f - x. Proof: let A be the event that the value u is in the set, and that this number of other values
    are in their sets, and P_u(A) its probability if u is the value. Draw another value v from the same distribution. T
    is convex, so the mean of P_v(A) over u and v is at least T(x), where x is the mean of P_u(A), a hit. But u is
    independent of the set under P_v, so the same mean is at most f times the probability of the other hits only, which
    is x plus the required probability of a miss. The rest is [M] Theorem 3.2.
    """
    return lambda right: least(right) / share - right


def is_refuted(
    wrong: LeastProbability, canaries: int, guesses: int, right: int, significance: float = SIGNIFICANCE
) -> bool:
    """Return whether the right guesses refute `of_one` or `of_set`, by the recursion of [M] Algorithm 3."""
    hits = significance * right / canaries
    misses = significance * (guesses - right) / canaries
    for index in range(right - 1, -1, -1):
        more = max(misses, wrong(hits))
        if more == misses:  # then neither changes in any further step
            break
        hits = min(1.0, hits + index / (guesses - index) * (more - misses))
        misses = more
    return hits + misses > guesses / canaries


def mu_refuted(refuted: Callable[[LeastProbability], bool]) -> float:
    """Return the largest mu whose Gaussian trade-off function is refuted, or 0; a bound for Gaussian mechanisms."""
    return _largest_refuted(lambda mu: refuted(gaussian(mu)), LARGEST_MU)


def _largest_refuted(refuted: Callable[[float], bool], highest: float) -> float:
    """Return the supremum of refuted values, by bisection; 0 if there is none."""
    if not refuted(0.0):
        return 0.0
    if refuted(highest):
        return highest
    low, high = 0.0, highest
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low
