"""Attacks on membership over the seeds of a setting: means with intervals, and differences between settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from flsim.attacks.membership.stored import column
from flsim.base.statistics import paired_t_p, t_interval
from flsim.results.seeds import named_apart
from flsim.runs.folder import Run
from flsim.show.table import Column, formatted, markdown, note

LEVEL = 0.01  # false-positive rate of the column of true-positive rates

MEANS = (
    "AUROC: the probability that a member scores above a non-member, mean over seeds; 0.5 says nothing. The 95% "
    "interval is Student's t over seeds. Seeds share the corpus, with its members and non-members, so it says nothing "
    "of other corpora. Blind: the same of an attack that reads no model. TPR: share of members that the attack names "
    "at 1% of false alarms."
)
DIFFERENCES = (
    "Less first: AUROC less that of the first setting, paired by seed, over the seeds that both have, with its 95% "
    "interval and the two-sided p-value of the paired t test."
)


def of_runs(tables: Mapping[Path, pd.DataFrame]) -> pd.DataFrame:
    """Return the rows of attacked runs as one table, with the setting, the series and the seed of each run.

    Args:
        tables: the rows of each run by its folder, from `flsim.attacks.membership.inference.attack_run` or
            `flsim.attacks.membership.users.attack_users`.
    """
    names = named_apart(tables)
    named = [table.assign(**names[path], seed=Run.open(path).config.seed) for path, table in tables.items()]
    return pd.concat(named, ignore_index=True)


def over_seeds(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each setting, unit and attack.

    Args:
        rows: rows of several seeds, as `of_runs` returns them.

    Returns:
        Columns setting, unit, attack, seeds (number of runs), auroc, low and high (mean over seeds, and its 95%
        interval), control_auroc and tpr (means over seeds), and difference, difference_low, difference_high and p: of
        the AUROC from the setting that comes first, paired by seed; NaN in rows of the first setting.
    """
    first = rows["series"].iloc[0]
    summary = []
    for (unit, attack, series), group in rows.groupby(["unit", "attack", "series"], sort=False):
        baseline = rows[(rows["unit"] == unit) & (rows["attack"] == attack) & (rows["series"] == first)]
        pairs = group.merge(baseline, on="seed", suffixes=("", "_first")) if series != first else group.iloc[:0]
        summary.append(_row(group) | _difference(pairs))
    return pd.DataFrame(summary)


def _row(group: pd.DataFrame) -> dict[str, Any]:
    area = group["auroc"].to_numpy()
    low, high = t_interval(area)
    means = {"control_auroc": group["control_auroc"].mean(), "tpr": group[column("tpr", LEVEL)].mean()}
    about = {name: group[name].iloc[0] for name in ("setting", "unit", "attack")}
    return about | {"seeds": len(group), "auroc": area.mean(), "low": low, "high": high} | means


def _difference(pairs: pd.DataFrame) -> dict[str, float]:
    if pairs.empty:
        return dict.fromkeys(("difference", "difference_low", "difference_high", "p"), np.nan)
    differences: NDArray[np.float64] = (pairs["auroc"] - pairs["auroc_first"]).to_numpy()
    low, high = t_interval(differences)
    p = paired_t_p(differences)
    return {"difference": float(differences.mean()), "difference_low": low, "difference_high": high, "p": p}


def to_text(rows: pd.DataFrame) -> str:
    """Return the rows of `over_seeds` as a table for each unit and attack, the strongest attack first."""
    tables = []
    by_attack = rows.groupby(["unit", "attack"], sort=False)
    for unit, attack in by_attack["auroc"].max().sort_values(ascending=False, kind="stable").index:
        group = by_attack.get_group((unit, attack))
        columns = [
            Column("Setting", group["setting"].tolist(), is_number=False),
            Column("n", [str(count) for count in group["seeds"]]),
        ]
        means = [
            Column("AUROC", formatted(group["auroc"], "{:.3f}")),
            Column("95%", _intervals(group["low"], group["high"], "{:.3f}")),
            Column("Blind", formatted(group["control_auroc"], "{:.3f}")),
            Column("TPR %", formatted(100 * group["tpr"], "{:.1f}")),
        ]
        differences = [
            Column("Less first", formatted(group["difference"], "{:+.3f}"), is_late=True),
            Column("95%", _intervals(group["difference_low"], group["difference_high"], "{:+.3f}"), is_late=True),
            Column("p", formatted(group["p"], "{:.2g}"), is_late=True),
        ]
        tables.append(f"{attack}: membership of {unit}s, over seeds\n\n{markdown(columns, [means, differences])}")
    return "\n".join([*tables, note(MEANS), note(DIFFERENCES)])


def _intervals(low: pd.Series, high: pd.Series, form: str) -> list[str]:
    pairs = zip(low, high, strict=True)
    return ["" if np.isnan(a) else f"{form.format(a)} to {form.format(b)}" for a, b in pairs]
