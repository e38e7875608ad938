"""Two runs over the same canaries, in full: exposure, RS and BS, utility, and each configuration.

The frame has a row for all canaries and one for each configuration:

    configuration                 "all", or (p_u, p_e) or a number of copies
    p_u, p_e, copies, n           of it, copies where it is their number; n canaries
    mean_difference, ci_low, _high  exposure in a less that in b, bits, with its 95% interval (Student's t)
    p_wilcoxon, p_t               that there is none; p_t_holm: of the configurations, p_t corrected for their number
    rs_a, rs_b                    memorized canaries; rs_only_a, rs_only_b: by one model alone
    rs_p, rs_p_holm               McNemar's exact test; of the configurations also corrected for their number
    rs_share, _share_low, _high   share of the discordant ones that are a's, with its exact 95% interval
    bs_...                        the same of BS

Blank: what was not measured, or needs two canaries where there is one.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from flsim.results import formats, layout
from flsim.results.compare import PairedExposure, counts_of, differences_of, paired_exposure
from flsim.results.compare_text import counts_text, difference_columns, json_rows, p_text, p_texts
from flsim.results.formats import formatted, text_of
from flsim.results.inference import holm
from flsim.results.layout import Column
from flsim.results.pairing import paired_canaries
from flsim.results.store import RunResults
from flsim.results.tables import copies, memorization_table, user_share

COUNTS = {
    "a": "Int64",
    "b": "Int64",
    "only_a": "Int64",
    "only_b": "Int64",
    "p": "Float64",
    "p_holm": "Float64",
    "share": "Float64",
    "share_low": "Float64",
    "share_high": "Float64",
}
COLUMNS = {
    "configuration": "string",
    "p_u": "Float64",
    "p_e": "Float64",
    "copies": "Int64",
    "n": "Int64",
    **dict.fromkeys(("mean_difference", "ci_low", "ci_high", "p_wilcoxon", "p_t", "p_t_holm"), "Float64"),
    **{f"{metric}_{name}": kind for metric in ("rs", "bs") for name, kind in COUNTS.items()},
}
MODEL = {
    "epochs": ("Epochs", "{:.3g}", 1),
    "accuracy": ("Accuracy, %", "{:.1f}", 100),
    "perplexity": ("Perplexity", "{:.1f}", 1),
    "epsilon_paper": ("Epsilon, paper's", "{:.3g}", 1),
    "epsilon_sound": ("Epsilon", "{:.3g}", 1),
    "record_epsilon": ("Epsilon, record's", "{:.3g}", 1),
}
LEGEND = """Only a, only b: memorized by one model alone. Share: of these, a's, with its
exact 95% interval (Clopper-Pearson). p: the chance of as uneven a split if
neither model memorized more (McNemar's exact test).
"""
CONFIGURATIONS_LEGEND = """Bits, a-b: mean exposure in a less that in b; CI: half its 95% interval (t).
RS, BS: memorized canaries, a/b. p: of the t test and of McNemar's exact test,
corrected for the number of rows (Holm), each column by itself.
"""
SCOPE = """Canaries are taken as independent, so all of this is about these two models and
says nothing of other seeds; for that, compare sweeps of several.
"""


@dataclass(frozen=True, eq=False)
class RunsCompared:
    """Two runs compared.

    Attributes:
        exposure: over all canaries.
        models: a row of `flsim.results.tables.memorization_table` for each run.
        table: the frame described above.
    """

    exposure: PairedExposure
    models: pd.DataFrame
    table: pd.DataFrame


def compare_runs(a: RunResults, b: RunResults, round: int | None = None, epoch: float | None = None) -> RunsCompared:
    """Compare two runs, at a round or after so many epochs; default each run's last evaluation.

    Raises:
        InputError: as `flsim.results.pairing.paired_canaries`.
    """
    canaries = paired_canaries(a, b, round, epoch).canaries
    rows = [{"configuration": "all", **_statistics(canaries)}]
    keys = [name for name in ("p_u", "p_e", "copies") if name in canaries]
    for _, some in canaries.groupby(keys, dropna=False, sort=False):
        configuration = {name: some[name].iloc[0] for name in keys}
        rows.append({"configuration": _name(configuration)} | configuration | _statistics(some))
    for p in ("p_t", "rs_p", "bs_p"):
        for row, corrected in zip(rows[1:], holm([row.get(p, math.nan) for row in rows[1:]]), strict=True):
            row[f"{p}_holm"] = corrected
    table = pd.DataFrame(rows, columns=list(COLUMNS)).astype(COLUMNS)
    return RunsCompared(paired_exposure(a, b, round, epoch), memorization_table([a, b], round, epoch), table)


def _name(configuration: Mapping[Any, Any]) -> str:
    p_u, p_e, number = (configuration.get(name) for name in ("p_u", "p_e", "copies"))
    if not pd.isna(p_u) and not pd.isna(p_e):
        return f"{user_share(p_u)}, {100 * p_e:.6g}%"
    return "unknown" if pd.isna(number) else copies(number)


def _statistics(canaries: pd.DataFrame) -> dict[str, Any]:
    found = differences_of(canaries)
    for metric in ("rs", "bs"):
        counts = counts_of(canaries, metric)
        if counts is not None:
            found |= {f"{metric}_{name}": value for name, value in asdict(counts).items() if name != "n"}
    return found


def to_json(compared: RunsCompared) -> dict[str, Any]:
    """Everything, as one JSON object; null where something is unknown or not finite."""
    everything, *configurations = json_rows(compared.table)
    a, b = json_rows(compared.models)
    return {"compared": "runs", "a": a, "b": b, "all": everything, "configurations": configurations}


def to_markdown(compared: RunsCompared, width: int = 80) -> str:
    """Everything, as people read it: at most `width` columns, but for names that are longer."""
    return "\n".join(
        [
            str(compared.exposure) + "\n",
            layout.markdown(*_both(compared), LEGEND + _warnings(compared.models, width), width),
            layout.markdown(*_configurations(compared.table), CONFIGURATIONS_LEGEND + SCOPE, width),
        ]
    )


def to_latex(compared: RunsCompared) -> str:
    """The rows of the frame as a tabular; it needs the package booktabs."""
    return layout.latex(*_configurations(compared.table, has_all=True))


def _both(compared: RunsCompared) -> tuple[list[Column], list[list[Column]]]:
    """Labels and units of a table: counts of either run and what is discordant, then utility and epsilon."""
    everything: Mapping[Any, Any] = compared.table.iloc[0].to_dict()
    lines: list[list[str]] = []
    for metric in ("rs", "bs"):
        if not pd.isna(everything[f"{metric}_a"]):
            counts = [str(everything[f"{metric}_{name}"]) for name in ("a", "b", "only_a", "only_b")]
            low, high = everything[f"{metric}_share_low"], everything[f"{metric}_share_high"]
            share = everything[f"{metric}_share"]
            found = "-" if pd.isna(share) else f"{share:.0%} ({low:.0%} to {high:.0%})"
            lines.append([f"{metric.upper()} /{everything['n']}", *counts, p_text(everything[f"{metric}_p"]), found])
    for name, (heading, template, scale) in MODEL.items():
        if name in compared.models and compared.models[name].notna().any():
            lines.append([heading, *formatted(compared.models[name], template, scale), "", "", "", ""])
    headings = ["", "a", "b", "only a", "only b", "p", "share (95%)"]
    cells = [[line[place] for line in lines] for place in range(len(headings))]
    units = [Column(heading, each) for heading, each in zip(headings[1:], cells[1:], strict=True)]
    return [Column("", cells[0], is_number=False)], [units]


def _configurations(table: pd.DataFrame, has_all: bool = False) -> tuple[list[Column], list[list[Column]]]:
    rows = table if has_all else table[1:]
    # The row of all canaries is one test by itself.
    ps = {p: rows[f"{p}_holm"].where(rows["configuration"] != "all", rows[p]) for p in ("p_t", "rs_p", "bs_p")}
    labels = [
        Column("p_u, p_e" if rows["copies"].isna().all() else "Canaries", text_of(rows["configuration"]), False),
        Column("n", text_of(rows["n"])),
    ]
    return labels, [
        [*difference_columns(rows), Column("p", p_texts(ps["p_t"]))],
        [Column("RS", counts_text(rows, "rs", "{}")), Column("p", p_texts(ps["rs_p"]))],
        [Column("BS", counts_text(rows, "bs", "{}")), Column("p", p_texts(ps["bs_p"]))],
    ]


def _warnings(models: pd.DataFrame, width: int) -> str:
    text = ""
    for name, status in zip(models["run"], models["status"], strict=True):
        if status != "completed":
            text += formats.note(f"Run {name} is {status}: this is not its final model.", width)
    epochs = models["epochs"]
    if epochs.notna().all() and epochs.min() < 0.99 * epochs.max():
        text += formats.note("The models read different numbers of epochs; name an --epoch that both have.", width)
    return text
