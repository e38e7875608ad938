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
on (`flsim.results.columns`); the agreement is rs_size and so on (`flsim.results.published`). The paper's
measurement is described by published_references, _prefix and _length, and that of flsim by these columns:

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

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd

from flsim.base.statistics import t_interval
from flsim.measures.built_in import QUANTITIES
from flsim.measures.quantity import Quantity, flags, numbers, of_model, select_for
from flsim.results import columns
from flsim.results.columns import By
from flsim.results.published import AGAINST, ASKED, PUBLISHED, asked, cells_of
from flsim.results.seeds import Sample, by_series, distinctions, sample
from flsim.results.store import RunResults, refuse_two_points

STANDARD = [quantity for quantity in select_for(QUANTITIES.values(), "table") if quantity.is_standard]
OPTIONAL = [quantity for quantity in select_for(QUANTITIES.values(), "table") if not quantity.is_standard]
NUMBERS = [*numbers(STANDARD), *of_model(STANDARD)]
COLUMNS = {
    "setting": "string",
    "run": "string",
    "round": "Int64",
    "epochs": "Float64",
    **{name: kind for quantity in flags(STANDARD) for name, kind in columns.columns_of(quantity).items()},
    "canaries": "Int64",
    **{name: kind for number in NUMBERS for name, kind in columns.columns_of(number).items()},
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
    **{name: "Float64" for flag in flags(STANDARD) for name in columns.columns_of(flag, "series")},
    "canaries": "Float64",
    **{name: kind for number in NUMBERS for name, kind in columns.columns_of(number, "series").items()},
    "references": "Int64",
}


def _groups(by: By, optional: Sequence[Quantity]) -> tuple[dict[str, str], ...]:
    """Return groups of further columns; a table has all of a group if some row has a value of one."""
    return (
        *(columns.columns_of(quantity, by) for quantity in optional),
        *(columns.POPULATION, columns.columns_of_controls(flags(STANDARD)), columns.PRIVACY, columns.RECORD_PRIVACY),
        {"reason" if by == "run" else "left_out": "string"},
        *(PUBLISHED, ASKED, columns.columns_of_controls(flags(optional))),
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
            and an epoch are given; for means over seeds, see `flsim.results.seeds.by_series` and `sample`.
    """
    refuse_two_points(round, epoch)
    quantities = select_for(columns.quantities_of(runs), "table")
    if by == "run":
        firsts = list(runs)
        rows = [
            {"setting": run.setting, "run": run.name, **_measured(run, quantities, round, epoch)}
            | {"status": run.status, "reason": run.reason}
            for run in runs
        ]
    else:
        samples = [sample(group, round, epoch) for group in by_series(runs)]
        firsts = [one.runs[0] for one in samples]
        rows = [
            {"setting": one.runs[0].setting + words} | _averaged(one, quantities)
            for one, words in zip(samples, distinctions(firsts), strict=True)
        ]
    for first, row in zip(firsts, rows, strict=True):
        row |= cells_of((published or {}).get(first)) | asked(first, (published or {}).get(first))
    optional = [quantity for quantity in quantities if not quantity.is_standard]
    always = COLUMNS if by == "run" else SERIES
    return columns.described(columns.frame_with_types(rows, always, _groups(by, optional)), optional)


def _measured(
    run: RunResults, quantities: Sequence[Quantity], round: int | None, epoch: float | None
) -> dict[str, Any]:
    row: dict[str, Any] = {"canaries": len(run.planted)}
    # The last finite evaluation of a diverged model is not a result.
    if run.status == "diverged" or not run.evaluated:
        return row
    if run.status != "completed" and run.is_before(round, epoch):
        return row
    at = run.at(round, epoch)
    for quantity in quantities:
        row |= _cells(run, quantity, at)
    return row | {
        "round": at,
        "epochs": run.epochs_of(at),
        "references": run.references(at),
        "whole_test_users": run.whole_test_users(at),
        **columns.control_columns([(run, at)], flags(quantities)),
        **columns.privacy_columns(run, at),
    }


def _cells(run: RunResults, quantity: Quantity, at: int) -> dict[str, Any]:
    """Return a run's cells in the columns of a quantity; empty if it was not measured."""
    name = quantity.name
    if not quantity.of_canaries:
        return {name: run.of_model(name, at)}
    values = run.of_planted(name, at)
    if values is None or values.empty:
        return {}
    if quantity.is_flag:
        count = int((values == 1).sum())
        best = lowest(run.planted[(values == 1).to_numpy()])
        return {name: count, **columns.share_columns(name, count, len(values)), f"{name}_lowest": best}
    cells = (float(values.mean()), *t_interval(values.to_numpy()))
    return dict(zip(columns.columns_of(quantity), cells, strict=True))


def _averaged(series: Sample, quantities: Sequence[Quantity]) -> dict[str, Any]:
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
        row |= _cells_over_seeds(series, quantity)
    # epsilons of the run with the largest, because populations differ; blank if a run has no epsilon
    epsilons = [columns.privacy_columns(run, round_) for run, round_ in series.taken]
    for epsilon, names in (("epsilon_sound", columns.PRIVACY), ("record_epsilon", columns.RECORD_PRIVACY)):
        if all(epsilon in of_run for of_run in epsilons):
            largest = max(epsilons, key=lambda of_run: float(of_run[epsilon]))
            row |= {name: largest.get(name) for name in names}
    return row | columns.control_columns(series.taken, flags(quantities))


def _cells_over_seeds(series: Sample, quantity: Quantity) -> dict[str, Any]:
    """Return a row's cells in the columns of a quantity; empty if it was not measured in all runs."""
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
        shares = columns.share_columns(name, int(sum(counts)), sum(map(len, memorized)))
        return {name: mean_of_known(counts), f"{name}_sd": _deviation(counts), **shares}
    means = np.array([canaries.mean() for canaries in values])  # seeds have equal weights
    cells = (float(means.mean()), *t_interval(means), *t_interval(np.concatenate(values)))
    return dict(zip(columns.columns_of(quantity, "series"), cells, strict=True))


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
