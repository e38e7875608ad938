"""Full comparison of two runs over the same canaries: exposure, RS and BS, utility, and each configuration.

The frame has a row for all canaries and one for each configuration:

    configuration                 "all", or (p_u, p_e) or a number of copies, with the rounds where planted in some
    p_u, p_e, copies, n           the configuration's settings, and n, its number of canaries planted in either run
    mean_difference, ci_low, _high  exposure in a less that in b, bits, with its 95% interval (Student's t)
    p_wilcoxon, p_t               p of no difference; p_t_holm: p_t corrected for the number of configurations
    at_ceiling_a, at_ceiling_b    canaries at the ceiling of exposure, log2(|R| + 1)
    rs_a, rs_b                    memorized canaries; rs_only_a, rs_only_b: memorized by one model only
    rs_p, rs_p_holm               McNemar's exact test; for configurations also corrected for their number
    rs_share, _share_low, _high   share of the discordant canaries memorized in a, with its exact 95% interval
    bs_...                        the same of BS, and of each flag of a user's own
    NAME_mean_difference, ...     the same as of exposure, of each number of canaries of a user's own

A cell is blank if it was not measured, or needs two canaries and there is one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from flsim.base.errors import InputError
from flsim.base.statistics import holm
from flsim.measures.quantity import Quantity, flags, numbers, of_model
from flsim.measures.utility import PERPLEXITY
from flsim.results import formats, layout
from flsim.results.ceiling import MANY, WHAT_TO_DO
from flsim.results.columns import AT_CEILING, COUNTS, DIFFERENCE, described, prefix_of
from flsim.results.compare import (
    PairedNumbers,
    counted_at_ceiling,
    counts_of,
    differences_of,
    paired_exposure,
    signed,
    statistics_of,
)
from flsim.results.compare_text import counts_text, difference_columns, json_rows, p_text, p_texts
from flsim.results.formats import formatted, rounds_text, text_of
from flsim.results.layout import Column
from flsim.results.like_utility import PairAtLikeUtility, pair_at_like_utility
from flsim.results.pairing import PairedCanaries, compared_in, paired_canaries, round_of
from flsim.results.store import RunResults, refuse_two_points
from flsim.results.tables import copies, memorization_table, user_share

TRAINING = {"epochs": ("Epochs", "{:.3g}", 1)}
PRIVACY = {
    "epsilon_paper": ("Epsilon, paper's", "{:.3g}", 1),
    "epsilon_sound": ("Epsilon", "{:.3g}", 1),
    "record_epsilon": ("Epsilon, record's", "{:.3g}", 1),
}
NO_CANARIES = "Neither run has canaries, so only utility is compared.\n"
LEGEND = """Only a, only b: memorized by that model only. Share: a's share of these, with
its exact 95% interval (Clopper-Pearson). p: the chance of an equally uneven
split if neither model memorized more (McNemar's exact test over the canaries
of this one pair of models).
"""
CONFIGURATIONS_LEGEND = """{}, a-b: mean {} in a minus that in b; CI: half its 95% interval (t).
{}: memorized canaries, a/b. p: of the t test and of McNemar's exact test,
corrected for the number of rows (Holm), each column by itself.
"""
SCOPE = """All of this treats canaries as independent. It is about these two models and
says nothing about other seeds; for those, compare sweeps of several seeds.
"""


def _of_canaries(runs: Sequence[RunResults]) -> list[Quantity]:
    """Return the quantities of canaries that have columns: the primary one and flags, measured or not, then others."""
    return [quantity for quantity in compared_in(runs) if quantity.of_canaries]


def _columns_of(quantity: Quantity) -> dict[str, str]:
    if quantity.is_flag:
        return {f"{quantity.name}_{name}": kind for name, kind in COUNTS.items()}
    return {prefix_of(quantity) + name: "Float64" for name in (*DIFFERENCE, "p_wilcoxon", "p_t", "p_t_holm")}


def _p_of(quantity: Quantity) -> str:
    """Return the column of a test's p."""
    return f"{quantity.name}_p" if quantity.is_flag else f"{prefix_of(quantity)}p_t"


COLUMNS = {
    "configuration": "string",
    "p_u": "Float64",
    "p_e": "Float64",
    "copies": "Int64",
    "n": "Int64",
    **dict.fromkeys(AT_CEILING, "Int64"),
    **{name: kind for quantity in _of_canaries([]) for name, kind in _columns_of(quantity).items()},
}


@dataclass(frozen=True, eq=False)
class RunsCompared:
    """The comparison of two runs, as `flsim.compare` returns it.

    Attributes:
        numbers: exposure over all canaries, then other numbers of canaries.
        quantities: the compared quantities, of canaries and of the model.
        models: a row of `flsim.results.tables.memorization_table` for each run.
        table: one row for all canaries and one for each configuration, as the module describes.
        never_planted: number of canaries that neither run planted; they are in no row.
        like_utility: exposure at the lowest perplexity that both runs reached, or why there is none; None without
            canaries.
    """

    numbers: Sequence[PairedNumbers]
    quantities: Sequence[Quantity]
    models: pd.DataFrame
    table: pd.DataFrame
    never_planted: int = 0
    like_utility: PairAtLikeUtility | str | None = None


def compare_runs(a: RunResults, b: RunResults, round: int | None = None, epoch: float | None = None) -> RunsCompared:
    """Compare two runs at a round or after a number of epochs; by default at each run's last evaluation.

    Two runs without any canaries are compared in utility alone. The comparison at equal perplexity is of all
    evaluations of both runs, whatever the round.

    Raises:
        InputError: as for `flsim.results.pairing.paired_canaries`.
    """
    if a.roster.empty and b.roster.empty:
        return _without_canaries(a, b, round, epoch)
    pair = paired_canaries(a, b, round, epoch)
    canaries, compared = pair.canaries, _of_canaries([a, b])
    rows = [{"configuration": "all", **_statistics(canaries, pair)}]
    keys = [name for name in ("p_u", "p_e", "copies", "first_round", "last_round") if name in canaries]
    for _, group in canaries.groupby(keys, dropna=False, sort=False):
        configuration = {name: group[name].iloc[0] for name in keys}
        rows.append({"configuration": _name(configuration)} | configuration | _statistics(group, pair))
    for p in (_p_of(quantity) for quantity in compared):
        for row, corrected in zip(rows[1:], holm([row.get(p, math.nan) for row in rows[1:]]), strict=True):
            row[f"{p}_holm"] = corrected
    types = COLUMNS | {name: kind for quantity in compared for name, kind in _columns_of(quantity).items()}
    table = pd.DataFrame(rows, columns=list(types)).astype(types)
    table = described(table, compared)
    over_all = [paired_exposure(a, b, round, epoch, quantity) for quantity in numbers(pair.quantities)]
    models = memorization_table([a, b], round, epoch)
    return RunsCompared(over_all, compared_in([a, b]), models, table, pair.never_planted, _at_like_utility(a, b))


def _without_canaries(a: RunResults, b: RunResults, round: int | None, epoch: float | None) -> RunsCompared:
    refuse_two_points(round, epoch)
    for run in (a, b):
        round_of(run, round, epoch)  # raises where there is nothing to compare
    table = pd.DataFrame([{"configuration": "all", "n": 0}], columns=list(COLUMNS)).astype(COLUMNS)
    return RunsCompared((), compared_in([a, b]), memorization_table([a, b], round, epoch), table)


def _at_like_utility(a: RunResults, b: RunResults) -> PairAtLikeUtility | str:
    try:
        return pair_at_like_utility(a, b)
    except InputError as error:
        return str(error)


def _name(configuration: Mapping[Any, Any]) -> str:
    p_u, p_e, number = (configuration.get(name) for name in ("p_u", "p_e", "copies"))
    window = rounds_text(configuration.get("first_round"), configuration.get("last_round"))
    if not pd.isna(p_u) and not pd.isna(p_e):
        name = f"{user_share(p_u)}, {100 * p_e:.6g}%"
    else:
        name = "unknown" if pd.isna(number) else copies(number)
    return ", ".join(filter(None, (name, window)))


def _statistics(canaries: pd.DataFrame, pair: PairedCanaries) -> dict[str, Any]:
    row: dict[str, Any] = {"n": len(canaries), **counted_at_ceiling(canaries, pair.references)}
    for quantity in pair.quantities:
        if quantity.is_flag:
            counts = counts_of(canaries, quantity.name)
            statistics = asdict(counts) if counts is not None else {}
        else:
            statistics = differences_of(canaries, quantity)
        prefix = f"{quantity.name}_" if quantity.is_flag else prefix_of(quantity)
        row |= {prefix + name: value for name, value in statistics.items() if name != "n"}
    return row


def to_json(compared: RunsCompared) -> dict[str, Any]:
    """Return the comparison as one JSON object; null stands for values that are unknown or not finite."""
    everything, *configurations = json_rows(compared.table)
    a, b = json_rows(compared.models)
    at_like = compared.like_utility
    like: dict[str, Any] | None = None
    if isinstance(at_like, PairAtLikeUtility):
        like = {PERPLEXITY.name: at_like.perplexity, "rounds": list(at_like.rounds)}
        like |= {name: _known(value) for name, value in statistics_of(at_like.differences).items() if name != "n"}
    more = {"all": everything, "configurations": configurations, "like_utility": like}
    return {"compared": "runs", "a": a, "b": b, **more}


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def to_markdown(compared: RunsCompared, width: int = 80) -> str:
    """Return the comparison as text of at most `width` columns, except for longer names."""
    if not compared.table["n"].iloc[0]:
        sides = zip("ab", compared.models.to_dict("records"), strict=True)
        named = "".join(
            f"  {side}: {model['setting']} ({model['run']}), round {model['round']}\n" for side, model in sides
        )
        return "\n".join([NO_CANARIES + named, layout.markdown(*_both(compared), _warnings(compared, width), width)])
    return "\n".join(
        [
            "\n".join(map(str, compared.numbers)) + "\n",
            formats.note(_like_utility_text(compared.like_utility), width),
            layout.markdown(*_both(compared), LEGEND + _warnings(compared, width), width),
            layout.markdown(*_configurations(compared), _legend(compared.quantities) + SCOPE, width),
        ]
    )


def to_latex(compared: RunsCompared) -> str:
    """Return the rows of the frame as a tabular; it needs the package booktabs."""
    has_canaries = bool(compared.table["n"].iloc[0])
    return layout.latex(*(_configurations(compared, has_all=True) if has_canaries else _both(compared)))


def _like_utility_text(at_like: PairAtLikeUtility | str | None) -> str:
    """Return a sentence on the comparison at equal perplexity, or on why there is none."""
    if not isinstance(at_like, PairAtLikeUtility):
        return f"Not compared at equal perplexity: {at_like}."
    quantity, (round_a, round_b) = at_like.quantity, at_like.rounds
    statistics = statistics_of(at_like.differences)
    mean, low, high = (f"{statistics[name]:{signed(quantity)}}" for name in ("mean_difference", "ci_low", "ci_high"))
    return (
        f"At equal perplexity, {at_like.perplexity:.4g}, the lowest that both reached (a at round {round_a:,.4g}, b at "
        f"round {round_b:,.4g}): mean of a - b: {mean} {quantity.unit} (95% CI {low} to {high}), over "
        f"these canaries p = {statistics['p_wilcoxon']:.2g} (Wilcoxon signed-rank)."
    )


def _legend(quantities: Sequence[Quantity]) -> str:
    primary = next(quantity for quantity in quantities if quantity.is_primary)
    standard = [flag.heading for flag in flags(quantities) if flag.is_standard]
    text = CONFIGURATIONS_LEGEND.format(primary.heading, primary.title.lower(), ", ".join(standard))
    own = [quantity for quantity in quantities if not quantity.is_standard]
    return text + "".join(formats.note(f"{quantity.heading}: {quantity.sentence}") for quantity in own)


def _both(compared: RunsCompared) -> tuple[list[Column], list[list[Column]]]:
    """Return labels and units of a table: counts of each run and discordant canaries, then utility and epsilon."""
    everything: Mapping[Any, Any] = compared.table.iloc[0].to_dict()
    lines: list[list[str]] = []
    for flag in flags(compared.quantities):
        name = flag.name
        if not pd.isna(everything[f"{name}_a"]):
            counts = [str(everything[f"{name}_{side}"]) for side in ("a", "b", "only_a", "only_b")]
            low, high = everything[f"{name}_share_low"], everything[f"{name}_share_high"]
            share = everything[f"{name}_share"]
            text = "-" if pd.isna(share) else f"{share:.0%} ({low:.0%} to {high:.0%})"
            lines.append([f"{flag.heading} /{everything['n']}", *counts, p_text(everything[f"{name}_p"]), text])
    for name, (heading, template, scale) in (TRAINING | _of_model(compared.quantities) | PRIVACY).items():
        if name in compared.models and compared.models[name].notna().any():
            lines.append([heading, *formatted(compared.models[name], template, scale), "", "", "", ""])
    headings = ["", "a", "b", *(["only a", "only b", "p", "share (95%)"] if everything["n"] else [])]
    cells = [[line[place] for line in lines] for place in range(len(headings))]
    units = [Column(heading, column_cells) for heading, column_cells in zip(headings[1:], cells[1:], strict=True)]
    return [Column("", cells[0], is_number=False)], [units]


def _of_model(quantities: Sequence[Quantity]) -> dict[str, tuple[str, str, int]]:
    """Return heading, format and factor of numbers of the model, which are columns of a table of runs."""
    return {quantity.name: (quantity.phrase, quantity.format, quantity.scale) for quantity in of_model(quantities)}


def _configurations(compared: RunsCompared, has_all: bool = False) -> tuple[list[Column], list[list[Column]]]:
    rows = compared.table if has_all else compared.table[1:]
    labels = [
        Column("p_u, p_e" if rows["copies"].isna().all() else "Canaries", text_of(rows["configuration"]), False),
        Column("n", text_of(rows["n"])),
    ]
    units = []
    for quantity in compared.quantities:
        if quantity.of_canaries and (quantity.is_standard or rows[_p_of(quantity)].notna().any()):
            p = _p_of(quantity)
            # The row of all canaries is one test by itself.
            ps = Column("p", p_texts(rows[f"{p}_holm"].where(rows["configuration"] != "all", rows[p])))
            cells = counts_text(rows, quantity.name, "{}") if quantity.is_flag else []
            unit = [Column(quantity.heading, cells)] if quantity.is_flag else difference_columns(rows, quantity)
            units.append([*unit, ps])
    return labels, units


def _warnings(compared: RunsCompared, width: int) -> str:
    text, models = "", compared.models
    if compared.never_planted:
        number = compared.never_planted
        which = "1 canary, planted in neither run, is" if number == 1 else f"{number} canaries, planted in neither, are"
        text += formats.note(f"{which} in no number.", width)
    n, a, b = map(int, compared.table[["n", *AT_CEILING]].iloc[0].fillna(0))
    if n and max(a, b) >= MANY * n:
        text += formats.note(
            f"{a} of {n} canaries in a and {b} in b are at the ceiling of exposure, ranked before all references: "
            f"differences between them cannot show; {WHAT_TO_DO}",
            width,
        )
    for name, status in zip(models["run"], models["status"], strict=True):
        if status != "completed":
            text += formats.note(f"Run {name} is {status}: this is not its final model.", width)
    epochs = models["epochs"]
    if epochs.notna().all() and epochs.min() < 0.99 * epochs.max():
        text += formats.note("The models read different numbers of epochs; name an --epoch that both have.", width)
    return text
