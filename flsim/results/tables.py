"""Memorization tables in the columns of Thakkar et al. (2020), Tables 1 to 4, from rows and rosters alone.

A run is a row; every format shows the same frame:

    setting, run             what was trained, and the run's name
    round                    number of completed rounds of the evaluated model; of central training, steps
    rs, bs                   canaries memorized by Random Sampling and by Beam Search
    rs_lowest, bs_lowest     least (p_u, p_e) with a memorized canary, by expected insertions; "-" where none is
    canaries                 planted canaries
    mean_exposure            mean over canaries, bits
    exposure_low, _high      its 95% confidence interval over canaries, Student's t
    accuracy, perplexity     Recall@1, a fraction, and perplexity on test text
    references               |R|, number of random continuations a canary was ranked among
    status                   completed, running, failed or diverged

and, where it was measured (`also = ["space"]`), in CSV and Parquet

    mean_space_exposure      mean over canaries of the exposure over the whole space, bits: beyond log2 |R|
    space_low, space_high    its 95% confidence interval over canaries, Student's t

and, where some run has noise on users' updates,

    epsilon_paper            by the paper's convention, which takes S for the sensitivity; blank for Poisson sampling
    epsilon_sound            by the convention that is named in sound_convention, which holds as it stands
    delta                    of both

and, where some run has noise on records' gradients,

    record_epsilon           of one record, which says nothing of a user: by the convention in record_convention
    record_delta             of it

and, where some run diverged, failed, or has checkpoints that could not be evaluated,

    reason                   why

What was not measured is blank. So is every measurement of a run that diverged.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pandas as pd

from flsim.files import new_file
from flsim.results.compare import t_interval
from flsim.results.store import RunResults

COLUMNS = {
    "setting": "string",
    "run": "string",
    "round": "Int64",
    "rs": "Int64",
    "rs_lowest": "string",
    "bs": "Int64",
    "bs_lowest": "string",
    "canaries": "Int64",
    "mean_exposure": "Float64",
    "exposure_low": "Float64",
    "exposure_high": "Float64",
    "accuracy": "Float64",
    "perplexity": "Float64",
    "references": "Int64",
    "status": "string",
}

SPACE = {"mean_space_exposure": "Float64", "space_low": "Float64", "space_high": "Float64"}
PRIVACY = {
    "epsilon_paper": "Float64",
    "epsilon_sound": "Float64",
    "sound_convention": "string",
    "delta": "Float64",
}
RECORD_PRIVACY = {
    "record_epsilon": "Float64",
    "record_convention": "string",
    "record_delta": "Float64",
}
REASON = {"reason": "string"}
TYPES = COLUMNS | SPACE | PRIVACY | RECORD_PRIVACY | REASON

LEGEND = """Lowest: (p_u, p_e) of the fewest expected insertions with a memorized canary.
Bits: mean exposure of all canaries.
"""
PRIVACY_LEGEND = "Eps.: epsilon by the paper's convention / by one that holds ({}), delta {}.\n"
RECORD_LEGEND = "Rec. eps.: epsilon of one record, not of a user, by {}, delta {}.\n"
ROUND_LEGEND = "Round: completed rounds; of central training (b_r), steps.\n"
LATEX_HEADINGS = {
    "Lowest": r"Lowest $(p_u, p_e)$",
    "Bits": "Exposure (bits)",
    "Rec. eps.": r"Record-level $\varepsilon$",
}
LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
}


def memorization_table(runs: Sequence[RunResults], round: int | None = None) -> pd.DataFrame:
    """A row per run, in the order given, with the columns of `COLUMNS`, and all others that have anything to say.

    Args:
        runs: what was read of each run.
        round: the evaluated round to show; default each run's last. Runs that have not come so far stay blank.

    Raises:
        InputError: a run went past that round without evaluating it, or some canaries' results are missing.
    """
    rows = [
        {"setting": run.setting, "run": run.name, **_measured(run, round), "status": run.status, "reason": run.reason}
        for run in runs
    ]
    columns = dict(COLUMNS)
    for more in (SPACE, PRIVACY, RECORD_PRIVACY, REASON):
        if any(row.get(name) is not None for row in rows for name in more):
            columns |= more
    return pd.DataFrame(rows, columns=list(columns)).astype(columns)


def _measured(run: RunResults, round: int | None) -> dict[str, Any]:
    shown: dict[str, Any] = {"canaries": len(run.roster)}
    # The last finite evaluation of a model that then diverged would pass for a result.
    if run.status == "diverged" or not run.evaluated:
        return shown
    if round is not None and run.status != "completed" and round > run.evaluated[-1]:
        return shown
    at = run.evaluation(round)
    for metric in ("rs", "bs"):
        memorized = run.of_canaries(metric, at)
        if memorized is not None:
            shown[metric] = int((memorized == 1).sum())
            shown[f"{metric}_lowest"] = lowest(run.roster[(memorized == 1).to_numpy()])
    for metric, names in (("exposure", ("mean_exposure", "exposure_low", "exposure_high")), ("space_exposure", SPACE)):
        bits = run.of_canaries(metric, at)
        if bits is not None:
            shown |= zip(names, (float(bits.mean()), *t_interval(bits.to_numpy())), strict=True)
    of_model = {name: run.of_model(name, at) for name in ("accuracy", "perplexity", "references")}
    return shown | {"round": at, **of_model, **_privacy(run, at)}


def _privacy(run: RunResults, at: int) -> dict[str, Any]:
    """The columns of `PRIVACY`, or of `RECORD_PRIVACY`, of a run with noise."""
    metrics = run.rows.loc[(run.rows["round"] == at) & (run.rows["canary"] == ""), "metric"]
    shown: dict[str, Any] = {}
    for name in metrics:
        if name.startswith("epsilon "):
            convention = name.removeprefix("epsilon ")
            if convention == "paper":
                shown["epsilon_paper"] = run.of_model(name, at)
            else:
                shown |= {"epsilon_sound": run.of_model(name, at), "sound_convention": convention}
            shown["delta"] = run.of_model("delta", at)
        elif name.startswith("record epsilon "):
            shown |= {"record_epsilon": run.of_model(name, at), "record_delta": run.of_model("record delta", at)}
            shown["record_convention"] = name.removeprefix("record epsilon ")
    return shown


def lowest(roster: pd.DataFrame) -> str:
    """The lowest configuration among canaries, as the paper prints it, e.g. ``"3/50K, 1%"``; ``"-"`` without any.

    Ordered by expected insertion frequency p_u * p_e, then by expected sharers p_u (section 4.2).
    """
    pairs = zip(roster["p_u"].astype(float), roster["p_e"].astype(float), strict=True)
    # Products that are equal on paper, such as 1/10 * 10% and 1 * 1%, can differ in their last bit.
    pair = min(pairs, key=lambda pair: (float(f"{pair[0] * pair[1]:.12g}"), pair[0]), default=None)
    return "-" if pair is None else f"{user_share(pair[0])}, {100 * pair[1]:.6g}%"


def user_share(p_u: float) -> str:
    """A probability as a fraction: ``"1/5K"``, ``"3/50K"``, ``"1/20"``; exact to 1e-9 of itself.

    Where that takes a numerator of more than three digits, a decimal number of six.
    """
    fraction = Fraction(p_u).limit_denominator(10**9)
    if fraction.numerator > 999 or abs(fraction - Fraction(p_u)) > Fraction(p_u) / 10**9:
        return f"{p_u:.6g}"
    below = fraction.denominator
    for unit, suffix in ((10**6, "M"), (10**3, "K")):
        if below % unit == 0:
            return f"{fraction.numerator}/{below // unit}{suffix}"
    return str(fraction)


def to_csv(table: pd.DataFrame) -> str:
    """All columns under the names of `COLUMNS`; numbers in full, accuracy as a fraction, blank where unknown."""
    return table.to_csv(index=False, lineterminator="\n")


def from_csv(text: str) -> pd.DataFrame:
    """The table that `to_csv` wrote, exactly."""
    # Numbers are converted afterwards: pandas' own parser may miss the last bit.
    cells = pd.read_csv(io.StringIO(text), dtype="string", keep_default_na=False, na_values=[""])
    return cells.astype({name: TYPES[name] for name in cells.columns})


def write_parquet(table: pd.DataFrame, path: Path) -> None:
    """All columns, with their types; read it with `pandas.read_parquet`."""
    with new_file(path) as partial:
        table.to_parquet(partial, index=False)


def to_markdown(table: pd.DataFrame, width: int = 80) -> str:
    """The paper's columns and mean exposure, aligned; cells go without padding where only that fits `width` characters.

    Run, round and status appear only where they say something: equal settings, different rounds, unfinished runs.
    """
    columns = _shown(table)
    escaped = [[re.sub(r"([\\|*<`\[])", r"\\\1", cell) for cell in column.cells] for column in columns]
    widths = [max(map(len, [column.heading, *cells])) for column, cells in zip(columns, escaped, strict=True)]
    tight = sum(widths) + len(widths) + 1
    pad = "" if tight <= width < tight + 2 * len(widths) else " "

    def line(cells: Sequence[str]) -> str:
        aligned = [
            cell.rjust(size) if column.is_number else cell.ljust(size)
            for cell, size, column in zip(cells, widths, columns, strict=True)
        ]
        return "|" + "|".join(f"{pad}{cell}{pad}" for cell in aligned) + "|\n"

    rule = [
        "-" * (size - column.is_number) + ":" * column.is_number for size, column in zip(widths, columns, strict=True)
    ]
    lines = [line([column.heading for column in columns]), line(rule), *map(line, zip(*escaped, strict=True))]
    return "".join(lines) + "\n" + _legend(table, columns)


def _legend(table: pd.DataFrame, columns: Sequence["_Column"]) -> str:
    text = LEGEND + (ROUND_LEGEND if any(column.heading == "Round" for column in columns) else "")
    for epsilon, convention, delta, legend in (
        ("epsilon_sound", "sound_convention", "delta", PRIVACY_LEGEND),
        ("record_epsilon", "record_convention", "record_delta", RECORD_LEGEND),
    ):
        if epsilon in table:
            deltas = [f"{value:.3g}" for value in table[delta].dropna().unique()]
            text += legend.format(", ".join(table[convention].dropna().unique()), ", ".join(deltas))
    if "reason" in table:
        for row in table.dropna(subset="reason").itertuples():
            text += f"{row.run} {row.status}: {' '.join(str(row.reason).split())}\n"
    return text


def to_latex(table: pd.DataFrame) -> str:
    """The columns of `to_markdown` as a tabular, ready to paste; it needs the package booktabs."""
    columns = _shown(table)
    alignment = "".join("r" if column.is_number else "l" for column in columns)
    body = [
        " & ".join(map(_latex, cells)) + r" \\" for cells in zip(*(column.cells for column in columns), strict=True)
    ]
    lines = [
        r"% needs \usepackage{booktabs}",
        rf"\begin{{tabular}}{{{alignment}}}",
        r"\toprule",
        " & ".join(LATEX_HEADINGS.get(column.heading, _latex(column.heading)) for column in columns) + r" \\",
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class _Column:
    heading: str
    cells: list[str]
    is_number: bool = True


def _shown(table: pd.DataFrame) -> list[_Column]:
    """The columns that people read, in the paper's order."""
    unfinished = bool((table["status"] != "completed").any())
    counts = table["canaries"].unique()
    of_all = f" /{counts[0]}" if len(counts) == 1 else ""

    def cells(name: str, template: str = "{}", scale: float = 1) -> list[str]:
        return ["" if pd.isna(value) else template.format(value * scale) for value in table[name]]

    def text(name: str) -> list[str]:
        return ["" if pd.isna(value) else str(value) for value in table[name]]

    def memorized(name: str) -> list[str]:
        out_of = [f"/{count}" if len(counts) > 1 else "" for count in table["canaries"]]
        return [cell and cell + rest for cell, rest in zip(text(name), out_of, strict=True)]

    columns = [
        _Column("Setting", text("setting"), is_number=False),
        _Column("Run", text("run"), is_number=False) if table["setting"].duplicated().any() else None,
        _Column("Round", text("round")) if unfinished or table["round"].nunique() > 1 else None,
        _Column(f"RS{of_all}", memorized("rs")),
        _Column("Lowest", text("rs_lowest"), is_number=False),
        _Column(f"BS{of_all}", memorized("bs")),
        _Column("Lowest", text("bs_lowest"), is_number=False),
        _Column("Bits", cells("mean_exposure", "{:.1f}")),
        _Column("Acc. %", cells("accuracy", "{:.1f}", 100)),
        _Column("Perp.", cells("perplexity", "{:.1f}")),
        _Column("Eps.", _epsilons(table)) if "epsilon_sound" in table else None,
        _Column("Rec. eps.", cells("record_epsilon", "{:.3g}")) if "record_epsilon" in table else None,
        _Column("Status", text("status"), is_number=False) if unfinished else None,
    ]
    return [column for column in columns if column is not None]


def _epsilons(table: pd.DataFrame) -> list[str]:
    """Both epsilons, as in ``"5.62/28.5"``; ``"-"`` where a convention is not about the run's sampler."""
    pairs = zip(table["epsilon_paper"], table["epsilon_sound"], strict=True)
    return [
        "" if pd.isna(sound) else f"{'-' if pd.isna(paper) else format(paper, '.3g')}/{sound:.3g}"
        for paper, sound in pairs
    ]


def _latex(text: str) -> str:
    """Text that LaTeX prints as it stands, batch sizes as the paper's mathematics."""
    escaped = "".join(LATEX.get(character, character) for character in text)
    return re.sub(r"\bb\\_([ur]) = (\d+)", r"$b_\1 = \2$", escaped)
