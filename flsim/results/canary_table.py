"""The canaries of a run at one evaluation, a row each: the phrase, how often it was planted, and what came of it.

    canary, phrase           its id, and its words
    p_u, p_e                 the probabilities by which it was planted; blank where it has a number of copies
    planned_insertions       records that were drawn for it
    sharers, insertions      users that have it, and records that are it; blank for runs that do not say
    first_round, last_round  rounds in which it is planted, blank for no bound; only where canaries have windows
    round                    completed rounds of the evaluated model; of central training, steps

Then come a column for each quantity of canaries, under its name, blank where it is unknown, and, where it was asked
for, ``written``: the phrase that ends in the likeliest continuation that a beam search finds after the known words.
"""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from flsim.measures.built_in import QUANTITIES
from flsim.measures.quantity import Quantity
from flsim.results import layout
from flsim.results.columns import described, quantities_in, quantities_of
from flsim.results.formats import formatted, rounds_text
from flsim.results.layout import Column
from flsim.results.store import RunResults, refuse_two_points
from flsim.results.tables import user_share

PLANTED = ("p_u", "p_e", "planned_insertions", "sharers", "insertions")
WINDOW = ("first_round", "last_round")
WRITTEN = "written"
TYPES = {
    "canary": "string",
    "phrase": "string",
    "p_u": "Float64",
    "p_e": "Float64",
    "planned_insertions": "Int64",
    "sharers": "Int64",
    "insertions": "Int64",
    "first_round": "Int64",
    "last_round": "Int64",
    "round": "Int64",
}
KINDS = {"flag": "boolean", "count": "Int64", "number": "Float64"}


def canary_table(
    run: RunResults, round: int | None = None, epoch: float | None = None, written: Mapping[str, str] | None = None
) -> pd.DataFrame:
    """Return a row for each canary, in the order of the roster, with the columns that the module lists.

    Args:
        run: what was read of the run.
        round: the evaluated round to show; default the last.
        epoch: in place of it, after how many epochs; see `RunResults.evaluation_at_epoch`.
        written: what a beam search wrote, by the canary's id.

    Raises:
        InputError: nothing was evaluated then, some canaries' results are missing, or both points are given.
    """
    refuse_two_points(round, epoch)
    at = run.at(round, epoch)
    roster = run.roster
    words = roster["words"].map(" ".join) if "words" in roster else pd.Series(pd.NA, roster.index)
    table = pd.DataFrame({"canary": roster["canary"], "phrase": words})
    for name in PLANTED:
        table[name] = roster.get(name, pd.NA)
    for name in WINDOW:
        if any(bound in roster for bound in WINDOW):
            table[name] = roster.get(name, pd.NA)
    table["round"] = at
    types = {name: kind for name, kind in TYPES.items() if name in table}
    kept = []
    for quantity in quantities_of([run]):
        values = run.of_canaries(quantity.name, at, quantity.is_partial) if quantity.of_canaries else None
        if values is not None:
            kept.append(quantity)
            table[quantity.name], types[quantity.name] = values.to_numpy(), KINDS[quantity.kind]
    if written is not None:
        table[WRITTEN], types[WRITTEN] = roster["canary"].map(dict(written)), "string"
    return described(table.astype(types), kept)


def to_markdown(table: pd.DataFrame) -> str:
    """Return tables of at most 80 characters, and what their columns mean."""
    return layout.markdown(*_columns_of(table))


def to_latex(table: pd.DataFrame) -> str:
    """Return the columns of `to_markdown` as tabulars, which need the package booktabs."""
    return layout.latex(*_columns_of(table))


def _columns_of(table: pd.DataFrame) -> tuple[list[Column], list[list[Column]]]:
    labels = [Column("Canary", _texts(table["canary"]), is_number=False)]
    units = [[Column("Phrase", _texts(table["phrase"]), is_number=False)], _planted(table), _counts(table)]
    units.append(_window(table))
    measured = [quantity for quantity in quantities_in(table) if quantity.name in table and quantity.of_canaries]
    listed = [quantity for quantity in measured if quantity.is_listed]
    units += [[_column(table, quantity)] for quantity in sorted(listed, key=lambda quantity: quantity.is_flag)]
    if WRITTEN in table:
        note = "Beam search wrote: the known words, then the likeliest continuation that it finds."
        units.append([Column("Beam search wrote", _texts(table[WRITTEN]), is_number=False, is_late=True, note=note)])
    return labels, [unit for unit in units if unit]


def _planted(table: pd.DataFrame) -> list[Column]:
    """Return the columns of p_u and p_e, or of planned copies where their number was set."""
    if table["p_u"].isna().all():
        planned = formatted(table["planned_insertions"], "{:,}")
        return [Column("Planned", planned, note="Planned: records that were drawn for the canary.")]
    shares = ["" if pd.isna(value) else user_share(float(value)) for value in table["p_u"]]
    note = "p_u: probability that a user has the canary; p_e: that a record of such a user is replaced by it."
    return [Column("p_u", shares, note=note), Column("p_e", formatted(table["p_e"], "{:.6g}%", 100))]


def _counts(table: pd.DataFrame) -> list[Column]:
    """Return the columns of sharers and copies, where the roster says them."""
    names = {"sharers": "Users", "insertions": "Copies"}
    notes = {"sharers": "Users: that have the canary.", "insertions": "Copies: records that are the canary."}
    return [
        Column(heading, formatted(table[name], "{:,}"), note=notes[name])
        for name, heading in names.items()
        if table[name].notna().any()
    ]


def _window(table: pd.DataFrame) -> list[Column]:
    """Return the column of the rounds in which canaries are planted, where they have windows."""
    if WINDOW[0] not in table:
        return []
    cells = [rounds_text(first, last) for first, last in zip(*(table[name] for name in WINDOW), strict=True)]
    return [Column("Planted", cells, is_number=False, note="Planted: the rounds in which copies are in place.")]


def _column(table: pd.DataFrame, quantity: Quantity) -> Column:
    values = table[quantity.name]
    note = f"{quantity.heading}: {quantity.description[:1].lower()}{quantity.description[1:]}"
    if quantity.is_flag:
        cells = ["unknown" if pd.isna(value) else "yes" if value else "no" for value in values]
    else:
        cells = formatted(values, quantity.format, quantity.scale)
    is_extra = quantity.name in QUANTITIES and not quantity.is_ranked and not quantity.is_flag
    return Column(quantity.heading, cells, is_number=not quantity.is_flag, is_extra=is_extra, note=note)


def _texts(values: "pd.Series[Any]") -> list[str]:
    return ["" if pd.isna(value) else str(value) for value in values]
