"""How ours agrees with what was published: in size, each value by itself, and in direction, each against all others."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy


def share_interval(memorized: int, canaries: int, confidence: float = 0.95) -> tuple[float, float]:
    """Clopper-Pearson interval of a share of canaries, both bounds in [0, 1].

    It takes canaries as independent, which those of one model are not, so it is too narrow for other seeds; over seeds
    it is of all their canaries pooled.
    """
    tail = (1 - confidence) / 2  # quantiles of beta distributions: scipy.stats would add a second to every table
    low = scipy.special.betaincinv(memorized, canaries - memorized + 1, tail) if memorized else 0.0
    high = scipy.special.betaincinv(memorized + 1, canaries - memorized, 1 - tail) if memorized < canaries else 1.0
    return float(low), float(high)


def size(low: float, high: float, published: float) -> str:
    """Ours against the published share: ``"same"`` where that lies in our interval, else ``"lower"``, ``"higher"``."""
    return "same" if low <= published <= high else "lower" if high < published else "higher"


@dataclass(frozen=True)
class Order:
    """Whether rows come in the published order.

    Attributes:
        pairs: pairs of rows whose published values differ.
        agreeing: how many of them differ with the same sign in ours; a tie of ours counts half.
        of_rows: for each row, which share of its pairs agrees; NaN where it has none.
        tau: Kendall's tau-b between ours and theirs; NaN where either has one value only.
        p: its two-sided p-value (scipy), which takes rows as exchangeable and independent; NaN where tau is.
    """

    pairs: int
    agreeing: float
    of_rows: tuple[float, ...]
    tau: float
    p: float


def order(ours: Sequence[float], theirs: Sequence[float]) -> Order:
    """Of float [rows] values, ours and the published ones in the same order."""
    a, b = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    signs = [np.sign(values[:, None] - values[None, :]) for values in (a, b)]
    differ = signs[1] != 0
    agree = np.where(differ, (1 + signs[0] * signs[1]) / 2, 0.0)
    counts = differ.sum(axis=1)
    of_rows = [
        float(sum_ / count) if count else math.nan for sum_, count in zip(agree.sum(axis=1), counts, strict=True)
    ]
    tau = p = math.nan
    if len(set(a)) > 1 and len(set(b)) > 1:
        tau, p = map(float, scipy.stats.kendalltau(a, b))
    return Order(int(differ.sum()) // 2, float(agree.sum()) / 2, tuple(of_rows), tau, p)
