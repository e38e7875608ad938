"""Memorization tables in the columns of Thakkar et al. (2020), Tables 1 to 4, from rows and rosters alone.

A run is a row; every format shows the same frame:

    setting, run             what was trained, and the run's name
    round                    number of completed rounds of the evaluated model; of central training, steps
    epochs                   how often they read as many records as there are; blank for older runs
    rs, bs                   canaries memorized by Random Sampling and by Beam Search
    rs_lowest, bs_lowest     least (p_u, p_e) with a memorized canary, by expected insertions; "-" where none is;
                             where canaries have a number of copies, the fewest
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

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pandas as pd

from flsim.results import formats
from flsim.results.compare import t_interval
from flsim.results.formats import Column, formatted, text_of
from flsim.results.formats import to_csv as to_csv
from flsim.results.store import RunResults, refuse_two_points

COLUMNS = {
    "setting": "string",
    "run": "string",
    "round": "Int64",
    "epochs": "Float64",
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
COPIES_LEGEND = "Copies: the fewest with a memorized canary, where their number was set.\n"
PRIVACY_LEGEND = "Eps.: epsilon by the paper's convention / by one that holds ({}), delta {}.\n"
RECORD_LEGEND = "Rec. eps.: epsilon of one record, not of a user, by {}, delta {}.\n"
ROUND_LEGEND = "Round: completed rounds; of central training (b_r), steps.\n"
EPOCH_LEGEND = "Epochs: records read, of rounds or (b_r) of steps, over how many records there are.\n"
ALL_EPOCHS_LEGEND = "All after {} epochs: each reads as many records as there are.\n"


def memorization_table(
    runs: Sequence[RunResults], round: int | None = None, epoch: float | None = None
) -> pd.DataFrame:
    """A row per run, in the order given, with the columns of `COLUMNS`, and all others that have anything to say.

    Args:
        runs: what was read of each run.
        round: the evaluated round to show; default each run's last. Runs that have not come so far stay blank.
        epoch: instead of a round: after how many epochs; see `RunResults.evaluation_at_epoch`.

    Raises:
        InputError: a run went past there without evaluating it, some canaries' results are missing, or both a round
            and an epoch are given.
    """
    refuse_two_points(round, epoch)
    rows = [
        {
            "setting": run.setting,
            "run": run.name,
            **_measured(run, round, epoch),
            "status": run.status,
            "reason": run.reason,
        }
        for run in runs
    ]
    columns = dict(COLUMNS)
    for more in (SPACE, PRIVACY, RECORD_PRIVACY, REASON):
        if any(row.get(name) is not None for row in rows for name in more):
            columns |= more
    return pd.DataFrame(rows, columns=list(columns)).astype(columns)


def _measured(run: RunResults, round: int | None, epoch: float | None) -> dict[str, Any]:
    shown: dict[str, Any] = {"canaries": len(run.roster)}
    # The last finite evaluation of a model that then diverged would pass for a result.
    if run.status == "diverged" or not run.evaluated:
        return shown
    if run.status != "completed" and run.is_before(round, epoch):
        return shown
    at = run.at(round, epoch)
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
    return shown | {"round": at, "epochs": run.epochs_of(at), **of_model, **_privacy(run, at)}


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

    Ordered by expected insertion frequency p_u * p_e, then by expected sharers p_u (section 4.2). Where canaries have
    a number of copies instead, the fewest, e.g. ``"2 copies"``.
    """
    if len(roster) and roster["p_u"].isna().all():
        return copies(int(roster["planned_insertions"].min()))
    pairs = zip(roster["p_u"].astype(float), roster["p_e"].astype(float), strict=True)
    # Products that are equal on paper, such as 1/10 * 10% and 1 * 1%, can differ in their last bit.
    pair = min(pairs, key=lambda pair: (float(f"{pair[0] * pair[1]:.12g}"), pair[0]), default=None)
    return "-" if pair is None else f"{user_share(pair[0])}, {100 * pair[1]:.6g}%"


def copies(number: int) -> str:
    """``"1 copy"``, ``"2 copies"``."""
    return f"{number:,} {'copy' if number == 1 else 'copies'}"


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


def from_csv(text: str) -> pd.DataFrame:
    """The table that `to_csv` wrote, exactly."""
    return formats.from_csv(text, TYPES)


def to_markdown(table: pd.DataFrame, width: int = 80) -> str:
    """The paper's columns and mean exposure, aligned; cells go without padding where only that fits `width` characters.

    Run, round and status appear only where they say something: equal settings, different rounds, unfinished runs.
    Epochs stand for different rounds where all runs know theirs.
    """
    return formats.markdown(_shown(table), width) + "\n" + _legend(table)


def to_latex(table: pd.DataFrame) -> str:
    """The columns of `to_markdown` as a tabular, ready to paste; it needs the package booktabs."""
    return formats.latex(_shown(table))


def progress(table: pd.DataFrame, is_unfinished: bool = False) -> tuple[Column | None, str]:
    """How far each row's model was trained, and what the legend says of that; no column where all are equal.

    Args:
        table: with the columns round and epochs.
        is_unfinished: to show equal rounds as well.
    """
    shown = table[table["round"].notna() | table["epochs"].notna()]
    # What rows over seeds have no common round for are still so many epochs.
    differ = shown["round"].nunique(dropna=False) > 1 or (len(shown) and shown["round"].isna().all())
    if differ and shown["epochs"].notna().all():
        cells = formatted(table["epochs"], "{:.3g}")
        found = {cell for cell in cells if cell}
        if len(found) == 1 and not is_unfinished:
            return None, ALL_EPOCHS_LEGEND.format(*found)
        return Column("Epochs", cells), EPOCH_LEGEND
    if differ or is_unfinished:
        return Column("Round", text_of(table["round"])), ROUND_LEGEND
    return None, ""


def _legend(table: pd.DataFrame) -> str:
    text = LEGEND + progress(table, _is_unfinished(table))[1]
    if any(table[name].str.contains(" cop").any() for name in ("rs_lowest", "bs_lowest")):
        text += COPIES_LEGEND
    for epsilon, convention, delta, legend in (
        ("epsilon_sound", "sound_convention", "delta", PRIVACY_LEGEND),
        ("record_epsilon", "record_convention", "record_delta", RECORD_LEGEND),
    ):
        if epsilon in table:
            deltas = [f"{value:.3g}" for value in table[delta].dropna().unique()]
            text += legend.format(", ".join(table[convention].dropna().unique()), ", ".join(deltas))
    if "reason" in table:
        for row in table.dropna(subset="reason").itertuples():
            text += formats.note(f"{row.run} {row.status}: {row.reason}")
    return text


def _is_unfinished(table: pd.DataFrame) -> bool:
    return bool((table["status"] != "completed").any())


def _shown(table: pd.DataFrame) -> list[Column]:
    """The columns that people read, in the paper's order."""
    unfinished = _is_unfinished(table)
    counts = table["canaries"].unique()
    of_all = f" /{counts[0]}" if len(counts) == 1 else ""

    def memorized(name: str) -> list[str]:
        out_of = [f"/{count}" if len(counts) > 1 else "" for count in table["canaries"]]
        return [cell and cell + rest for cell, rest in zip(text_of(table[name]), out_of, strict=True)]

    columns = [
        Column("Setting", text_of(table["setting"]), is_number=False),
        Column("Run", text_of(table["run"]), is_number=False) if table["setting"].duplicated().any() else None,
        progress(table, unfinished)[0],
        Column(f"RS{of_all}", memorized("rs")),
        Column("Lowest", text_of(table["rs_lowest"]), is_number=False),
        Column(f"BS{of_all}", memorized("bs")),
        Column("Lowest", text_of(table["bs_lowest"]), is_number=False),
        Column("Bits", formatted(table["mean_exposure"], "{:.1f}")),
        Column("Acc. %", formatted(table["accuracy"], "{:.1f}", 100)),
        Column("Perp.", formatted(table["perplexity"], "{:.1f}")),
        Column("Eps.", _epsilons(table)) if "epsilon_sound" in table else None,
        Column("Rec. eps.", formatted(table["record_epsilon"], "{:.3g}")) if "record_epsilon" in table else None,
        Column("Status", text_of(table["status"]), is_number=False) if unfinished else None,
    ]
    return [column for column in columns if column is not None]


def _epsilons(table: pd.DataFrame) -> list[str]:
    """Both epsilons, as in ``"5.62/28.5"``; ``"-"`` where a convention is not about the run's sampler."""
    pairs = zip(table["epsilon_paper"], table["epsilon_sound"], strict=True)
    return [
        "" if pd.isna(sound) else f"{'-' if pd.isna(paper) else format(paper, '.3g')}/{sound:.3g}"
        for paper, sound in pairs
    ]
