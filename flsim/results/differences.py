"""Differences between two settings, as one long frame: a row for each compared quantity.

Both sides plant the same phrases, so each canary is its own control, and every statistic is about differences. Two runs
are compared canary by canary. Two settings are compared seed by seed: both runs of a seed have the same canaries, and
seeds have different canaries. Seeds are then the independent unit. Canaries of one model are correlated, so a test over
the pooled canaries of all seeds would report false differences.

    row                the settings that both sides have in common; of two runs "all" canaries, or those of one
                       configuration: (p_u, p_e) or a number of copies, with rounds if some are planted in a window
    a, b               the two settings, as in a table
    at                 "end": the evaluation that is compared, by default each run's last; "equal perplexity": the
                       lowest perplexity that both runs of a seed reached
    quantity           exposure, rs, bs, and every other quantity that is compared; or one of these:
                       at_ceiling: canaries of the largest exposure that |R| references show, log2(|R| + 1);
                       diverged: runs that diverged, an outcome; such a seed is dropped from both sides;
                       epochs; canaries: those compared, planted in both runs, a mean over seeds;
                       round: in which a perplexity was first reached, between two evaluations a fraction;
                       published_rs, published_bs, published_canaries: of the published rows
    over, n            the independent unit, "seeds" or "canaries", and the number of them
    test               "t": Student's; "signed ranks": Wilcoxon's with Pratt's zeros; "exchange": Fisher's
                       randomization of a and b within seeds; "McNemar": exact; "discordant": see below
    value_a, value_b   the mean of a number, or how many canaries have a flag; over seeds, the mean of that
    difference         value_a minus value_b
    low, high          its 95% interval, Student's t over the unit
    p, p_holm          two-sided p that it is zero, and p corrected for all rows in its column of p (Holm)
    left_out           runs or seeds that are in no number, or why nothing is compared, with the reasons

Rows of the test "discordant" have the canaries that only one of two runs memorized: value_a and value_b are their
numbers, difference is the share of a, and low and high are its exact interval (Clopper and Pearson). A cell is blank if
it was not measured, or cannot be computed: an interval over seeds needs two seeds.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from flsim.base import statistics
from flsim.base.errors import InputError
from flsim.base.statistics import ROUNDING, paired_t_p, t_interval
from flsim.measures.built_in import PERPLEXITY, PRIMARY
from flsim.measures.quantity import Quantity, flags, numbers, of_model, panels_first, select_for
from flsim.results.published import COUNTED_OF, PREFIX
from flsim.results.rows import RunResults, read_run, refuse_two_points
from flsim.results.sweeps import PARTITION, Sweep, SweepRun, is_sweep, read_sweep, sample
from flsim.results.tables import (
    copies,
    described,
    mean_of_known,
    memorization_table,
    quantities_of,
    rounds_text,
    user_share,
)

# The two runs of a pair: the values of the same canaries in both, at their ends and at equal perplexity.

WINDOW = ("first_round", "last_round")
Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class PairedCanaries:
    """The values of the same canaries in two runs."""

    # a row per canary that is compared, see `compared_canaries`, indexed by its id. Columns: p_u, p_e and copies (the
    # number, if p_u is not set); first_round and last_round if canaries have windows; NAME_a and NAME_b for each
    # measured quantity.
    canaries: pd.DataFrame
    excluded: int  # number of canaries that are not compared
    quantities: Sequence[Quantity]  # the quantities that were measured in both runs, the primary quantity first
    references: float  # |R| of both


def paired_canaries(
    a: RunResults, b: RunResults, round: int | None = None, epoch: float | None = None
) -> PairedCanaries:
    """Return the values of the same canaries in two runs; InputError if they are not comparable at this point."""
    refuse_two_points(round, epoch)
    _refuse_other_canaries(a, b)
    round_a, round_b = round_of(a, round, epoch), round_of(b, round, epoch)
    references = a.references(round_a), b.references(round_b)
    if references[0] != references[1] or references[0] is None:
        sizes = " and ".join("unknown" if size is None else f"{size:.0f}" for size in references)
        raise InputError(
            f"runs {a.name} and {b.name}: ranked among different numbers of references ({sizes}), so their "
            "exposures are not comparable; evaluate both runs with the same evaluation.references"
        )
    roster = a.roster.set_index("canary")
    canaries = roster[["p_u", "p_e"]].astype("float64")
    if "planned_insertions" in roster:
        canaries["copies"] = roster["planned_insertions"].astype("Int64").where(canaries["p_u"].isna())
    canaries = canaries.join(_windowed(a, b).set_index("canary").filter(items=WINDOW))
    compared = [quantity for quantity in compared_in([a, b]) if quantity.of_canaries]
    for name, run, at in (("a", a, round_a), ("b", b, round_b)):
        for quantity in compared:
            values = run.of_canaries(quantity.name, at)
            if values is not None:
                canaries[f"{quantity.name}_{name}"] = values
            elif quantity.is_primary:
                raise InputError(
                    f"run {run.name}, round {at}: {quantity.name} was not measured; evaluate this checkpoint again"
                )
    in_both = [quantity for quantity in compared if {f"{quantity.name}_a", f"{quantity.name}_b"} <= {*canaries}]
    planted = canaries.index.isin(compared_canaries(a, b))
    if planted.sum() < 2:
        raise InputError(
            f"runs {a.name} and {b.name}: {int(planted.sum())} of {len(canaries)} canaries were planted in both, but a "
            "comparison needs at least two; plant more, e.g. with a larger canaries.p_u"
        )
    return PairedCanaries(canaries[planted], int((~planted).sum()), in_both, references[0])


def compared_canaries(a: RunResults, b: RunResults) -> list[str]:
    """Return the ids of the canaries that both runs planted, or those of one run if the other plants none (arm OUT).

    A canary that only one of two planting runs has, because of its coin, would compare planted with unplanted.
    """
    in_a, in_b = {*a.planted["canary"]}, {*b.planted["canary"]}
    return sorted(in_a & in_b if in_a and in_b else in_a | in_b)


def _windowed(a: RunResults, b: RunResults) -> pd.DataFrame:
    """Return the roster of the run whose canaries have windows; of two, that which plants canaries in some round."""
    rosters = [run.roster for run in (a, b) if any(name in run.roster for name in WINDOW)]
    planting = [
        roster
        for roster in rosters
        if not {*WINDOW} <= {*roster} or not (roster["last_round"] < roster["first_round"]).fillna(False).all()
    ]
    return [*planting, *rosters, a.roster][0]


def compared_in(runs: Sequence[RunResults]) -> list[Quantity]:
    """Return the quantities to compare: the primary number, flags, other numbers, and numbers of the model."""
    compared = select_for(quantities_of(runs), "compare")
    return sorted(compared, key=lambda quantity: not quantity.is_primary)


def _refuse_other_canaries(a: RunResults, b: RunResults) -> None:
    phrases_a, phrases_b = (
        {canary: tuple(tokens) for canary, tokens in zip(run.roster["canary"], run.roster["tokens"], strict=True)}
        for run in (a, b)
    )
    differing = sorted(c for c in {*phrases_a, *phrases_b} if phrases_a.get(c) != phrases_b.get(c))
    if differing:
        raise InputError(
            f"runs {a.name} and {b.name}: planted different canaries, for example {differing[0]}; compare runs "
            "with the same corpus, seed and [canaries]"
        )


def round_of(run: RunResults, round: int | None, epoch: float | None) -> int:
    """Return the evaluated round of a run to compare; InputError if it diverged, or was not evaluated there."""
    if run.status == "diverged":
        raise InputError(f"run {run.name}: diverged and cannot be compared; lower its learning rate")
    return run.at(round, epoch)


def pairs_of_seeds(a: Sequence[RunResults], b: Sequence[RunResults]) -> list[tuple[int, RunResults, RunResults]]:
    """Return (seed, run of a, run of b) by ascending seed; InputError if none is common, or one is unknown or twice."""
    runs_a, runs_b = _of_seeds(a), _of_seeds(b)
    seeds = sorted({*runs_a} & {*runs_b})
    if not seeds:
        raise InputError(
            f"the seeds {sorted(runs_a)} and {sorted(runs_b)} have no seed in common; train both settings with the "
            "same seed"
        )
    return [(seed, runs_a[seed], runs_b[seed]) for seed in seeds]


def _of_seeds(runs: Sequence[RunResults]) -> dict[int, RunResults]:
    by_seed: dict[int, RunResults] = {}
    for run in runs:
        if run.seed is None:
            raise InputError(f"run {run.name}: an older run without a stored seed; compare this run separately")
        if run.seed in by_seed:
            raise InputError(
                f"runs {by_seed[run.seed].name} and {run.name}: both have seed {run.seed}; exclude one of them"
            )
        by_seed[run.seed] = run
    return by_seed


def of_mean(differences: ArrayLike) -> dict[str, Any]:
    """Return the mean of differences of independent units, its 95% interval and p by Student's t, and their number.

    Differences are rounded first, as scipy advises, because rounding error must not break ties. An unknown difference
    makes all except the number NaN.
    """
    rounded = np.round(np.asarray(differences, dtype="float64"), ROUNDING)
    low, high = t_interval(rounded)
    mean = float(rounded.mean()) if len(rounded) else math.nan
    return {"difference": mean, "low": low, "high": high, "p": paired_t_p(rounded), "n": len(rounded)}


def at_equal_perplexity(seeds: Mapping[int, Sequence[tuple[RunResults, RunResults]]]) -> Row:
    """Return the row of exposure over seeds, each at the lowest perplexity that both runs of a pair reached.

    A model that was trained longer predicts better, and has memorized more. A difference at the end of training can
    therefore be a difference in utility. The numbers of a seed are means over its pairs. A seed with a pair that has no
    comparison is excluded, with the reason.
    """
    means, reasons = list[NDArray[np.float64]](), dict[int, str]()
    for seed, runs in seeds.items():
        try:
            pairs = [pair_at_like_utility(*both) for both in runs]
        except InputError as error:
            reasons[seed] = str(error)
            continue
        means.append(np.mean([(pair.value_a, pair.value_b, pair.differences.mean()) for pair in pairs], axis=0))
    row: Row = {"over": "seeds", "at": LIKE, "quantity": PRIMARY.name}
    if reasons:
        which = f"seed{'s' * (len(reasons) != 1)} {', '.join(map(str, reasons))}"
        row |= {"left_out": f"{which} excluded: {'; '.join(reasons.values())}"}
    if not means:
        return row
    a, b, changes = np.array(means).T
    return row | two_means(PRIMARY.name, float(a.mean()), float(b.mean())) | of_mean(changes) | {"test": "t"}


def two_at_equal_perplexity(a: RunResults, b: RunResults) -> list[Row]:
    """Return the rows of two runs over canaries: the perplexity, the rounds that reached it, and tests of exposure."""
    at: Row = {"at": LIKE}
    try:
        pair = pair_at_like_utility(a, b)
    except InputError as error:
        return [at | {"quantity": PRIMARY.name, "left_out": str(error)}]
    means = two_means(PRIMARY.name, pair.value_a, pair.value_b)
    rows = [two_means(PERPLEXITY.name, pair.perplexity, pair.perplexity), two_means("round", *pair.rounds)]
    return [at | row for row in (*rows, *(means | row for row in of_differences(pair.differences)))]


@dataclass(frozen=True, eq=False)
class PairAtLikeUtility:
    """A number of canaries in run a minus that in run b, at the lowest perplexity that both reached."""

    perplexity: float  # the perplexity
    rounds: tuple[float, float]  # the rounds at which a and b first reached it; fractions between two evaluations
    value_a: float  # value_a, value_b: means over canaries
    value_b: float
    differences: "pd.Series[float]"  # a - b of each compared canary, by its id, in the number's unit


def pair_at_like_utility(a: RunResults, b: RunResults) -> PairAtLikeUtility:
    """Compare two runs at the lowest perplexity that both reached; InputError as `trajectory` and `at_perplexity`."""
    perplexity = lowest_in_both(a, b)
    (round_a, of_a), (round_b, of_b) = (at_perplexity(run, perplexity) for run in (a, b))
    planted = compared_canaries(a, b)
    means = float(of_a[planted].mean()), float(of_b[planted].mean())
    return PairAtLikeUtility(perplexity, (round_a, round_b), *means, (of_a - of_b)[planted])


def lowest_in_both(a: RunResults, b: RunResults) -> float:
    """Return the lowest perplexity that both runs reached at an evaluation that also measured exposure."""
    return max(float(np.exp(trajectory(run).index.to_numpy().min())) for run in (a, b))


def at_perplexity(run: RunResults, perplexity: float) -> "tuple[float, pd.Series[float]]":
    """Return the round at which a run first reached a perplexity, and the exposure of each canary, by id.

    Between two evaluations, both are interpolated along the cross-entropy, the logarithm of perplexity. Raises
    InputError if the run never reached it, or its first evaluation is already below it.
    """
    measured = trajectory(run)
    entropies, target = measured.index.to_numpy(), math.log(perplexity)
    reached = np.flatnonzero(entropies <= target + 1e-12)
    if not len(reached):
        raise InputError(
            f"run {run.name}: never reached perplexity {perplexity:.4g}; its lowest is {math.exp(entropies.min()):.4g}"
        )
    last = int(reached[0])
    if math.isclose(entropies[last], target, abs_tol=1e-12):
        return float(measured["round"].iloc[last]), measured.iloc[last, 1:]
    if not last:
        raise InputError(
            f"run {run.name}: its first evaluation is already below perplexity {perplexity:.4g}, at "
            f"{math.exp(entropies[0]):.4g}; evaluate it earlier, with a smaller evaluation.every"
        )
    before, after = entropies[last - 1], entropies[last]
    share = (before - target) / (before - after)
    values = (1 - share) * measured.iloc[last - 1] + share * measured.iloc[last]
    return float(values["round"]), values.iloc[1:]


def trajectory(run: RunResults) -> pd.DataFrame:
    """Return each evaluation's round and exposures, indexed by cross-entropy on test text (nats), or InputError."""
    rows = []
    for round_ in run.evaluated:
        perplexity, values = run.of_model(PERPLEXITY.name, round_), run.of_canaries(PRIMARY.name, round_)
        if values is not None and perplexity is not None and math.isfinite(perplexity) and perplexity > 0:
            rows.append(pd.Series({"round": float(round_), **values.to_dict()}, name=math.log(perplexity)))
    if not rows:
        raise InputError(f"run {run.name}: no evaluation has both perplexity and {PRIMARY.name}; evaluate it again")
    return pd.DataFrame(rows)


TOLERANCE = 1e-6  # tolerance in bits for rounding, below the ceiling
WHAT_TO_DO = "`flsim evaluate RUN --also space` measures beyond it."
MANY = 0.1  # smallest share of canaries at the ceiling that is reported


def is_at_ceiling(exposures: ArrayLike, references: float | None) -> NDArray[np.bool_]:
    """Return bool [n], whether each of float64 [n] exposures is the largest possible one; all False without |R|."""
    values: NDArray[Any] = np.asarray(exposures, dtype="float64")
    return values > (math.inf if references is None else math.log2(references + 1) - TOLERANCE)


def share_at_ceiling(runs: Iterable[tuple[RunResults, int]]) -> float:
    """Return the share of planted canaries with known exposure at the ceiling, at given rounds; 0 without any."""
    known = [(run.of_planted(PRIMARY.name, round_), run.references(round_)) for run, round_ in runs]
    flags = [is_at_ceiling(bits, number) for bits, number in known if bits is not None and number is not None]
    return float(np.concatenate(flags).mean()) if any(map(len, flags)) else 0.0


END, LIKE = "end", "equal perplexity"
ALL = "all"
TESTS = ("t", "exchange", "McNemar")  # whose p is in the main column of a quantity
VALUES = ("value_a", "value_b", "difference", "low", "high", "p", "p_holm")
COLUMNS = {
    **dict.fromkeys(("row", "a", "b", "at", "quantity", "over"), "string"),
    "n": "Int64",
    "test": "string",
    **dict.fromkeys(VALUES, "Float64"),
    "left_out": "string",
}
CONFIGURATION = {"p_u": "Float64", "p_e": "Float64", "copies": "Int64"}  # further columns of two runs


@dataclass(frozen=True)
class Pair:
    """Two settings to compare, each with one run, or with one run per seed.

    Attributes:
        row: the common settings of the two.
        a, b: their runs, including those that have not started.
    """

    row: str
    a: list[SweepRun]
    b: list[SweepRun]

    @property
    def label(self) -> str:
        """Return the common settings of both as in a table; empty before both have started."""
        begun = [[run.results for run in runs if run.results] for runs in (self.a, self.b)]
        if not all(begun):
            return ""
        if not self.a[0].grid:  # not of a sweep, so `row` is such a name
            return self.row
        a, b = (runs[0] for runs in begun)
        return a.setting if a.setting == b.setting else a.label if a.label == b.label else self.row


def twins(sweep: Sweep) -> list[Pair]:
    """Return IID (a) and non-IID (b) of each row of a sweep with both partitions; InputError if no row has both."""
    rows: dict[tuple[Any, ...], Pair] = {}
    for run in sweep.runs:
        pair = rows.setdefault(run.row, Pair(_label(run), [], []))
        if run.axes.get(PARTITION) in ("iid", "non-iid"):
            (pair.a if run.axes[PARTITION] == "iid" else pair.b).append(run)
    pairs = [pair for pair in rows.values() if pair.a and pair.b]
    if not pairs:
        raise InputError(
            f"{sweep.path}: no row of this sweep has both partitions; name a second sweep to compare it with"
        )
    return pairs


def same_names(a: Sweep, b: Sweep) -> list[Pair]:
    """Return pairs of the runs of two sweeps with the same names, without seeds; InputError if no name is in both."""
    others = {run.name: run for run in b.runs}
    rows: dict[tuple[Any, ...], Pair] = {}
    for run in a.runs:
        if run.name in others:
            pair = rows.setdefault((*run.row, run.axes.get(PARTITION)), Pair(_label(run, True), [], []))
            pair.a.append(run)
            pair.b.append(others[run.name])
    if not rows:
        raise InputError(f"{a.path} and {b.path}: no run has the same name in both; compare sweeps of one definition")
    return list(rows.values())


def _label(run: SweepRun, has_partition: bool = False) -> str:
    axes = [f"{axis.split('.')[-1]}={value}" for axis, value in run.axes.items() if has_partition or axis != PARTITION]
    return " ".join([run.grid, *axes])


def planned(runs: Sequence[RunResults]) -> list[SweepRun]:
    """Return runs without a sweep as entries of a sweep."""
    return [SweepRun(run.name, "", -1 if run.seed is None else run.seed, {}, None, run) for run in runs]


def differences(pairs: Sequence[Pair], round: int | None = None, epoch: float | None = None) -> pd.DataFrame:
    """Return the frame of pairs of settings: over seeds, or over canaries for a pair with one seed.

    The compared runs are those that a table over seeds averages. A pair without a comparison has the reason. Raises
    InputError if both a round and an epoch are given.
    """
    refuse_two_points(round, epoch)
    runs = [run.results for pair in pairs for run in (*pair.a, *pair.b) if run.results]
    quantities = panels_first(compared_in(runs))
    return frame_of([row for pair in pairs for row in _of_pair(pair, quantities, round, epoch)], COLUMNS, quantities)


def frame_of(rows: Sequence[Row], types: Mapping[str, str], quantities: Sequence[Quantity]) -> pd.DataFrame:
    """Return rows as a frame, with p corrected within each family: a column of p for a quantity at one point."""
    frame = pd.DataFrame(rows, columns=list(types)).astype(types)
    # of a flag, rows over seeds and rows over canaries have different tests, and are in one column
    column_of_p = frame["test"].mask(frame["test"].isin(TESTS), "main")
    for _, family in frame[frame["row"] != ALL].groupby(["at", "quantity", column_of_p], sort=False):
        frame.loc[family.index, "p_holm"] = statistics.holm(family["p"].astype("float64").tolist())
    return described(frame, quantities)


def _of_pair(pair: Pair, quantities: Sequence[Quantity], round: int | None, epoch: float | None) -> Iterator[Row]:
    begun = [[run.results for run in runs if run.results] for runs in (pair.a, pair.b)]
    a, b = (runs[0].setting if runs else None for runs in begun)
    side = {"row": pair.row, "a": a, "b": b, "at": END}
    diverged = [sum(run.status == "diverged" for run in runs) for runs in begun]
    yield side | two_means("diverged", *diverged)
    published = [runs[0].published or {} for runs in (pair.a, pair.b)]
    if published[0] != published[1]:  # equal runs of two sweeps have the same published row
        for name in COUNTED_OF:
            yield side | two_means(f"{PREFIX}{name}", *(row.get(name) for row in published))
    why = [f"{run.name} (not started)" for run in (*pair.a, *pair.b) if run.results is None]
    rows: list[Row] = []
    try:
        samples = [sample(runs, round, epoch) for runs in begun]
        why += [f"{name} ({reason})" for one in samples for name, reason in one.left_out.items()]
        if all(one.taken for one in samples):
            of_a, of_b = ([run for run, _ in one.taken] for one in samples)
            rows = list(_of_runs(of_a, of_b, quantities, round, epoch))
    except InputError as error:
        why.append(str(error))
    if why:
        yield side | {"quantity": "left out", "left_out": "; ".join(why)}
    for row in rows:
        yield side | row


def two_means(quantity: str, a: float | None, b: float | None) -> Row:
    return {"quantity": quantity, "value_a": a, "value_b": b, "difference": None if a is None or b is None else a - b}


def _of_runs(
    a: Sequence[RunResults],
    b: Sequence[RunResults],
    quantities: Sequence[Quantity],
    round: int | None,
    epoch: float | None,
) -> Iterator[Row]:
    """Yield the rows of two series: from the runs of each common seed."""
    pairs = pairs_of_seeds(a, b)
    paired = [paired_canaries(run_a, run_b, round, epoch) for _, run_a, run_b in pairs]
    unit = {"over": "seeds" if len(pairs) > 1 else "canaries", "n": len(pairs)}
    yield unit | two_means("canaries", *[float(np.mean([len(one.canaries) for one in paired]))] * 2)
    counts = np.mean([at_ceiling_of(one.canaries, one.references) for one in paired], axis=0)
    yield unit | two_means("at_ceiling", *counts.tolist())
    points = [[(run, run.at(round, epoch)) for run in runs] for _, *runs in pairs]
    yield unit | two_means(
        "epochs", *(mean_of_known([run.epochs_of(at) for run, at in side]) for side in zip(*points, strict=True))
    )
    for quantity in of_model(quantities):
        sides = (
            mean_of_known([run.of_model(quantity.name, at) for run, at in side]) for side in zip(*points, strict=True)
        )
        yield unit | two_means(quantity.name, *sides)
    for quantity in (*numbers(quantities), *flags(quantities)):
        if all(quantity in one.quantities for one in paired):
            rows = [_over_seeds(paired, quantity)] if len(paired) > 1 else of_canaries(paired[0].canaries, quantity)
            yield from (unit | row for row in rows)
    if len(pairs) > 1:
        yield at_equal_perplexity({seed: [(run_a, run_b)] for seed, run_a, run_b in pairs})
    else:
        yield from (row for row in two_at_equal_perplexity(*pairs[0][1:]) if row["quantity"] == PRIMARY.name)


def _over_seeds(paired: Sequence[PairedCanaries], quantity: Quantity) -> Row:
    """Return the row of a quantity of canaries over seeds; equal differences of integers have no interval."""
    values = [[one.canaries[f"{quantity.name}_{side}"] for side in "ab"] for one in paired]
    if not quantity.is_flag:
        means = np.mean([[side.mean() for side in sides] for sides in values], axis=0)
        per_seed = [np.round((a - b).to_numpy(), statistics.ROUNDING).mean() for a, b in values]
        return two_means(quantity.name, *means.tolist()) | of_mean(per_seed) | {"test": "t"}
    counts = np.array([[int((side == 1).sum()) for side in sides] for sides in values])
    gaps = counts[:, 0] - counts[:, 1]
    low, high = statistics.t_interval(gaps.astype(float)) if np.ptp(gaps) else (math.nan, math.nan)
    row = two_means(quantity.name, *counts.mean(axis=0).tolist())
    return row | {"low": low, "high": high, "p": statistics.sign_flip_p(gaps.tolist()), "test": "exchange"}


def of_canaries(canaries: pd.DataFrame, quantity: Quantity) -> list[Row]:
    """Return the rows of a quantity for all or some of `PairedCanaries.canaries` of two runs, as if independent."""
    a, b = (canaries[f"{quantity.name}_{side}"] for side in "ab")
    if quantity.is_flag:
        return of_flags((a == 1).to_numpy(bool), (b == 1).to_numpy(bool), quantity.name)
    return [two_means(quantity.name, float(a.mean()), float(b.mean())) | row for row in of_differences(a - b)]


def of_differences(values: "pd.Series[float]") -> list[Row]:
    """Return the cells of the t test and of the signed-rank test of the paired differences [n] of canaries."""
    row = {"over": "canaries"} | of_mean(values)
    ranks = {"p": statistics.signed_rank_p(np.round(values.to_numpy(), statistics.ROUNDING)), "test": "signed ranks"}
    return [row | {"test": "t"}, {name: row[name] for name in ("over", "n", "difference")} | ranks]


def of_flags(a: NDArray[np.bool_], b: NDArray[np.bool_], name: str) -> list[Row]:
    """Return the rows of a flag of the same canaries [n] in two runs, and of canaries that only one memorized."""
    only_a, only_b = int((a & ~b).sum()), int((~a & b).sum())
    discordant = only_a + only_b
    # excludes one half exactly if the p-value of McNemar's test is below 5%
    low, high = statistics.share_interval(only_a, discordant)
    row = {"over": "canaries"}
    return [
        row
        | two_means(name, int(a.sum()), int(b.sum()))
        | {"n": len(a), "p": statistics.mcnemar_p(only_a, only_b), "test": "McNemar"},
        row
        | two_means(name, only_a, only_b)
        | {"difference": only_a / discordant if discordant else math.nan, "low": low, "high": high}
        | {"n": discordant, "test": "discordant"},
    ]


def at_ceiling_of(canaries: pd.DataFrame, references: float) -> list[int]:
    """Return the numbers of canaries with the largest possible exposure in run a and in run b."""
    return [int(is_at_ceiling(canaries[f"{PRIMARY.name}_{side}"], references).sum()) for side in "ab"]


@dataclass(frozen=True, eq=False)
class Comparison:
    """The comparison of two runs or of sweeps, as `flsim.compare` returns it.

    Attributes:
        table: the differences over all canaries and in each configuration, as `flsim.results.differences` describes
            them, with p_u, p_e and the number of copies of each configuration.
        models: a row of `flsim.results.tables.memorization_table` for each run.
        quantities: the compared quantities, of canaries and of the model.
        excluded: number of canaries that are in no row, because they were not planted in both runs.
        pairs: the compared settings of sweeps; empty for two runs.
        heading: what is compared, for sweeps; empty for two runs.
    """

    table: pd.DataFrame
    models: pd.DataFrame
    quantities: Sequence[Quantity]
    excluded: int = 0
    pairs: Sequence[Pair] = ()
    heading: str = ""


def compare_folders(a: Path, b: Path | None, round: int | None = None, epoch: float | None = None) -> Comparison:
    """Compare two runs, the partitions of a sweep, or two sweeps; InputError as for `flsim.compare`."""
    kinds = {is_sweep(path) for path in (a, b) if path is not None}
    if len(kinds) > 1:
        raise InputError(f"{a} and {b}: a run and a sweep are not comparable; name two runs, a sweep, or two sweeps")
    if True in kinds:
        return compare_sweeps(a, b, round, epoch)
    first = read_run(a)
    if b is None:
        raise InputError(f"{a}: comparing needs two runs or a sweep; name another run, or a sweep folder")
    second = read_run(b)
    compared = compare_runs(first, second, round, epoch)
    if first.identity is not None and (first.identity, first.rounds) == (second.identity, second.rounds):
        raise InputError(f"{a} and {b}: both folders are copies of the same run; name another run")
    return compared


def compare_sweeps(a: Path, b: Path | None, round: int | None = None, epoch: float | None = None) -> Comparison:
    """Compare the partitions of a sweep, or the runs with equal names of two sweeps; InputError without a pair."""
    sweep = read_sweep(a)
    pairs = twins(sweep) if b is None else same_names(sweep, read_sweep(b))
    runs = [run.results for pair in pairs for run in (*pair.a, *pair.b) if run.results]
    frame = differences(pairs, round, epoch)
    if not (frame["quantity"] == "canaries").any():
        reasons = list(dict.fromkeys(frame["left_out"].dropna()))
        more = f"; and {len(reasons) - 3} more rows" if len(reasons) > 3 else ""
        statuses = {run.results and run.results.status for pair in pairs for run in (*pair.a, *pair.b)}
        more += "" if statuses <= {"completed", "diverged"} else "; repeat `flsim sweep` to complete the runs"
        why = "; ".join(reasons[:3]) + more
        raise InputError(f"{a}{'' if b is None else f' and {b}'}: there is no comparison: {why}")
    models = memorization_table(runs, round, epoch)
    heading = f"{sweep.heading}: IID (a) minus non-IID (b)" if b is None else f"{a} (a) minus {b} (b)"
    return Comparison(frame, models, compared_in(runs), pairs=pairs, heading=heading)


def compare_runs(a: RunResults, b: RunResults, round: int | None = None, epoch: float | None = None) -> Comparison:
    """Compare two runs at a round or after a number of epochs; by default at each run's last evaluation.

    Two runs without any canaries are compared only in utility. The comparison at equal perplexity uses all evaluations
    of both runs, independent of the round.

    Raises:
        InputError: see `paired_canaries`.
    """
    quantities, types = compared_in([a, b]), COLUMNS | CONFIGURATION
    side = {"a": a.setting, "b": b.setting, "at": END, "row": ALL}
    if a.roster.empty and b.roster.empty:
        refuse_two_points(round, epoch)
        for run in (a, b):
            round_of(run, round, epoch)  # raises if there is no comparison
        return Comparison(frame_of([], types, ()), memorization_table([a, b], round, epoch), quantities)
    pair = paired_canaries(a, b, round, epoch)
    rows = [side | row for row in _of_configuration(pair.canaries, pair)]
    keys = [name for name in (*CONFIGURATION, *WINDOW) if name in pair.canaries]
    for _, group in pair.canaries.groupby(keys, dropna=False, sort=False):
        configuration = {name: group[name].iloc[0] for name in keys}
        named = side | configuration | {"row": name_of_configuration(configuration)}
        rows += [named | row for row in _of_configuration(group, pair)]
    rows += [side | row for row in two_at_equal_perplexity(a, b)]
    of_canary = [quantity for quantity in quantities if quantity.of_canaries]
    models = memorization_table([a, b], round, epoch)
    return Comparison(frame_of(rows, types, of_canary), models, quantities, pair.excluded)


def _of_configuration(canaries: pd.DataFrame, pair: PairedCanaries) -> Iterator[Row]:
    counts = at_ceiling_of(canaries, pair.references)
    yield two_means("at_ceiling", *counts) | {"over": "canaries", "n": len(canaries)}
    for quantity in pair.quantities:
        if quantity.of_canaries:
            yield from of_canaries(canaries, quantity)


def name_of_configuration(configuration: Mapping[Any, Any]) -> str:
    """Return the name of a configuration, such as ``"1/5K, 100%"`` or ``"2 copies, in round 3"``."""
    p_u, p_e, number = (configuration.get(name) for name in CONFIGURATION)
    window = rounds_text(*(configuration.get(name) for name in WINDOW))
    if not pd.isna(p_u) and not pd.isna(p_e):
        name = f"{user_share(p_u)}, {100 * p_e:.6g}%"
    else:
        name = "unknown" if pd.isna(number) else copies(number)
    return ", ".join(filter(None, (name, window)))


def to_wide(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a frame of differences with one row for each name of a row, and its quantities next to each other.

    Columns are row, a, b, over, n and left_out, and for each quantity, those of `VALUES` that have values:
    ``exposure_difference``, ``rs_value_a``. Names at equal perplexity begin with ``like_``; names for signed ranks and
    discordant canaries contain the test: ``rs_discordant_low``.
    """
    columns: dict[str, dict[str, Any]] = {}
    for line in frame.to_dict("records"):
        row = columns.setdefault(line["row"], {"row": line["row"], "a": line["a"], "b": line["b"]})
        is_end = line["at"] == END
        if not pd.isna(line["left_out"]):
            row["left_out" if is_end else "like_left_out"] = line["left_out"]
        if is_end and line["test"] in TESTS:
            row |= {"over": line["over"]} | ({"n": line["n"]} if line["over"] == "canaries" else {})
        if is_end and line["quantity"] == "canaries":
            row |= {"seeds": line["n"], "over": line["over"]}
        name = ("" if is_end else "like_") + line["quantity"].replace(" ", "_")
        name += {"signed ranks": "_ranks", "discordant": "_discordant"}.get(line["test"], "")
        row |= {f"{name}_{value}": line[value] for value in VALUES if not pd.isna(line[value])}
        row |= {value: line[value] for value in CONFIGURATION if value in line}
    wide = pd.DataFrame(list(columns.values()), columns=["row"] if not columns else None)
    wide.attrs = dict(frame.attrs)
    return wide


def column(wide: pd.DataFrame, name: str) -> "pd.Series[Any]":
    """Return a column of `to_wide`; blank if no row has it."""
    return wide[name] if name in wide else pd.Series(pd.NA, wide.index, "Float64")
