"""Memorization tables in the columns of Thakkar et al. (2020), Tables 1 to 4, from rows and rosters alone.

A run is a row. Every format shows the same frame:

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

If they were measured (`also`), there are the columns of further measures. A flag has those of RS, a number of canaries
its mean and interval like exposure, and a number of the model one column. The columns of a user's own measure have the
names of its quantities. Those of "space" are

    mean_space_exposure      mean over canaries of the exposure over the whole space, bits: beyond log2 |R|
    space_low, space_high    its 95% confidence interval over canaries, Student's t

If the test users are whole authors, neither cut into balanced users nor dropped:

    whole_test_users         number of them that accuracy and perplexity are measured on

If some canary was never planted, because no record was drawn for it or because it is a control:

    controls                 number of such canaries, the null control: no count, share or mean holds them
    rs_controls, bs_controls those of them that RS and BS show as memorized: false positives
    false_positive_rate      probability that RS shows one of them as memorized, 1 / (|R| + 1)

If some run has noise on users' updates:

    epsilon_paper            by the paper's convention, which takes S for the sensitivity; blank for Poisson sampling
    epsilon_sound            by the convention named in sound_convention, which is correct
    delta                    of both

If some run has noise on records' gradients:

    record_epsilon           of one record, which says nothing of a user: by the convention in record_convention
    record_delta             its delta

If some run diverged, failed, was interrupted, or has checkpoints that could not be evaluated:

    reason                   why

If runs stand for published rows, published_table, _data and _setting name the row, published_rs and so on are its
values (`flsim.results.columns`), and rs_size and so on tell how ours agree (`flsim.results.against_published`). Beside
published_references, _prefix and _length, which say what the paper's counts answer, there are ours:

    prefix                   number of a canary's first words that the attacker knows
    length                   number of words of a planted canary; blank if they differ

A cell that was not measured is blank, and so is every measurement of a run that diverged.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import pandas as pd

from flsim.base.statistics import t_interval
from flsim.measures.built_in import QUANTITIES
from flsim.measures.quantity import Quantity, flags, numbers, of_model, select_for
from flsim.results import columns, display_columns, formats, layout
from flsim.results.against_published import AGAINST
from flsim.results.formats import formatted, text_of
from flsim.results.formats import to_csv as to_csv
from flsim.results.layout import Column
from flsim.results.published import PUBLISHED, cells_of
from flsim.results.question import ASKED, asked
from flsim.results.store import RunResults, refuse_two_points

STANDARD = [quantity for quantity in select_for(QUANTITIES.values(), "table") if quantity.is_standard]
OPTIONAL = [quantity for quantity in select_for(QUANTITIES.values(), "table") if not quantity.is_standard]
COLUMNS = {
    "setting": "string",
    "run": "string",
    "round": "Int64",
    "epochs": "Float64",
    **{name: kind for quantity in flags(STANDARD) for name, kind in columns.columns_of(quantity).items()},
    "canaries": "Int64",
    **{name: kind for quantity in numbers(STANDARD) for name, kind in columns.columns_of(quantity).items()},
    **{name: kind for quantity in of_model(STANDARD) for name, kind in columns.columns_of(quantity).items()},
    "references": "Int64",
    "status": "string",
}
REASON = {"reason": "string"}
CONTROLS = columns.columns_of_controls(flags(STANDARD))
GROUPS = (columns.POPULATION, CONTROLS, columns.PRIVACY, columns.RECORD_PRIVACY, REASON, PUBLISHED, ASKED)
TYPES = COLUMNS | {
    name: kind for group in (*map(columns.columns_of, OPTIONAL), *GROUPS, AGAINST) for name, kind in group.items()
}

ONE_SEED = "One seed a row: means and intervals are over its canaries and say nothing about other seeds."
INTERVAL = "CI: half the 95% interval of {}, Student's t over canaries."


def memorization_table(
    runs: Sequence[RunResults],
    round: int | None = None,
    epoch: float | None = None,
    published: Mapping[RunResults, Mapping[str, Any]] | None = None,
) -> pd.DataFrame:
    """Return one row per run, in the order given, with the columns of `COLUMNS` and all others that have values.

    Args:
        runs: the results of each run.
        round: the evaluated round to show; by default each run's last. Runs that have not come so far stay blank.
        epoch: the number of epochs to show, in place of `round`; see `RunResults.evaluation_at_epoch`.
        published: rows of `flsim.results.published` that runs stand for.

    Raises:
        InputError: a run passed that round without an evaluation, some canaries' results are missing, or both a round
            and an epoch are given.
    """
    refuse_two_points(round, epoch)
    quantities = columns.quantities_of(runs)
    rows = [
        {
            "setting": run.setting,
            "run": run.name,
            **_measured(run, select_for(quantities, "table"), round, epoch),
            "status": run.status,
            "reason": run.reason,
            **cells_of((published or {}).get(run)),
            **asked(run, (published or {}).get(run)),
        }
        for run in runs
    ]
    optional = [quantity for quantity in select_for(quantities, "table") if not quantity.is_standard]
    controls = columns.columns_of_controls(flags(optional))
    table = columns.frame(rows, COLUMNS, (*map(columns.columns_of, optional), *GROUPS, controls))
    return columns.described(table, optional)


def _measured(
    run: RunResults, quantities: Sequence[Quantity], round: int | None, epoch: float | None
) -> dict[str, Any]:
    row: dict[str, Any] = {"canaries": len(run.planted)}
    # The last finite evaluation of a model that then diverged would pass for a result.
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
        **columns.controls([(run, at)], flags(quantities)),
        **columns.privacy(run, at),
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
        return {name: count, **columns.shares(name, count, len(values)), f"{name}_lowest": best}
    cells = (float(values.mean()), *t_interval(values.to_numpy()))
    return dict(zip(columns.columns_of(quantity), cells, strict=True))


def lowest(roster: pd.DataFrame) -> str:
    """Return the lowest configuration among canaries as the paper prints it, e.g. ``"3/50K, 1%"``; ``"-"`` without any.

    Configurations are ordered by expected insertion frequency p_u * p_e, then by expected sharers p_u (section 4.2). If
    canaries have a number of copies instead, the fewest is returned, e.g. ``"2 copies"``.
    """
    if len(roster) and roster["p_u"].isna().all():
        return copies(int(roster["planned_insertions"].min()))
    pairs = zip(roster["p_u"].astype(float), roster["p_e"].astype(float), strict=True)
    # Products that are equal on paper, such as 1/10 * 10% and 1 * 1%, can differ in their last bit.
    pair = min(pairs, key=lambda pair: (float(f"{pair[0] * pair[1]:.12g}"), pair[0]), default=None)
    return "-" if pair is None else f"{user_share(pair[0])}, {100 * pair[1]:.6g}%"


def copies(number: int) -> str:
    """Return a number of copies in words: ``"1 copy"``, ``"2 copies"``."""
    return f"{number:,} {'copy' if number == 1 else 'copies'}"


def user_share(p_u: float) -> str:
    """Return a probability as a fraction: ``"1/5K"``, ``"3/50K"``, ``"1/20"``; its relative error is below 1e-9.

    If the numerator would have more than three digits, return a decimal number of six digits.
    """
    fraction = Fraction(p_u).limit_denominator(10**9)
    if fraction.numerator > 999 or abs(fraction - Fraction(p_u)) > Fraction(p_u) / 10**9:
        return f"{p_u:.6g}"
    below = fraction.denominator
    for unit, suffix in ((10**6, "M"), (10**3, "K")):
        if below % unit == 0:
            return f"{fraction.numerator}/{below // unit}{suffix}"
    return str(fraction)


def from_csv(text: str, own: Sequence[Quantity] = ()) -> pd.DataFrame:
    """Return exactly the table that `to_csv` wrote; `own` describes a user's own measures."""
    types = {name: kind for quantity in own for name, kind in columns.columns_of(quantity).items()}
    types |= columns.columns_of_controls(flags(own))
    return columns.described(formats.from_csv(text, TYPES | types), own)


def to_markdown(table: pd.DataFrame, width: int = layout.TERMINAL) -> str:
    """Return the paper's columns and related ones, in as many tables as `width` characters take, with a legend.

    Run, round and status appear only if they matter: for equal settings, different rounds, or unfinished runs. Epochs
    replace different rounds if all runs know theirs.
    """
    return layout.markdown(*_columns(table), display_columns.legend(table) + _remarks(table), width)


def to_latex(table: pd.DataFrame) -> str:
    """Return the columns of `to_markdown` as tabulars, ready to paste; they need the package booktabs."""
    return layout.latex(*_columns(table), _remarks(table))


def _remarks(table: pd.DataFrame) -> str:
    """Return the sentences below a table that are not about one column."""
    text = display_columns.population(table) + display_columns.progress(table, _is_unfinished(table))[1]
    if table["round"].notna().any():
        text += formats.note(ONE_SEED)
    if "reason" in table:
        for row in table.dropna(subset="reason").itertuples():
            text += formats.note(f"{row.run} {row.status}: {row.reason}")
    if partial := [quantity.title for quantity in _partly_measured(table)]:
        text += formats.note(f"Not measured of all runs, so only in CSV and Parquet: {', '.join(partial)}.")
    return text + display_columns.agreement(table) + display_columns.tuned(table)


def _partly_measured(table: pd.DataFrame) -> list[Quantity]:
    """Return the built-in quantities that some evaluated runs have and others lack: columns of gaps say little."""
    evaluated = table[table["round"].notna()]
    partial = []
    for quantity in OPTIONAL:
        if columns.is_in(table, quantity):
            values = evaluated[quantity.name if quantity.name in table else columns.mean_of(quantity)]
            if values.isna().any():
                partial.append(quantity)
    return partial


def _is_unfinished(table: pd.DataFrame) -> bool:
    return bool((table["status"] != "completed").any())


def _columns(table: pd.DataFrame) -> tuple[list[Column], list[list[Column]]]:
    """Return the columns as people read them, in the paper's order: labels of a row, and units that stay together."""
    unfinished = _is_unfinished(table)
    labels = [Column("Setting", text_of(table["setting"]), is_number=False)]
    if table["setting"].duplicated().any():
        labels.append(Column("Run", text_of(table["run"]), is_number=False))
    quantities = select_for(columns.quantities_in(table), "table")
    partial = _partly_measured(table)
    measured = [
        quantity
        for quantity in quantities
        if quantity.is_standard or (columns.is_in(table, quantity) and quantity not in partial)
    ]
    memorized = [unit for flag in flags(measured) for unit in display_columns.memorized(table, flag, "{}")]
    means = [
        [
            *display_columns.mean(table, number),
            Column("CI", _half(table, number), is_extra=True, note=INTERVAL.format(number.heading)),
            *display_columns.companions(table, number, measured),
        ]
        for number in numbers(measured)
        if not number.beside
    ]
    status = [[Column("Status", text_of(table["status"]), is_number=False, is_late=True)]] if unfinished else []
    progress = [unit for unit in [display_columns.progress(table, unfinished)[0]] if unit]
    utility = display_columns.utility(table, of_model(measured))
    memorized += display_columns.controls(table)
    return labels, [*progress, *status, *memorized, *means, *utility, *display_columns.epsilons(table)]


def _half(table: pd.DataFrame, quantity: Quantity) -> list[str]:
    """Return half the interval of a mean."""
    low, high = (table[f"{quantity.column}_{end}"] for end in ("low", "high"))
    return formatted((high - low) / 2, quantity.format)
