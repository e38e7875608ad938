"""Figures of a report, one for each question; every panel has a name and a description with numbers."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from numpy.typing import NDArray

from flsim.base.statistics import t_interval
from flsim.measures.built_in import PRIMARY, QUANTITIES
from flsim.measures.quantity import Quantity, flags, panels_first
from flsim.report.blocks import Block, Cell, Figure, Fold, folded, number
from flsim.report.contrasts import END
from flsim.report.gather import Configuration, Gathered, RunView, Setting, by_configuration, ceiling_of, percent
from flsim.results.run_file import PARTITIONS
from flsim.results.tables import user_share
from flsim.show import figure as show
from flsim.show.figure import draw_band, draw_line, draw_rule, draw_threads, inline, label_above, panels, scale
from flsim.show.plots import draw_quantity, draw_utility, title_of, unit_of

TOGETHER = 4  # largest number of settings in a panel
MOST = 12  # rows of a panel with dots
STEP = 36  # pixels from a row to the next
CELL, ROW, GAP = 36, 26, 10  # pixels of a cell of a heat map, and between maps
POINTS = 40  # of a canary's line
FLAG = flags(QUANTITIES.values())[0]  # that distinguish lines of canaries
BAND = "Lines are means over seeds, bands from the lowest to the highest seed."
STYLES = {0: "IID", 1: "Non-IID", 2: "records drawn at random"}  # by number of a line style
CEILING = "log₂(|R| + 1)"
BEHIND: dict[str, Any] = {"facecolor": show.PAPER, "edgecolor": "none", "pad": 1}  # width of the text before a line
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Dot:
    """A mean in a row of a panel, with its 95% interval, its single values, and a name."""

    name: str
    style: int
    mean: float
    low: float
    high: float
    parts: Sequence[float] = ()

    def text(self, template: str) -> str:
        """Return the mean with its interval."""
        mean, low, high = (number(value, template) for value in (self.mean, self.low, self.high))
        return f"{self.name}: {mean}" + ("" if low == "–" else f" ({low} to {high})") + "."


Rows = Mapping[str, Sequence[Dot]]


def _dot_panels(
    rows: Rows, ends: tuple[float, float], label: str, template: str, rule: float | None, title: str, id_: str
) -> list[Markup]:
    """Return panels with a row for each name: the means as numbers, and dots below."""
    images = list[Markup]()
    for first in range(0, len(rows), MOST):
        names = list(rows)[first : first + MOST]
        figure, (axes,) = panels(height=38 + STEP * len(names), margins=(6, 10, 4, 34))
        scale(axes.xaxis, *ends, label)
        axes.set(ylim=(STEP * len(names), 0), yticks=[])
        if rule is not None:
            draw_rule(axes, x=rule)
        at: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        for place, name in enumerate(names):
            lowered = re.sub("_([ure])\\b", lambda match: "ᵤᵣₑ"["ure".index(match[1])], name)
            axes.annotate(lowered, (0, STEP * place + 11), (0, 0), color=show.INK, **at)
            means = " / ".join(number(dot.mean, template) for dot in rows[name])
            axes.annotate(means, (1, STEP * place + 11), (-6, 0), ha="right", bbox=BEHIND, **at)
            for index, dot in enumerate(rows[name]):
                y = STEP * place + 24 + (8 * index - 4 if len(rows[name]) > 1 else 0)
                show.draw_interval(axes, y, dot.style, dot.mean, (dot.low, dot.high), dot.parts)
            if place:
                axes.axhline(STEP * place - 2, color=show.RULE, linewidth=0.75)
        description = " ".join(dot.text(template) for name in names for dot in rows[name])
        images.append(inline(figure, f"{id_}-{first}", title, description))
    return images


def overview(gathered: Gathered) -> list[Figure]:
    """Return mean exposure at the end of training: a row for each setting with both of its partitions.

    If there are many settings, a row is a technique, with means over its settings. A seed without a run in one
    partition of a setting is also excluded from the other partition. No figure is returned for a single mean.
    """
    groups = {line.label: line.paired if line.both_partitions else line.settings for line in gathered.lines}
    if len(groups) > MOST:
        settings = [setting for of_line in groups.values() for setting in of_line]
        names = dict.fromkeys(setting.technique for setting in settings)
        groups = {name: [setting for setting in settings if setting.technique == name] for name in names}
    rows: dict[str, list[Dot]] = {}
    for name, settings in groups.items():
        for partition in (*PARTITIONS, None):
            measured = [setting for setting in settings if setting.partition == partition and setting.is_measured]
            if measured:
                rows.setdefault(name, []).append(_mean_of(measured, f"{STYLES[measured[0].style]}, {name}"))
    dots = [dot for of_row in rows.values() for dot in of_row]
    if len(dots) < 2:
        return []
    bounds = [bound for setting in gathered.settings if (bound := setting.ceiling) is not None]
    values = [value for dot in dots for value in (dot.mean, *dot.parts)]
    ceiling = max(bounds) if bounds else None
    ends = min(0.0, *values), ceiling or 1.1 * max(values) or 1.0
    images = _dot_panels(rows, ends, "bits", "{:.1f}", ceiling, PRIMARY.caption, "overview")
    caption = (
        f"{PRIMARY.caption} at the end of training, in {PRIMARY.unit}, with 95% intervals over seeds (Student’s t) and "
        f"each seed (hollow).{f' Dotted: {ceiling:.1f}, the largest possible, {CEILING}.' if ceiling else ''}"
    )
    return [Figure(caption, [("", image) for image in images], legend_of(gathered.settings))]


def _mean_of(settings: Sequence[Setting], name: str) -> Dot:
    """Return the mean over settings of exposure, for the seeds that all settings have."""
    by_seed = [
        {
            run.results.seed if run.results.seed is not None else -place: value
            for place, (run, round_) in enumerate(setting.shown_runs, 1)
            if not math.isnan(value := run.value(PRIMARY, round_))
        }
        for setting in settings
    ]
    seeds = sorted(set.intersection(*map(set, by_seed)))
    means = [float(np.mean([values[seed] for values in by_seed])) for seed in seeds]
    if not means:
        means = [float(np.mean([np.mean([*values.values()]) for values in by_seed]))]
    parts = means if len(means) > 1 else ()
    return Dot(name, settings[0].style, float(np.mean(means)), *t_interval(np.array(means)), parts)


def forest(frame: pd.DataFrame) -> list[Block]:
    """Return the differences in exposure: of each factor, and of the partitions in each setting."""
    frame = frame[(frame["quantity"] == PRIMARY.name) & frame["difference"].notna()]
    images = list[tuple[Cell, Markup]]()
    for title, is_main in (
        ("Each factor, with all other settings equal", True),
        ("IID − non-IID in each setting", False),
    ):
        rows: dict[str, list[Dot]] = {}
        for row in frame[frame["is_main"] == is_main].to_dict("records"):
            name = f"{row['a']} − {row['b']}, {row['setting'] or row['factor']}" if is_main else row["setting"]
            description = f"{name}, {'end of training' if row['at'] == END else 'equal perplexity'}"
            dot = Dot(description, int(row["at"] != END), row["difference"], row["low"], row["high"])
            rows.setdefault(name, []).append(dot)
        dots = [dot for of_row in rows.values() for dot in of_row]
        furthest = 4 * max((abs(dot.mean) for dot in dots), default=0.0) + 0.1
        values = [value for dot in dots for value in (dot.low, dot.mean, dot.high) if not math.isnan(value)]
        low, high = max(-furthest, min([0.0, *values])), min(furthest, max([0.0, *values]))
        ends = low - 0.06 * (high - low) - 0.05, high + 0.06 * (high - low) + 0.05
        dot_panels = _dot_panels(rows, ends, "bits", "{:+.2f}", 0.0, f"Exposure, {title}", f"difference-{int(is_main)}")
        images += [(title, image) for image in dot_panels]
    caption = (
        "Difference in mean exposure, a − b, with its 95% interval, at the end of training and at the first "
        "equal perplexity. Dotted: no difference. Intervals that end at the edge are cut."
    )
    return [Figure(caption, images, [(0, "end of training"), (1, "equal perplexity")])] if images else []


def curves(gathered: Gathered) -> list[Block]:
    """Return figures of every metric over training: few settings share a panel, others have one for each row."""
    begun_settings = [setting for setting in gathered.settings if setting.shown_runs]
    absent = [setting.label for setting in gathered.settings if not setting.shown_runs]
    if not begun_settings:
        return []
    left_out = f" These runs cannot be shown: {'; '.join(absent)}." if absent else ""
    if len(begun_settings) <= TOGETHER:
        styles = {setting: index for index, setting in enumerate(begun_settings)}
        images = [
            (title_of(quantity), _curve(gathered, quantity, styles, "all"))
            for quantity in panels_first(gathered.quantities)
        ]
        legend = [(style, _named(setting)) for setting, style in styles.items()]
        caption = f"Memorization and utility over {_x(gathered)}. {BAND}{left_out}"
        return [Figure(caption, images, legend)]
    blocks: list[Block] = []
    for quantity in panels_first(gathered.quantities):
        images = [
            (line.label, _curve(gathered, quantity, {setting: setting.style for setting in begun}, str(index)))
            for index, line in enumerate(gathered.lines)
            if (begun := [setting for setting in line.settings if setting.shown_runs])
        ]
        caption = f"{title_of(quantity)}, over {_x(gathered)}, each panel as long as its training. {BAND}{left_out}"
        blocks.append(
            Fold(title_of(quantity), [Figure(caption, images, legend_of(begun_settings))], quantity.is_primary)
        )
    return blocks


def primary_curve(gathered: Gathered) -> list[Figure]:
    """Return mean exposure over training in one panel, for a report on one setting."""
    styles = {setting: place for place, setting in enumerate(gathered.settings[:TOGETHER]) if setting.shown_runs}
    if not any(setting.is_measured for setting in styles):
        return []
    panel = _curve(gathered, PRIMARY, styles, "first")
    return [Figure(f"{PRIMARY.caption} over {_x(gathered)}. {BAND}", [("", panel)])]


def _with_unit(quantity: Quantity, value: float) -> str:
    if quantity.is_flag:
        return f"{value:.1f} canaries"
    unit = "%" if quantity.is_percentage else f" {quantity.unit}" if quantity.of_canaries else ""
    return quantity.format.format(value) + unit


def _curve(gathered: Gathered, quantity: Quantity, styles: Mapping[Setting, int], id_: str) -> Markup:
    """Return a panel with the settings' curves, on the scale of all settings."""
    title, x = title_of(quantity), _x(gathered)
    measured = {setting: setting.curve(quantity, gathered.in_epochs) for setting in gathered.settings}
    curves_by_style = {style: measured[setting] for setting, style in styles.items()}
    figure, (axes,) = panels()
    last = max((line.x[-1] for line in curves_by_style.values() if len(line.x)), default=1.0)
    scale(axes.xaxis, 0, last or 1.0, x, is_whole=not gathered.in_epochs)
    heights = np.concatenate(
        [values for line in measured.values() for values in (line.y, *_known(line.low, line.high))]
    )
    runs = [run.results for setting in styles for run, _ in setting.shown_runs]
    canaries = max(len(run.planted) for run in runs)
    draw_quantity(axes, quantity, curves_by_style, heights, canaries, runs)
    label_above(axes, unit_of(quantity))
    descriptions = []
    for setting, line in zip(styles, curves_by_style.values(), strict=True):
        begin, end = (_with_unit(quantity, line.y[place]) for place in (0, -1)) if len(line.y) else ("", "")
        description = (
            f"from {begin} at {line.x[0]:.3g} to {end} at {line.x[-1]:.3g} {x}" if len(line.y) else "not measured"
        )
        descriptions.append(f"{setting.label}: {description}.")
    return inline(figure, f"{quantity.name}-{id_}", f"{title} over {x}", " ".join(descriptions))


def _known(*values: Floats) -> list[Floats]:
    return [array[np.isfinite(array)] for array in values]


def by_perplexity(gathered: Gathered) -> list[Block]:
    """Return exposure against perplexity, with a panel for each row of the tables."""
    paths = {setting: path for setting in gathered.settings if len(path := setting.path) > 1}
    groups = [(line.label, [setting for setting in line.settings if setting in paths]) for line in gathered.lines]
    images = [
        (
            label,
            _utility_panel(
                {setting: paths[setting] for setting in group}, [setting.style for setting in group], f"line-{index}"
            ),
        )
        for index, (label, group) in enumerate(groups)
        if group
    ]
    caption = (
        "Mean exposure against perplexity on test text, from one evaluation to the next; both axes are means "
        "over seeds. Training goes from right to left. If a curve is below another curve, its models memorize "
        "less at an equal perplexity."
    )
    return folded(Figure(caption, images, legend_of(list(paths))), "Exposure against perplexity")


def _utility_panel(paths: Mapping[Setting, Floats], styles: Sequence[int], id_: str) -> Markup:
    figure, (axes,) = panels()
    draw_utility(axes, dict(zip(styles, paths.values(), strict=True)))
    axes.set_xlabel("perplexity, log scale", loc="right", labelpad=2)
    label_above(axes, "bits")
    description = []
    for setting, path in paths.items():
        (first, begin), (last, end) = path[0, :2], path[-1, :2]
        description.append(
            f"{setting.label}: from {begin:.1f} bits at perplexity {first:.4g} to {end:.1f} bits at {last:.4g}."
        )
    return inline(figure, f"utility-{id_}", "Exposure against perplexity", " ".join(description))


def traces(gathered: Gathered) -> list[Block]:
    """Return a panel for each setting, with a thin line for every canary of one run."""
    images = [
        (setting.label, image)
        for index, setting in enumerate(gathered.settings)
        if setting.shown_runs and not setting.last(PRIMARY.name).empty
        for image in [_traced(setting, setting.shown_runs[0][0], index, gathered)]
    ]
    caption = (
        f"Bits of exposure of each canary of the first seed, over {_x(gathered)}, by configuration. Solid: "
        f"{FLAG.outcome} at the last evaluation, as {FLAG.title} {FLAG.finds}; dashed: not. Numbers: canaries "
        f"{FLAG.outcome}, of all canaries."
    )
    return folded(Figure(caption, images), "Canary by canary", most=TOGETHER)


def _traced(setting: Setting, run: RunView, index: int, gathered: Gathered) -> Markup:
    """Return small axes for each configuration of a run's canaries, with one scale."""
    bits, by_flag = run.of_planted(PRIMARY.name), run.of_planted(FLAG.name)
    rounds = bits.index[:: -math.ceil(len(bits) / POINTS)][::-1]
    xs = [(run.results.epochs_of(round_) or 0.0) if gathered.in_epochs else float(round_) for round_ in rounds]
    ceiling, groups = ceiling_of([run]), by_configuration(run.results.planted)
    columns = 2 if len(groups) > 1 else 1
    rows = math.ceil(len(groups) / columns)
    size = {"height": 32 + 92 * rows, "rows": rows, "columns": columns, "margins": (22, 6, 22, 30), "gaps": (22, 32)}
    figure, grid = panels(**size, sharex=True, sharey=True)  # type: ignore[arg-type]
    top = max(float(bits.to_numpy().max()), ceiling or 1.0)
    scale(grid[0].xaxis, 0, max(xs) or 1.0, most=3, is_whole=not gathered.in_epochs)
    scale(grid[0].yaxis, min(0.0, float(bits.to_numpy().min())), 1.03 * top, most=2)
    description = []
    for axes, (configuration, planted) in zip(grid, groups.items(), strict=False):
        if ceiling is not None:
            draw_rule(axes, y=ceiling)
        canaries = planted["canary"].tolist()
        memorized = {canary for canary in canaries if not by_flag.empty and by_flag[canary].iloc[-1] == 1}
        lines = {
            is_memorized: [canary for canary in canaries if (canary in memorized) is is_memorized]
            for is_memorized in (False, True)
        }
        looks = {False: {"color": show.STRONG, "linewidth": 0.9, "linestyle": (0, (3, 2))}, True: {}}
        for is_memorized, of_kind in lines.items():
            draw_threads(axes, xs, [bits.loc[rounds, canary].tolist() for canary in of_kind], **looks[is_memorized])
        axes.set_title(f"{_short(configuration)}: {len(memorized)}/{len(canaries)}", x=0, pad=5, color=show.INK)
        ends = bits.loc[rounds[-1], canaries]
        description.append(
            f"{configuration.label}: {len(memorized)} of {len(canaries)} canaries memorized; exposures end between "
            f"{ends.min():.1f} and {ends.max():.1f} bits."
        )
    for axes in grid[len(groups) :]:
        axes.set_axis_off()
    grid[len(groups) - 1].set_xlabel(_x(gathered), loc="right", labelpad=2)
    return inline(figure, f"trace-{index}", f"Exposure of each canary, {setting.label}", " ".join(description))


def _short(configuration: Configuration) -> str:
    if configuration.is_grid and not configuration.window:
        return f"{user_share(configuration.p_u)} × {percent(configuration.p_e)}"
    return configuration.label


def configurations(gathered: Gathered) -> list[Block]:
    """Return a panel for each setting and quantity of canaries: a heat map over p_u x p_e, or bars over copies."""
    measured = [quantity for quantity in gathered.quantities if quantity.of_canaries]
    images = list[tuple[Cell, Markup]]()
    for index, setting in enumerate(gathered.settings):
        maps = list[tuple[Quantity, Mapping[Configuration, float]]]()
        for quantity in measured:
            if not (last := setting.last(quantity.name)).empty:
                # the percentage of a configuration's canaries that are memorized, or the mean of a number over them
                scale_ = 100 if quantity.is_flag else quantity.scale
                values = last["value"] == 1 if quantity.is_flag else last["value"]
                groups = by_configuration(last.assign(value=values))
                maps.append((quantity, {at: float(scale_ * rows["value"].mean()) for at, rows in groups.items()}))
        if maps:
            images.append((f"{setting.label} ({setting.seeds})", _maps(setting, maps, f"map-{index}")))
    caption = (
        "Outcome in each configuration, at the last evaluation, over all seeds. Rows: p_u, the probability that a user "
        "shares a canary; columns: p_e, the probability that a record of a sharer is replaced by it. Without these "
        "probabilities, rows: numbers of copies."
    )
    return folded(Figure(caption, images), "Settings", most=TOGETHER)


def _maps(setting: Setting, maps: Sequence[tuple[Quantity, Mapping[Configuration, float]]], id_: str) -> Markup:
    """Return a heat map for each quantity and window of canaries, as many side by side as possible."""
    parts = [
        (
            quantity,
            {configuration: value for configuration, value in values.items() if configuration.window == window},
            window,
        )
        for quantity, values in maps
        for window in dict.fromkeys(configuration.window for configuration in values)
    ]
    names = [_names(values) for _, values, _ in parts]
    left = 14 + 6 * max(len(name) for rows, _ in names for name in rows)
    wide, high = CELL * max(len(of_map) for _, of_map in names), ROW * max(len(of_map) for of_map, _ in names)
    columns = max(1, min(len(parts), int((show.WIDTH - left + GAP) // (wide + GAP))))
    rows = math.ceil(len(parts) / columns)
    right = show.WIDTH - left - columns * wide - GAP * (columns - 1)
    size: dict[str, Any] = {"margins": (left, right, 20, 22), "gaps": (GAP, 42), "rows": rows, "columns": columns}
    figure, grid = panels(height=rows * high + (rows - 1) * 42 + 42, **size)
    description = []
    for place, (axes, (quantity, values, window)) in enumerate(zip(grid, parts, strict=False)):
        template = "{:.0f}" if quantity.is_flag else quantity.format
        highest = 100.0 if quantity.is_flag else (setting.ceiling if quantity.is_primary else None)
        _map(axes, values, template, highest or max(values.values()) or 1.0, has_rows=not place % columns)
        title = f"{quantity.heading}, %" if quantity.is_flag else f"mean {quantity.unit or quantity.heading}"
        axes.set_title(", ".join(filter(None, (title, window))), x=0, pad=5, color=show.INK)
        name = f"{quantity.heading}, % {quantity.outcome}" if quantity.is_flag else f"mean {quantity.phrase}"
        words = (f"{configuration.label}: {template.format(value)}" for configuration, value in values.items())
        description.append(f"{name}: {'; '.join(words)}.")
    for axes in grid[len(parts) :]:
        axes.set_axis_off()
    return inline(figure, id_, f"By configuration, {setting.label}", " ".join(description))


def _names(values: Mapping[Configuration, float]) -> tuple[list[str], list[str]]:
    """Return the names of the rows and columns: p_u upwards and p_e, or numbers of copies downwards."""
    if all(configuration.is_grid for configuration in values):
        grid = (
            sorted({configuration.p_u for configuration in values}),
            sorted({configuration.p_e for configuration in values}),
        )
        return list(map(user_share, grid[0])), list(map(percent, grid[1]))
    return [_row(configuration) for configuration in values][::-1], [""]


def _row(configuration: Configuration) -> str:
    if configuration.is_grid:
        return _short(configuration)
    return "all" if math.isnan(configuration.copies) else f"{configuration.copies:,.0f}"


def _map(axes: Axes, values: Mapping[Configuration, float], template: str, highest: float, *, has_rows: bool) -> None:
    """Draw numbers in cells, shaded by their ratio to the largest."""
    rows, columns = _names(values)
    levels = np.zeros((len(rows), len(columns)))
    for configuration, value in values.items():
        row, column = _row(configuration), ""
        if columns != [""]:
            row, column = user_share(configuration.p_u), percent(configuration.p_e)
        y, x = rows.index(row), columns.index(column)
        levels[y, x] = min(len(show.SHADES) - 1, int(len(show.SHADES) * value / highest)) if value > 0 else 0
        colour = show.ON_LOW if levels[y, x] < 4 else show.ON_HIGH
        axes.text(x + 0.5, y + 0.5, template.format(value), ha="center", va="center_baseline", color=colour)
    norm = BoundaryNorm(np.arange(len(show.SHADES) + 1) - 0.5, len(show.SHADES))
    axes.pcolormesh(levels, cmap=ListedColormap(show.SHADES), norm=norm, edgecolors=show.PAPER, linewidth=1.5)
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(length=0)
    axes.set_xticks(np.arange(len(columns)) + 0.5, columns)
    axes.set_yticks(np.arange(len(rows)) + 0.5, rows if has_rows else [""] * len(rows))


def roc_panel(
    title: str,
    id_: str,
    curves_of: Sequence[tuple[int, Floats, Floats]],
    lowest: tuple[float, float],
    description: str,
    band: tuple[Floats, Floats, Floats] | None = None,
    allowed: Callable[[Floats], Floats] | None = None,
) -> Markup:
    """Return true-positive rates over false-positive rates on logarithmic scales, with chance dashed."""
    left, floor = lowest
    figure, (axes,) = panels()
    scale(axes.xaxis, left, 1.0, "FPR", is_log=True)
    scale(axes.yaxis, floor, 1.0, "TPR", is_log=True)
    draw_threads(axes, [max(left, floor), 1.0], [[max(left, floor), 1.0]], color=show.STRONG, linestyle=(0, (3, 2)))
    if band is not None:
        draw_band(axes, *band, curves_of[0][0])
    if allowed is not None:
        rates = np.geomspace(left, 1.0, 60)
        draw_line(axes, rates, np.clip(allowed(rates), floor, 1.0), 2, has_markers=False)
    for style, fpr, tpr in curves_of:
        draw_line(axes, np.maximum(fpr, left), np.maximum(tpr, floor), style, has_markers=False)
    return inline(figure, id_, title, description)


def legend_of(settings: Sequence[Setting]) -> list[tuple[int, str]]:
    """Return the line styles of the settings' partitions with their names."""
    return [(style, STYLES[style]) for style in sorted({setting.style for setting in settings})]


def _named(setting: Setting) -> str:
    unfinished = f", at round {setting.shown_runs[0][1]:,}, unfinished" if setting.is_unfinished else ""
    return f"{setting.label} ({setting.seeds}{unfinished})"


def _x(gathered: Gathered) -> str:
    return "epochs" if gathered.in_epochs else "rounds (central: steps)"
