"""Measurements of each canary against rounds, with the rounds in which a user who shares it took part."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from flsim.base.errors import InputError
from flsim.measures.quantity import Quantity, select_for
from flsim.results.columns import described, quantities_in, quantities_of
from flsim.results.formats import note, rounds_text
from flsim.results.store import RunResults
from flsim.results.tables import user_share

WIDTH = 80  # characters of a line
LEGEND = """sharers: number of different sharers that took part since the last evaluation
so far: how often a sharer took part since the start of training
since: rounds since a sharer last took part
in rounds: rounds in which a sharer took part since the last evaluation
In central training: rounds are steps; a sharer takes part when a copy is read.
"""


def trace(run: RunResults, took_part: pd.DataFrame, canaries: Sequence[str] = ()) -> pd.DataFrame:
    """Return a row for each canary and evaluated round, in the order of the roster, then of rounds.

    Args:
        run: the results of the run.
        took_part: a row for each time that a sharer took part, with ``round`` from 1, ``canary``, its id, and ``user``;
            see `flsim.runs.participation`. In central training, each time that a step read a user's copy.
        canaries: ids of the canaries to show; all if empty.

    Returns:
        Columns canary and round; exposure (bits), rs and bs (1 if memorized), and a user's own quantities of canaries,
        NaN if the model had diverged; sharers, the number of different sharers that took part since the last
        evaluation; participations, how often a sharer took part since the start; rounds_since_use, the rounds since a
        sharer last took part, NaN if none has; sharer_rounds, a tuple of the rounds since the last evaluation in which
        a sharer took part.

    Raises:
        InputError: there is no such canary, or none, nothing was evaluated, or some canaries' results are missing.
    """
    known = run.roster["canary"].tolist()
    if not known:
        raise InputError(f"run {run.name}: was trained without canaries, so there is nothing to trace")
    for canary in canaries:
        if canary not in known:
            raise InputError(f"run {run.name}: has no canary {canary}; its canaries are {known[0]} to {known[-1]}")
    run.evaluation()  # raises where there is none
    rounds = np.array(run.evaluated)
    quantities = _traced(quantities_of([run]))
    measured = {
        quantity.name: {
            round_: values for round_ in run.evaluated if (values := run.of_canaries(quantity.name, round_)) is not None
        }
        for quantity in quantities
    }
    by_canary = dict(list(took_part.groupby("canary")))
    rows = []
    for canary in [id_ for id_ in known if not canaries or id_ in canaries]:
        met = by_canary.get(canary, took_part.iloc[:0])
        at, users = met["round"].to_numpy(), met["user"].to_numpy()
        last = np.searchsorted(at, rounds, side="right").tolist()  # of rounds, which ascend
        for round_, first, end in zip(rounds.tolist(), [0, *last[:-1]], last, strict=True):
            rows.append(
                {
                    "canary": canary,
                    "round": round_,
                    **{metric: measured[metric].get(round_, {canary: math.nan})[canary] for metric in measured},
                    "sharers": len(np.unique(users[first:end])),
                    "participations": end,
                    "rounds_since_use": float(round_ - at[end - 1]) if end else math.nan,
                    "sharer_rounds": tuple(np.unique(at[first:end]).tolist()),
                }
            )
    return described(pd.DataFrame(rows), quantities)


def _traced(quantities: Iterable[Quantity]) -> list[Quantity]:
    """Return the quantities of canaries that a trace shows: the primary number, flags, then other numbers."""
    traced = [quantity for quantity in select_for(quantities, "trace") if quantity.of_canaries]
    return sorted(traced, key=lambda quantity: not quantity.is_primary)


def to_csv(table: pd.DataFrame) -> str:
    """Return all columns as CSV; rounds of sharers are separated by spaces."""
    spaced = table.assign(sharer_rounds=[" ".join(map(str, rounds)) for rounds in table["sharer_rounds"]])
    return spaced.to_csv(index=False, lineterminator="\n")


def to_json(table: pd.DataFrame) -> str:
    """Return a JSON list of rows; null stands for a metric that was not measured."""
    rows = table.to_dict("records")
    return json.dumps([{key: None if value != value else value for key, value in row.items()} for row in rows])


def to_text(table: pd.DataFrame, run: RunResults) -> str:
    """Return a block of text for each canary, at most 80 characters wide; longer lists of rounds are cut."""
    about: dict[Any, Any] = run.roster.set_index("canary").to_dict("index")
    blocks = [f"{run.setting} [{run.name}]"]
    quantities = [quantity for quantity in _traced(quantities_in(table)) if quantity.name in table]
    width = max(len("since"), *(len(_since(value)) for value in table["rounds_since_use"]))
    counts = f"{'sharers':>7}  {'so far':>6}  {'since':>{width}}  in rounds"
    widths = [_width(quantity, table[quantity.name]) for quantity in quantities]
    names = "".join(f"{quantity.short:>{width}}  " for quantity, width in zip(quantities, widths, strict=True))
    heading = f"{'round':>9}  {names}{counts}"
    for canary in table["canary"].unique():
        planted = about[canary]
        held = f"; copies {planted['insertions']}" if "insertions" in planted else ""
        shares = (
            f"planned copies {planted['planned_insertions']}"
            if math.isnan(planted["p_u"])
            else f"p_u {user_share(planted['p_u'])}, p_e {100 * planted['p_e']:.6g}%"
        )
        window = rounds_text(planted.get("first_round"), planted.get("last_round"))
        lines = [f"{canary}: {shares}{held}{window and f'; planted {window}'}", heading]
        for row in table[table["canary"] == canary].to_dict("records"):
            cells = [_cell(quantity, row[quantity.name]) for quantity in quantities]
            measured = "".join(f"{cell:>{width}}  " for cell, width in zip(cells, widths, strict=True))
            lines.append(_line(row, measured, width, WIDTH - len(heading) + len("in rounds")))
        blocks.append("\n".join(lines))
    legend = "".join(
        _explained(quantity, run) for quantity in quantities if not quantity.is_standard or quantity.is_primary
    )
    return "\n\n".join([*blocks, legend + LEGEND])


def steps_to_text(steps: Sequence[float]) -> str:
    """Return a line about the server's effective steps, one for each round; empty where none is known."""
    if not steps:
        return ""
    low, middle, high = (f"{value:.3g}" for value in (min(steps), float(np.median(steps)), max(steps)))
    text = f"median {middle} over {len(steps):,} rounds, from {low} to {high}"
    return note(f"effective step: norm of the server's step over that of the mean update, {text}", WIDTH)


def _explained(quantity: Quantity, run: RunResults) -> str:
    """Return a line that explains the column of a number, with the number's largest possible value."""
    if not quantity.is_standard:
        return note(f"{quantity.short}: {quantity.sentence}", WIDTH)
    references = run.references(run.evaluated[-1])
    ceiling = f", of at most {math.log2(references + 1):.1f}" if references else ""
    return f"{quantity.short}: {quantity.title.lower()}{ceiling}\n"


def _width(quantity: Quantity, values: "pd.Series[float]") -> int:
    """Return the number of characters of a column."""
    cells = (_cell(quantity, value) for value in values)
    return max(len(quantity.short), 3 if quantity.is_flag else 5, *map(len, cells))


def _cell(quantity: Quantity, value: float) -> str:
    if math.isnan(value):
        return ""
    if quantity.is_flag:
        return "yes" if value else "no"
    return quantity.format.format(value)


def _since(rounds: float) -> str:
    return "" if math.isnan(rounds) else f"{rounds:,.0f}"


def _line(row: Mapping[Any, Any], measured: str, width: int, room: int) -> str:
    """Return the line of one round; lists of rounds that are longer than `room` characters are cut."""
    rounds = " ".join(map(str, row["sharer_rounds"]))
    room = max(room, len("in rounds"))
    if len(rounds) > room:
        rounds = rounds[: room - 4].rsplit(" ", 1)[0] + " ..."
    counts = f"{row['sharers']:>7,}  {row['participations']:>6,}  {_since(row['rounds_since_use']):>{width}}"
    return f"{row['round']:>9,}  {measured}{counts}  {rounds}".rstrip()
