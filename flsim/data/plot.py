"""Figure of the lengths of a corpus' records and users."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

from flsim.base.errors import InputError
from flsim.base.files import named_file
from flsim.data.inspect import LENGTHS
from flsim.data.manifest import SPLITS, WHOLE

FORMATS: dict[str, dict[str, Any]] = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
OF = {"words_per_record": "records", "records_per_user": "users", "words_per_user": "users"}
# Train is an area; the others are lines of Okabe and Ito's colours (2008), which their dashes tell apart in print.
LINES = {
    "heldout": ("#0072B2", "--"),
    "test": ("#D55E00", ":"),
    "heldout-whole": ("#009E73", "-."),
    "test-whole": ("#CC79A7", "-"),
}
STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.xmargin": 0.02,
    "font.size": 10,
    "grid.alpha": 0.3,
    "pdf.fonttype": 42,
    "svg.hashsalt": "flsim",  # the same corpus gives the same bytes
}


def refuse_plot(path: Path) -> None:
    """Raise InputError for a path that no figure can be written to.

    Callers check a path with this function before the work that the figure needs.
    """
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"{path}: plots are written as .png, .svg or .pdf; name one of these")
    if not path.parent.is_dir():
        raise InputError(f"{path}: no such folder as {path.parent}; make it first")


def plot_lengths(summary: dict[str, Any], path: Path) -> None:
    """Write the figure of `draw_lengths`, whole or not at all.

    Args:
        summary: what `inspect` returned.
        path: a .png, .svg or .pdf file to write.

    Raises:
        InputError: the path has another ending, or its folder does not exist.
    """
    refuse_plot(path)
    kind = path.suffix.lower()
    with mpl.rc_context(STYLE), named_file(path) as partial:
        draw_lengths(summary).savefig(partial, format=kind[1:], dpi=150, metadata=FORMATS[kind])


def draw_lengths(summary: dict[str, Any]) -> Figure:
    """Return histograms of words per record, records per user and words per user, for each split with users.

    Whole authors have a row of panels of their own, because they differ in length far more than balanced users do.
    """
    splits = {name: split for name, split in summary["splits"].items() if split["users"]}
    populations = ([name for name in names if name in splits] for names in (SPLITS, WHOLE.values()))
    rows = [names for names in populations if names] or [[]]
    figure = Figure(figsize=(11, 3.4 * len(rows)), layout=ConstrainedLayoutEngine(wspace=0.05))
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(rows), len(LENGTHS), squeeze=False)
    for names, row in zip(rows, panels, strict=True):
        for panel, length in zip(row, LENGTHS, strict=True):
            for name in names:
                _histogram(panel, name, splits[name]["histograms"][length])
            panel.set(xlabel=length.replace("_", " "), ylabel=f"share of {OF[length]} (%)")
            panel.set_ylim(bottom=0)
    lines = [patch for row in panels for patch in row[-1].patches]
    labels = [f"{name}, {splits[name]['users']:,} users" for names in rows for name in names]
    figure.legend(lines, labels, loc="outside lower center", ncols=len(summary["splits"]), frameon=False)
    return figure


def _histogram(panel: Axes, name: str, histogram: dict[str, Any]) -> None:
    counts, edges = np.array(histogram["counts"]), np.array(histogram["edges"], np.float64)
    if not counts.sum():
        return
    shares = 100 * counts / counts.sum()
    if np.all(np.diff(edges) == 1):
        edges -= 0.5  # a bin of one value is drawn around it
    if name == "train":
        panel.stairs(shares, edges, fill=True, facecolor="0.8", edgecolor="black", linewidth=0.8)
    else:
        colour, dashes = LINES[name]
        panel.stairs(shares, edges, color=colour, linestyle=dashes, linewidth=1.6)
    if histogram["scale"] == "log":
        panel.set_xscale("log") if edges[0] else panel.set_xscale("symlog", linthresh=1)
    else:
        panel.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def short(number: float) -> str:
    """Return a number as a short label of an axis: 950, 9,500, 95k, 950k, 9.5M."""
    if number < 10_000:
        return f"{number:,.0f}"
    return f"{number / 1e3:.0f}k" if number < 999_500 else f"{number / 1e6:.3g}M"
