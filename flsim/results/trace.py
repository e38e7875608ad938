"""Measurements of each canary against rounds, with the rounds in which a user who shares it took part."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from flsim.base.errors import InputError
from flsim.measures.quantity import Quantity, select_for
from flsim.results.columns import described, quantities_of
from flsim.results.store import RunResults


def trace(run: RunResults, took_part: pd.DataFrame, canaries: Sequence[str] = ()) -> pd.DataFrame:
    """Return a row for each canary and evaluated round, in the order of the roster, then of rounds.

    Args:
        run: the results of the run.
        took_part: a row for each time that a sharer took part, with ``round`` from 1, ``canary``, its id, and ``user``;
            see `flsim.runs.folder.participation`. In central training, each time that a step read a user's copy.
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
    quantities = traced(quantities_of([run]))
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


def traced(quantities: Iterable[Quantity]) -> list[Quantity]:
    """Return the quantities of canaries that a trace shows: the primary number, flags, then other numbers."""
    traced = [quantity for quantity in select_for(quantities, "trace") if quantity.of_canaries]
    return sorted(traced, key=lambda quantity: not quantity.is_primary)
