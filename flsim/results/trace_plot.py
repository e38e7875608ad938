"""The trace as a figure: numbers of each canary against rounds, above the rounds in which a sharer took part."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from flsim.measures.built_in import PRIMARY, QUANTITIES
from flsim.measures.quantity import Quantity, flags, shown
from flsim.results.columns import quantities_in
from flsim.results.figures import COLOURS, DASHES, MARKERS, ROUNDS, plain, write_figure
from flsim.results.store import RunResults
from flsim.results.tables import copies, user_share

ROW, PANEL, WIDTH = 0.17, 2.0, 3.7  # inches: height of a canary's row and of lines of a number, width of both
BESIDE, GAP, TITLE, BELOW, TOP, LEGEND = 1.05, 0.24, 0.3, 0.5, 0.4, 0.6  # inches around them
PIXELS = 1500  # of a row: ticks that are closer are one
GREY = "#555555"
FLAGS = [flag for flag in flags(QUANTITIES.values()) if flag.is_standard]  # a filled marker, and a ring
SHAPES = (*MARKERS, "*", "h", "d", "p")


def plot_trace(run: RunResults, table: pd.DataFrame, path: Path) -> None:
    """Write the figure of `draw_trace`, whole or not at all.

    Args:
        run: what was read of the run.
        table: of `flsim.results.trace.trace`.
        path: a .png, .svg or .pdf file to write.

    Raises:
        InputError: another kind of file, or no such folder.
    """
    write_figure(lambda: draw_trace(run, table), path)


def draw_trace(run: RunResults, table: pd.DataFrame) -> Figure:
    """Panels for each configuration, and below them a row for each of its canaries, which is their legend too.

    The first panel is of exposure; each quantity of a user's own that traces show has one more. Lines are told apart by
    marker and dashes, which stand beside the canary's id. A marker is filled where Random Sampling says memorized, and
    has a ring where Beam Search does.
    """
    traced = run.roster[run.roster["canary"].isin(table["canary"])]
    of_copies = ["planned_insertions"] if traced["p_u"].isna().any() else []
    groups: list[tuple[Any, pd.DataFrame]] = list(traced.groupby(["p_u", "p_e", *of_copies], sort=False, dropna=False))
    own = [each for each in shown(quantities_in(table), "trace") if each.of_canaries and not each.is_standard]
    quantities = [PRIMARY, *own]
    columns = _columns([(p_u, p_e) for (p_u, p_e, *_), _ in groups])
    rows, longest = math.ceil(len(groups) / columns), max(len(group) for _, group in groups)
    strip_height = ROW * longest
    block = TITLE + len(quantities) * (PANEL + GAP) + strip_height + BELOW
    figure = Figure(figsize=(max(2, columns) * (BESIDE + WIDTH) + GAP, TOP + rows * block + LEGEND))
    FigureCanvasAgg(figure)
    figure.suptitle(plain(f"{run.setting} [{run.name}]"), y=1 - 0.4 * TOP / figure.get_figheight())
    panels: dict[Quantity, list[Axes]] = {quantity: [] for quantity in quantities}
    for index, ((p_u, p_e, *number), group) in enumerate(groups):
        row, column = divmod(index, columns)
        x, y = BESIDE + column * (BESIDE + WIDTH), LEGEND + (rows - row - 1) * block + BELOW
        for below, quantity in zip(reversed(range(len(quantities))), quantities, strict=True):
            like = panels[quantity][0] if panels[quantity] else None
            panel = _axes(figure, x, y + strip_height + GAP + below * (PANEL + GAP), PANEL, like)
            panel.set_ylabel(plain(quantity.phrase.lower() if quantity.is_standard else quantity.phrase))
            panel.tick_params(labelbottom=False)
            if quantity.is_flag:
                panel.set_yticks([0, 1], ["no", "yes"])
            panels[quantity].append(panel)
        strip = _axes(figure, x, y, strip_height)
        title = copies(*number) if number else f"$p_u$ = {user_share(p_u)}, $p_e$ = {100 * p_e:.6g}%"
        panels[PRIMARY][-1].set_title(title, loc="left", fontsize=10)
        for place, canary in enumerate(group["canary"]):
            of = table[table["canary"] == canary]
            for quantity in quantities:
                _line(panels[quantity][-1], place, of, quantity)
            _ticks(strip, place, of)
        _name(strip, group, longest)
        if index + columns >= len(groups):
            strip.set_xlabel(ROUNDS)
        _scale([*(panels[quantity][-1] for quantity in quantities), strip], int(table["round"].max()))
    if groups:
        _finish(figure, panels[PRIMARY], run)
    return figure


def _axes(figure: Figure, x: float, y: float, height: float, like: Axes | None = None) -> Axes:
    """Axes at a place in inches. A layout engine's solution would depend on where things lie in memory."""
    width, whole = figure.get_size_inches()
    return figure.add_axes((x / width, y / whole, WIDTH / width, height / whole), sharey=like)


def _columns(pairs: list[tuple[float, float]]) -> int:
    """As many columns as p_e has values where that makes a grid, else at most three."""
    of_p_e = len({p_e for _, p_e in pairs})
    return of_p_e if len(pairs) == of_p_e * len({p_u for p_u, _ in pairs}) else min(3, len(pairs))


def _style(row: int) -> dict[str, Any]:
    return {
        "color": COLOURS[row % len(COLOURS)],
        "marker": SHAPES[row % len(SHAPES)],
        "linestyle": DASHES[row // len(SHAPES) % len(DASHES)],
    }


def _line(panel: Axes, row: int, measured: pd.DataFrame, quantity: Quantity) -> None:
    """A number of a canary; hollow markers, filled ones over them, rings around."""
    style = _style(row)
    hollow: dict[str, Any] = {"markerfacecolor": "white", "markersize": 5, "clip_on": False, "zorder": 3}
    filled = hollow | {"markerfacecolor": style["color"], "linestyle": "none", "zorder": 4}
    ring = hollow | {
        **{"marker": "o", "markersize": 10, "markerfacecolor": "none"},
        **{"linestyle": "none", "zorder": 2},
    }
    for flag, change in zip((None, *FLAGS), (hollow | {"linewidth": 1}, filled, ring), strict=True):
        of = measured if flag is None else measured[measured[flag.name] == 1]
        [line] = panel.plot(of["round"], of[quantity.name], **(style | change))
        line.set_in_layout(False)  # an unclipped line without points would take the whole figure


def _ticks(strip: Axes, row: int, measured: pd.DataFrame) -> None:
    rounds = np.array([round_ for since in measured["sharer_rounds"] for round_ in since])
    last = int(measured["round"].max())
    kept = rounds[np.unique(rounds * PIXELS // max(1, last), return_index=True)[1]] if len(rounds) else rounds
    width = float(np.clip(0.5 * 72 * WIDTH / max(1, last), 0.6, 1.4))
    strip.vlines(kept, row - 0.36, row + 0.36, color=_style(row)["color"], linewidth=width)


def _name(strip: Axes, group: pd.DataFrame, longest: int) -> None:
    """Every second row shaded; beside each the marker and the id of its canary, and how many copies there are."""
    for row in range(0, len(group), 2):
        strip.axhspan(row - 0.5, row + 0.5, color="black", alpha=0.05, linewidth=0)
    for row in range(len(group)):
        style = _style(row) | {"linestyle": "none", "markersize": 4.5, "markerfacecolor": "white", "clip_on": False}
        strip.plot([-0.025], [row], transform=strip.get_yaxis_transform(), **style)
    ids = group["canary"].tolist()
    if "insertions" in group:
        ids = [f"{id_} ({copies})" for id_, copies in zip(ids, group["insertions"], strict=True)]
        where = strip.get_yaxis_transform()
        strip.text(-0.05, -0.6, "canary (copies)", transform=where, ha="right", va="bottom", fontsize=6.5)
    strip.set_yticks(range(len(group)), ids, fontsize=7.5)
    strip.tick_params(axis="y", length=0, pad=11)
    strip.set_ylim(longest - 0.5, -0.5)
    strip.grid(visible=False, axis="y")
    strip.spines["left"].set_visible(False)


def _scale(column: list[Axes], last: int) -> None:
    """Rounds, the same in panels and the strip below them."""
    for axes in column:
        axes.set_xlim(0, 1.015 * last)  # a tick at the end stays whole
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def _finish(figure: Figure, panels: list[Axes], run: RunResults) -> None:
    """What exposure can be at most, and what the marks mean."""
    labels = [f"{flag.outcome} ({flag.heading})" for flag in FLAGS]
    handles = [
        Line2D([], [], color=GREY, marker="o", markersize=5, markerfacecolor="white", label="not memorized"),
        Line2D([], [], color=GREY, marker="o", markersize=5, label=labels[0]),
        Line2D([], [], color=GREY, marker="o", markersize=10, markerfacecolor="none", label=labels[1]),
        Line2D([], [], color=GREY, marker="|", markersize=9, markeredgewidth=1.4, label="a sharer took part"),
    ]
    for handle in handles:
        handle.set_linestyle("none")
    references = run.references(run.evaluated[-1])
    if references:
        ceiling = math.log2(references + 1)
        for panel in panels:
            panel.axhline(ceiling, color=GREY, linestyle=(0, (1, 2)), linewidth=1, zorder=1)
        label = f"most that |R| = {references:,.0f} can show"
        handles.append(Line2D([], [], color=GREY, linestyle=(0, (1, 2)), linewidth=1, label=label))
        panels[0].set_ylim(0, 1.04 * ceiling)
    else:
        panels[0].set_ylim(bottom=0)
    figure.legend(handles=handles, loc="lower center", ncols=3, frameon=False, fontsize=9)
