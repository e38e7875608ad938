"""Figure of exposure against rounds since last use, and of the advantage against rounds, by window."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flsim.attacks.forgetting import advantage
from flsim.attacks.forgetting.measure import Forgetting, curve
from flsim.attacks.forgetting.tables import name_text, rounds_text
from flsim.attacks.forgetting.times import grid
from flsim.base.errors import InputError
from flsim.show.figure import legend_below, line_style, plain, subplots, write_figure

OUT = {"color": "#555555", "linestyle": (0, (1, 2)), "linewidth": 1.4}
COLUMNS = 3
MOST_TICKS = 8  # distance of labels that do not overlap
LINE = "Line: median exposure{}; band: its 95% interval over {}"


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

    A line is the mean over seeds of the median exposure, with its interval, and the dotted line arm OUT, with which the
    panel below has the advantage.
    """
    panels = measured.windows()
    several = measured.times["series"].nunique() > 1
    names = list(dict.fromkeys(name_text(row, "arm IN") for row in measured.times.to_dict("records")))
    columns = 2 if len(panels) == 4 else min(COLUMNS, len(panels))
    has_twin = bool(measured.times["advantage"].notna().any())
    kinds = 1 + has_twin
    rows = math.ceil(len(panels) / columns)
    height = 3.1 * rows * kinds + 0.6 + 0.2 * math.ceil(len(names) / 4)
    figure, all_axes = subplots(max(5.0, 3.6 * columns), height, rows * kinds, columns, sharey="row")
    exposures = all_axes[::kinds].ravel().tolist()
    advantages = all_axes[1::kinds].ravel().tolist() if has_twin else []
    for empty in (*exposures[len(panels) :], *advantages[len(panels) :]):
        empty.set_axis_off()
    for index, (axes, table) in enumerate(zip(exposures, panels, strict=False)):
        first_row = table.iloc[0].to_dict()
        window = f"planted in {rounds_text(first_row)}"
        axes.set_title(plain(f"{first_row['setting']}\n{window}" if several else window), fontsize=10)
        _draw(axes, curve(table, "out"), **OUT, label="arm OUT")
        for _, of_group in table.groupby("group", sort=False):
            name = name_text(of_group.iloc[0].to_dict(), "arm IN")
            style = line_style(names.index(name)) | {"markersize": 5, "label": plain(name)}
            _draw(axes, curve(of_group, "in"), **style)
            if has_twin:
                _draw(advantages[index], advantage.curve(of_group), **style | {"markersize": 3})
        if has_twin:  # shade the rounds in which canaries are planted, and mark the line at which nothing was added
            lower, (first, last) = advantages[index], (first_row["first_round"], first_row["last_round"])
            if not pd.isna(last):
                lower.axvspan(0 if pd.isna(first) else float(first) - 1, float(last), color="#eeeeee", zorder=-2)
            lower.axhline(0, color="#555555", linewidth=0.8, zorder=-1)
            lower.set_xlabel("rounds")
    _scale(exposures[: len(panels)], columns)
    for axes in advantages[::columns]:
        axes.set_ylabel("nats that training added")
    has_seeds = bool((measured.success["seeds"] > 1).any())
    over = "seeds (t)" if has_seeds else "canaries"
    legend_below(figure, exposures, 4, LINE.format(" and mean advantage" * has_twin, over))
    return figure


def _draw(axes: Axes, points: Sequence[tuple[float, float, float, float]], **style: object) -> None:
    """Draw points with their intervals; draw nothing if there are none."""
    x, y, lows, highs = np.array(points, dtype="float64").reshape(-1, 4).T
    if len(x):
        (line,) = axes.plot(x, y, **style)  # type: ignore[arg-type]
        axes.fill_between(x, lows, highs, color=line.get_color(), alpha=0.15, linewidth=0)


def _scale(panels: Sequence[Axes], columns: int) -> None:
    """Set scales on which early rounds are as wide as late rounds, and that contain all lines; wide bands are cut."""
    heights = [np.asarray(line.get_ydata(), "float64") for axes in panels for line in axes.get_lines()]
    for index, axes in enumerate(panels):
        longest = int(max((np.max(line.get_xdata()) for line in axes.get_lines()), default=1))
        ticks = [k for k in grid(longest) if k < longest / 1.5]
        if len(ticks) > MOST_TICKS:
            ticks = [k for k in ticks if math.log10(max(k, 1)).is_integer() and k < longest / 3]
        ticks = [*ticks, longest]
        axes.set_xscale("symlog", linthresh=1, linscale=0.5)
        axes.set_xlim(-0.1, 1.1 * longest + 1)
        axes.set_xticks(ticks, map(str, ticks))
        axes.minorticks_off()
        axes.set_xlabel("rounds since last use")
        axes.set_ylim(0, 1.15 * float(np.nanmax(np.concatenate(heights))))
        if index % columns == 0:
            axes.set_ylabel("exposure (bits)")
