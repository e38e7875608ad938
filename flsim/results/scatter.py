"""Parts of figures that have a point for each pair of a model and a secret, against the secret's estimated exposure."""

import math
from collections.abc import Sequence
from textwrap import fill
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from flsim.results.figures import line_style, plain
from flsim.results.secret_pairs import ESTIMATE

GREY = "#555555"
EXPOSURE = "estimated exposure of the secret (bits, skew-normal fit)"
NOTE_WIDTH = 136  # characters of a line below the figure


def new_figure(ylabel: str) -> tuple[Figure, Axes]:
    """Return a figure of one panel, on whose logarithmic y axis phrases or nodes are counted."""
    figure = Figure(figsize=(7.5, 5.6), layout=ConstrainedLayoutEngine())
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    panel.set(xlabel=EXPOSURE, ylabel=ylabel, yscale="log")
    panel.yaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,.0f}" if count >= 1 else ""))
    return figure, panel


def draw_points(panel: Axes, pairs: pd.DataFrame, column: str, is_filled: "pd.Series[bool]") -> list[Line2D]:
    """Draw a column of pairs against exposure, open where not filled, and return a handle for each setting.

    There are no handles where all pairs are of one setting.
    """
    handles = []
    settings = list(dict.fromkeys(pairs["setting"]))
    for index, setting in enumerate(settings):
        style = line_style(index) | {"linestyle": "none", "markersize": 5.5, "alpha": 0.75, "clip_on": False}
        is_of_setting = pairs["setting"] == setting
        for mask, face in ((~is_filled, "none"), (is_filled, style["color"])):
            chosen = pairs[is_of_setting & mask]
            [line] = panel.plot(chosen[ESTIMATE], chosen[column], markerfacecolor=face, zorder=3, **style)
            line.set_in_layout(False)  # an unclipped line without points would take the whole figure
        handles.append(Line2D([], [], label=plain(setting), **style))
    return handles if len(settings) > 1 else []


def mark_handles(filled: str, hollow: str) -> list[Line2D]:
    """Return handles that say what filled and open points are."""
    style: dict[str, Any] = {"color": GREY, "marker": "o", "linestyle": "none", "markersize": 5.5}
    return [Line2D([], [], label=filled, **style), Line2D([], [], markerfacecolor="none", label=hollow, **style)]


def draw_unique(panel: Axes, phrases: float) -> Line2D:
    """Draw the exposure of log2 |R| bits, from which on a secret should be the likeliest phrase; return its handle."""
    bits = math.log2(phrases)
    style: dict[str, Any] = {"color": GREY, "linestyle": (0, (1, 2)), "linewidth": 1.2}
    panel.axvline(bits, zorder=1, **style)
    panel.set_xlim(left=0, right=max(panel.get_xlim()[1], 1.04 * bits))
    return Line2D([], [], label=f"log2 |R| = {bits:.1f} bits: the likeliest of |R| = {phrases:,.0f}", **style)


def set_legend(figure: Figure, panel: Axes, handles: Sequence[Line2D], note: str) -> None:
    """Draw the legend in the corner of exposed secrets that are hard to find, which is empty, and a note below."""
    panel.legend(handles=handles, loc="upper right", fontsize=8, framealpha=0.95, edgecolor="none")
    text = fill(" ".join(note.split()), NOTE_WIDTH)
    figure.supxlabel(plain(text), fontsize=7.5, color=GREY, x=0.02, ha="left", multialignment="left")
