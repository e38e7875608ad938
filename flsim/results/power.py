"""How small a difference a plan can find: power of the tests of `flsim compare`, before anything is trained.

Of exposure by the noncentral t distribution, of counts by adding up McNemar's exact test.
"""

import bisect
import math
from collections.abc import Callable

import numpy as np
import scipy

ALPHA = 0.05  # two-sided
POWER = 0.8  # Cohen's (1988) convention

# Measured on the demo, five seeds, IID less non-IID (docs/results.md, "The demo, five seeds"): differences d of 3.62,
# 2.06, 1.88, 1.19 and 1.81 bits, with 95% intervals over 48 canaries whose half widths h are 1.07, 0.835, 0.82, 0.685
# and 0.795. Spread over canaries: h sqrt(48) / t(0.975, 47), root mean square of the seeds. Between seeds: the d have a
# standard deviation of 0.90, of which canaries make SD_CANARIES / sqrt(48) = 0.42; the rest is the seeds' own.
SD_CANARIES = 2.93  # bits
SD_SEEDS = 0.80  # bits
# Of the same runs: 2 of 5 x 48 canaries were memorized by the non-IID model alone (RS), 50 by the IID one alone.
ONLY_B = 2 / 240

MOST = 1_000_000  # canaries or seeds that are looked for


def power_of_exposure(
    effect: float,
    canaries: int,
    seeds: int = 1,
    sd_canaries: float = SD_CANARIES,
    sd_seeds: float = SD_SEEDS,
    alpha: float = ALPHA,
) -> float:
    """Chance that a mean difference in exposure is found, by the two-sided t test.

    Of one seed that is the paired test over canaries, which takes the two models as they are, so that `sd_seeds` has no
    part in it. Of several it is the test over seeds of the seeds' means, whose variance is
    sd_seeds^2 + sd_canaries^2 / canaries. The t statistic is then noncentral t (Cohen, 1988, section 2).

    Args:
        effect: the mean difference, bits.
        canaries: planted in each run.
        seeds: pairs of runs.
        sd_canaries: standard deviation of a seed's differences over its canaries, bits.
        sd_seeds: standard deviation between seeds of what the mean would be over endlessly many canaries, bits.
        alpha: level of the test.

    Returns:
        0 where nothing can be tested: one canary of one seed.
    """
    sizes, sd = (canaries, sd_canaries) if seeds == 1 else (seeds, math.hypot(sd_seeds, sd_canaries / canaries**0.5))
    if sizes < 2:
        return 0.0
    shift = abs(effect) * math.sqrt(sizes) / sd if sd else math.inf if effect else 0.0
    if not 1e-6 < shift < 1000:  # beyond, scipy is not to be relied on, and the answer no longer changes
        return alpha if shift < 1 else 1.0
    # The square of t is F, noncentral as well: both tails at once, and scipy has no number for one of t's now and then.
    critical = float(scipy.stats.t.isf(alpha / 2, sizes - 1))
    return float(scipy.stats.ncf.sf(critical**2, 1, sizes - 1, shift**2))


def detectable_exposure(
    canaries: int,
    seeds: int = 1,
    sd_canaries: float = SD_CANARIES,
    sd_seeds: float = SD_SEEDS,
    alpha: float = ALPHA,
    power: float = POWER,
) -> float:
    """The least mean difference in exposure, bits, that is found with a chance of `power`; see `power_of_exposure`.

    Infinite where nothing can be tested.
    """

    def lacking(effect: float) -> float:
        return power_of_exposure(effect, canaries, seeds, sd_canaries, sd_seeds, alpha) - power

    most = max(sd_canaries, sd_seeds) or 1.0
    while lacking(most) < 0:
        if most > 1e6:
            return math.inf
        most *= 2
    return float(scipy.optimize.brentq(lacking, 0.0, most))


def canaries_for(
    effect: float,
    seeds: int = 1,
    sd_canaries: float = SD_CANARIES,
    sd_seeds: float = SD_SEEDS,
    alpha: float = ALPHA,
    power: float = POWER,
) -> int | None:
    """How many canaries find a mean difference of `effect` bits with a chance of `power`.

    None where a million do not: what differs between seeds is no smaller for more canaries.
    """
    return _least(lambda canaries: power_of_exposure(effect, canaries, seeds, sd_canaries, sd_seeds, alpha), power)


def seeds_for(
    effect: float,
    canaries: int,
    sd_canaries: float = SD_CANARIES,
    sd_seeds: float = SD_SEEDS,
    alpha: float = ALPHA,
    power: float = POWER,
) -> int | None:
    """How many seeds, at least two, find a mean difference of `effect` bits over seeds; None where a million do not."""

    def of(seeds: int) -> float:
        # One seed's test asks about its models, not about seeds, so it is no smaller design of the same question.
        return power_of_exposure(effect, canaries, seeds, sd_canaries, sd_seeds, alpha) if seeds > 1 else 0.0

    return _least(of, power)


def power_of_counts(only_a: float, only_b: float, canaries: int, alpha: float = ALPHA) -> float:
    """Chance that McNemar's exact test finds a difference in RS, or BS, of two runs.

    Exactly: over how many canaries are discordant, binomial, and how these divide, binomial given their number.

    Args:
        only_a: probability that a canary is memorized in run a alone.
        only_b: the same of run b; the difference in share memorized is only_a - only_b.
        canaries: planted in each run, taken as independent.
        alpha: level of the test.
    """
    discordant = min(1.0, only_a + only_b)
    if discordant == 0:
        return 0.0
    m = np.arange(canaries + 1)
    # The largest count in a tail that is still rejected, -1 without one. A tail of (1/2)^m is never exactly alpha / 2.
    tail = scipy.stats.binom.ppf(alpha / 2, m, 0.5) - 1
    of_a = min(1.0, only_a / discordant)
    found = scipy.stats.binom.cdf(tail, m, of_a) + scipy.stats.binom.sf(m - tail - 1, m, of_a)
    return float((scipy.stats.binom.pmf(m, canaries, discordant) * found).sum())


def detectable_counts(canaries: int, only_b: float = ONLY_B, alpha: float = ALPHA, power: float = POWER) -> float:
    """The least difference in share memorized, only_a - only_b, that is found with a chance of `power`.

    Of more canaries in run a, where a share of `only_b` is memorized in run b alone whatever the difference. Infinite
    where not even all others in run a alone would be found: of fewer than six canaries none ever is.
    """

    def lacking(only_a: float) -> float:
        return power_of_counts(only_a, only_b, canaries, alpha) - power

    if lacking(1 - only_b) < 0:
        return math.inf
    return float(scipy.optimize.brentq(lacking, only_b, 1 - only_b)) - only_b


def _least(power_of: Callable[[int], float], power: float) -> int | None:
    """The least number, up to `MOST`, whose power is as high; None without any. Power must rise with the number."""
    if power_of(MOST) < power:
        return None
    return 1 + bisect.bisect_left(range(1, MOST + 1), power, key=power_of)
