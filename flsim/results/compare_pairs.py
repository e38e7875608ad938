"""Settings compared in pairs, one row each: IID and non-IID twins of a sweep, or the same runs of two sweeps.

The frame:

    row                        the common settings of the two
    setting_a, setting_b       the settings as in a table
    seeds                      number of seeds with a run of both
    diverged_a, diverged_b     runs that diverged: an outcome. A seed that diverged on one side is in no other column
    unit                       the independent unit: "seeds", or for one seed "canaries"
    canaries                   compared canaries of a seed, those planted in either run: mean over seeds
    epochs_a, epochs_b         number of epochs that the models read, means over seeds
    mean_difference            exposure in a less that in b, bits
    ci_low, ci_high, p         its 95% interval and p, from Student's t over `unit`
    at_ceiling_a, _b           canaries at the ceiling of exposure, log2(|R| + 1), means over seeds
    rs_a, rs_b                 memorized canaries, means over seeds
    rs_low, rs_high            95% interval of their difference, Student's t over seeds; blank for one seed
    rs_p                       exact: a and b are exchanged within seeds (Fisher); for one seed McNemar's over canaries
    bs_...                     the same of BS, and of each flag of a user's own
    NAME_mean_difference, ...  the same as of exposure, of each number of canaries of a user's own
    p_holm, rs_p_holm, ...     corrected for the number of rows with a test, by Holm, each column by itself
    perplexity_a, accuracy_a, _b   means over seeds
    published_rs_a, ..._bs_b   values of the published rows, and published_canaries, their numbers of canaries
    like_utility_difference    exposure in a less that in b, bits, each seed at the lowest perplexity that both its runs
                               reached; like_utility_low, _high, its 95% interval over seeds, blank for one seed
    like_utility_p             p of Student's t over seeds that it is zero, blank for one seed: not of canaries, even
                               where `p` is; like_utility_p_holm, corrected for the number of rows with such a test
    like_utility_left_out      why there is no such difference, or the seeds that it leaves out, with their reasons
    left_out                   runs that are not compared, with reasons

A cell is blank if it was not measured or cannot be computed.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from flsim.base.errors import InputError
from flsim.base.statistics import holm
from flsim.measures.quantity import Quantity, flags, numbers, of_model, panels_first
from flsim.results.columns import AT_CEILING, DIFFERENCE, described, prefix_of, quantities_in
from flsim.results.compare import counted_at_ceiling, counts_of, paired_exposure
from flsim.results.compare_seeds import counts_over_seeds
from flsim.results.like_utility import left_out_text, like_utility
from flsim.results.pairing import compared_in, paired_canaries
from flsim.results.published import COUNTED_OF, PREFIX
from flsim.results.seeds import sample
from flsim.results.store import RunResults, refuse_two_points
from flsim.results.sweep_pairs import Pair
from flsim.results.worlds import paired_over_seeds, pairs_of_seeds


def columns_of(quantity: Quantity) -> list[str]:
    """Return the columns of a quantity, all of numbers."""
    if not quantity.of_canaries:
        return [f"{quantity.name}_{side}" for side in "ab"]
    if quantity.is_flag:
        return [f"{quantity.name}_{name}" for name in ("a", "b", "low", "high", "p", "p_holm")]
    return [prefix_of(quantity) + name for name in (*DIFFERENCE, "p", "p_holm")]


def quantities_in_pairs(table: pd.DataFrame) -> list[Quantity]:
    """Return the quantities that a frame of `compare_pairs` has, with a user's own last."""
    own = [quantity for quantity in quantities_in(table) if set(columns_of(quantity)) <= {*table}]
    return [*STANDARD, *(quantity for quantity in own if quantity not in STANDARD)]


def p_of(quantity: Quantity) -> str:
    """Return the column of a test's p."""
    return f"{quantity.name}_p" if quantity.is_flag else f"{prefix_of(quantity)}p"


LIKE_UTILITY = tuple(f"like_utility_{name}" for name in ("difference", "low", "high", "p"))
LIKE_UTILITY_P = LIKE_UTILITY[-1]
STANDARD = panels_first(compared_in([]))
COLUMNS = {
    **dict.fromkeys(("row", "setting_a", "setting_b"), "string"),
    "seeds": "Int64",
    **dict.fromkeys(("diverged_a", "diverged_b"), "Int64"),
    "unit": "string",
    "canaries": "Float64",
    **dict.fromkeys(("epochs_a", "epochs_b"), "Float64"),
    **{name: "Float64" for quantity in STANDARD for name in columns_of(quantity)},
    **dict.fromkeys(AT_CEILING, "Float64"),
    **{f"{PREFIX}{metric}_{side}": "Int64" for metric in COUNTED_OF for side in "ab"},
    **dict.fromkeys((*LIKE_UTILITY, f"{LIKE_UTILITY_P}_holm"), "Float64"),
    "like_utility_left_out": "string",
    "left_out": "string",
}


def compare_pairs(pairs: Sequence[Pair], round: int | None = None, epoch: float | None = None) -> pd.DataFrame:
    """Return one row per pair, with the columns of `COLUMNS`.

    The compared runs are those that a table over seeds averages. A pair that cannot be compared has a row with the
    reason.

    Raises:
        InputError: both a round and an epoch are given.
    """
    refuse_two_points(round, epoch)
    runs = [run.results for pair in pairs for run in (*pair.a, *pair.b) if run.results]
    quantities = panels_first(compared_in(runs))
    rows = [_row(pair, quantities, round, epoch) for pair in pairs]
    for p in (*(p_of(quantity) for quantity in quantities if quantity.of_canaries), LIKE_UTILITY_P):
        for row, corrected in zip(rows, holm([row.get(p, math.nan) for row in rows]), strict=True):
            row[f"{p}_holm"] = corrected
    own = [quantity for quantity in quantities if not quantity.is_standard]
    types = COLUMNS | {name: "Float64" for quantity in own for name in columns_of(quantity)}
    return described(pd.DataFrame(rows, columns=list(types)).astype(types), own)


def _row(pair: Pair, quantities: Sequence[Quantity], round: int | None, epoch: float | None) -> dict[str, Any]:
    row: dict[str, Any] = {"row": pair.row}
    begun = {side: [run.results for run in runs if run.results] for side, runs in (("a", pair.a), ("b", pair.b))}
    why = [f"{run.name} (not begun)" for run in (*pair.a, *pair.b) if run.results is None]
    published = {"a": pair.a[0].published or {}, "b": pair.b[0].published or {}}
    for side in "ab":
        row[f"diverged_{side}"] = sum(run.status == "diverged" for run in begun[side])
        row[f"setting_{side}"] = begun[side][0].setting if begun[side] else None
        if published["a"] != published["b"]:  # the same run of two sweeps stands for one published row
            row |= {f"{PREFIX}{name}_{side}": published[side].get(name) for name in COUNTED_OF}
    try:
        samples = {side: sample(runs, round, epoch) for side, runs in begun.items()}
        taken = {side: [run for run, _ in side_sample.taken] for side, side_sample in samples.items()}
        why += [
            f"{name} ({reason})" for side_sample in samples.values() for name, reason in side_sample.left_out.items()
        ]
        if taken["a"] and taken["b"]:
            row |= _compared(taken["a"], taken["b"], quantities, round, epoch)
    except InputError as error:
        why.append(str(error))
    return row | {"left_out": "; ".join(why) or None}


def _compared(
    a: Sequence[RunResults],
    b: Sequence[RunResults],
    quantities: Sequence[Quantity],
    round: int | None,
    epoch: float | None,
) -> dict[str, Any]:
    pairs = pairs_of_seeds(a, b)
    canaries = [paired_canaries(run_a, run_b, round, epoch) for _, run_a, run_b in pairs]
    row: dict[str, Any] = {
        "seeds": len(pairs),
        "unit": "seeds" if len(pairs) > 1 else "canaries",
        "canaries": float(np.mean([len(pair.canaries) for pair in canaries])),
    }
    counts = [counted_at_ceiling(pair.canaries, pair.references) for pair in canaries]
    row |= {name: float(np.mean([count[name] for count in counts])) for name in AT_CEILING}
    for name, runs in (("a", [run for _, run, _ in pairs]), ("b", [run for _, _, run in pairs])):
        points = [run.at(round, epoch) for run in runs]
        row[f"epochs_{name}"] = _mean([run.epochs_of(at) for run, at in zip(runs, points, strict=True)])
        for quantity in of_model(quantities):
            measured = [run.of_model(quantity.name, at) for run, at in zip(runs, points, strict=True)]
            row[f"{quantity.name}_{name}"] = _mean(measured)
    row |= _at_like_utility(pairs)
    for quantity in numbers(quantities):
        if all(quantity in pair.quantities for pair in canaries):
            row |= _difference(pairs, quantity, round, epoch)
    if len(pairs) > 1:
        for metric, over in counts_over_seeds(a, b, round, epoch).items():
            row |= {f"{metric}_a": over.a, f"{metric}_b": over.b, f"{metric}_p": over.p}
            row |= {f"{metric}_low": over.ci_low, f"{metric}_high": over.ci_high}
        return row
    for flag in flags(quantities):
        of_flag = counts_of(canaries[0].canaries, flag.name)
        if of_flag is not None:
            row |= {f"{flag.name}_a": of_flag.a, f"{flag.name}_b": of_flag.b, f"{flag.name}_p": of_flag.p}
    return row


def _at_like_utility(pairs: Sequence[tuple[int, RunResults, RunResults]]) -> dict[str, Any]:
    """Return the cells of `LIKE_UTILITY`, and why runs lack evaluations near the common perplexity."""
    try:
        over = like_utility([run for _, run, _ in pairs], [run for _, _, run in pairs])
    except InputError as error:
        return {"like_utility_left_out": str(error)}
    cells = dict(zip(LIKE_UTILITY, (over.mean_difference, over.ci_low, over.ci_high, over.p), strict=True))
    return cells | {"like_utility_left_out": left_out_text(over.left_out) if over.left_out else None}


def _difference(
    pairs: Sequence[tuple[int, RunResults, RunResults]], quantity: Quantity, round: int | None, epoch: float | None
) -> dict[str, Any]:
    """Return the mean difference of a number with its interval and p, over seeds, or for one seed over canaries."""
    if len(pairs) > 1:
        a, b = [run for _, run, _ in pairs], [run for _, _, run in pairs]
        over = paired_over_seeds(a, b, round, epoch, quantity)
        statistics = (over.mean_difference, over.ci_low, over.ci_high, over.p)
    else:
        one = paired_exposure(pairs[0][1], pairs[0][2], round, epoch, quantity)
        statistics = (one.mean_difference, one.ci_low, one.ci_high, one.p_t)
    return dict(zip((prefix_of(quantity) + name for name in (*DIFFERENCE, "p")), statistics, strict=True))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if len(known) == len(values) else None
