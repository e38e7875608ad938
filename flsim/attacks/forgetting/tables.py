"""Forgetting as tables and figures: times of groups, success of attacks by rounds since last use, and tests."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flsim.attacks.forgetting import advantage
from flsim.attacks.forgetting.measure import Forgetting, curve
from flsim.attacks.forgetting.success import grid
from flsim.attacks.result import text_of
from flsim.base.errors import InputError
from flsim.results.tables import user_share
from flsim.show.figure import LINES, RULE, STRONG, draw_band, draw_line, legend_below, plain, subplots
from flsim.show.table import Field, Table, table_of

LEVEL = 0.05  # level of a corrected log-rank test
SUMMARY = (
    "T({alpha:g}): the smallest k, in rounds since last use, from which on the one-sided 95% upper bound of "
    "the accuracy is at most {alpha:g}; > means that it was not reached by the last k. At best: the smallest "
    "alpha that this number of canaries can show. Half by: rounds from the end of the window until half of "
    "the canaries have had an evaluated rank that does not reveal them (p > 0.05). Nats: log-perplexity in "
    "arm OUT minus log-perplexity in arm IN, as a mean over canaries, when the window ends. Left %: the share "
    "of this difference that remains at the end of training. 95%: Student's t over seeds."
)
K = (
    "k: rounds since last use; a row uses the last evaluation of each canary up to k, after the previous row. "
    "Bits: median exposure of arms IN and OUT, with a 95% interval over canaries. Acc.: accuracy of "
    "distinguishing IN from OUT with a threshold that half of the canaries chose and the other half tested, "
    "with its upper bound. Prec.: precision at a false-positive rate of 10%. Heuristic eps.: ln(TPR / FPR) at "
    "this false-positive rate, which is no bound. Intervals and tests treat canaries as independent, but "
    "canaries of one model are not independent."
)
LABELS = (
    Field("Setting", "setting"),
    Field("Rounds", "window"),
    Field("Planted", "planted"),
    Field("Hardness", "hardness"),
)
SINCE = Field("k", "k", "{:,}")
BY_K = (
    Field("n", "canaries", "{:,}"),
    Field("Bits IN", "bits_in", "{:.1f}", ends=("bits_in_low", "bits_in_high")),
    Field("OUT", "bits_out", "{:.1f}"),
    Field("Acc. %", "success", "{:.0f}", 100),
    Field("at most", "success_upper", "{:.0f}", 100),
    Field("Prec. %", "precision", "{:.0f}", 100),
    Field("Heuristic eps.", "heuristic_epsilon", "{:.1f}"),
)
ADVANTAGE = (
    Field("Nats", "advantage", "{:.2f}", ends=("advantage_low", "advantage_high"), is_late=True),
    Field("Left %", "left", "{:.0f}", 100, ends=("left_low", "left_high")),
)
UNTESTED = "no two groups have ranks at equal numbers of rounds after a window."
TESTS = (
    Field("p", "p", "{:.2g}"),
    Field("Holm", "p_holm", "{:.2g}"),
    Field("Left, points", "left_difference", "{:+.0f}", 100, ends=("left_difference_low", "left_difference_high")),
)


def window_text(row: Mapping[Any, Any]) -> str:
    """Return the rounds of a group's window, e.g. ``"1-50"``; ``"51"`` for one round, ``"all"`` without a bound."""
    first, last = ("" if pd.isna(row[name]) else str(int(row[name])) for name in ("first_round", "last_round"))
    return (first or "all") if first == last else f"{first or 1}-{last}"


def planted_text(row: Mapping[Any, Any]) -> str:
    """Return the configuration of a group, e.g. ``"10 copies"``, ``"1/20, 50%"``, or ``"all"`` if pooled."""
    if pd.isna(row["p_u"]):
        return "all" if pd.isna(row["copies"]) else f"{row['copies']:,} cop{'y' if row['copies'] == 1 else 'ies'}"
    return f"{user_share(row['p_u'])}, {100 * row['p_e']:.6g}%"


def rounds_text(row: Mapping[Any, Any]) -> str:
    """Return the window of a group as text, e.g. ``"rounds 1-50"``, ``"round 51"`` or ``"all rounds"``."""
    window = window_text(row)
    return "all rounds" if window == "all" else f"round{'s' * (not window.isdecimal())} {window}"


def name_text(row: Mapping[Any, Any], pooled: str = "all canaries") -> str:
    """Return a group's name among those of its window, e.g. ``"10 copies, hard"``; `pooled` for all numbers."""
    planted = planted_text(row)
    hardness = "" if pd.isna(row["hardness"]) else f", {row['hardness']}"
    return f"{pooled if planted == 'all' else planted}{hardness}"


def group_text(row: Mapping[Any, Any]) -> str:
    """Return a group's name within its setting, e.g. ``"rounds 1-50, 10 copies, hard"``."""
    return f"{rounds_text(row)}, {name_text(row)}"


def time_text(rounds: Any, is_censored: Any) -> str:
    """Return a time in rounds, ``"> 50"`` if it is censored, and ``"-"`` if it is unknown."""
    if pd.isna(is_censored):
        return "-"
    return f"> {rounds:,}" if is_censored else f"{rounds:,}"


def to_text(measured: Forgetting) -> str:
    """Return the times of groups, a table for each group, the significant tests, and notes."""
    parts = [text_of("How fast canaries are forgotten", [times_table(measured)])]
    for row in measured.times.to_dict("records"):
        setting = f"{row['setting']}: " if measured.times["series"].nunique() > 1 else ""
        table = measured.success[measured.success["group"] == row["group"]]
        tables = [table_of(table, [SINCE], [BY_K])] if len(table) else []
        parts.append(text_of(f"{setting}{group_text(row)}", tables, [] if tables else ["No canary was used."]))
    if len(measured.tests):
        parts.append(_tests(measured))
    return "\n".join([*parts, text_of(summary_of(measured), [], [K, *measured.notes])])


def summary_of(measured: Forgetting) -> str:
    """Return the explanation of the table of times."""
    return SUMMARY.format(alpha=float(measured.times["alpha"].iloc[0]))


def times_table(measured: Forgetting) -> Table:
    """Return the table of forgetting times, a row for each group."""
    times, rows = measured.times, measured.times.to_dict("records")
    named = _named(times).assign(
        used=times["canaries"] - times["never_used"],
        forgotten_by=[
            time_text(row["k_max"] if pd.isna(row["time"]) else row["time"], row["is_censored"]) for row in rows
        ],
        half_by=[time_text(row["median_time"], row["median_is_censored"]) for row in rows],
    )
    summary = (
        Field("Canaries", "used", "{:,}"),
        Field("Seeds", "seeds", "{:,}"),
        Field("Last k", "k_max", "{:,}"),
        Field(f"T({float(times['alpha'].iloc[0]):g})", "forgotten_by"),
        Field("At best", "least_alpha", "{:.2f}"),
        Field("Half by", "half_by"),
    )
    return table_of(named, _labels(named), [summary, ADVANTAGE])


def success_table(measured: Forgetting) -> Table:
    """Return one table of the success of attacks, a row for each group and k."""
    named = _named(measured.success)
    return table_of(named, [*_labels(named), SINCE], [BY_K], [K])


def _named(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of groups with their windows and configurations in words."""
    records = rows.to_dict("records")
    return rows.assign(window=[*map(window_text, records)], planted=[*map(planted_text, records)])


def _labels(named: pd.DataFrame) -> Sequence[Field]:
    return [label for label in LABELS if named[label.name].nunique(dropna=False) > 1] or LABELS[1:3]


def _tests(measured: Forgetting) -> str:
    """Return the pairs of groups that differ significantly and the number of tests, or why nothing was tested."""
    tests, rows = measured.tests, measured.times.set_index("group").to_dict("index")
    for side in "ab":
        names = [f"{row['setting']}: {group_text(row)}" for row in (rows[group] for group in tests[f"group_{side}"])]
        tests = tests.assign(**{side: names})
    printed = tests[
        (tests["p_holm"] <= LEVEL) | ((tests["differs"] == "setting") & tests["left_difference_low"].notna())
    ]
    tested, differing = int(tests["p"].notna().sum()), int((tests["p_holm"] <= LEVEL).sum())
    if not tested and printed.empty:
        return text_of(f"Differences between groups are not tested: {UNTESTED}", [])
    note = (
        "p: log-rank tests of the rounds from the end of the window until a canary's rank does not reveal it, "
        f"between groups that differ in one thing; {differing} of {tested} pairs differ after the correction "
        f"by Holm; {len(tests) - tested} pairs have no ranks at equal numbers of rounds. Left: the remaining "
        "share in the first group minus the remaining share in the second group, paired by seed."
    )
    tables = [table_of(printed, [Field("Group", "a"), Field("against", "b")], [TESTS])] if len(printed) else []
    return text_of("Differences between groups", tables, [note])


# Figure of exposure against rounds since last use, and of the advantage against rounds, by window.

OUT = "arm OUT"
OUTSIDE = len(LINES) - 1  # style of arm OUT
COLUMNS = 3
MOST_TICKS = 8  # distance of labels that do not overlap
LINE = "Line: median exposure{}; band: its 95% interval over {}"
Points = list[tuple[float, float, float, float]]


@dataclass(frozen=True)
class Panel:
    """The lines of one window of rounds, as points with their intervals by the names of groups."""

    row: Mapping[Any, Any]  # a row of its observations
    exposures: Mapping[str, Points]  # by rounds since last use, with arm OUT first
    advantages: Mapping[str, Points]  # by rounds; empty without arm OUT

    @property
    def window(self) -> str:
        return f"planted in {rounds_text(self.row)}"


def panels_of(measured: Forgetting) -> tuple[list[Panel], list[str]]:
    """Return a panel for each setting and window, and the names of all groups, whose places are their styles."""
    rows = measured.times.to_dict("records")
    names = list(dict.fromkeys(name_text(row, "arm IN") for row in rows))
    has_twin = bool(measured.times["advantage"].notna().any())
    panels = []
    for table in measured.windows():
        groups = {
            name_text(of_group.iloc[0].to_dict(), "arm IN"): of_group
            for _, of_group in table.groupby("group", sort=False)
        }
        exposures = {OUT: curve(table, "out")} | {name: curve(group, "in") for name, group in groups.items()}
        advantages = {name: advantage.advantage_curve(group) for name, group in groups.items()} if has_twin else {}
        panels.append(Panel(table.iloc[0].to_dict(), exposures, advantages))
    return panels, names


def draw_lines(axes: Axes, lines: Mapping[str, Points], names: Sequence[str], top: float) -> None:
    """Draw lines with their intervals from 0, or the lowest value, to the top; wide intervals are cut."""
    values = [value for points in lines.values() for _, value, *_ in points]
    axes.set_ylim(min(0.0, 1.1 * min(values, default=0.0)), top)
    for name, points in lines.items():
        x, y, low, high = np.array(points, dtype="float64").reshape(-1, 4).T
        style = OUTSIDE if name == OUT else names.index(name)
        draw_band(axes, x, low, high, style)
        draw_line(axes, x, y, style, label=plain(name))


def scale_rounds(axes: Axes, lines: Mapping[str, Points]) -> None:
    """Set a scale of rounds since last use on which early rounds are as wide as late rounds."""
    longest = int(max((k for points in lines.values() for k, *_ in points), default=1))
    ticks = [k for k in grid(longest) if k < longest / 1.5]
    if len(ticks) > MOST_TICKS:
        ticks = [k for k in ticks if math.log10(max(k, 1)).is_integer() and k < longest / 3]
    axes.set_xscale("symlog", linthresh=1, linscale=0.5)
    axes.set_xlim(-0.1, 1.1 * longest + 1)
    axes.set_xticks([*ticks, longest], map(str, [*ticks, longest]))
    axes.minorticks_off()


def draw(measured: Forgetting) -> Figure:
    """Return a figure with a panel for each setting and window, and a line for each group of canaries.

    A line is the mean over seeds of the median exposure, with its interval. The panel below has the advantage. Raises
    InputError if no exposure was measured after a canary's use.
    """
    if measured.success["bits_in"].isna().all():
        raise InputError(
            "no exposure was measured after a canary was used, so the plot is empty; evaluate later rounds, without "
            "evaluation.decide"
        )
    panels, names = panels_of(measured)
    several = measured.times["series"].nunique() > 1
    columns = 2 if len(panels) == 4 else min(COLUMNS, len(panels))
    has_twin = any(panel.advantages for panel in panels)
    kinds, rows = 1 + has_twin, math.ceil(len(panels) / columns)
    height = 3.1 * rows * kinds + 0.6 + 0.2 * math.ceil(len(names) / 4)
    figure, all_axes = subplots(max(5.0, 3.6 * columns), height, rows * kinds, columns, sharey="row")
    exposures = all_axes[::kinds].ravel().tolist()
    advantages = all_axes[1::kinds].ravel().tolist() if has_twin else []
    for empty in (*exposures[len(panels) :], *advantages[len(panels) :]):
        empty.set_axis_off()
    top, added = top_of(panel.exposures for panel in panels), top_of(panel.advantages for panel in panels)
    for index, (axes, panel) in enumerate(zip(exposures, panels, strict=False)):
        axes.set_title(plain(f"{panel.row['setting']}\n{panel.window}" if several else panel.window), fontsize=10)
        draw_lines(axes, panel.exposures, names, top)
        scale_rounds(axes, panel.exposures)
        axes.set_xlabel("rounds since last use")
        if has_twin:
            draw_lines(advantages[index], panel.advantages, names, added)
            mark_window(advantages[index], panel)
            advantages[index].set_xlabel("rounds")
    for axes in exposures[::columns]:
        axes.set_ylabel("exposure (bits)")
    for axes in advantages[::columns]:
        axes.set_ylabel("nats that training added")
    has_seeds = bool((measured.success["seeds"] > 1).any())
    over = "seeds (t)" if has_seeds else "canaries"
    legend_below(figure, exposures, 4, LINE.format(" and mean advantage" * has_twin, over))
    return figure


def top_of(lines: Iterable[Mapping[str, Points]]) -> float:
    """Return the upper end of a scale of lines."""
    values = [value for by_name in lines for points in by_name.values() for _, value, *_ in points]
    return 1.15 * max(values, default=0.0) or 1.0


def mark_window(axes: Axes, panel: Panel) -> None:
    """Shade the rounds in which canaries are planted, and mark the line at which nothing was added."""
    first, last = panel.row["first_round"], panel.row["last_round"]
    if not pd.isna(last):
        axes.axvspan(0 if pd.isna(first) else float(first) - 1, float(last), color=RULE, alpha=0.4, zorder=-2)
    axes.axhline(0, color=STRONG, linewidth=0.8, zorder=-1)
