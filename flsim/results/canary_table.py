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

import pandas as pd

from flsim.results.columns import described, quantities_of
from flsim.results.store import RunResults, refuse_two_points

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
