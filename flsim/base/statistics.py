"""Intervals and tests of plain numbers; callers know the meaning of the numbers, such as canaries or seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from flsim.base.arrays import Floats
from flsim.base.errors import InputError
from flsim.base.rng import stream

ROUNDING = 9  # decimals of a bit: far below any exposure's resolution, so equal differences are ties
RESAMPLES = 1_000  # of a bootstrap
EXCHANGES = 9_999  # random exchanges of a log-rank test
DECIMALS = 12  # of log-rank scores, far below 1 / canaries, so equal scores are ties


def lower_bound(successes: int, trials: int, tail: float) -> float:
    """Return the exact bound above the true probability with probability at most `tail`: Clopper and Pearson (1934).

    >>> round(lower_bound(14, 48, 0.025), 4)
    0.1695
    """
    return float(scipy.special.betaincinv(successes, trials - successes + 1, tail)) if successes else 0.0


def upper_bound(successes: int, trials: int, tail: float) -> float:
    """Return the exact bound that is below the true probability with probability at most `tail`.

    >>> round(upper_bound(0, 100, 0.05), 6)
    0.029513
    """
    failures = trials - successes
    return float(scipy.special.betainccinv(successes + 1, failures, tail)) if failures else 1.0


def share_interval(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the exact interval of a probability, (0, 1) without trials, which are treated as independent.

    Canaries of one model are not independent, so their interval is too narrow for other seeds.
    """
    tail = (1 - confidence) / 2
    return lower_bound(successes, trials, tail), upper_bound(successes, trials, tail)


def difference_interval(
    hits: int, trials: int, other_hits: int, other_trials: int, confidence: float = 0.95
) -> tuple[float, float]:
    """Return the interval of the difference of two independent probabilities, the first minus the second.

    Newcombe, "Interval estimation for the difference between independent proportions" (1998), method 10, from the score
    intervals (Wilson, 1927) of both. It is approximate, and neither empty nor outside [-1, 1] if rates are 0 or 1.

    >>> [round(end, 4) for end in difference_interval(56, 70, 48, 80)]
    [0.0524, 0.3339]
    """
    sides = [(hits, trials), (other_hits, other_trials)]
    first, second = (hits / trials for hits, trials in sides)
    one, two = (scipy.stats.binomtest(*side).proportion_ci(confidence, method="wilson") for side in sides)
    below, above = (first - one.low, two.high - second), (one.high - first, second - two.low)
    return first - second - float(np.hypot(*below)), first - second + float(np.hypot(*above))


def at_least(probabilities: Sequence[float], successes: int) -> float:
    """Return the probability of `successes` or more of independent coins that have these probabilities."""
    coins = np.asarray(probabilities, dtype=np.float64)
    if successes <= 0:
        return 1.0
    if successes > len(coins):
        return 0.0
    if (coins == coins[0]).all():
        return float(scipy.special.betainc(successes, len(coins) - successes + 1, coins[0]))
    # Sum over few failures, not many successes, because sums of small terms lose no digits.
    return float(scipy.stats.poisson_binom.cdf(len(coins) - successes, 1 - coins))


@cache
def differ_by_more_than_chance(counts: tuple[int, int], totals: tuple[int, int], level: float = 0.05) -> bool:
    """Return whether two counts, such as of memorized canaries, differ by Fisher's exact test (two-sided) at a level.

    Two models tend to memorize the same canaries, so their counts differ less by chance, and the test is conservative.
    """
    table = [[count, max(total - count, 0)] for count, total in zip(counts, totals, strict=True)]
    return float(scipy.stats.fisher_exact(table).pvalue) < level


def t_interval(values: NDArray[np.floating[Any]], confidence: float = 0.95) -> tuple[float, float]:
    """Return Student's t confidence interval of the mean of float64 [n] values; NaN for fewer than two values."""
    if len(values) < 2:
        return math.nan, math.nan
    half = float(scipy.stats.t.ppf((1 + confidence) / 2, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values)))
    return float(values.mean()) - half, float(values.mean()) + half


def median_interval(values: Floats) -> tuple[float, float, float]:
    """Return the median of float64 [n] values with its exact 95% interval between two values, by the sign test.

    It is NaN for fewer than six values, which are all on one side of the median in more than 5% of draws.

    >>> median_interval(np.arange(1.0, 11.0))
    (5.5, 2.0, 9.0)
    """
    if not len(values):
        return math.nan, math.nan, math.nan
    outside = int(scipy.stats.binom.ppf(0.025, len(values), 0.5))
    ordered = np.sort(values)
    low, high = (ordered[outside - 1], ordered[-outside]) if outside else (math.nan, math.nan)
    return float(np.median(values)), float(low), float(high)


def paired_t_p(differences: NDArray[np.floating[Any]]) -> float:
    """Return the two-sided p of the t test that float64 [n] differences have mean 0; 1 if all are 0, NaN for one."""
    if len(differences) < 2:
        return math.nan
    if not differences.any():
        return 1.0
    # The variance of equal differences is rounding error, which must not determine the statistic.
    return 0.0 if np.ptp(differences) == 0 else float(scipy.stats.ttest_1samp(differences, 0.0).pvalue)


def signed_rank_p(differences: NDArray[np.floating[Any]]) -> float:
    """Return the two-sided p-value of the signed-rank test that float64 [n] differences are symmetric about zero.

    It is 1 if all are zero. It is exact up to 50 differences without ties or zeros and up to 13 with them, and
    otherwise uses the tie-corrected normal approximation.
    """
    if not differences.any():
        return 1.0
    return float(scipy.stats.wilcoxon(differences, zero_method="pratt", correction=False, method="auto").pvalue)


def mcnemar_p(only_a: int, only_b: int) -> float:
    """Return McNemar's (1947) exact two-sided p: the binomial test of one half on discordant canaries; 1 without."""
    discordant = only_a + only_b
    return float(scipy.stats.binomtest(only_a, discordant).pvalue) if discordant else 1.0


def sign_flip_p(differences: Sequence[int]) -> float:
    """Return the exact two-sided p-value that the signs of [n] integer differences are random.

    Fisher's (1935) randomization test: of all 2^n ways to exchange the settings within seeds, the share whose sum is at
    least as far from zero. The test makes no assumption about the distribution, and is never below 2 / 2^n. It is NaN
    for a single difference.
    """
    if len(differences) < 2:
        return math.nan
    share = np.ones(1)  # number of ways whose sum is the index minus the middle
    for size in np.abs(differences).tolist():
        kernel = np.zeros(2 * size + 1)
        kernel[[0, -1]] += 0.5 if size else 1.0
        share = np.convolve(share, kernel)
    middle = len(share) // 2
    return float(min(1.0, share[np.abs(np.arange(len(share)) - middle) >= abs(sum(differences))].sum()))


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values [n] of one family, corrected by Holm (1979), for any dependence between the tests.

    NaN, if nothing was tested, stays NaN and does not count.
    """
    corrected = [math.nan] * len(p)
    tested = sorted((value, index) for index, value in enumerate(p) if not math.isnan(value))
    largest = 0.0
    for place, (value, index) in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - place) * value))
        corrected[index] = largest
    return corrected


@dataclass(frozen=True)
class AtLevel:
    """The true-positive rate at a false-positive rate.

    The threshold is the lowest that allows at most k = level * others false positives. At this threshold, random
    guesses have an expected rate of (k + 1) / (others + 1), slightly above the level.
    """

    level: float  # the largest false-positive rate that is allowed
    alarms: int  # number of non-members at or above the threshold
    detected: int  # number of members at or above the threshold
    tpr: float  # share of members at or above the threshold
    # low, high: interval of the rate at a false-positive rate of `level` in the population, not only in these
    # non-members; see `Roc.interval`
    low: float
    high: float


@dataclass(frozen=True)
class Roc:
    """A curve with a point for each threshold, from above all scores to below all."""

    fpr: Floats  # fpr, tpr: float64 [points], ascending, from (0, 0) to (1, 1)
    tpr: Floats
    members: int  # members, others: their numbers
    others: int

    def at(self, level: float) -> AtLevel:
        """Return the last point whose false-positive rate is at most the level; InputError for one below 1 / others."""
        if level * (1 + 1e-12) * self.others < 1:  # 1 / 98 times 98 is below 1 in float64
            raise InputError(
                f"a false-positive rate of {level:g} needs {1 / level:,.0f} non-members, found {self.others:,}"
            )
        place = int(np.searchsorted(self.fpr, level * (1 + 1e-12), side="right")) - 1
        alarms, detected = round(self.fpr[place] * self.others), round(self.tpr[place] * self.members)
        return AtLevel(level, alarms, detected, detected / self.members, *self.interval(level))

    def interval(self, level: float, confidence: float = 0.95) -> tuple[float, float]:
        """Return an interval of the true-positive rate at a false-positive rate in the population.

        The population's rate at the k-th highest score of n others is distributed as Beta(k, n - k + 1), or is
        conservative if scores are equal. So one score is a threshold with a rate of at most `level`, and another one
        with at least `level`. The error probability of each is (1 - `confidence`) / 4, as that of the interval of
        Clopper and Pearson for the members above it. Members and others are assumed independent.
        """
        tail = (1 - confidence) / 4
        k = np.arange(1, self.others + 1)
        # probability that the rate at the k-th score is at most `level`
        is_below = scipy.special.betainc(k, self.others - k + 1, level)
        strict, lax = int((is_below >= 1 - tail).sum()), int((is_below > tail).sum()) + 1
        alarms = np.rint(self.fpr * self.others)
        detected = np.rint(self.tpr * self.members).astype(np.int64)
        low, high = 0.0, 1.0
        if strict:  # above the score at this position: the last point with fewer alarms
            above = int(detected[np.searchsorted(alarms, strict, side="left") - 1])
            low = share_interval(above, self.members, 1 - 2 * tail)[0]
        if lax <= self.others:  # at or above this score
            upto = int(detected[np.searchsorted(alarms, lax, side="left")])
            high = share_interval(upto, self.members, 1 - 2 * tail)[1]
        return low, high


def roc(members: Floats, others: Floats) -> Roc:
    """Return the curve of scores of members [n_in] and others [n_out]; InputError if a side or a value is missing."""
    _check(members, others)
    scores = np.concatenate([members, others])
    order = np.argsort(-scores, kind="stable")
    is_member = (np.arange(len(scores)) < len(members))[order]
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)  # the last of equal scores
    tpr, fpr = is_member.cumsum()[ends] / len(members), (~is_member).cumsum()[ends] / len(others)
    return Roc(np.append(0.0, fpr), np.append(0.0, tpr), len(members), len(others))


def auroc(members: Floats, others: Floats) -> float:
    """Return the probability that a member scores above a non-member, where equal scores count half (Mann and Whitney).

    >>> auroc(np.array([0.0, 4, 6, 7]), np.array([1.0, 2, 3, 5])) * 16
    11.0
    """
    _check(members, others)
    ordered = np.sort(others)
    below, upto = (np.searchsorted(ordered, members, side=side) for side in ("left", "right"))
    return float((below + upto).mean() / 2 / len(others))


def auroc_interval(
    members: Floats,
    others: Floats,
    units: tuple[Sequence[object], Sequence[object]],
    rng: np.random.Generator,
    confidence: float = 0.95,
) -> tuple[float, float]:
    """Return the bootstrap interval (percentiles) of the area, drawing complete `units`, such as users, of both.

    If scores are separated, so are those of every draw. The bound is then that of Clopper and Pearson, with the area as
    the probability that a unit of the smaller side is in order.
    """
    sides = [_by_unit(scores, names) for scores, names in zip((members, others), units, strict=True)]
    areas = []
    for _ in range(RESAMPLES):
        resampled = [np.concatenate([side[i] for i in rng.integers(len(side), size=len(side))]) for side in sides]
        areas.append(auroc(*resampled))
    tail, smaller = (1 - confidence) / 2, min(map(len, sides))
    low, high = np.quantile(areas, [tail, 1 - tail])
    of_separated = lower_bound(smaller, smaller, tail)
    return (of_separated if low == 1 else float(low)), (1 - of_separated if high == 0 else float(high))


def _by_unit(scores: Floats, units: Sequence[object]) -> list[Floats]:
    names = {name: place for place, name in enumerate(dict.fromkeys(units))}
    places = np.array([names[name] for name in units])
    return [scores[places == place] for place in range(len(names))]


def _check(members: Floats, others: Floats) -> None:
    for scores, name in ((members, "members"), (others, "others")):
        if not len(scores):
            raise InputError(f"no {name}, so members cannot be compared with non-members; give at least one of each")
        if not np.isfinite(scores).all():
            raise InputError(f"scores of {name}: some scores are not finite; remove them")


def log_rank_p(one: Sequence[tuple[int, bool]], other: Sequence[tuple[int, bool]]) -> float:
    """Return the two-sided p-value of the log-rank test that two groups have the same distribution of times.

    The statistic is that of Mantel (1966): the number of events of a group, minus the number that is expected if all
    have the same distribution. Its distribution is that over `EXCHANGES` random exchanges between the groups, with the
    same random numbers for the same times (Phipson and Smyth, 2010). The test is exact for groups of any size if their
    members are independent; the normal approximation (`scipy.stats.logrank`) is not, if few canaries have late events.

    Times are with whether they are censored (the event was not observed by then). It is NaN if a group is empty, and 1
    if there was no event, or all events were at the same time.
    """
    if not one or not other:
        return math.nan
    times, is_censored = map(np.array, zip(*one, *other, strict=True))
    scores, places = np.unique(_log_rank_scores(times, ~is_censored), return_inverse=True)
    rng = stream(0, "log-rank")
    sums = rng.multivariate_hypergeometric(np.bincount(places).tolist(), len(one), EXCHANGES) @ scores
    observed = abs(scores[places[: len(one)]].sum())
    extreme = int((np.abs(sums) >= observed - 1e-6).sum())
    return (1 + extreme) / (1 + EXCHANGES)


def _log_rank_scores(times: "NDArray[Any]", is_event: NDArray[np.bool_]) -> Floats:
    """Return the indicator of an event at each time, minus the cumulative hazard (Nelson and Aalen); the sum is 0.

    The sum over a group is the log-rank statistic. Scores are rounded, so equal scores are ties.
    """
    at, place = np.unique(times, return_inverse=True)
    events = np.bincount(place, is_event, len(at))
    at_risk = len(times) - np.searchsorted(np.sort(times), at)
    hazard = np.cumsum(events / at_risk)
    return np.asarray(np.round(is_event - hazard[place], DECIMALS), np.float64)
