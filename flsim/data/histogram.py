"""Exact distributions of lengths, counted a piece at a time, their bins, and histograms in text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

QUANTILES = {"min": 0.0, "5%": 0.05, "median": 0.5, "95%": 0.95, "max": 1.0}
BINS = 24  # at most; a terminal has room for three such histograms side by side
BLOCKS, ASCII = tuple(" ▁▂▃▄▅▆▇█─"), tuple(" .:#-")  # nothing, parts of a cell, a whole cell, and the axis
HEIGHT = 6  # lines
LONG_TAIL = 10  # a maximum of more than so many medians asks for a logarithmic axis


@dataclass(frozen=True)
class Distribution:
    """The number of things of each length.

    Attributes:
        values: int64 [distinct], the lengths that occur, ascending.
        counts: int64 [distinct], how many things have each length.
    """

    values: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def count(cls, lengths: Iterable[NDArray[Any]]) -> "Distribution":
        """Count all lengths in several arrays, of which one at a time is in memory."""
        whole = cls(np.empty(0, np.int64), np.empty(0, np.int64))
        for piece in lengths:
            whole += cls(*np.unique(piece, return_counts=True))
        return whole

    def __add__(self, other: "Distribution") -> "Distribution":
        values, place = np.unique(np.concatenate([self.values, other.values]), return_inverse=True)
        counts = np.zeros(len(values), np.int64)
        np.add.at(counts, place, np.concatenate([self.counts, other.counts]))
        return Distribution(values, counts)

    def quantiles(self) -> dict[str, int]:
        """Return each quantile by name: the smallest length that at least this share of the things do not exceed.

        The result is empty if there are no things.
        """
        if not len(self.values):
            return {}
        cumulative = np.cumsum(self.counts)
        ranks = {name: max(1, int(np.ceil(share * cumulative[-1]))) for name, share in QUANTILES.items()}
        return {name: int(self.values[np.searchsorted(cumulative, rank)]) for name, rank in ranks.items()}

    def edges(self) -> tuple[list[int], str]:
        """Return edges of at most `BINS` bins that hold every value, and the scale of their axis, "linear" or "log".

        Bin i holds the values from ``edges[i]`` up to, not including, ``edges[i + 1]``. Few values have a bin each. A
        long tail has bins of equal ratio, up to rounding, after one for 0. Other bins have a round width.
        """
        if not len(self.values):
            return [], "linear"
        low, high = int(self.values[0]), int(self.values[-1])
        if high - low < BINS:
            return list(range(low, high + 2)), "linear"
        if high > LONG_TAIL * max(1, self.quantiles()["median"]):
            ratios = np.geomspace(max(low, 1), high + 1, BINS + (low > 0))
            return [0] * (low == 0) + np.unique(np.round(ratios)).astype(int).tolist(), "log"
        widths = (digit * 10**power for power in range(19) for digit in (1, 2, 5))
        width = next(width for width in widths if high // width - low // width < BINS)
        return list(range(low - low % width, high + width - high % width + 1, width)), "linear"

    def binned(self, edges: Sequence[int]) -> list[int]:
        """Return how many things each bin holds; the edges must hold every value."""
        counts = np.zeros(max(0, len(edges) - 1), np.int64)
        np.add.at(counts, np.searchsorted(edges, self.values, side="right") - 1, self.counts)
        totals: list[int] = counts.tolist()
        return totals


def short(number: float) -> str:
    """Return a number as a short label of an axis: 950, 9,500, 95k, 950k, 9.5M."""
    if number < 10_000:
        return f"{number:,.0f}"
    return f"{number / 1e3:.0f}k" if number < 999_500 else f"{number / 1e6:.3g}M"


def panel(title: str, histogram: dict[str, Any], signs: Sequence[str]) -> list[str]:
    """Return a histogram as lines of text, in at most `BINS` columns and always the same number of lines.

    Args:
        title: the first line.
        histogram: ``edges``, ``counts`` and ``scale``; a histogram without counts gives only the title.
        signs: `BLOCKS` or `ASCII`.

    Returns:
        Title, bars, axis, the first and the last value, and the share of the highest bar.
    """
    edges, counts = histogram["edges"], histogram["counts"]
    if not sum(counts):
        return [title] + [""] * (HEIGHT + 3)
    *levels, axis = signs
    parts = len(levels) - 1
    columns = BINS // len(counts)
    heights = [max(count > 0, round(HEIGHT * parts * count / max(counts))) for count in counts]  # no count is invisible
    bars = [
        "".join(levels[min(max(height - parts * line, 0), parts)] * columns for height in heights)
        for line in reversed(range(HEIGHT))
    ]
    width = columns * len(counts)
    first = short(edges[0])
    last = short(edges[-1] - (edges[-1] - edges[-2] == 1))  # a bin of one value is named by it
    scale = ", log scale" if histogram["scale"] == "log" else ""
    share = f"top bar {max(counts) / sum(counts):.0%}{scale}"
    return [title, *bars, axis * width, f"{first}{last:>{width - len(first)}}", share]


def can_show(encoding: str) -> bool:
    """Return whether an output encoding has the block characters."""
    try:
        "".join(BLOCKS).encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
