"""Lower bounds on epsilon from guesses of canaries: each canary is a random phrase among many phrases.

For each of m canaries, an attacker with the model names a set of phrases. Before training a set has the share f of all
phrases. Given the model, and all other canaries, the canary is in it with probability at most

    q(epsilon, f) = f e^epsilon / (f e^epsilon + 1 - f)

if training is epsilon-DP for the records of the canary (replace-one): the odds of two phrases, and of two sets, change
by at most e^epsilon. If canaries are taken in sequence, the number of hits is dominated by the sum of m independent
coins with these probabilities: Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run" (2023),
Theorem 5.2, with sets instead of bits. A canary of g users has g epsilon.

The set contains all phrases that are more likely than the t-th most likely of R random references, and the canary hits
if its rank is at most t. Given the model, the share of the set is Beta(t, R - t + 1). All canaries use the same
references, so f is bounded for all m together (Bonferroni), which uses a part of the significance.
"""

import math
from collections.abc import Sequence

import numpy as np
import scipy

from flsim.base.statistics import at_least

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
