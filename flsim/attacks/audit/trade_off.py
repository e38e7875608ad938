"""The largest true-positive rate that a privacy claim allows an attacker, at each false-positive rate.

Under (epsilon, delta)-DP, any test of one user's presence has (Kairouz, Oh and Viswanath, "The Composition Theorem for
Differential Privacy", 2015, Theorem 2.1)

    TPR <= min(1, e^epsilon FPR + delta, 1 - e^-epsilon (1 - delta - FPR)),

and under a curve delta(epsilon), the smallest of these bounds over all epsilon. f(FPR) = 1 - TPR is its trade-off
function (Dong, Roth and Su, "Gaussian Differential Privacy", 2022, section 2).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

# T(x) = f(1 - x): for a set with probability x under one data set, the smallest probability under another data set.
# Mahloujifar, Melis and Chaudhuri (2024) call it the inverse of the blow-up function.
LeastProbability = Callable[[float], float]


@dataclass(frozen=True)
class Allowed:
    """A claim, as a curve of (epsilon, delta): float64 [n] each."""

    epsilons: NDArray[np.float64]
    deltas: NDArray[np.float64]

    @classmethod
    def point(cls, epsilon: float, delta: float) -> "Allowed":
        return cls(np.array([epsilon]), np.array([delta]))

    def tpr(self, fpr: float) -> float:
        """Return the largest true-positive rate of any attacker with this false-positive rate."""
        with np.errstate(over="ignore"):
            few = np.exp(self.epsilons) * fpr + self.deltas
        many = 1 - np.exp(-self.epsilons) * (1 - self.deltas - fpr)
        return float(min(1.0, np.minimum(few, many).min()))

    def least_probability(self, x: float) -> float:
        return max(0.0, 1.0 - self.tpr(1.0 - x))


def gaussian(mu: float) -> LeastProbability:
    """Return T of mu-GDP, which is Phi(Phi^-1(x) - mu) (Dong, Roth and Su, 2022, equation 6)."""

    def least(x: float) -> float:
        return float(scipy.special.ndtr(scipy.special.ndtri(x) - mu))

    return least


def of_group(least: LeastProbability, users: int) -> LeastProbability:
    """Return T of a group of `users` users (Dong, Roth and Su, 2022, Theorem 2.14)."""

    def least_of_group(x: float) -> float:
        for _ in range(users):
            x = least(x)
        return x

    return least_of_group


def epsilon_of_gaussian(mu: float, delta: float) -> float:
    """Return epsilon of mu-GDP at a delta (Balle and Wang, 2018, Theorem 8; Dong, Roth and Su, 2022, Corollary 1)."""
    return root(lambda epsilon: delta_of_gaussian(mu, epsilon) - delta, 1e-10)


def root(excess: Callable[[float], float], xtol: float) -> float:
    """Return the first argument, from 0 on, at which a decreasing function is at most 0."""
    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    return float(scipy.optimize.brentq(excess, 0.0, high, xtol=xtol))


def delta_of_gaussian(mu: float, epsilon: float) -> float:
    """Return delta of mu-GDP at an epsilon (see `epsilon_of_gaussian`)."""
    if mu == 0:
        return 0.0
    normal = scipy.special  # the second term with its logarithm, because e^epsilon overflows
    return float(normal.ndtr(-epsilon / mu + mu / 2) - math.exp(epsilon + normal.log_ndtr(-epsilon / mu - mu / 2)))
