"""Figure of exposure against rounds since last use, and of the advantage against rounds, by window."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flsim.attacks.forgetting import advantage
from flsim.attacks.forgetting.measure import Forgetting, curve
from flsim.attacks.forgetting.tables import name_text, rounds_text
from flsim.attacks.forgetting.times import grid
from flsim.base.errors import InputError
from flsim.show.figure import (
    LINES,
    RULE,
    STRONG,
    draw_band,
    draw_line,
    legend_below,
    plain,
    subplots,
    write_figure,
)

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
        advantages = {name: advantage.curve(group) for name, group in groups.items()} if has_twin else {}
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


def plot(measured: Forgetting, path: Path) -> None:
    """Write the figure of `draw`, atomically. Raises InputError if no exposure was measured after a canary's use."""
    if measured.success["bits_in"].isna().all():
        raise InputError(
            "no exposure was measured after a canary was used, so the plot is empty; evaluate later rounds, without "
            "evaluation.decide"
        )
    write_figure(lambda: draw(measured), path)


def draw(measured: Forgetting) -> Figure:
    """Return a figure with a panel for each setting and window, and a line for each group of canaries.

    A line is the mean over seeds of the median exposure, with its interval. The panel below has the advantage.
    """
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
