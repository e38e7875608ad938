"""The trace of canaries: as text, and as a figure with the rounds in which a sharer took part."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from flsim.measures.built_in import PRIMARY, QUANTITIES
from flsim.measures.quantity import Quantity, flags, select_for
from flsim.results.canary_table import traced
from flsim.results.columns import quantities_in
from flsim.results.store import RunResults
from flsim.results.tables import copies, rounds_text, user_share
from flsim.show.figure import DASHES, LINES, MARKERS, ROUNDS, plain, write_figure
from flsim.show.table import Column, formatted, json_rows, markdown, note

ROW, PANEL, WIDTH = 0.17, 2.0, 3.7  # inches: height of a canary's row and of lines of a number, width of both
BESIDE, GAP, TITLE, BELOW, TOP, LEGEND = 1.05, 0.24, 0.3, 0.5, 0.4, 0.6  # inches around them
PIXELS = 1500  # of a row: closer ticks are merged
GREY = "#555555"
# flags that are shown as a filled marker and as a ring
FLAGS = [flag for flag in flags(QUANTITIES.values()) if flag.is_standard]
SHAPES = (*MARKERS, "*", "h", "d", "p")
ROUNDS_SHOWN = 24  # characters of a list of rounds
COUNTS = """sharers: number of different sharers that took part since the last evaluation
so far: how often a sharer took part since the start of training
since: rounds since a sharer last took part
in rounds: rounds in which a sharer took part since the last evaluation
In central training: rounds are steps; a sharer takes part when a copy is read.
"""


def to_csv(table: pd.DataFrame) -> str:
    """Return all columns as CSV; rounds of sharers are separated by spaces."""
    if "sharer_rounds" in table:
        table = table.assign(sharer_rounds=[" ".join(map(str, rounds)) for rounds in table["sharer_rounds"]])
    return table.to_csv(index=False, lineterminator="\n")


def to_json(table: pd.DataFrame) -> str:
    """Return a JSON list of rows; null is a metric that was not measured."""
    return json.dumps(json_rows(table))


def to_text(table: pd.DataFrame, run: RunResults) -> str:
    """Return a table for each canary, at most 80 characters wide; longer lists of rounds are cut."""
    roster: dict[Any, Any] = run.roster.set_index("canary").to_dict("index")
    quantities = [quantity for quantity in traced(quantities_in(table)) if quantity.name in table]
    blocks = [f"{run.setting} [{run.name}]\n"]
    for canary in table["canary"].unique():
        planted, rows = roster[canary], table[table["canary"] == canary]
        held = f"; copies {planted['insertions']}" if "insertions" in planted else ""
        shares = (
            f"planned copies {planted['planned_insertions']}"
            if math.isnan(planted["p_u"])
            else f"p_u {user_share(planted['p_u'])}, p_e {100 * planted['p_e']:.6g}%"
        )
        window = rounds_text(planted.get("first_round"), planted.get("last_round"))
        measured = [Column(quantity.short, _cells(quantity, rows[quantity.name])) for quantity in quantities]
        counts = _participation(rows) if "sharer_rounds" in rows else []
        heading = f"{canary}: {shares}{held}{window and f'; planted {window}'}\n"
        blocks.append(
            heading + markdown([Column("round", formatted(rows["round"], "{:,}"))], [measured, *filter(None, [counts])])
        )
    explained = [quantity for quantity in quantities if not quantity.is_standard or quantity.is_primary]
    legend = "".join(_explained(quantity, run) for quantity in explained) + COUNTS * ("sharer_rounds" in table)
    return "\n\n".join([*(block.strip() for block in blocks), legend])


def _participation(rows: pd.DataFrame) -> list[Column]:
    """Return columns with the participation of sharers in the rounds of a canary's rows."""
    cells = [shorten(" ".join(map(str, rounds)), ROUNDS_SHOWN, placeholder=" ...") for rounds in rows["sharer_rounds"]]
    return [
        Column("sharers", formatted(rows["sharers"], "{:,}")),
        Column("so far", formatted(rows["participations"], "{:,}")),
        Column("since", formatted(rows["rounds_since_use"], "{:,.0f}")),
        Column("in rounds", cells, is_number=False),
    ]


def steps_to_text(steps: Sequence[float]) -> str:
    """Return a line about the effective steps of the server; empty if none is known."""
    if not steps:
        return ""
    low, middle, high = (f"{value:.3g}" for value in (min(steps), float(np.median(steps)), max(steps)))
    text = f"median {middle} over {len(steps):,} rounds, from {low} to {high}"
    return note(f"effective step: norm of the server's step over that of the mean update, {text}")


def _explained(quantity: Quantity, run: RunResults) -> str:
    """Return a line that explains the column of a number, with the number's largest possible value."""
    if not quantity.is_standard:
        return note(f"{quantity.short}: {quantity.sentence}")
    references = run.references(run.evaluated[-1])
    ceiling = f", of at most {math.log2(references + 1):.1f}" if references else ""
    return f"{quantity.short}: {quantity.title.lower()}{ceiling}\n"


def _cells(quantity: Quantity, values: "pd.Series[float]") -> list[str]:
    if quantity.is_flag:
        return ["" if math.isnan(value) else "yes" if value else "no" for value in values]
    return formatted(values, quantity.format)


def plot_trace(run: RunResults, table: pd.DataFrame, path: Path) -> None:
    """Write the figure of `draw_trace`, atomically.

    Args:
        run: the results of the run.
        table: the table of `flsim.results.canary_table.trace`.
        path: a .png, .svg or .pdf file to write.

    Raises:
        InputError: the path has another suffix, or its folder does not exist.
    """
    write_figure(lambda: draw_trace(run, table), path)


def draw_trace(run: RunResults, table: pd.DataFrame) -> Figure:
    """Return a figure with panels for each configuration above a row for each canary; the rows are also the legend.

    The first panel shows exposure. Each custom quantity in traces has a further panel. Lines differ by marker and
    dashes, which are shown next to the canary id. A marker is filled if the canary is memorized by Random Sampling, and
    has a ring if it is memorized by Beam Search.
    """
    roster = run.roster[run.roster["canary"].isin(table["canary"])]
    of_copies = ["number"] if roster["p_u"].isna().any() else []
    if of_copies:  # canaries with probabilities have no number of copies, and can be together with controls
        roster = roster.assign(number=roster["planned_insertions"].where(roster["p_u"].isna()))
    windows = [name for name in ("first_round", "last_round") if name in roster]
    keys = ["p_u", "p_e", *windows, *of_copies]
    groups: list[tuple[Any, pd.DataFrame]] = list(roster.groupby(keys, sort=False, dropna=False))
    own = [
        quantity
        for quantity in select_for(quantities_in(table), "trace")
        if quantity.of_canaries and not quantity.is_standard
    ]
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
        title = copies(int(number[-1])) if math.isnan(p_u) else f"$p_u$ = {user_share(p_u)}, $p_e$ = {100 * p_e:.6g}%"
        first_row = group.iloc[0]
        if window := rounds_text(first_row.get("first_round"), first_row.get("last_round")):
            title += f", planted {window}"
        panels[PRIMARY][-1].set_title(title, loc="left", fontsize=10)
        for place, canary in enumerate(group["canary"]):
            rows_of_canary = table[table["canary"] == canary]
            for quantity in quantities:
                _line(panels[quantity][-1], place, rows_of_canary, quantity)
            if "sharer_rounds" in table:
                _ticks(strip, place, rows_of_canary)
        _name(strip, group, longest)
        if index + columns >= len(groups):
            strip.set_xlabel(ROUNDS)
        _scale([*(panels[quantity][-1] for quantity in quantities), strip], int(table["round"].max()))
    if groups:
        _finish(figure, panels[PRIMARY], run)
    return figure


def _axes(figure: Figure, x: float, y: float, height: float, like: Axes | None = None) -> Axes:
    """Return axes at a place in inches. The result of a layout engine would depend on memory addresses."""
    width, whole = figure.get_size_inches()
    return figure.add_axes((x / width, y / whole, WIDTH / width, height / whole), sharey=like)


def _columns(pairs: list[tuple[float, float]]) -> int:
    """Return the number of columns: that of the values of p_e if these form a grid, otherwise at most three."""
    of_p_e = len({p_e for _, p_e in pairs})
    return of_p_e if len(pairs) == of_p_e * len({p_u for p_u, _ in pairs}) else min(3, len(pairs))


def _style(row: int) -> dict[str, Any]:
    return {
        "color": LINES[row % len(LINES)],
        "marker": SHAPES[row % len(SHAPES)],
        "linestyle": DASHES[row // len(SHAPES) % len(DASHES)],
    }


def _line(panel: Axes, row: int, measured: pd.DataFrame, quantity: Quantity) -> None:
    """Draw a number of a canary with hollow markers, filled markers over them, and rings around."""
    style = _style(row)
    hollow: dict[str, Any] = {"markerfacecolor": "white", "markersize": 5, "clip_on": False, "zorder": 3}
    filled = hollow | {"markerfacecolor": style["color"], "linestyle": "none", "zorder": 4}
    ring = hollow | {
        **{"marker": "o", "markersize": 10, "markerfacecolor": "none"},
        **{"linestyle": "none", "zorder": 2},
    }
    for flag, change in zip((None, *FLAGS), (hollow | {"linewidth": 1}, filled, ring), strict=True):
        marked = measured if flag is None else measured[measured[flag.name] == 1]
        [line] = panel.plot(marked["round"], marked[quantity.name], **(style | change))
        line.set_in_layout(False)  # an unclipped line without points would cover the complete figure


def _ticks(strip: Axes, row: int, measured: pd.DataFrame) -> None:
    rounds = np.array([round_ for since in measured["sharer_rounds"] for round_ in since])
    last = int(measured["round"].max())
    kept = rounds[np.unique(rounds * PIXELS // max(1, last), return_index=True)[1]] if len(rounds) else rounds
    width = float(np.clip(0.5 * 72 * WIDTH / max(1, last), 0.6, 1.4))
    strip.vlines(kept, row - 0.36, row + 0.36, color=_style(row)["color"], linewidth=width)


def _name(strip: Axes, group: pd.DataFrame, longest: int) -> None:
    """Shade every second row, and draw its marker, the canary id and the number of copies next to each row."""
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
    """Set the same scale of rounds in panels and in the rows below."""
    for axes in column:
        axes.set_xlim(0, 1.015 * last)  # a tick at the end is not cut
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def _finish(figure: Figure, panels: list[Axes], run: RunResults) -> None:
    """Draw the largest possible exposure, and a legend of the marks."""
    labels = [f"{flag.outcome} ({flag.heading})" for flag in FLAGS]
    handles = [
        Line2D([], [], color=GREY, marker="o", markersize=5, markerfacecolor="white", label="not memorized"),
        Line2D([], [], color=GREY, marker="o", markersize=5, label=labels[0]),
        Line2D([], [], color=GREY, marker="o", markersize=10, markerfacecolor="none", label=labels[1]),
        Line2D([], [], color=GREY, marker="|", markersize=9, markeredgewidth=1.4, label="a sharer took part"),
    ][: 3 if run.is_elsewhere else 4]
    for handle in handles:
        handle.set_linestyle("none")
    references = run.references(run.evaluated[-1])
    if references:
        ceiling = math.log2(references + 1)
        for panel in panels:
            panel.axhline(ceiling, color=GREY, linestyle=(0, (1, 2)), linewidth=1, zorder=1)
        label = f"largest exposure with |R| = {references:,.0f}"
        handles.append(Line2D([], [], color=GREY, linestyle=(0, (1, 2)), linewidth=1, label=label))
        panels[0].set_ylim(0, 1.04 * ceiling)
    else:
        panels[0].set_ylim(bottom=0)
    figure.legend(handles=handles, loc="lower center", ncols=3, frameon=False, fontsize=9)
