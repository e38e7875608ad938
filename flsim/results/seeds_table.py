"""Tables over seeds: a row per series of runs that differ in nothing but the seed.

Every format shows the same frame:

    setting, series, runs    what was trained, the series' digest, and the names of the runs that are averaged
    seeds, given             how many runs are averaged, of how many
    round, epochs            of the evaluated models: the common round, blank without one, and the mean of epochs
    rs, rs_sd, bs, bs_sd     canaries memorized by Random Sampling and by Beam Search: mean over seeds, its deviation
    canaries                 planted canaries, of each run
    mean_exposure            mean over seeds and canaries, bits
    seeds_low, seeds_high    its 95% interval from Student's t over the seeds' means, for the mean over all seeds
    canaries_low, _high      its 95% interval over all canaries of all seeds pooled, which it takes as independent:
                             too narrow for other seeds, whose models and canaries are others
    accuracy, accuracy_sd    Recall@1, a fraction: mean over seeds, standard deviation
    perplexity, _sd          on test text: mean over seeds, standard deviation
    references               |R|, number of random continuations a canary was ranked among

and, where some run is not averaged,

    left_out                 which, and why

Blank: what was not measured in every run of a row, and what needs two seeds where there is one.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from flsim.results import formats
from flsim.results.formats import Column, formatted, text_of
from flsim.results.seeds import Sample, by_series, sample, spread
from flsim.results.store import RunResults
from flsim.results.tables import progress

COLUMNS = {
    "setting": "string",
    "series": "string",
    "runs": "string",
    "seeds": "Int64",
    "given": "Int64",
    "round": "Int64",
    "epochs": "Float64",
    "rs": "Float64",
    "rs_sd": "Float64",
    "bs": "Float64",
    "bs_sd": "Float64",
    "canaries": "Int64",
    "mean_exposure": "Float64",
    "seeds_low": "Float64",
    "seeds_high": "Float64",
    "canaries_low": "Float64",
    "canaries_high": "Float64",
    "accuracy": "Float64",
    "accuracy_sd": "Float64",
    "perplexity": "Float64",
    "perplexity_sd": "Float64",
    "references": "Int64",
}
LEFT_OUT = {"left_out": "string"}
TYPES = COLUMNS | LEFT_OUT

LEGEND = """n: seeds{}. RS, BS, Bits (exposure), Acc., Perp.: means over them; SD: of them.
CI_s: half the 95% interval of Bits, Student's t over seeds: for other seeds.
CI_c: the same over all seeds' canaries, taken as independent: for these models.
"""


def seeds_table(runs: Sequence[RunResults], round: int | None = None, epoch: float | None = None) -> pd.DataFrame:
    """A row per series, in the order of first runs, with the columns of `COLUMNS`, and `left_out` where any run is.

    Args:
        runs: what was read of each run.
        round: the evaluated round to show; default the last of completed runs.
        epoch: instead of a round: after how many epochs.

    Raises:
        InputError: as `flsim.results.seeds.by_series` and `sample`, or some canaries' results are missing.
    """
    rows = [_row(sample(group, round, epoch)) for group in by_series(runs)]
    columns = COLUMNS | (LEFT_OUT if any(row["left_out"] for row in rows) else {})
    return pd.DataFrame(rows, columns=list(columns)).astype(columns)


def _row(of: Sample) -> dict[str, Any]:
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
    row["references"] = of.taken[0][0].of_model("references", of.taken[0][1])
    canaries = {
        metric: [run.of_canaries(metric, round_) for run, round_ in of.taken] for metric in ("rs", "bs", "exposure")
    }
    for metric in ("rs", "bs"):
        counts = [None if values is None else float((values == 1).sum()) for values in canaries[metric]]
        row |= {metric: _mean(counts), f"{metric}_sd": _deviation(counts)}
    for metric in ("accuracy", "perplexity"):
        measured = [run.of_model(metric, round_) for run, round_ in of.taken]
        row |= {metric: _mean(measured), f"{metric}_sd": _deviation(measured)}
    exposures = [values.to_numpy() for values in canaries["exposure"] if values is not None]
    if len(exposures) == len(of.taken):
        bits = spread(exposures)
        row["mean_exposure"] = bits.mean
        row["seeds_low"], row["seeds_high"] = bits.over_seeds
        row["canaries_low"], row["canaries_high"] = bits.over_canaries
    return row


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return float(np.mean(found)) if len(found) == len(values) else None


def _deviation(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    if len(found) < max(2, len(values)) or not np.isfinite(found).all():  # a finite model can have infinite perplexity
        return None
    return float(np.std(found, ddof=1))


def from_csv(text: str) -> pd.DataFrame:
    """The table that `flsim.results.formats.to_csv` wrote, exactly."""
    return formats.from_csv(text, TYPES)


def to_markdown(table: pd.DataFrame, width: int = 80) -> str:
    """Means and how sure they are, aligned, with what they mean, and a line for each row's runs that were left out."""
    of_given = "/given" if "left_out" in table else ""
    text = formats.markdown(_shown(table), width) + "\n" + LEGEND.format(of_given) + progress(table)[1]
    if "left_out" in table:
        for row in table.dropna(subset="left_out").itertuples():
            text += formats.note(f"Left out of {row.setting}: {row.left_out}", width)
    return text


def to_latex(table: pd.DataFrame) -> str:
    """The columns of `to_markdown` as a tabular, ready to paste; it needs the package booktabs."""
    return formats.latex(_shown(table))


def _shown(table: pd.DataFrame) -> list[Column]:
    counts = table["canaries"].unique()
    of_all = f" /{counts[0]}" if len(counts) == 1 else ""

    def memorized(name: str) -> list[str]:
        out_of = [f"/{count}" if len(counts) > 1 else "" for count in table["canaries"]]
        return [cell and cell + rest for cell, rest in zip(formatted(table[name], "{:.1f}"), out_of, strict=True)]

    n = [
        f"{seeds}/{given}" if "left_out" in table else f"{seeds}"
        for seeds, given in zip(table["seeds"], table["given"], strict=True)
    ]
    of_repeated = table["runs"].str.split(", ").str[0]
    columns = [
        Column("Setting", text_of(table["setting"]), is_number=False),
        Column("First run", text_of(of_repeated), is_number=False) if table["setting"].duplicated().any() else None,
        Column("n", n),
        progress(table)[0],
        Column(f"RS{of_all}", memorized("rs")),
        Column(f"BS{of_all}", memorized("bs")),
        Column("Bits", formatted(table["mean_exposure"], "{:.1f}")),
        Column("CI_s", formatted((table["seeds_high"] - table["seeds_low"]) / 2, "{:.1f}")),
        Column("CI_c", formatted((table["canaries_high"] - table["canaries_low"]) / 2, "{:.1f}")),
        Column("Acc. %", formatted(table["accuracy"], "{:.1f}", 100)),
        Column("SD", formatted(table["accuracy_sd"], "{:.1f}", 100)),
        Column("Perp.", formatted(table["perplexity"], "{:.1f}")),
        Column("SD", formatted(table["perplexity_sd"], "{:.1f}")),
    ]
    return [column for column in columns if column is not None]
