"""Intervals and tests for plain numbers; the caller decides whether these are canaries or seeds."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

ROUNDING = 9  # decimals of a bit: far below any exposure's resolution, so that equal differences tie


def t_interval(values: NDArray[np.floating[Any]], confidence: float = 0.95) -> tuple[float, float]:
    """Return Student's t confidence interval of the mean of float64 [n] values; NaN below two of them."""
    if len(values) < 2:
        return math.nan, math.nan
    half = float(scipy.stats.t.ppf((1 + confidence) / 2, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values)))
    return float(values.mean()) - half, float(values.mean()) + half


def paired_t_p(differences: NDArray[np.floating[Any]]) -> float:
    """Return the two-sided p-value of the t test that float64 [n] differences have mean zero.

    It is 1 if all are zero, and NaN for only one.
    """
    if len(differences) < 2:
        return math.nan
    if not differences.any():
        return 1.0
    # The spread of equal differences is rounding error, which must not become a statistic.
    if np.ptp(differences) == 0:
        return 0.0
    return float(scipy.stats.ttest_1samp(differences, 0.0).pvalue)


def signed_rank_p(differences: NDArray[np.floating[Any]]) -> float:
    """Return the two-sided p-value of the signed-rank test that float64 [n] differences lie symmetric about zero.

    It is 1 if all are zero. It is exact up to 50 differences without ties or zeros and up to 13 with them, and
    otherwise uses the tie-corrected normal approximation.
    """
    if not differences.any():
        return 1.0
    return float(scipy.stats.wilcoxon(differences, zero_method="pratt", correction=False, method="auto").pvalue)


def mcnemar_p(only_a: int, only_b: int) -> float:
    """Return the two-sided p-value of McNemar's exact test, by the numbers of canaries memorized in one model only.

    This is the binomial test of one half on the discordant pairs (McNemar, 1947); 1 if there are none.
    """
    discordant = only_a + only_b
    return float(scipy.stats.binomtest(only_a, discordant).pvalue) if discordant else 1.0


def discordant_interval(only_a: int, only_b: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the exact interval of the probability that a discordant canary is a's: Clopper and Pearson (1934).

    The interval is conditional on the number of discordant pairs, so it leaves out one half exactly if `mcnemar_p` is
    below 1 - confidence. The odds of its ends are an exact interval of the conditional odds ratio (Breslow and Day,
    1980, 5.2). It is (0, 1) if there are no discordant pairs.
    """
    discordant = only_a + only_b
    if not discordant:
        return 0.0, 1.0
    interval = scipy.stats.binomtest(only_a, discordant).proportion_ci(confidence, method="exact")
    return float(interval.low), float(interval.high)


def sign_flip_p(differences: Sequence[int]) -> float:
    """Return the exact two-sided p-value that each of [n] whole differences was as likely to have the other sign.

    Fisher's (1935) randomization test: of all 2^n ways to exchange the settings within seeds, the share whose sum is as
    far from zero. It supposes nothing about the distribution of differences, and is never below 2 / 2^n. It is NaN for
    only one difference.
    """
    if len(differences) < 2:
        return math.nan
    share = np.ones(1)  # of the ways whose sum is its index less the middle
    for size in np.abs(differences).tolist():
        kernel = np.zeros(2 * size + 1)
        kernel[[0, -1]] += 0.5 if size else 1.0
        share = np.convolve(share, kernel)
    middle = len(share) // 2
    return float(min(1.0, share[np.abs(np.arange(len(share)) - middle) >= abs(sum(differences))].sum()))


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values [n] of one family, corrected by Holm (1979).

    The chance that any corrected value below 0.05 is a false discovery is at most 5%, for any dependence between the
    tests. NaN, where nothing was tested, stays NaN and does not count.
    """
    corrected = [math.nan] * len(p)
    tested = sorted((value, index) for index, value in enumerate(p) if not math.isnan(value))
    largest = 0.0
    for place, (value, index) in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - place) * value))
        corrected[index] = largest
    return corrected
