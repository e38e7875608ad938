"""Tables over seeds: a row per series of runs that differ in nothing but the seed.

Every format shows the same frame:

    setting, series, runs    what was trained, the series' digest, and the names of the runs that are averaged
    seeds, given             how many runs are averaged, of how many
    round, epochs            of the evaluated models: the common round, blank without one, and the mean of epochs
    rs, rs_sd, bs, bs_sd     canaries memorized by Random Sampling and by Beam Search: mean over seeds, its deviation
    rs_share_low, _high, ... exact 95% interval of the share of all canaries of all seeds pooled: too narrow, as below
    canaries                 planted canaries, of each run
    mean_exposure            mean over seeds and canaries, bits
    seeds_low, seeds_high    its 95% interval from Student's t over the seeds' means, for the mean over all seeds
    canaries_low, _high      its 95% interval over all canaries of all seeds pooled, which it takes as independent:
                             too narrow for other seeds, whose models and canaries are others
    accuracy, accuracy_sd    Recall@1, a fraction: mean over seeds, standard deviation
    perplexity, _sd          on test text: mean over seeds, standard deviation
    references               |R|, number of random continuations a canary was ranked among

and, where they were measured (`also`), the columns of further measures, as in a table of runs; of "space"

    mean_space_exposure      mean of the exposure over the whole space, bits, with the same intervals

and, where some run has noise, the columns of epsilon of a table of runs, by the run whose epsilon is largest;

where some run is not averaged,

    left_out                 which, and why

and, where runs stand for published rows, those, as in a table of runs.

Blank: what was not measured in every run of a row, and what needs two seeds where there is one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from flsim.measures.quantity import Quantity, flags, numbers, of_model, shown
from flsim.results import columns, display_columns, formats, layout
from flsim.results.against_published import AGAINST
from flsim.results.formats import formatted, text_of
from flsim.results.layout import Column
from flsim.results.published import PUBLISHED, cells_of
from flsim.results.seeds import Sample, by_series, sample, spread
from flsim.results.store import RunResults
from flsim.results.tables import OPTIONAL, STANDARD

COLUMNS = {
    "setting": "string",
    "series": "string",
    "runs": "string",
    "seeds": "Int64",
    "given": "Int64",
    "round": "Int64",
    "epochs": "Float64",
    **{name: "Float64" for flag in flags(STANDARD) for name in (flag.name, f"{flag.name}_sd")},
    **{name: "Float64" for flag in flags(STANDARD) for name in columns.columns_over_seeds(flag)},
    "canaries": "Int64",
    **{name: kind for number in numbers(STANDARD) for name, kind in columns.columns_over_seeds(number).items()},
    **{name: kind for number in of_model(STANDARD) for name, kind in columns.columns_over_seeds(number).items()},
    "references": "Int64",
}
LEFT_OUT = {"left_out": "string"}
GROUPS = (columns.PRIVACY, columns.RECORD_PRIVACY, LEFT_OUT, PUBLISHED)
TYPES = COLUMNS | {
    name: kind
    for group in (*map(columns.columns_over_seeds, OPTIONAL), *GROUPS, AGAINST)
    for name, kind in group.items()
}

MEANS = "n: seeds{}. {}: means over them; SD: of them."
OVER_SEEDS = "CI_s: half the 95% interval of {}, Student's t over seeds: for other seeds."
OVER_CANARIES = "CI_c: the same over all seeds' canaries, taken as independent: for these models."


def seeds_table(
    runs: Sequence[RunResults],
    round: int | None = None,
    epoch: float | None = None,
    published: Mapping[RunResults, Mapping[str, Any]] | None = None,
) -> pd.DataFrame:
    """A row per series, in the order of first runs, with the columns of `COLUMNS`, and others with anything to say.

    Args:
        runs: what was read of each run.
        round: the evaluated round to show; default the last of completed runs.
        epoch: instead of a round: after how many epochs.
        published: rows of `flsim.results.published` that runs stand for; a series has that of its first run.

    Raises:
        InputError: as `flsim.results.seeds.by_series` and `sample`, or some canaries' results are missing.
    """
    series = [sample(group, round, epoch) for group in by_series(runs)]
    quantities = shown(columns.quantities_of(runs), "table")
    rows = [{**_row(of, quantities), **cells_of((published or {}).get(of.runs[0]))} for of in series]
    optional = [quantity for quantity in quantities if not quantity.is_standard]
    table = columns.frame(rows, COLUMNS, (*map(columns.columns_over_seeds, optional), *GROUPS))
    return columns.described(table, optional)


def _row(of: Sample, quantities: Sequence[Quantity]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "setting": of.setting,
        "series": of.runs[0].series,
        "runs": ", ".join(run.name for run, _ in of.taken) or None,
        "seeds": len(of.taken),
        "given": len(of.runs),
        "canaries": len(of.runs[0].roster),
        "left_out": "; ".join(f"{name} ({why})" for name, why in of.left_out.items()) or None,
    }
    if not of.taken:
        return row
    rounds = {round_ for _, round_ in of.taken}
    row["round"] = rounds.pop() if len(rounds) == 1 else None
    row["epochs"] = _mean([run.epochs_of(round_) for run, round_ in of.taken])
    row["references"] = of.taken[0][0].references(of.taken[0][1])
    for quantity in quantities:
        row |= _cells(of, quantity)
    return row | _privacy(of)


def _cells(of: Sample, quantity: Quantity) -> dict[str, Any]:
    """A row's cells in the columns of a quantity; none where some run has not measured it."""
    name = quantity.name
    if not quantity.of_canaries:
        measured = [run.of_model(name, round_) for run, round_ in of.taken]
        return {name: _mean(measured), f"{name}_sd": _deviation(measured)}
    values = _of_canaries(of, name)
    if not values:
        return {}
    if quantity.is_flag:
        memorized = [each == 1 for each in values]
        counts = [float(each.sum()) for each in memorized]
        shares = columns.shares(name, int(sum(counts)), sum(map(len, memorized)))
        return {name: _mean(counts), f"{name}_sd": _deviation(counts), **shares}
    over = spread(values)
    cells = (over.mean, *over.over_seeds, *over.over_canaries)
    return dict(zip(columns.columns_over_seeds(quantity), cells, strict=True))


def _of_canaries(of: Sample, metric: str) -> list[NDArray[np.floating[Any]]]:
    """Values of each run's canaries; empty where some run has none."""
    measured = [run.of_canaries(metric, round_) for run, round_ in of.taken]
    found = [values.to_numpy() for values in measured if values is not None]
    return found if len(found) == len(measured) else []


def _privacy(of: Sample) -> dict[str, Any]:
    """Epsilons of the run whose epsilon is largest, since populations differ in size; blank where a run has none."""
    found = [columns.privacy(run, round_) for run, round_ in of.taken]
    privacy: dict[str, Any] = {}
    for epsilon, names in (("epsilon_sound", columns.PRIVACY), ("record_epsilon", columns.RECORD_PRIVACY)):
        if all(epsilon in each for each in found):
            largest = max(found, key=lambda each: float(each[epsilon]))
            privacy |= {name: largest.get(name) for name in names}
    return privacy


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return float(np.mean(found)) if len(found) == len(values) else None


def _deviation(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    if len(found) < max(2, len(values)) or not np.isfinite(found).all():  # a finite model can have infinite perplexity
        return None
    return float(np.std(found, ddof=1))


def from_csv(text: str, own: Sequence[Quantity] = ()) -> pd.DataFrame:
    """The table that `flsim.results.formats.to_csv` wrote, exactly; `own` describes what a user's measures computed."""
    types = {name: kind for quantity in own for name, kind in columns.columns_over_seeds(quantity).items()}
    return columns.described(formats.from_csv(text, TYPES | types), own)


def to_markdown(table: pd.DataFrame, width: int = layout.TERMINAL) -> str:
    """Means and how sure they are, aligned, with what they mean, and a line for each row's runs that were left out."""
    return layout.markdown(*_shown(table), display_columns.legend(table) + _said(table), width)


def to_latex(table: pd.DataFrame) -> str:
    """The columns of `to_markdown` as tabulars, ready to paste; they need the package booktabs."""
    return layout.latex(*_shown(table), _said(table))


def _said(table: pd.DataFrame) -> str:
    """What is said below a table that is not about one column."""
    text = display_columns.progress(table)[1]
    if "left_out" in table:
        for row in table.dropna(subset="left_out").itertuples():
            text += formats.note(f"Left out of {row.setting}: {row.left_out}")
    return text + display_columns.agreement(table)


def _shown(table: pd.DataFrame) -> tuple[list[Column], list[list[Column]]]:
    """What a row is, and units of columns that stay together."""
    is_partial = "left_out" in table
    n = [
        f"{seeds}/{given}" if is_partial else f"{seeds}"
        for seeds, given in zip(table["seeds"], table["given"], strict=True)
    ]
    labels = [Column("Setting", text_of(table["setting"]), is_number=False)]
    if table["setting"].duplicated().any():
        labels.append(Column("First run", text_of(table["runs"].str.split(", ").str[0]), is_number=False))
    quantities = shown(columns.quantities_in(table), "table")
    measured = [quantity for quantity in quantities if quantity.is_standard or columns.is_in(table, quantity)]
    labels += [Column("n", n, note=MEANS.format("/given" if is_partial else "", ", ".join(map(_name, STANDARD))))]
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
    return labels, [*progress, *memorized, *means, *utility, *display_columns.epsilons(table)]


def _name(quantity: Quantity) -> str:
    """A heading, and of a mean what it is of."""
    is_mean = quantity.of_canaries and not quantity.is_flag
    return f"{quantity.heading} ({quantity.title.lower()})" if is_mean else quantity.heading


def _half(table: pd.DataFrame, quantity: Quantity, over: str) -> list[str]:
    """Half the interval of a mean, over seeds or over canaries."""
    low, high = (table[f"{columns.prefix_of(quantity)}{over}_{end}"] for end in ("low", "high"))
    return formatted((high - low) / 2, quantity.format)
