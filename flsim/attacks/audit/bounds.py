"""Exact tests and lower bounds on epsilon from canaries, and what a privacy claim allows an attacker."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

from flsim.base.arrays import Floats
from flsim.base.statistics import at_least, lower_bound, share_interval, upper_bound

# Lower bounds on epsilon from guesses of canaries: each canary is a random phrase among many phrases.
#
# For each of m canaries, an attacker with the model names a set of phrases. Before training a set has the share f of
# all phrases. Given the model, and all other canaries, the canary is in its set with probability at most
#
#     q(epsilon, f) = f e^epsilon / (f e^epsilon + 1 - f)
#
# if training is epsilon-DP for the records of the canary (replace-one): the odds of two phrases, and of two sets,
# change by at most e^epsilon. If canaries are taken in sequence, the number of hits is dominated by the sum of m
# independent coins with these probabilities: Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run"
# (2023), Theorem 5.2, with sets instead of bits. A canary of g users has g epsilon.
#
# The set contains all phrases that are more likely than the t-th most likely of R random references, and the canary
# hits if its rank is at most t. Given the model, the share of the set is Beta(t, R - t + 1). All canaries use the same
# references, so f is bounded for all m together (Bonferroni), which uses a part of the significance.

SIGNIFICANCE = 0.05
OF_SHARES = 0.01  # part of the significance for the bound of the shares
HIGHEST = 60.0  # largest epsilon of a bound


def share_of_references(threshold: int, references: int, canaries: int, significance: float = OF_SHARES) -> float:
    """Return f, an upper bound of the shares of all sets with probability at least 1 - significance."""
    return float(scipy.special.betaincinv(threshold, references - threshold + 1, 1 - significance / canaries))


def hit_probability(epsilon: float, share: float) -> float:
    """Return q(epsilon, f), the largest probability under epsilon-DP; f before any training."""
    return 1.0 if share >= 1 else float(scipy.special.expit(epsilon + math.log(share) - math.log1p(-share)))


def epsilon_of_hits(hits: int, share: float, groups: Sequence[int], significance: float = SIGNIFICANCE) -> float:
    """Return the lower bound on epsilon of a user that hits prove under pure DP, for canaries of `groups` users [m]."""
    sizes = np.asarray(groups, dtype=np.float64)

    def probability(epsilon: float) -> float:
        return at_least([hit_probability(epsilon * size, share) for size in sizes], hits)

    if hits == 0 or probability(0.0) >= significance:
        return 0.0
    if probability(HIGHEST) < significance:
        return HIGHEST
    return float(scipy.optimize.brentq(lambda epsilon: probability(epsilon) - significance, 0.0, HIGHEST, xtol=1e-10))


def epsilon_of_ranks(
    hits: int, threshold: int, references: int, groups: Sequence[int], significance: float = SIGNIFICANCE
) -> float:
    """Return the lower bound on epsilon of one user from ranks of at most `threshold` among shared references."""
    share = share_of_references(threshold, references, len(groups))
    return epsilon_of_hits(hits, share, groups, significance - OF_SHARES)


def default_threshold(references: int) -> int:
    """Return the largest rank at which a canary counts as found, by a rule that does not use ranks.

    >>> [default_threshold(references) for references in (500, 20_000, 2_000_000)]
    [1, 20, 100]
    """
    return 100 if references >= 100_000 else max(1, references // 1_000)


# Exact tests from ranks: a canary among R references from the same distribution, independent of training.
#
# For a canary that was not trained on, all ranks from 1 to R + 1 are equally likely. Therefore the test rank <= t has
# the false-positive rate t / (R + 1) exactly, without a shadow model and without text that was not trained on.

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


# The largest true-positive rate that a privacy claim allows an attacker, at each false-positive rate.
#
# Under (epsilon, delta)-DP, any test of one user's presence has (Kairouz, Oh and Viswanath, "The Composition Theorem
# for Differential Privacy", 2015, Theorem 2.1)
#
#     TPR <= min(1, e^epsilon FPR + delta, 1 - e^-epsilon (1 - delta - FPR)),
#
# and under a curve delta(epsilon), the smallest of these bounds over all epsilon. f(FPR) = 1 - TPR is its trade-off
# function (Dong, Roth and Su, "Gaussian Differential Privacy", 2022, section 2).


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
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian  # takes a second

    return float(get_epsilon_gaussian(1 / mu, delta)) if mu else 0.0


# Lower bounds on epsilon from one run whose canaries are planted by independent fair coins.
#
# [S] Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run" (2023), Theorem 5.2 and Algorithm 1.
# [M] Mahloujifar, Melis and Chaudhuri, "Auditing f-Differential Privacy in One Run" (2024), Theorem 3.2, Algorithm 3.
#
# The attacker guesses the coins of r of m canaries, with the highest and the lowest scores, and v guesses are right.
# The number of guesses is fixed before scores are known.

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
