"""Exposure of each canary against rounds, and the rounds in which somebody who shares it took part."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from flsim.base.errors import InputError
from flsim.results.store import RunResults
from flsim.results.tables import user_share

METRICS = ("exposure", "rs", "bs")
HEADING = f"{'round':>9}  {'bits':>5}  {'RS':>3}  {'BS':>3}  {'sharers':>7}  {'so far':>6}  in rounds"
ROUNDS = 80 - len(HEADING) + len("in rounds")  # characters that are left for them
LEGEND = """bits: exposure{ceiling}
sharers: different ones that took part since the evaluation before
so far: how often one took part, from the start on
in rounds: when one did, since the evaluation before
Of central training: rounds are steps, and to take part is to have a copy read.
"""


def trace(run: RunResults, took_part: pd.DataFrame, canaries: Sequence[str] = ()) -> pd.DataFrame:
    """A row for each canary and evaluated round, in the order of the roster, then of rounds.

    Args:
        run: what was read of the run.
        took_part: a row for each time that a sharer took part, with ``round`` from 1, ``canary``, its id, and ``user``;
            see `flsim.runs.participation`. Of central training: that a step read a copy of a user's.
        canaries: ids of those to show; all where empty.

    Returns:
        canary, round; exposure (bits), rs, bs (1 where memorized), NaN where the model had diverged; sharers, how many
        different ones took part since the evaluation before; participations, how often one did from the start on;
        sharer_rounds, the rounds since the evaluation before in which one did, a tuple.

    Raises:
        InputError: no such canary, nothing was evaluated, or some canaries' results are missing.
    """
    known = run.roster["canary"].tolist()
    for canary in canaries:
        if canary not in known:
            raise InputError(f"run {run.name}: has no canary {canary}; its canaries are {known[0]} to {known[-1]}")
    run.evaluation()  # raises where there is none
    rounds = np.array(run.evaluated)
    measured = {
        metric: {round_: values for round_ in run.evaluated if (values := run.of_canaries(metric, round_)) is not None}
        for metric in METRICS
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
                    **{metric: measured[metric].get(round_, {canary: math.nan})[canary] for metric in METRICS},
                    "sharers": len(np.unique(users[first:end])),
                    "participations": end,
                    "sharer_rounds": tuple(np.unique(at[first:end]).tolist()),
                }
            )
    return pd.DataFrame(rows)


def to_csv(table: pd.DataFrame) -> str:
    """All columns; rounds of sharers separated by spaces."""
    spaced = table.assign(sharer_rounds=[" ".join(map(str, rounds)) for rounds in table["sharer_rounds"]])
    return spaced.to_csv(index=False, lineterminator="\n")


def to_json(table: pd.DataFrame) -> str:
    """A list of rows; null where a metric was not measured."""
    rows = table.to_dict("records")
    return json.dumps([{key: None if value != value else value for key, value in row.items()} for row in rows])


def to_text(table: pd.DataFrame, run: RunResults) -> str:
    """A block for each canary, at most 80 characters wide: lists of rounds that are longer are cut."""
    about: dict[Any, Any] = run.roster.set_index("canary").to_dict("index")
    blocks = [f"{run.setting} [{run.name}]"]
    for canary in table["canary"].unique():
        of = about[canary]
        held = f"; copies {of['insertions']}" if "insertions" in of else ""
        shares = (
            f"planned copies {of['planned_insertions']}"
            if math.isnan(of["p_u"])
            else f"p_u {user_share(of['p_u'])}, p_e {100 * of['p_e']:.6g}%"
        )
        lines = [f"{canary}: {shares}{held}", HEADING]
        lines += [_line(row) for row in table[table["canary"] == canary].to_dict("records")]
        blocks.append("\n".join(lines))
    references = run.of_model("references", run.evaluated[-1])
    ceiling = f", of at most {math.log2(references + 1):.1f}" if references else ""
    return "\n\n".join([*blocks, LEGEND.format(ceiling=ceiling)])


def _line(row: Mapping[Any, Any]) -> str:
    bits = "" if math.isnan(row["exposure"]) else f"{row['exposure']:.1f}"
    rs, bs = ("" if math.isnan(row[metric]) else "yes" if row[metric] else "no" for metric in ("rs", "bs"))
    rounds = " ".join(map(str, row["sharer_rounds"]))
    if len(rounds) > ROUNDS:
        rounds = rounds[: ROUNDS - 4].rsplit(" ", 1)[0] + " ..."
    counts = f"{row['sharers']:>7,}  {row['participations']:>6,}"
    return f"{row['round']:>9,}  {bits:>5}  {rs:>3}  {bs:>3}  {counts}  {rounds}".rstrip()
