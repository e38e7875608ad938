"""Memorization tables in the columns of Thakkar et al. (2020), Tables 1 to 4, from rows and rosters only.

A run is a row. All formats show the same frame:

    setting, run             name of the training, and name of the run
    round                    number of completed rounds of the evaluated model; in central training, of steps
    epochs                   how often training read as many records as there are; blank for older runs
    rs, bs                   canaries memorized by Random Sampling and by Beam Search
    rs_share_low, _high, ... exact 95% interval of the share of canaries, which it treats as independent
    rs_lowest, bs_lowest     least (p_u, p_e) with a memorized canary, by expected insertions; "-" if there is none;
                             if a number of copies was set, the fewest copies
    canaries                 planted canaries, which all counts, shares and means are of
    mean_exposure            mean over canaries, bits
    exposure_low, _high      its 95% confidence interval over canaries, Student's t
    accuracy, perplexity     Recall@1, a fraction, and perplexity on test text
    references               |R|, number of random continuations a canary was ranked among
    status                   completed, running, failed, interrupted or diverged

If they were measured (`also`), there are the columns of further measures. A flag has the same columns as RS, a number
of canaries has a mean and an interval like exposure, and a number of the model has one column. The columns of a custom
measure have the names of its quantities. Those of "space" are

    mean_space_exposure      mean over canaries of the exposure over the complete space, bits: beyond log2 |R|
    space_low, space_high    its 95% confidence interval over canaries, Student's t

If the test users are complete authors:

    whole_test_users         number of them that accuracy and perplexity are measured on

If some canary was never planted, because no record was drawn for it, or because it is a control:

    controls                 number of such canaries, the null control: no count, share or mean holds them
    rs_controls, bs_controls those of them that RS and BS show as memorized: false positives
    false_positive_rate      probability that RS shows one of them as memorized, 1 / (|R| + 1)

If some run has noise on users' updates:

    epsilon_paper            by the paper's convention, which takes S for the sensitivity; blank for Poisson sampling
    epsilon_sound            by the convention named in sound_convention, which is correct
    delta                    of both

If some run has noise on records' gradients:

    record_epsilon           of one record, not of a user: by the convention in record_convention
    record_delta             its delta

If some run diverged, failed, was interrupted, or has checkpoints that could not be evaluated:

    reason                   why

If runs reproduce published rows, published_table, _data and _setting name the row. Its values are published_rs and so
on, and the agreement is rs_size and so on (`flsim.results.published`). The paper's measurement is described by
published_references, _prefix and _length, and that of flsim by these columns:

    prefix                   number of a canary's first words that the attacker knows
    length                   number of words of a planted canary; blank if they differ

Cells that were not measured are blank, including all measurements of diverged runs.

With by="series", runs that differ only in their seed are a row, in the columns above and these:

    series, runs             the series' digest, and the names of the averaged runs, in place of run and status; the
                             settings in which trainings of the same name differ are added to setting
    seeds, given             number of averaged runs, and number of all runs
    diverged                 number of runs that diverged: an outcome, in no mean
    round, epochs            of the evaluated models: the common round, blank without one, and the mean of epochs
    rs, rs_sd, bs, bs_sd     memorized canaries: mean and deviation over seeds; the interval of the share is of all
                             canaries of all seeds pooled: too narrow for other seeds, which have other models
    canaries                 planted canaries of a run: mean over seeds
    mean_exposure            mean over seeds and canaries
    seeds_low, seeds_high    its 95% interval from Student's t over the seeds' means, for the mean over all seeds
    canaries_low, _high      its 95% interval over all canaries of all seeds pooled, which it treats as independent
    accuracy_sd, ...         standard deviation over seeds of a number of the model, which is a mean
    left_out                 runs that are not averaged, and the reasons

Controls are then those of all seeds pooled, and epsilons those of the run with the largest. A cell is also blank if it
was not measured in every run of a row, or if it needs two seeds and there is only one.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import pandas as pd

from flsim.base.errors import InputError
from flsim.base.statistics import share_interval, t_interval
from flsim.measures import built_in
from flsim.measures.built_in import QUANTITIES
from flsim.measures.quantity import Quantity, flags, from_json, numbers, of_model, select_for, to_json
from flsim.results.published import AGAINST, ASKED, PUBLISHED, asked, cells_of
from flsim.results.rows import RunResults, refuse_two_points
from flsim.results.sweeps import Sample, by_series, distinctions, sample

# Columns that tables of runs and tables over seeds have in common: their types and the sources of their cells.

PRIVACY = {"epsilon_paper": "Float64", "epsilon_sound": "Float64", "sound_convention": "string", "delta": "Float64"}
POPULATION = {"whole_test_users": "Int64"}  # number of complete authors on which utility is measured
RECORD_PRIVACY = {"record_epsilon": "Float64", "record_convention": "string", "record_delta": "Float64"}
FALSE_POSITIVE = "false_positive_rate"
By = Literal["run", "series"]  # what a row of a table is
OVER_SEEDS = ("seeds_low", "seeds_high", "canaries_low", "canaries_high")
DESCRIBED = "quantities"  # attribute of a table: descriptions of custom measures


def columns_of(quantity: Quantity, by: By = "run") -> dict[str, str]:
    """Return the columns that a table of runs, or over seeds, has for a quantity, with their types."""
    name, is_of_runs = quantity.name, by == "run"
    if quantity.is_flag:
        shares = dict.fromkeys((f"{name}_share_low", f"{name}_share_high"), "Float64")
        of_seeds = {name: "Float64", f"{name}_sd": "Float64", **shares}
        return {name: "Int64", **shares, f"{name}_lowest": "string"} if is_of_runs else of_seeds
    if not quantity.of_canaries:
        return dict.fromkeys((name,) if is_of_runs else (name, f"{name}_sd"), "Float64")
    # those of the primary number over seeds have no prefix
    ends = [f"{quantity.column}_low", f"{quantity.column}_high"] if is_of_runs else []
    ends = ends or [prefix_of(quantity) + end for end in OVER_SEEDS]
    return dict.fromkeys((mean_of(quantity), *ends), "Float64")


def columns_of_controls(flags: Iterable[Quantity]) -> dict[str, str]:
    """Return the types of the columns of canaries never planted: their number, flags, and how often RS marks one."""
    counts = {f"{flag.name}_controls": "Int64" for flag in flags}
    return {"controls": "Int64", **counts, FALSE_POSITIVE: "Float64"}


def mean_of(quantity: Quantity) -> str:
    """Return the column of a number's mean over canaries."""
    return f"mean_{quantity.name}"


def prefix_of(quantity: Quantity) -> str:
    """Return the prefix of the names of a number's columns; empty for the primary number."""
    return "" if quantity.is_primary else f"{quantity.column}_"


def names_of(quantity: Quantity) -> list[str]:
    """Return all names of a quantity in tables, its own name first."""
    columns = (*columns_of(quantity), *columns_of(quantity, "series"), f"{quantity.name}_controls")
    return list(dict.fromkeys((quantity.name, quantity.column, *columns)))


def quantities_of(runs: Iterable[RunResults]) -> list[Quantity]:
    """Return the quantities that runs may have: the built-in ones, then those of custom measures.

    For a built-in measure whose quantities depend on the canaries, these are the quantities that any run has.

    Raises:
        InputError: two runs have different descriptions for one name.
    """
    described: dict[str, tuple[Quantity, RunResults]] = {}
    known = dict(QUANTITIES)
    for run in runs:
        known |= _built_in(run.rows["metric"].unique())
        for name, quantity in run.own.items():
            other, first = described.setdefault(name, (quantity, run))
            if not other.is_like(quantity):
                raise InputError(
                    f"runs {first.name} and {run.name}: {name} differs between the runs (kind, unit, direction "
                    "or subject); show the runs separately, or rename one of the measures"
                )
    return [*known.values(), *(quantity for quantity, _ in described.values())]


def quantities_in(table: pd.DataFrame) -> list[Quantity]:
    """Return the quantities that a table can have columns of: built-in, then custom."""
    return [*(QUANTITIES | _built_in(table.columns)).values(), *map(from_json, table.attrs.get(DESCRIBED, ()))]


def _built_in(names: Iterable[str]) -> dict[str, Quantity]:
    """Return the quantities of built-in measures among the names, including those that depend on the canaries."""
    return {name: quantity for name in names if (quantity := built_in.described(name))}


def is_in(table: pd.DataFrame, quantity: Quantity) -> bool:
    """Return whether a table has columns of a quantity."""
    return quantity.name in table or mean_of(quantity) in table


def described(table: pd.DataFrame, quantities: Iterable[Quantity]) -> pd.DataFrame:
    """Return the table with the descriptions of custom measures, which are also stored in Parquet files."""
    custom = [to_json(quantity) for quantity in quantities if built_in.described(quantity.name) is None]
    if custom:
        table.attrs[DESCRIBED] = custom
    return table


def frame_with_types(
    rows: Sequence[Mapping[str, Any]], always: Mapping[str, str], groups: Iterable[Mapping[str, str]]
) -> pd.DataFrame:
    """Return rows as a table with columns of the given types."""
    columns = dict(always)
    for more in groups:
        if any(row.get(name) is not None for row in rows for name in more):
            columns |= more
    has = {name for row in rows for name in row if row[name] is not None}
    columns = {name: kind for name, kind in columns.items() if name not in PUBLISHED or name in has}
    return pd.DataFrame(rows, columns=list(columns)).astype(columns)


def control_columns(runs: Sequence[tuple[RunResults, int]], flags: Iterable[Quantity]) -> dict[str, Any]:
    """Return the cells of `columns_of_controls` over runs at given rounds; empty if all canaries were planted.

    A phrase that was never planted is drawn like the references, so it has rank 1 with probability 1 / (|R| + 1) or
    less.
    """
    number = sum(len(run.controls) for run, _ in runs)
    if not number:
        return {}
    cells: dict[str, Any] = {"controls": number}
    for flag in flags:
        values = [run.of_controls(flag.name, at) for run, at in runs]
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            cells[f"{flag.name}_controls"] = sum(int((value == 1).sum()) for value in known)
    references = {run.references(at) for run, at in runs}
    size = references.pop() if len(references) == 1 else None
    return cells | {FALSE_POSITIVE: None if size is None else 1 / (size + 1)}


def epsilons_of(run: RunResults, at: int) -> pd.DataFrame:
    """Return a row for each epsilon of an evaluation: its unit ("user" or "record"), convention, value and delta."""
    rows = run.rows[(run.rows["round"] == at) & (run.rows["canary"] == "")]
    named = rows["metric"].str.extract(r"^(?P<unit>record )?epsilon (?P<convention>.+)$").fillna({"unit": ""})
    rows = rows.assign(unit=named["unit"], convention=named["convention"]).dropna(subset="convention")
    rows["delta"] = [run.of_model(f"{unit}delta", at) for unit in rows["unit"]]
    return rows.assign(unit=rows["unit"].str.strip().replace("", "user"))


def privacy_columns(run: RunResults, at: int) -> dict[str, Any]:
    """Return the columns of `PRIVACY`, or of `RECORD_PRIVACY`, of a run with noise."""
    cells: dict[str, Any] = {}
    for row in epsilons_of(run, at).to_dict("records"):
        if row["unit"] == "record":
            cells |= {"record_epsilon": row["value"], "record_convention": row["convention"]}
            cells["record_delta"] = row["delta"]
        elif row["convention"] == "paper":
            cells |= {"epsilon_paper": row["value"], "delta": row["delta"]}
        else:
            cells |= {"epsilon_sound": row["value"], "sound_convention": row["convention"], "delta": row["delta"]}
    return cells


# The canaries of a run at one evaluation, one row each: the phrase, its copies, and the measured quantities.
#
#     canary, phrase           its id, and its words
#     p_u, p_e                 the probabilities by which it was planted; blank if it has a number of copies
#     planned_insertions       records that were drawn for it
#     sharers, insertions      users that have it, and records that are it; blank for runs without these counts
#     first_round, last_round  rounds in which it is planted, blank for no bound; only if canaries have windows
#     round                    completed rounds of the evaluated model; of central training, steps
#
# Further columns have the quantities of canaries, by name; unknown values are blank. On request, ``written`` has the
# phrase with the most likely continuation of the known words that a beam search finds.

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


# The table of memorization: its columns, and a row for each run or series.

STANDARD = [quantity for quantity in select_for(QUANTITIES.values(), "table") if quantity.is_standard]
OPTIONAL = [quantity for quantity in select_for(QUANTITIES.values(), "table") if not quantity.is_standard]
NUMBERS = [*numbers(STANDARD), *of_model(STANDARD)]
COLUMNS = {
    "setting": "string",
    "run": "string",
    "round": "Int64",
    "epochs": "Float64",
    **{name: kind for quantity in flags(STANDARD) for name, kind in columns_of(quantity).items()},
    "canaries": "Int64",
    **{name: kind for number in NUMBERS for name, kind in columns_of(number).items()},
    "references": "Int64",
    "status": "string",
}
SERIES = {
    "setting": "string",
    "series": "string",
    "runs": "string",
    "seeds": "Int64",
    "given": "Int64",
    "diverged": "Int64",
    "round": "Int64",
    "epochs": "Float64",
    **{name: "Float64" for flag in flags(STANDARD) for name in (flag.name, f"{flag.name}_sd")},
    **{name: "Float64" for flag in flags(STANDARD) for name in columns_of(flag, "series")},
    "canaries": "Float64",
    **{name: kind for number in NUMBERS for name, kind in columns_of(number, "series").items()},
    "references": "Int64",
}


def _groups(by: By, optional: Sequence[Quantity]) -> tuple[dict[str, str], ...]:
    """Return groups of further columns; a table has all of a group if some row has a value of one."""
    return (
        *(columns_of(quantity, by) for quantity in optional),
        *(POPULATION, columns_of_controls(flags(STANDARD)), PRIVACY, RECORD_PRIVACY),
        {"reason" if by == "run" else "left_out": "string"},
        *(PUBLISHED, ASKED, columns_of_controls(flags(optional))),
    )


def types(by: By, own: Sequence[Quantity] = ()) -> dict[str, str]:
    """Return all columns that a table may have, with their types; `own` are quantities of custom measures."""
    groups = (*_groups(by, (*OPTIONAL, *own)), AGAINST)
    return (COLUMNS if by == "run" else SERIES) | {name: kind for group in groups for name, kind in group.items()}


def memorization_table(
    runs: Sequence[RunResults],
    round: int | None = None,
    epoch: float | None = None,
    published: Mapping[RunResults, Mapping[str, Any]] | None = None,
    by: By = "run",
) -> pd.DataFrame:
    """Return one row per run or per series, in the order given, with all columns that have values.

    Args:
        runs: the results of each run.
        round: the evaluated round to show; by default each run's last, and for a series, that of completed runs. Runs
            that have not reached it are blank.
        epoch: the number of epochs to show, instead of `round`; see `RunResults.evaluation_at_epoch`.
        published: rows of `flsim.results.published` of runs; a series has that of its first run.
        by: whether a row is a run or a series.

    Raises:
        InputError: a run passed this round without an evaluation, results of some canaries are missing, or both a round
            and an epoch are given; for means over seeds, see `flsim.results.sweeps.by_series` and `sample`.
    """
    refuse_two_points(round, epoch)
    quantities = select_for(quantities_of(runs), "table")
    if by == "run":
        samples = [_alone(run, round, epoch) for run in runs]
    else:
        samples = [sample(group, round, epoch) for group in by_series(runs)]
    rows = []
    for one, words in zip(samples, distinctions([one.runs[0] for one in samples]), strict=True):
        run = one.runs[0]
        name: dict[str, str | None] = {"setting": run.setting + words}
        if by == "run":
            name |= {"run": run.name, "status": run.status, "reason": run.reason}
        row_of_paper = (published or {}).get(run)
        rows.append(name | _measured(one, quantities) | cells_of(row_of_paper) | asked(run, row_of_paper))
    optional = [quantity for quantity in quantities if not quantity.is_standard]
    always = COLUMNS if by == "run" else SERIES
    return described(frame_with_types(rows, always, _groups(by, optional)), optional)


def _alone(run: RunResults, round: int | None, epoch: float | None) -> Sample:
    """Return a run as a series; without an evaluation if it diverged, or has not reached this point."""
    # The last finite evaluation of a diverged model is not a result.
    is_blank = run.status == "diverged" or not run.evaluated
    is_blank = is_blank or (run.status != "completed" and run.is_before(round, epoch))
    return Sample([run], [] if is_blank else [(run, run.at(round, epoch))], {})


def _measured(series: Sample, quantities: Sequence[Quantity]) -> dict[str, Any]:
    """Return the cells of a series in the columns of both kinds of tables, except those that name it."""
    averaged = [run for run, _ in series.taken]
    row: dict[str, Any] = {
        "series": series.runs[0].series,
        "runs": ", ".join(run.name for run in averaged) or None,
        "seeds": len(series.taken),
        "given": len(series.runs),
        "diverged": sum(run.status == "diverged" for run in series.runs),  # an outcome, not missing data
        "canaries": float(np.mean([len(run.planted) for run in averaged or series.runs])),
        "left_out": "; ".join(f"{name} ({why})" for name, why in series.left_out.items()) or None,
    }
    if not series.taken:
        return row
    rounds = {round_ for _, round_ in series.taken}
    row["round"] = rounds.pop() if len(rounds) == 1 else None
    row["epochs"] = mean_of_known([run.epochs_of(round_) for run, round_ in series.taken])
    row["references"] = series.taken[0][0].references(series.taken[0][1])
    whole = {run.whole_test_users(round_) for run, round_ in series.taken}
    row["whole_test_users"] = None if None in whole else min(count for count in whole if count is not None)
    for quantity in quantities:
        row |= _cells(series, quantity)
    # epsilons of the run with the largest, because populations differ; blank if a run has no epsilon
    epsilons = [privacy_columns(run, round_) for run, round_ in series.taken]
    for epsilon, names in (("epsilon_sound", PRIVACY), ("record_epsilon", RECORD_PRIVACY)):
        if all(epsilon in of_run for of_run in epsilons):
            largest = max(epsilons, key=lambda of_run: float(of_run[epsilon]))
            row |= {name: largest.get(name) for name in names}
    return row | control_columns(series.taken, flags(quantities))


def _cells(series: Sample, quantity: Quantity) -> dict[str, Any]:
    """Return the cells in the columns of a quantity; empty if it was not measured in all runs."""
    name = quantity.name
    if not quantity.of_canaries:
        measured = [run.of_model(name, round_) for run, round_ in series.taken]
        return {name: mean_of_known(measured), f"{name}_sd": _deviation(measured)}
    of_runs = [run.of_planted(name, round_) for run, round_ in series.taken]
    values = [canaries.to_numpy() for canaries in of_runs if canaries is not None and not canaries.empty]
    if not values or len(values) < len(of_runs):
        return {}
    if quantity.is_flag:
        memorized = [canaries == 1 for canaries in values]
        counts = [float(canaries.sum()) for canaries in memorized]
        low, high = share_interval(int(sum(counts)), sum(map(len, memorized)))
        shares = {f"{name}_share_low": low, f"{name}_share_high": high}
        best = {f"{name}_lowest": lowest(series.taken[0][0].planted[memorized[0]])} if len(values) == 1 else {}
        return {name: mean_of_known(counts), f"{name}_sd": _deviation(counts), **shares, **best}
    means = np.array([canaries.mean() for canaries in values])  # seeds have equal weights
    over_canaries = t_interval(np.concatenate(values))
    of_run = dict(zip(columns_of(quantity), (float(means.mean()), *over_canaries), strict=True))
    cells = (float(means.mean()), *t_interval(means), *over_canaries)
    return of_run | dict(zip(columns_of(quantity, "series"), cells, strict=True))


def mean_of_known(values: Sequence[float | None]) -> float | None:
    """Return the mean; None if a value is unknown."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if len(known) == len(values) else None


def _deviation(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if len(known) < max(2, len(values)) or not np.isfinite(known).all():  # a finite model can have infinite perplexity
        return None
    return float(np.std(known, ddof=1))


def lowest(roster: pd.DataFrame) -> str:
    """Return the lowest configuration among canaries as the paper prints it, e.g. ``"3/50K, 1%"``; ``"-"`` if none.

    Configurations are ordered by expected insertion frequency p_u * p_e, then by expected sharers p_u (section 4.2). If
    canaries have a number of copies instead, the fewest is returned, e.g. ``"2 copies"``.
    """
    if len(roster) and roster["p_u"].isna().all():
        return copies(int(roster["planned_insertions"].min()))
    pairs = zip(roster["p_u"].astype(float), roster["p_e"].astype(float), strict=True)
    # Products that are mathematically equal, such as 1/10 * 10% and 1 * 1%, can differ in their last bit.
    pair = min(pairs, key=lambda pair: (float(f"{pair[0] * pair[1]:.12g}"), pair[0]), default=None)
    return "-" if pair is None else f"{user_share(pair[0])}, {100 * pair[1]:.6g}%"


def copies(number: int) -> str:
    """Return a number of copies as text: ``"1 copy"``, ``"2 copies"``."""
    return f"{number:,} {'copy' if number == 1 else 'copies'}"


def user_share(p_u: float) -> str:
    """Return a probability as a fraction such as ``"3/50K"``, to 1e-9; or as a decimal above three digits."""
    fraction = Fraction(p_u).limit_denominator(10**9)
    if fraction.numerator > 999 or abs(fraction - Fraction(p_u)) > Fraction(p_u) / 10**9:
        return f"{p_u:.6g}"
    below = fraction.denominator
    for unit, suffix in ((10**6, "M"), (10**3, "K")):
        if below % unit == 0:
            return f"{fraction.numerator}/{below // unit}{suffix}"
    return str(fraction)


def rounds_text(first: Any, last: Any) -> str:
    """Return the rounds in which a canary is planted, as text; empty if it is planted in all."""
    if pd.isna(first) and pd.isna(last):
        return ""
    if pd.isna(last):
        return f"from round {first:,} on"
    start = 1 if pd.isna(first) else first
    if last < start:
        return f"in no round (from {start:,})"
    return f"in round {start:,}" if start == last else f"in rounds {start:,} to {last:,}"
