"""The trace of canaries: as text, and as a figure with the rounds in which a sharer took part."""

import math
from collections.abc import Sequence
from textwrap import shorten
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flsim.measures.built_in import MEMORIZED
from flsim.measures.quantity import Quantity
from flsim.results.differences import name_of_configuration
from flsim.results.rows import RunResults
from flsim.results.tables import quantities_in, traced
from flsim.show.figure import DASHES, LINES, MARKERS, ROUNDS, plain, subplots
from flsim.show.plots import draw_ceilings
from flsim.show.table import Field, note, table_of

SHAPES = (*MARKERS, "*", "h", "d", "p")
ROUNDS_SHOWN = 22  # characters of a list of rounds
NOT_PLANTED = "not planted"  # controls, and canaries without a copy because of a coin
SHARERS = (
    "sharers: number of different sharers that took part since the last evaluation; in central training, a sharer "
    "takes part when a copy is read, and rounds are steps."
)
IN_ROUNDS = (
    "in rounds: rounds in which a sharer took part since the last evaluation; a long list is cut, and --csv prints all "
    "rounds."
)
PARTICIPATION = (
    Field("sharers", "sharers", "{:,}", note=SHARERS),
    Field("so far", "participations", "{:,}", note="so far: how often a sharer took part since the start of training."),
    Field("since", "rounds_since_use", "{:,.0f}", note="since: rounds since a sharer last took part."),
    Field(*("in rounds", "in_rounds"), note=IN_ROUNDS),
)


def to_csv(table: pd.DataFrame) -> str:
    """Return all columns as CSV; rounds of sharers are separated by spaces."""
    if "sharer_rounds" in table:
        table = table.assign(sharer_rounds=[" ".join(map(str, rounds)) for rounds in table["sharer_rounds"]])
    return table.to_csv(index=False, lineterminator="\n")


def to_text(table: pd.DataFrame, run: RunResults) -> str:
    """Return how each canary was planted, and a table of all, at most 80 characters wide; longer lists are cut."""
    quantities = [quantity for quantity in traced(quantities_in(table)) if quantity.name in table]
    lines = [f"{run.setting} [{run.name}]", ""]
    for row in _planted(table, run):
        planted = f"; planted copies: {row['insertions']}" if "insertions" in row else ""
        lines.append(f"{row['canary']}: {name_of_configuration(row)}{planted}")
    flags = {one.name: table[one.name].map({0.0: "no", 1.0: "yes"}) for one in quantities if one.is_flag}
    shown = table.assign(**flags)
    if "sharer_rounds" in table:
        rounds = [" ".join(map(str, rounds)) for rounds in table["sharer_rounds"]]
        shown["in_rounds"] = [shorten(text, ROUNDS_SHOWN, placeholder=" ...") for text in rounds]
    measured = [Field(one.short, one.name, "" if one.is_flag else one.format) for one in quantities]
    labels = [Field("id", "canary"), Field("round", "round", "{:,}")]
    explained = [one for one in quantities if not one.is_standard or one.is_primary]
    notes = [_explained(quantity, run) for quantity in explained]
    return "\n".join([*lines, "", table_of(shown, labels, [measured, PARTICIPATION], notes).markdown()])


def _planted(table: pd.DataFrame, run: RunResults) -> list[dict[Any, Any]]:
    roster = run.roster[run.roster["canary"].isin(table["canary"])]
    return roster.assign(copies=roster.get("planned_insertions")).to_dict("records")


def steps_to_text(steps: Sequence[float]) -> str:
    """Return a line about the effective steps of the server; empty if none is known, or if all are 1, as of FedAvg."""
    if np.allclose(steps, 1, atol=1e-3):
        return ""
    low, middle, high = (f"{value:.3g}" for value in (min(steps), float(np.median(steps)), max(steps)))
    text = f"median {middle} over {len(steps):,} rounds, from {low} to {high}"
    return note(f"effective step: norm of the server's step over that of the mean update, {text}")


def _explained(quantity: Quantity, run: RunResults) -> str:
    """Return a sentence that explains the column of a number, with the number's largest possible value."""
    if not quantity.is_standard:
        return f"{quantity.short}: {quantity.sentence}"
    references = run.references(run.evaluated[-1])
    ceiling = f", of at most {math.log2(references + 1):.1f}" if references else ""
    return f"{quantity.short}: {quantity.title.lower()}{ceiling}"


def draw_trace(run: RunResults, table: pd.DataFrame) -> Figure:
    """Return a figure of canaries over rounds, filled if memorized, and of the rounds in which sharers took part."""
    groups: dict[str, list[str]] = {}
    planted = set(run.planted["canary"])
    for row in _planted(table, run):  # an arm OUT plants none, and has its configurations
        label = NOT_PLANTED if planted and row["canary"] not in planted else name_of_configuration(row)
        groups.setdefault(label, []).append(row["canary"])
    if NOT_PLANTED in groups:
        groups[NOT_PLANTED] = groups.pop(NOT_PLANTED)  # last
    quantities = [quantity for quantity in traced(quantities_in(table)) if quantity.name in table]
    quantities = [quantity for quantity in quantities if quantity.is_primary or not quantity.is_standard]
    last, has_rounds = int(table["round"].max()), "sharer_rounds" in table
    # lines of rounds need a height each; curves overlap
    height = max(1.8, 0.6 + 0.17 * max(map(len, groups.values()))) if has_rounds else 2.2
    size = (4.4 * (len(quantities) + has_rounds), height * len(groups) + 0.6)
    figure, grid = subplots(*size, len(groups), len(quantities) + has_rounds, gap=0.02, sharex=True)
    for (label, canaries), row in zip(groups.items(), grid, strict=True):
        row[0].set_title(plain(label), loc="left", fontsize=10)
        for quantity, axes, first in zip(quantities, row, grid[0], strict=False):
            if axes is not first:
                axes.sharey(first)
            axes.set(ylabel=plain(quantity.phrase), xlim=(0, 1.015 * last))
            for place, canary in enumerate(canaries):
                _draw_canary(axes, place, table[table["canary"] == canary], quantity)
            if quantity.is_primary:
                axes.set_ylim(bottom=0)
                draw_ceilings(axes, [run])
        if has_rounds:
            rounds = [table.loc[table["canary"] == canary, "sharer_rounds"].sum() for canary in canaries]
            looks = [_style(place)["color"] for place in range(len(canaries))]
            row[-1].eventplot(rounds, colors=looks, linelengths=0.7, linewidths=0.8)
            row[-1].set_yticks(range(len(canaries)), canaries, fontsize=7)
            row[-1].invert_yaxis()
    for axes in grid[-1]:
        axes.set_xlabel(ROUNDS)
    figure.suptitle(plain(f"{run.setting} [{run.name}]"))
    return figure


def _draw_canary(axes: Axes, place: int, measured: pd.DataFrame, quantity: Quantity) -> None:
    """Draw a number of a canary with hollow markers, and filled markers over them when it is memorized."""
    look = _style(place) | {"clip_on": False, "markersize": 5}
    for line, fill, dashes in (
        (measured, "white", look["linestyle"]),
        (measured[measured[MEMORIZED.name] == 1], None, "none"),
    ):
        [points] = axes.plot(
            line["round"], line[quantity.name], **look | {"markerfacecolor": fill, "linestyle": dashes}
        )
        points.set_in_layout(False)  # an unclipped line without points would cover the complete figure


def _style(row: int) -> dict[str, Any]:
    """Return the look of a canary's line, which differs from other canaries also without colour."""
    shape, dashes = row % len(SHAPES), row // len(SHAPES)
    return {"color": LINES[row % len(LINES)], "marker": SHAPES[shape], "linestyle": DASHES[dashes % len(DASHES)]}
