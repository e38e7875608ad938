"""Agreement with published values: in size, value by value, and in direction, each value against all others."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import scipy
from numpy.typing import NDArray


def share_interval(memorized: int, canaries: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the Clopper-Pearson interval of a share of canaries, with both bounds in [0, 1].

    The interval treats canaries as independent. Those of one model are not, so the interval is too narrow for other
    seeds. Over seeds, all their canaries are pooled.
    """
    tail = (1 - confidence) / 2  # quantiles of beta distributions: scipy.stats would add a second to every table
    low = scipy.special.betaincinv(memorized, canaries - memorized + 1, tail) if memorized else 0.0
    high = scipy.special.betaincinv(memorized + 1, canaries - memorized, 1 - tail) if memorized < canaries else 1.0
    return float(low), float(high)


def size(low: float, high: float, published: float) -> str:
    """Return "same" if the published share lies in our interval, otherwise whether ours is "lower" or "higher"."""
    return "same" if low <= published <= high else "lower" if high < published else "higher"


@cache
def differ_by_more_than_chance(counts: tuple[int, int], totals: tuple[int, int], level: float = 0.05) -> bool:
    """Return whether Fisher's exact test tells two counts of memorized canaries apart, two-sided.

    The test treats the canaries of both models as independent. Two rows of a paper have the same canaries, which tend
    to be memorized in both or in neither, so their counts differ less by chance: the test is conservative. It does not
    know how far counts differ between seeds.

    Args:
        counts: memorized canaries of two models.
        totals: all canaries of each.
        level: largest p-value of counts that are told apart.
    """
    table = [[count, max(total - count, 0)] for count, total in zip(counts, totals, strict=True)]
    return float(scipy.stats.fisher_exact(table).pvalue) < level


@dataclass(frozen=True)
class Order:
    """The agreement of rows with the published order.

    Attributes:
        pairs: number of pairs of rows whose published values differ.
        agreeing: number of those pairs whose difference has the same sign in ours; a tie of ours counts half.
        clear_pairs, clear_agreeing: the same of the pairs that the paper tells apart by more than chance.
        of_rows: for each row, the share of its clear pairs that agrees; NaN if it has none.
        tau: Kendall's tau-b between our and the published values; NaN if either has only one value.
        p: two-sided p-value of tau (scipy), which treats rows as exchangeable and independent; NaN if tau is.
    """

    pairs: int
    agreeing: float
    clear_pairs: int
    clear_agreeing: float
    of_rows: tuple[float, ...]
    tau: float
    p: float


def order(ours: Sequence[float], theirs: Sequence[float], is_clear: NDArray[np.bool_] | None = None) -> Order:
    """Return the agreement of two orders of rows.

    Args:
        ours: float [rows], our values.
        theirs: float [rows], the published values in the same order.
        is_clear: bool [rows, rows], symmetric: whether published values differ by more than chance. Without it all
            pairs that differ are clear.
    """
    a, b = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    signs = [np.sign(values[:, None] - values[None, :]) for values in (a, b)]
    differ = signs[1] != 0
    agree = np.where(differ, (1 + signs[0] * signs[1]) / 2, 0.0)
    clear = differ if is_clear is None else differ & is_clear
    clearly = np.where(clear, agree, 0.0)
    of_rows = [
        float(sum_ / count) if count else math.nan
        for sum_, count in zip(clearly.sum(axis=1), clear.sum(axis=1), strict=True)
    ]
    tau = p = math.nan
    if len(set(a)) > 1 and len(set(b)) > 1:
        tau, p = map(float, scipy.stats.kendalltau(a, b))
    all_pairs, clear_pairs = (
        (int(which.sum()) // 2, float(scores.sum()) / 2) for which, scores in ((differ, agree), (clear, clearly))
    )
    return Order(*all_pairs, *clear_pairs, tuple(of_rows), tau, p)
