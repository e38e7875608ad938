"""Tables over seeds, with a row per series of runs that differ only in their seed.

Every format shows the same frame:

    setting, series, runs    the training, the series' digest, and the names of the averaged runs; the settings in
                             which trainings of the same name differ are added to it
    seeds, given             number of averaged runs, and number of all runs
    diverged                 number of runs that diverged: an outcome, in no mean
    round, epochs            of the evaluated models: the common round, blank without one, and the mean of epochs
    rs, rs_sd, bs, bs_sd     canaries memorized by Random Sampling and by Beam Search: mean and deviation over seeds
    rs_share_low, _high, ... exact 95% interval of the share of all canaries of all seeds pooled: too narrow, as below
    canaries                 planted canaries of a run, which all counts, shares and means are of: mean over seeds
    mean_exposure            mean over seeds and canaries, bits
    seeds_low, seeds_high    its 95% interval from Student's t over the seeds' means, for the mean over all seeds
    canaries_low, _high      its 95% interval over all canaries of all seeds pooled, which it treats as independent:
                             too narrow for other seeds, which have other models and canaries
    accuracy, accuracy_sd    Recall@1, a fraction: mean over seeds, standard deviation
    perplexity, _sd          on test text: mean over seeds, standard deviation
    references               |R|, number of random continuations a canary was ranked among

If they were measured (`also`), there are the columns of further measures, as in a table of runs. For "space" this is

    mean_space_exposure      mean of the exposure over the whole space, bits, with the same intervals

If the test users of all runs of a row are whole authors, there is the column whole_test_users of a table of runs, of
the run with the fewest.

If some canary was never planted, there are the columns of controls of a table of runs, over all seeds pooled.

If some run has noise, there are the columns of epsilon of a table of runs, from the run with the largest epsilon. If
some run is not averaged, there is

    left_out                 its name, and the reason

If runs stand for published rows, there are their columns, as in a table of runs. A cell is blank if it was not measured
in every run of a row, or if it needs two seeds and there is one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from flsim.measures.quantity import Quantity, flags, numbers, of_model, select_for
from flsim.results import columns, display_columns, formats, layout
from flsim.results.against_published import AGAINST
from flsim.results.distinctions import distinctions
from flsim.results.formats import formatted, text_of
from flsim.results.layout import Column
from flsim.results.published import PUBLISHED, cells_of
from flsim.results.question import ASKED, asked
from flsim.results.seeds import Sample, by_series, sample, spread
from flsim.results.store import RunResults
from flsim.results.tables import CONTROLS, OPTIONAL, STANDARD

COLUMNS = {
    "setting": "string",
    "series": "string",
    "runs": "string",
    "seeds": "Int64",
    "given": "Int64",
    "diverged": "Int64",
    "round": "Int64",
    "epochs": "Float64",
    **{name: "Float64" for flag in flags(STANDARD) for name in (flag.name, f"{flag.name}_sd")},
    **{name: "Float64" for flag in flags(STANDARD) for name in columns.columns_over_seeds(flag)},
    "canaries": "Float64",
    **{name: kind for number in numbers(STANDARD) for name, kind in columns.columns_over_seeds(number).items()},
    **{name: kind for number in of_model(STANDARD) for name, kind in columns.columns_over_seeds(number).items()},
    "references": "Int64",
}
LEFT_OUT = {"left_out": "string"}
GROUPS = (columns.POPULATION, CONTROLS, columns.PRIVACY, columns.RECORD_PRIVACY, LEFT_OUT, PUBLISHED, ASKED)
TYPES = COLUMNS | {
    name: kind
    for group in (*map(columns.columns_over_seeds, OPTIONAL), *GROUPS, AGAINST)
    for name, kind in group.items()
}

MEANS = "n: seeds{}. {}: means over seeds; SD: standard deviation over seeds."
DIVERGED = (
    "Div.: runs that diverged, an outcome. Means are over the other seeds, so rows with different seeds do not "
    "compare; paired means, as of IID less Non-IID, drop both runs of such a seed."
)
OVER_SEEDS = "CI_s: half the 95% interval of {}, Student's t over seeds: valid for other seeds."
OVER_CANARIES = "CI_c: the same over all seeds' canaries, treated as independent: valid for these models only."


def seeds_table(
    runs: Sequence[RunResults],
    round: int | None = None,
    epoch: float | None = None,
    published: Mapping[RunResults, Mapping[str, Any]] | None = None,
) -> pd.DataFrame:
    """Return one row per series, in the order of first runs, with the columns of `COLUMNS` and others that have values.

    Args:
        runs: the results of each run.
        round: the evaluated round to show; by default the last one of completed runs.
        epoch: the number of epochs to show, in place of `round`.
        published: rows of `flsim.results.published` that runs stand for; a series has that of its first run.

    Raises:
        InputError: as for `flsim.results.seeds.by_series` and `sample`, or some canaries' results are missing.
    """
    series = [sample(group, round, epoch) for group in by_series(runs)]
    quantities = select_for(columns.quantities_of(runs), "table")
    rows = []
    firsts = [series_sample.runs[0] for series_sample in series]
    for series_sample, first, apart in zip(series, firsts, distinctions(firsts), strict=True):
        row = (published or {}).get(first)
        name = series_sample.setting + apart
        rows.append({"setting": name, **_row(series_sample, quantities), **cells_of(row), **asked(first, row)})
    optional = [quantity for quantity in quantities if not quantity.is_standard]
    controls = columns.columns_of_controls(flags(optional))
    table = columns.frame(rows, COLUMNS, (*map(columns.columns_over_seeds, optional), *GROUPS, controls))
    return columns.described(table, optional)


def _row(series: Sample, quantities: Sequence[Quantity]) -> dict[str, Any]:
    averaged = [run for run, _ in series.taken]
    row: dict[str, Any] = {
        "series": series.runs[0].series,
        "runs": ", ".join(run.name for run in averaged) or None,
        "seeds": len(series.taken),
        "given": len(series.runs),
        "diverged": series.diverged,
        "canaries": float(np.mean([len(run.planted) for run in averaged or series.runs])),
        "left_out": "; ".join(f"{name} ({why})" for name, why in series.left_out.items()) or None,
    }
    if not series.taken:
        return row
    rounds = {round_ for _, round_ in series.taken}
    row["round"] = rounds.pop() if len(rounds) == 1 else None
    row["epochs"] = _mean([run.epochs_of(round_) for run, round_ in series.taken])
    row["references"] = series.taken[0][0].references(series.taken[0][1])
    whole = {run.whole_test_users(round_) for run, round_ in series.taken}
    row["whole_test_users"] = None if None in whole else min(count for count in whole if count is not None)
    for quantity in quantities:
        row |= _cells(series, quantity)
    return row | columns.controls(series.taken, flags(quantities)) | _privacy(series)


def _cells(series: Sample, quantity: Quantity) -> dict[str, Any]:
    """Return a row's cells in the columns of a quantity; empty if some run has not measured it."""
    name = quantity.name
    if not quantity.of_canaries:
        measured = [run.of_model(name, round_) for run, round_ in series.taken]
        return {name: _mean(measured), f"{name}_sd": _deviation(measured)}
    values = _of_canaries(series, name)
    if not values:
        return {}
    if quantity.is_flag:
        memorized = [canaries == 1 for canaries in values]
        counts = [float(canaries.sum()) for canaries in memorized]
        shares = columns.shares(name, int(sum(counts)), sum(map(len, memorized)))
        return {name: _mean(counts), f"{name}_sd": _deviation(counts), **shares}
    over = spread(values)
    cells = (over.mean, *over.over_seeds, *over.over_canaries)
    return dict(zip(columns.columns_over_seeds(quantity), cells, strict=True))


def _of_canaries(series: Sample, metric: str) -> list[NDArray[np.floating[Any]]]:
    """Return the values of each run's planted canaries; empty if some run has none."""
    measured = [run.of_planted(metric, round_) for run, round_ in series.taken]
    known = [values.to_numpy() for values in measured if values is not None and not values.empty]
    return known if len(known) == len(measured) else []


def _privacy(series: Sample) -> dict[str, Any]:
    """Return epsilons of the run with the largest epsilon, because populations differ in size.

    The cells are blank if a run has no epsilon.
    """
    epsilons = [columns.privacy(run, round_) for run, round_ in series.taken]
    privacy: dict[str, Any] = {}
    for epsilon, names in (("epsilon_sound", columns.PRIVACY), ("record_epsilon", columns.RECORD_PRIVACY)):
        if all(epsilon in of_run for of_run in epsilons):
            largest = max(epsilons, key=lambda of_run: float(of_run[epsilon]))
            privacy |= {name: largest.get(name) for name in names}
    return privacy


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if len(known) == len(values) else None


def _deviation(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if len(known) < max(2, len(values)) or not np.isfinite(known).all():  # a finite model can have infinite perplexity
        return None
    return float(np.std(known, ddof=1))


def from_csv(text: str, own: Sequence[Quantity] = ()) -> pd.DataFrame:
    """Return exactly the table that `flsim.results.formats.to_csv` wrote; `own` describes a user's own measures."""
    types = {name: kind for quantity in own for name, kind in columns.columns_over_seeds(quantity).items()}
    types |= columns.columns_of_controls(flags(own))
    return columns.described(formats.from_csv(text, TYPES | types), own)


def to_markdown(table: pd.DataFrame, width: int = layout.TERMINAL) -> str:
    """Return means and intervals, aligned, with a legend and a line for the left-out runs of each row."""
    return layout.markdown(*_columns(table), display_columns.legend(table) + _remarks(table), width)


def to_latex(table: pd.DataFrame) -> str:
    """Return the columns of `to_markdown` as tabulars, ready to paste; they need the package booktabs."""
    return layout.latex(*_columns(table), _remarks(table))


def _remarks(table: pd.DataFrame) -> str:
    """Return the sentences below a table that are not about one column."""
    text = display_columns.population(table) + display_columns.progress(table)[1]
    if "left_out" in table:
        for row in table.dropna(subset="left_out").itertuples():
            text += formats.note(f"Left out of {row.setting}: {row.left_out}")
    return text + display_columns.agreement(table) + display_columns.tuned(table)


def _columns(table: pd.DataFrame) -> tuple[list[Column], list[list[Column]]]:
    """Return the columns that label a row, and units of columns that stay together."""
    is_partial = "left_out" in table
    n = [
        f"{seeds}/{number_of_runs}" if is_partial else f"{seeds}"
        for seeds, number_of_runs in zip(table["seeds"], table["given"], strict=True)
    ]
    labels = [Column("Setting", text_of(table["setting"]), is_number=False)]
    if table["setting"].duplicated().any():
        labels.append(Column("First run", text_of(table["runs"].str.split(", ").str[0]), is_number=False))
    quantities = select_for(columns.quantities_in(table), "table")
    measured = [quantity for quantity in quantities if quantity.is_standard or columns.is_in(table, quantity)]
    labels += [Column("n", n, note=MEANS.format("/given" if is_partial else "", ", ".join(map(_name, STANDARD))))]
    if (table["diverged"] > 0).any():
        labels.append(Column("Div.", text_of(table["diverged"]), note=DIVERGED))
    progress = [unit for unit in [display_columns.progress(table)[0]] if unit]
    memorized = [unit for flag in flags(measured) for unit in display_columns.memorized(table, flag, "{:.1f}")]
    means = [
        [
            *display_columns.mean(table, number, has_note=not number.is_standard),
            Column("CI_s", _half(table, number, "seeds"), note=OVER_SEEDS.format(number.heading)),
            Column("CI_c", _half(table, number, "canaries"), note=OVER_CANARIES),
            *display_columns.companions(table, number, measured),
        ]
        for number in numbers(measured)
        if not number.beside
    ]
    utility = display_columns.utility(table, of_model(measured), has_deviations=True)
    memorized += display_columns.controls(table)
    return labels, [*progress, *memorized, *means, *utility, *display_columns.epsilons(table)]


def _name(quantity: Quantity) -> str:
    """Return a quantity's heading, and for a mean also its title."""
    is_mean = quantity.of_canaries and not quantity.is_flag
    return f"{quantity.heading} ({quantity.title.lower()})" if is_mean else quantity.heading


def _half(table: pd.DataFrame, quantity: Quantity, over: str) -> list[str]:
    """Return half the interval of a mean, over seeds or over canaries."""
    low, high = (table[f"{columns.prefix_of(quantity)}{over}_{end}"] for end in ("low", "high"))
    return formatted((high - low) / 2, quantity.format)
