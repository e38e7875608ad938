"""Settings compared in pairs, a row each: IID and non-IID twins of a sweep, or the same runs of two sweeps.

The frame:

    row                        what the two have in common
    setting_a, setting_b       in the words of a table
    seeds                      how many have a run of both
    unit                       what is taken as independent: "seeds", or of one seed "canaries"
    canaries                   planted canaries, of each run
    epochs_a, epochs_b         how often the models read as many records as there are, means over seeds
    mean_difference            exposure in a less that in b, bits, with
    ci_low, ci_high, p         its 95% interval and p, from Student's t over `unit`
    rs_a, rs_b                 memorized canaries, means over seeds
    rs_low, rs_high            95% interval of their difference, Student's t over seeds; blank for one seed
    rs_p                       exact: exchanging a and b within seeds (Fisher), of one seed McNemar's over canaries
    bs_...                     the same of BS
    p_holm, rs_p_holm, ...     corrected for the number of rows, by Holm, each column by itself
    perplexity_a, accuracy_a, _b   means over seeds
    published_rs_a, ..._bs_b   of the published rows, and published_canaries, of how many
    left_out                   runs that are not compared, and why

Blank: what was not measured, or cannot be said.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from flsim.base.errors import InputError
from flsim.results.compare import counts_of, paired_exposure
from flsim.results.compare_seeds import counts_over_seeds
from flsim.results.inference import holm
from flsim.results.pairing import paired_canaries
from flsim.results.seeds import sample
from flsim.results.store import RunResults, refuse_two_points
from flsim.results.sweep_pairs import Pair
from flsim.results.worlds import paired_over_seeds, pairs_of_seeds

TESTED = ("p", "rs_p", "bs_p")
FLOATS = (
    *("epochs_a", "epochs_b", "mean_difference", "ci_low", "ci_high", "p", "p_holm"),
    *(f"{metric}_{name}" for metric in ("rs", "bs") for name in ("a", "b", "low", "high", "p", "p_holm")),
    *(f"{metric}_{name}" for metric in ("perplexity", "accuracy") for name in ("a", "b")),
)
COLUMNS = {
    **dict.fromkeys(("row", "setting_a", "setting_b"), "string"),
    "seeds": "Int64",
    "unit": "string",
    "canaries": "Int64",
    **dict.fromkeys(FLOATS, "Float64"),
    **{f"published_{metric}_{name}": "Int64" for metric in ("rs", "bs", "canaries") for name in ("a", "b")},
    "left_out": "string",
}


def compare_pairs(pairs: Sequence[Pair], round: int | None = None, epoch: float | None = None) -> pd.DataFrame:
    """A row per pair, with the columns of `COLUMNS`.

    Compared are the runs that a table over seeds averages. A pair that does not compare has a row that says why.

    Raises:
        InputError: both a round and an epoch.
    """
    refuse_two_points(round, epoch)
    rows = [_row(pair, round, epoch) for pair in pairs]
    for p in TESTED:
        for row, corrected in zip(rows, holm([row.get(p, math.nan) for row in rows]), strict=True):
            row[f"{p}_holm"] = corrected
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype(COLUMNS)


def _row(pair: Pair, round: int | None, epoch: float | None) -> dict[str, Any]:
    row: dict[str, Any] = {"row": pair.row}
    begun = {side: [run.results for run in runs if run.results] for side, runs in (("a", pair.a), ("b", pair.b))}
    why = [f"{run.name} (not begun)" for run in (*pair.a, *pair.b) if run.results is None]
    published = {"a": pair.a[0].published or {}, "b": pair.b[0].published or {}}
    for side in "ab":
        row[f"setting_{side}"] = begun[side][0].setting if begun[side] else None
        if published["a"] != published["b"]:  # the same run of two sweeps stands for one published row
            row |= {f"published_{name}_{side}": published[side].get(name) for name in ("rs", "bs", "canaries")}
    try:
        samples = {side: sample(runs, round, epoch) for side, runs in begun.items()}
        taken = {side: [run for run, _ in of.taken] for side, of in samples.items()}
        why += [f"{name} ({reason})" for of in samples.values() for name, reason in of.left_out.items()]
        if taken["a"] and taken["b"]:
            row |= _compared(taken["a"], taken["b"], round, epoch)
    except InputError as error:
        why.append(str(error))
    return row | {"left_out": "; ".join(why) or None}


def _compared(
    a: Sequence[RunResults], b: Sequence[RunResults], round: int | None, epoch: float | None
) -> dict[str, Any]:
    pairs = pairs_of_seeds(a, b)
    row: dict[str, Any] = {
        "seeds": len(pairs),
        "unit": "seeds" if len(pairs) > 1 else "canaries",
        "canaries": len(pairs[0][1].roster),
    }
    for name, runs in (("a", [run for _, run, _ in pairs]), ("b", [run for _, _, run in pairs])):
        points = [run.at(round, epoch) for run in runs]
        row[f"epochs_{name}"] = _mean([run.epochs_of(at) for run, at in zip(runs, points, strict=True)])
        for metric in ("perplexity", "accuracy"):
            measured = [run.of_model(metric, at) for run, at in zip(runs, points, strict=True)]
            row[f"{metric}_{name}"] = _mean(measured)
    if len(pairs) > 1:
        over = paired_over_seeds(a, b, round, epoch)
        row |= {"mean_difference": over.mean_difference, "ci_low": over.ci_low, "ci_high": over.ci_high, "p": over.p}
        for metric, counts in counts_over_seeds(a, b, round, epoch).items():
            row |= {f"{metric}_a": counts.a, f"{metric}_b": counts.b, f"{metric}_p": counts.p}
            row |= {f"{metric}_low": counts.ci_low, f"{metric}_high": counts.ci_high}
        return row
    _, run_a, run_b = pairs[0]
    one = paired_exposure(run_a, run_b, round, epoch)
    row |= {"mean_difference": one.mean_difference, "ci_low": one.ci_low, "ci_high": one.ci_high, "p": one.p_t}
    canaries = paired_canaries(run_a, run_b, round, epoch).canaries
    for metric in ("rs", "bs"):
        found = counts_of(canaries, metric)
        if found is not None:
            row |= {f"{metric}_a": found.a, f"{metric}_b": found.b, f"{metric}_p": found.p}
    return row


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return float(np.mean(found)) if len(found) == len(values) else None
