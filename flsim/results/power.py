"""Power of the tests of `flsim compare`: the smallest difference that a plan can detect, before training.

Power for exposure comes from the noncentral t distribution. Power for counts sums McNemar's exact test.
"""

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy

ALPHA = 0.05  # two-sided
POWER = 0.8  # Cohen's (1988) convention

# Measured on five seeds, IID minus non-IID, at a learning rate of 1 (experiments/results/demo-plan.csv): d of 3.62,
# 2.06, 1.88, 1.19 and 1.81 bits, with 95% intervals over 48 canaries whose half widths h are 1.07, 0.835, 0.82, 0.685
# and 0.795. Spread over canaries: h sqrt(48) / t(0.975, 47), root mean square of the seeds. Between seeds: the d have a
# standard deviation of 0.90, of which canaries make SD_CANARIES / sqrt(48) = 0.42; the rest is the variance between
# seeds.
SD_CANARIES = 2.93  # bits
SD_SEEDS = 0.80  # bits
# In the same runs, of 5 x 48 canaries, 2 were memorized only by the non-IID model (RS), and 50 only by the IID model.
ONLY_B = 2 / 240

MOST = 1_000_000  # largest number of canaries or seeds in a search


@dataclass(frozen=True)
class Spread:
    """Assumed spread of differences in exposure, in bits; by default as in the demo."""

    canaries: float = SD_CANARIES  # standard deviation of the differences of a seed over its canaries
    seeds: float = SD_SEEDS  # standard deviation between seeds of the mean over infinitely many canaries


DEMO = Spread()


def power_of_exposure(
    effect: float, canaries: int, seeds: int = 1, spread: Spread = DEMO, alpha: float = ALPHA
) -> float:
    """Return the power of the two-sided t test for a mean difference in exposure of `effect` bits.

    For one seed, this is the paired test over `canaries` planted in each run. It compares only these two models, so the
    spread between seeds does not matter. For several seeds, which are pairs of runs, it is the test over their means,
    whose variance is spread.seeds^2 + spread.canaries^2 / canaries. The t statistic is then noncentral t (Cohen, 1988,
    section 2). The power is 0 if there is no test, with one canary of one seed.
    """
    sizes, sd = canaries, spread.canaries
    if seeds != 1:
        sizes, sd = seeds, math.hypot(spread.seeds, spread.canaries / canaries**0.5)
    if sizes < 2:
        return 0.0
    shift = abs(effect) * math.sqrt(sizes) / sd if sd else math.inf if effect else 0.0
    if not 1e-6 < shift < 1000:  # beyond this value scipy is unreliable, and the result no longer changes
        return alpha if shift < 1 else 1.0
    # The square of t is noncentral F, which gives both tails at once; scipy sometimes returns NaN for noncentral t.
    critical = float(scipy.stats.t.isf(alpha / 2, sizes - 1))
    return float(scipy.stats.ncf.sf(critical**2, 1, sizes - 1, shift**2))


def detectable_exposure(
    canaries: int, seeds: int = 1, spread: Spread = DEMO, alpha: float = ALPHA, power: float = POWER
) -> float:
    """Return the smallest mean difference, bits, that is detected with probability `power`; infinite without a test."""

    def lacking(effect: float) -> float:
        return power_of_exposure(effect, canaries, seeds, spread, alpha) - power

    most = max(spread.canaries, spread.seeds) or 1.0
    while lacking(most) < 0:
        if most > 1e6:
            return math.inf
        most *= 2
    return float(scipy.optimize.brentq(lacking, 0.0, most))


def canaries_for(
    effect: float, seeds: int = 1, spread: Spread = DEMO, alpha: float = ALPHA, power: float = POWER
) -> int | None:
    """Return the number of canaries that detects a difference of `effect` bits; None if a million are too few."""
    return _least(lambda canaries: power_of_exposure(effect, canaries, seeds, spread, alpha), power)


def seeds_for(
    effect: float, canaries: int, spread: Spread = DEMO, alpha: float = ALPHA, power: float = POWER
) -> int | None:
    """Return the number of seeds, from two, that detects a mean difference of `effect` bits; None above a million."""

    def power_over_seeds(seeds: int) -> float:
        # The test of one seed compares its models, not seeds, so it does not answer the same question.
        return power_of_exposure(effect, canaries, seeds, spread, alpha) if seeds > 1 else 0.0

    return _least(power_over_seeds, power)


def power_of_counts(only_a: float, only_b: float, canaries: int, alpha: float = ALPHA) -> float:
    """Return the power of McNemar's exact test for a difference in RS or BS of two runs, with independent canaries.

    `only_a` and `only_b` are the probabilities that a canary is memorized in one run only. The power is exact: it sums
    over the binomial number of discordant canaries, and over their binomial division between the runs.
    """
    discordant = min(1.0, only_a + only_b)
    if discordant == 0:
        return 0.0
    m = np.arange(canaries + 1)
    # The largest count in a tail that is still rejected, -1 without one. A tail of (1/2)^m is never exactly alpha / 2.
    tail = scipy.stats.binom.ppf(alpha / 2, m, 0.5) - 1
    of_a = min(1.0, only_a / discordant)
    rejected = scipy.stats.binom.cdf(tail, m, of_a) + scipy.stats.binom.sf(m - tail - 1, m, of_a)
    return float((scipy.stats.binom.pmf(m, canaries, discordant) * rejected).sum())


def detectable_counts(canaries: int, only_b: float = ONLY_B, alpha: float = ALPHA, power: float = POWER) -> float:
    """Return the smallest difference only_a - only_b, for any share `only_b`, detected with probability `power`.

    It is infinite if even the largest difference is not detected, as always with fewer than six canaries.
    """

    def lacking(only_a: float) -> float:
        return power_of_counts(only_a, only_b, canaries, alpha) - power

    if lacking(1 - only_b) < 0:
        return math.inf
    return float(scipy.optimize.brentq(lacking, only_b, 1 - only_b)) - only_b


def _least(power_of: Callable[[int], float], power: float) -> int | None:
    """Return the smallest number, up to `MOST`, with at least this power, which increases with it; or None."""
    return None if power_of(MOST) < power else 1 + bisect.bisect_left(range(1, MOST + 1), power, key=power_of)
