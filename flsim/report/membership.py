"""Blocks of a report on how well attacks tell records of training from others, where run folders have such rows."""

import pandas as pd
from markupsafe import Markup

from flsim.membership.stored import LEVELS, column, newest_rows
from flsim.report.blocks import Block, Cell, Figure, Group, Heading, Table, left, number
from flsim.report.gather import Gathered, RunView
from flsim.report.svg import STYLES, Axis, Panel

NOTE = (
    "Members are records of training users that took part; non-members are records of authors who are held out, of "
    "equal lengths. Of users, each is told by records of the user that no training read. AUROC: the probability that a "
    "member scores above a non-member, with a 95% interval by resampling authors. Named: members that score above all "
    "but so many non-members. Untrained: the same attack on the model before training. Blind: an attack by length and "
    "word frequency alone; above 0.55 the comparison is confounded. LiRA and RMIA: by the other seeds' runs as shadow "
    "models, on targets about which coins decided, with intervals by resampling targets. `flsim membership` has more."
)
CAPTION = (
    "Members that each attack names (TPR), by the share of non-members that it names too (FPR), on log scales. Thin "
    "dashes: an attacker who knows nothing. Shaded: the 95% interval of the attack of the largest area, which treats "
    "records as independent."
)
CLAIMED = " Thin line: the most that the run’s own ledger leaves to any attacker."


def membership(gathered: Gathered) -> list[Block]:
    """Return a table with a row for each attack on each shown run, and a figure of ROC curves; nothing without rows."""
    attacked = [
        (_name(run, setting.label, len(setting.shown_runs)), rows)
        for setting in gathered.settings
        for run, _ in setting.shown_runs
        if len(rows := _named_by_unit(newest_rows(run.path, run.results.identity)))
    ]
    if not attacked:
        return []
    every = pd.concat([rows for _, rows in attacked], ignore_index=True)
    areas = every.groupby("attack")["auroc"].mean().drop(["blind"], errors="ignore").sort_values(ascending=False)
    styles = {str(attack): style for style, attack in enumerate(areas.index[:STYLES])}
    has_claims = bool(every["epsilon"].notna().any())
    rates = [Heading(f"Named at {100 * level:g}%") for level in LEVELS]
    headings = [left("Setting"), left("Attack"), Heading("In"), Heading("Out"), Heading("AUROC"), *rates]
    headings += [Heading(f"Allowed at {100 * level:g}%") for level in LEVELS if has_claims]
    headings += [Heading("Untrained"), Heading("Blind")]
    cells = [_row(name, row, has_claims) for name, rows in attacked for _, row in rows.iterrows()]
    panels: list[tuple[Cell, Markup]] = [
        (name, _curves(rows, styles, index)) for index, (name, rows) in enumerate(attacked)
    ]
    legend = [(style, attack) for attack, style in styles.items()]
    figure = Figure(CAPTION + CLAIMED * has_claims, [Group(panels)], legend)
    return [Table("How well attacks tell records of training from others", headings, cells, NOTE), figure]


def _named_by_unit(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows in which attacks on users and authors have other names than those on records."""
    units = rows["unit"].where(rows["unit"] != "record", "")
    return rows.assign(attack=rows["attack"] + units.map(lambda unit: f" ({unit}s)" if unit else ""))


def _name(run: RunView, label: str, runs: int) -> str:
    return label if runs == 1 or run.results.seed is None else f"{label}, seed {run.results.seed}"


def _row(name: str, row: "pd.Series[float]", has_claims: bool) -> list[Cell]:
    area = f"{row['auroc']:.3f} ({row['auroc_low']:.3f} to {row['auroc_high']:.3f})"
    cells: list[Cell] = [name, str(row["attack"]), f"{row['n_in']:,}", f"{row['n_out']:,}", area]
    cells += [number(row[column("tpr", level)], "{:.1%}") for level in LEVELS]
    cells += [number(row[column("allowed", level)], "{:.1%}") for level in LEVELS if has_claims]
    blind = number(row["control_auroc"], "{:.3f}") + (", confounded" if row["is_confounded"] else "")
    return [*cells, number(row["untrained_auroc"], "{:.3f}"), blind]


def _curves(rows: pd.DataFrame, styles: dict[str, int], index: int) -> Markup:
    """Return a panel with a curve for each attack that has a style, of one run."""
    low = min(1 / float(rows["n_out"].max()), 0.1)
    panel = Panel(Axis(low, 1, "FPR", is_log=True), Axis(low, 1, "TPR", is_log=True))
    panel.threads([[(low, low), (1, 1)]], "no")
    drawn = rows[rows["attack"].isin(styles)].sort_values("auroc", ascending=False).to_dict("records")
    descriptions = []
    for place, row in enumerate(drawn):
        points = list(zip(row["curve_fpr"].tolist(), row["curve_tpr"].tolist(), strict=True))
        if place == 0:
            ends = (row["curve_low"].tolist(), row["curve_high"].tolist())
            lows, highs = (list(zip(row["curve_fpr"].tolist(), end, strict=True)) for end in ends)
            panel.band(lows, highs, styles[row["attack"]])
            allowed = zip(row["curve_fpr"].tolist(), row["curve_allowed"].tolist(), strict=True)
            panel.threads([[(fpr, tpr) for fpr, tpr in allowed if tpr is not None and tpr >= low]], "yes")
        panel.line([(fpr, tpr) for fpr, tpr in points if tpr >= low], styles[row["attack"]], has_markers=False)
        descriptions.append(f"{row['attack']}: area {row['auroc']:.3f}.")
    return panel.render(f"membership-{index}", "True-positive rate by false-positive rate", " ".join(descriptions))
