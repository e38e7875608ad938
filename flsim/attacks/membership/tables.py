"""Attacks on membership as tables and ROC curves, with means over seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flsim.attacks.membership.inference import LEVELS, column
from flsim.attacks.result import Result, over_seeds, refuse_unlike, text_of
from flsim.base.statistics import paired_t_p
from flsim.results.rows import read_run_file
from flsim.results.sweeps import named_apart
from flsim.show.figure import legend_below, plain, subplots
from flsim.show.plots import draw_roc
from flsim.show.table import Field, Table, note, table_of

LEVEL = 0.01  # false-positive rate of the rate in means over seeds
AREA = (
    "AUROC: the probability that a member scores above a non-member, with a 95% interval by resampling "
    "authors; 0.5 means chance."
)
RATE = (
    "% at F: share of members that the attack finds if the share F of non-members are false alarms, with an interval "
    "at least as wide as for independent members. Empty if there are too few non-members for F."
)
ALLOWED = "Allowed: the largest share that the ledger allows any attacker."
SHADOWS = (
    "In and Out: pairs of a run and a target that its training read, or did not. Each run is attacked once, "
    "with the others as shadow models. Intervals resample runs. Fair coins decided which targets are in, so "
    "only training can distinguish the two groups."
)
MEANS = (
    "AUROC: mean over seeds, with its 95% interval by Student's t. All seeds share the corpus, so the "
    "interval does not cover other corpora. Blind: the same for an attack that reads no model. TPR: share of "
    "members found at 1% of false alarms. Less first: AUROC minus the AUROC of the first setting, over the "
    "seeds of both settings, with the interval and the p-value of the paired t test."
)
LABELS = (Field("Attack", "attack"), Field("Unit", "unit"), Field("In", "n_in", "{:,}"), Field("Out", "n_out", "{:,}"))
AUROC = Field("AUROC", "auroc", "{:.3f}", ends=("auroc_low", "auroc_high"))
RATES = tuple(
    (
        Field(
            f"% at {100 * level:g}%",
            column("tpr", level),
            "{:.1f}",
            100,
            ends=(column("tpr_low", level), column("tpr_high", level)),
            note=RATE,
        ),
        Field("Allowed", column("allowed", level), "{:.1f}", 100, note=ALLOWED),
    )
    for level in LEVELS
)
CONTROLS = tuple(
    Field(
        heading, name, "{:.3f}", note=f"{heading}: AUROC {how}; it should be near 0.5.", is_late=heading == "Untrained"
    )
    for heading, name, how in (
        ("Untrained", "untrained_auroc", "before training"),
        ("Permuted", "permuted_auroc", "with permuted labels"),
    )
)


def to_text(name: str, attacked: Result) -> str:
    first = attacked.frame.iloc[0]
    what = " and ".join(f"{unit}s" for unit in dict.fromkeys(attacked.frame["unit"]))
    title = f"{first['setting']} ({name}), after round {first['round']:,}: membership of {what}"
    return text_of(title, [table(attacked.frame)], attacked.notes)


def table(rows: pd.DataFrame, labels: Sequence[Field] = (), controls: Sequence[Field] = CONTROLS) -> Table:
    """Return the table of rows of attacks, with further labels of its rows."""
    labels = [*labels, *(label for label in LABELS if label.name != "unit" or set(rows["unit"]) != {"record"})]
    rates = [rate for rate in RATES if rows[rate[0].name].notna().any()]  # without a rate, a limit has no meaning
    return table_of(rows, labels, [[replace(AUROC, note=AREA)], *rates, controls])


def shadows_to_text(setting: str, attacks: pd.DataFrame, targets: pd.DataFrame) -> str:
    """Return the results of attacks with shadow models, from the rows of `success` and `counterfactual`, as text."""
    known = targets[targets["standard_error"].notna()]
    above = int((known["memorization"] > 2 * known["standard_error"]).sum())
    memorization = (
        f"Counterfactual memorization: on average {known['memorization'].mean():.4f} nats per token more in "
        f"runs with a target than in runs without it; {above} of {len(known)} targets are above two standard "
        "errors."
    )
    first = attacks.iloc[0]
    title = f"{setting}: membership of {first['unit']}s with {first['shadows']} shadow models"
    labels = [label for label in LABELS if label.name != "unit"]
    return text_of(title, [table_of(attacks, labels, [[AUROC], *RATES], [SHADOWS])], [memorization])


def means_over_seeds(attacked: Mapping[Path, Result]) -> pd.DataFrame:
    """Return a row for each setting, unit and attack.

    The columns are unit, attack, series, setting, seeds (number of runs), auroc, control_auroc and tpr with the ends of
    their 95% intervals, and difference, difference_low, difference_high and p: from the first setting, paired by seed.
    """
    names = named_apart(attacked)
    rows = pd.concat(
        [one.frame.assign(**names[path], seed=read_run_file(path)["seed"]) for path, one in attacked.items()],
        ignore_index=True,
    )
    refuse_unlike(rows, ["unit", "attack", "series", "setting"])
    return with_differences(rows.assign(tpr=rows[column("tpr", LEVEL)]))


def with_differences(rows: pd.DataFrame) -> pd.DataFrame:
    """Return means over seeds, and differences from the first setting; see `means_over_seeds`."""
    key, value = ["unit", "attack", "series", "setting"], {"auroc": "", "control_auroc": "control_", "tpr": "tpr_"}
    means = over_seeds(rows, key, value)
    first = rows[rows["series"] == rows["series"].iloc[0]]
    pairs = rows.merge(first, on=["unit", "attack", "seed"], suffixes=("", "_first"))
    pairs = pairs[pairs["series"] != pairs["series_first"]]
    pairs["difference"] = pairs["auroc"] - pairs["auroc_first"]
    columns = ["difference", "difference_low", "difference_high", "p"]
    p = [paired_t_p(group["difference"].to_numpy("float64")) for _, group in pairs.groupby(key, sort=False)]
    differences = over_seeds(pairs, key, {"difference": "difference_"}).assign(p=p).reindex(columns=[*key, *columns])
    return means.merge(differences.astype(dict.fromkeys(columns, np.float64)), "left", key)


def means_to_text(rows: pd.DataFrame) -> str:
    """Return the rows of `means_over_seeds` as a table for each unit and attack, the strongest attack first."""
    labels = (Field("Setting", "setting"), Field("n", "seeds", "{}"))
    units = (
        (
            Field("AUROC", "auroc", "{:.3f}", ends=("low", "high")),
            Field("Blind", "control_auroc", "{:.3f}"),
            Field("TPR %", "tpr", "{:.1f}", 100),
        ),
        (
            Field("Less first", "difference", "{:+.3f}", ends=("difference_low", "difference_high"), is_late=True),
            Field("p", "p", "{:.2g}"),
        ),
    )
    texts, by_attack = [], rows.groupby(["unit", "attack"], sort=False)
    for unit, attack in by_attack["auroc"].max().sort_values(ascending=False, kind="stable").index:
        title = f"{attack}: membership of {unit}s, over seeds"
        texts.append(text_of(title, [table_of(by_attack.get_group((unit, attack)), labels, units)]))
    return "\n".join([*texts, note(MEANS)])


# Figure of ROC curves of attacks on membership.


def draw(attacked: Mapping[Path, Result]) -> Figure:
    """Return a figure with a panel for each run, and a curve for each attack and unit on logarithmic scales."""
    every = pd.concat([result.frame for result in attacked.values()])
    names = list(dict.fromkeys(names_of(every)))
    count = len(attacked)
    figure, (panels,) = subplots(max(5.0, 3.4 * count), 4.4, 1, count, gap=0.02, sharex=True, sharey=True)
    for axes, (folder, result) in zip(panels, attacked.items(), strict=True):
        draw_attacks(axes, result.frame, names)
        setting = result.frame["setting"].iloc[0]
        axes.set_title(plain(f"{setting}\n{folder.resolve().name}"), fontsize=10)
        axes.set_xlabel("false-positive rate")
    panels[0].set_ylabel("true-positive rate")
    legend_below(figure, panels, 3)
    return figure


def names_of(rows: pd.DataFrame) -> list[str]:
    """Return the attack of each row, with the unit if the unit is not a record."""
    units = rows["unit"].map(lambda unit: f" ({unit})" if unit != "record" else "")
    return (rows["attack"] + units).tolist()


def draw_attacks(axes: Axes, rows: pd.DataFrame, names: Sequence[str]) -> None:
    """Draw the curves of one run, with the interval of the largest area, and the curve that its ledger allows."""
    lowest = min(1 / float(rows["n_out"].max()), 0.1)
    curves = [
        (names.index(name), *_floats(row, "fpr", "tpr"), name)
        for name, row in zip(names_of(rows), rows.to_dict("records"), strict=True)
    ]
    best = int(rows["auroc"].to_numpy().argmax())
    row = rows.to_dict("records")[best]
    allowed = _floats(row, "fpr", "allowed") if pd.notna(row["epsilon"]) else None
    draw_roc(axes, curves, lowest, (curves[best][0], *_floats(row, "fpr", "low", "high")), allowed)


def _floats(row: Mapping[Any, Any], *names: str) -> tuple[Any, ...]:
    return tuple(np.array(list(row[f"curve_{name}"]), dtype="float64") for name in names)
