"""The canaries of a run at one evaluation, one row each: the phrase, its copies, and the measured quantities.

    canary, phrase           its id, and its words
    p_u, p_e                 the probabilities by which it was planted; blank if it has a number of copies
    planned_insertions       records that were drawn for it
    sharers, insertions      users that have it, and records that are it; blank for runs without these counts
    first_round, last_round  rounds in which it is planted, blank for no bound; only if canaries have windows
    round                    completed rounds of the evaluated model; of central training, steps

Further columns have the quantities of canaries, by name; unknown values are blank. On request, ``written`` has the
phrase with the most likely continuation of the known words that a beam search finds.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from flsim.base.errors import InputError
from flsim.measures.quantity import Quantity, select_for
from flsim.results.columns import described, quantities_of
from flsim.results.store import RunResults

PLANTED = ("p_u", "p_e", "planned_insertions", "sharers", "insertions")
WINDOW = ("first_round", "last_round")
WRITTEN = "written"
NOBODY = pd.DataFrame({"round": np.empty(0, np.int64), "user": np.empty(0, np.int64)})
PARTICIPATION = ["sharers", "participations", "rounds_since_use", "sharer_rounds"]
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


def canary_table(run: RunResults, round: int | None = None, written: Mapping[str, str] | None = None) -> pd.DataFrame:
    """Return a row for each canary, in the roster's order, with the columns of the module; InputError as `trace`."""
    _refuse_without_canaries(run)
    at = run.at(round)
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
    shown = []
    for quantity in quantities_of([run]):
        values = run.of_canaries(quantity.name, at, quantity.is_partial) if quantity.of_canaries else None
        if values is not None:
            shown.append(quantity)
            table[quantity.name], types[quantity.name] = values.to_numpy(), KINDS[quantity.kind]
    if written is not None:
        table[WRITTEN], types[WRITTEN] = roster["canary"].map(dict(written)), "string"
    return described(table.astype(types), shown)


def trace(run: RunResults, took_part: pd.DataFrame | None, canaries: Sequence[str] = ()) -> pd.DataFrame:
    """Return a row for each canary and evaluated round, in the order of the roster, then of rounds.

    `took_part` has the rounds from 1, canaries and users of `flsim.runs.folder.participation`, and is None if unknown,
    which omits the columns from sharers on. Columns are canary and round; exposure (bits), rs and bs (1 if memorized),
    and custom quantities, NaN if the model had diverged; sharers, the different ones that took part since the last
    evaluation; participations since the start; rounds_since_use, NaN before a use; and sharer_rounds, a tuple of the
    rounds since the last evaluation. Raises InputError for unknown or no canaries, no evaluation, or missing results.
    """
    _refuse_without_canaries(run)
    known = run.roster["canary"].tolist()
    for canary in canaries:
        if canary not in known:
            raise InputError(f"run {run.name}: there is no canary {canary}; the canaries are {known[0]} to {known[-1]}")
    run.evaluation()  # raises if there is none
    rounds = np.array(run.evaluated)
    quantities = traced(quantities_of([run]))
    measured = {
        quantity.name: {
            round_: values for round_ in run.evaluated if (values := run.of_canaries(quantity.name, round_)) is not None
        }
        for quantity in quantities
    }
    by_canary = {} if took_part is None else dict(list(took_part.groupby("canary")))
    rows = []
    for canary in [id_ for id_ in known if not canaries or id_ in canaries]:
        met = by_canary.get(canary, NOBODY)
        at, users = met["round"].to_numpy(), met["user"].to_numpy()
        last = np.searchsorted(at, rounds, side="right").tolist()  # last evaluation before each of the ascending rounds
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
    table = pd.DataFrame(rows)
    return described(table.drop(columns=PARTICIPATION) if took_part is None else table, quantities)


def _refuse_without_canaries(run: RunResults) -> None:
    if run.roster.empty:
        raise InputError(f"run {run.name}: was trained without canaries; name a run with canaries")


def traced(quantities: Iterable[Quantity]) -> list[Quantity]:
    """Return the quantities of canaries that a trace shows: the primary number, then flags, then other numbers."""
    traced = [quantity for quantity in select_for(quantities, "trace") if quantity.of_canaries]
    return sorted(traced, key=lambda quantity: not quantity.is_primary)
