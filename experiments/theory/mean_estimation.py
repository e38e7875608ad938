"""Forgetting in mean estimation: how far apart the models of two histories are, rounds after they differed.

Jagielski et al., "Measuring Forgetting of Memorized Training Examples" (2022), section 5.3 and appendix D.3, estimate a
mean by SGD: each step moves the model theta by 2 eta (x - theta) towards a random example x. The class below derives
the same for Federated Averaging. A user whose examples have the mean m takes E steps of full-batch gradient descent,
which move theta by s (m - theta), where s = 1 - (1 - 2 eta)^E. The server averages C users. So a round is

    theta <- (1 - s) theta + s (mean of m over the cohort),

and the paper's step is a round with C = E = 1. Let two runs differ in one user's m, in one round, by a vector w. After
k more rounds the means of theta differ by (s / C) (1 - s)^k w. If means of users have covariance Sigma, theta has
covariance (s^2 / C) f (1 - a^k) / (1 - a) Sigma, where a = (1 - s)^2 and f is the factor of a finite population. The
rate of local steps cancels from the ratio except for a:

    d_k^2 = (w' Sigma^-1 w) / (C f) * a^k (1 - a) / (1 - a^k).

With normal m the best test of one history against the other has accuracy Phi(d_k / 2). It knows theta before the round
in which the runs differ, and the other users of that round.
"""

import math
from dataclasses import dataclass

from scipy.special import ndtr, ndtri

from flsim.base.errors import InputError, at_least_one


@dataclass(frozen=True)
class MeanEstimation:
    """A mean that is estimated from random users, two histories of which differ in one user of one round.

    Attributes:
        distance: sqrt(w' Sigma^-1 w), the distance between the two values that the user's mean may have had, in
            standard deviations of users.
        rate: eta, the learning rate of a step theta <- theta - 2 eta (theta - x); above 0 and below 1/2.
        steps: E, the number of steps that a user takes in a round.
        cohort: C, the number of users in a round.
        population: N, the number of users that a cohort is drawn from without replacement; None for independent draws.

    Raises:
        InputError: a value is outside its range, or the cohort is larger than the population.
    """

    distance: float
    rate: float
    steps: int = 1
    cohort: int = 1
    population: int | None = None

    def __post_init__(self) -> None:
        at_least_one(steps=self.steps, cohort=self.cohort)
        if not 0 <= self.distance < math.inf:
            raise InputError(f"distance must be finite and not negative, found {self.distance}")
        if not 0 < self.rate < 0.5:
            raise InputError(f"rate must be above 0 and below 1/2, found {self.rate}")
        if self.population is not None and self.population < self.cohort:
            raise InputError(f"cohort must be at most the population of {self.population:,}, found {self.cohort:,}")

    @classmethod
    def injected(cls, size: float, rate: float) -> "MeanEstimation":
        """Return the paper's Algorithm 4, which takes one step on +v or on -v before the random ones.

        Args:
            size: v' Sigma^-1 v; the distance between +v and -v is twice its root.
            rate: eta.
        """
        return cls(2 * math.sqrt(size), rate)

    @property
    def kept(self) -> float:
        """Return 1 - s = (1 - 2 eta)^E, the share of a difference that a round keeps."""
        return (1 - 2 * self.rate) ** self.steps

    @property
    def variance_factor(self) -> float:
        """Return f, the variance of a cohort's mean over that of independent draws: (N - C) / (N - 1)."""
        if self.population is None:
            return 1.0
        return (self.population - self.cohort) / max(1, self.population - 1)

    def separation(self, rounds: int) -> float:
        """Return d_k: the distance between the two models' means, in standard deviations of one model.

        It is infinite if nothing is random: before the first random round, and if all users take part.

        Args:
            rounds: k, the number of rounds after the one that differs.
        """
        if not self.distance:
            return 0.0  # equal histories, also before anything is random
        log_a = 2 * math.log(self.kept)
        noise = self.cohort * self.variance_factor * -math.expm1(rounds * log_a)
        if not noise:
            return math.inf
        return self.distance * math.sqrt(math.exp(rounds * log_a) * -math.expm1(log_a) / noise)

    def accuracy(self, rounds: int) -> float:
        """Return Phi(d_k / 2), the accuracy of the best test if both histories are equally likely."""
        return float(ndtr(self.separation(rounds) / 2))

    def true_positives(self, rounds: int, false_positives: float) -> float:
        """Return Phi(Phi^-1(FPR) + d_k), the true-positive rate of the best test at a false-positive rate."""
        return float(ndtr(ndtri(false_positives) + self.separation(rounds)))

    def renyi(self, rounds: int, order: float) -> float:
        """Return the Renyi divergence, in nats, between the two models: order d_k^2 / 2.

        It is the same in both directions, as both are normal with equal covariance.
        """
        return order * self.separation(rounds) ** 2 / 2

    def renyi_bound(self, rounds: int, order: float) -> float:
        """Return the bound on `renyi` that no learning rate exceeds: order distance^2 / (2 k C f).

        For `injected` it is 2 order (v' Sigma^-1 v) / k, Theorem 1 of the paper. It holds because
        k a^k (1 - a) <= 1 - a^k for 0 < a < 1, and is the limit for small rates.
        """
        if not self.distance:
            return 0.0
        noise = 2 * rounds * self.cohort * self.variance_factor
        return order * self.distance**2 / noise if noise else math.inf

    def rounds_until(self, accuracy: float) -> int | None:
        """Return the least k >= 1 from which `accuracy(k)` is at most a number above 1/2; None if it never is.

        Raises:
            InputError: the accuracy is not above 1/2 and below 1.
        """
        if not 0.5 < accuracy < 1:
            raise InputError(f"accuracy must be above 1/2 and below 1, found {accuracy}")
        if not self.distance:
            return 1
        noise = self.cohort * self.variance_factor
        if not noise:
            return None
        log_a, limit = 2 * math.log(self.kept), (2 * float(ndtri(accuracy))) ** 2
        # d_k^2 <= limit, solved for a^k
        return max(1, math.ceil(math.log1p(self.distance**2 / noise * -math.expm1(log_a) / limit) / -log_a))
