"""Blocks and figures of a report; a figure for each question, whose panels have names and descriptions with numbers."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.colors import BoundaryNorm, ListedColormap

from flsim.base.arrays import Floats
from flsim.base.statistics import t_interval
from flsim.measures.built_in import PRIMARY, QUANTITIES
from flsim.measures.quantity import Quantity, flags, panels_first
from flsim.report.gather import Gathered, Setting, by_configuration
from flsim.results.differences import END
from flsim.show import figure as show
from flsim.show.figure import inline, label_above, panels, scale, swatch
from flsim.show.plots import draw_quantity, draw_utility, title_of, unit_of
from flsim.show.table import Column, Field, table_of
from flsim.show.table import Table as ShownTable

# Blocks of the sections of a report, which template.html lays out, and the text of numbers.


@dataclass(frozen=True)
class Note:
    """A paragraph in smaller type."""

    text: str


@dataclass(frozen=True)
class Facts:
    """A list of names, each with a description."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class ReportTable:
    """A table whose first column names its rows."""

    caption: str
    columns: Sequence[Column]
    notes: Sequence[str] = ()

    @property
    def rows(self) -> list[tuple[str, ...]]:
        return list(zip(*(column.cells for column in self.columns), strict=True))


@dataclass(frozen=True)
class Figure:
    """Panels of one width, side by side if they fit."""

    caption: str
    panels: Sequence[tuple[str, Markup]]
    legend: Sequence[tuple[int, str]] = ()

    @property
    def swatches(self) -> list[tuple[Markup, str]]:
        return [(swatch(style), text) for style, text in self.legend]


@dataclass(frozen=True)
class Fold:
    """Folded blocks, which a click opens; a printed report shows them."""

    title: str
    blocks: "Sequence[Block]"
    is_open: bool = False


Block = Note | Facts | ReportTable | Figure | Fold


@dataclass(frozen=True)
class Section:
    """A part of the report with a heading."""

    id: str
    title: str
    blocks: list[Block] = field(default_factory=list)


def shown(table: ShownTable, caption: str, most: int = 8) -> list[Block]:
    """Return a table of the command line with all columns side by side; folded if it has more than `most` rows."""
    columns = [*table.labels, *(column for unit in table.units for column in unit)]
    below, *others = (" ".join(part.split()) for part in table.below.split("\n\n"))
    explained = " ".join(filter(None, dict.fromkeys([*(column.note for column in columns), below])))
    block = ReportTable(caption, columns, list(filter(None, [explained, *others])))
    return [block] if len(block.rows) <= most else [Fold(f"{caption}: {len(block.rows)} rows", [block])]


def listed(
    caption: str, rows: Sequence[Mapping[Any, Any]], fields: Sequence[Field], *notes: str, most: int = 8
) -> list[Block]:
    """Return rows as a table of the fields that some row has, see `shown`; no block without rows."""
    return shown(table_of(pd.DataFrame(rows, dtype=object), fields, [], notes), caption, most) if rows else []


def folded(figure: Figure, title: str, most: int) -> list[Block]:
    """Return a figure with its first panels shown, and all others folded."""
    if not figure.panels:
        return []
    rest = replace(figure, caption=f"{figure.caption} (continued)", panels=figure.panels[most:])
    first = replace(figure, panels=figure.panels[:most])
    return [first, *([Fold(f"{title}: {len(rest.panels)} more", [rest])] if rest.panels else [])]


def number(value: Any, template: str = "{:.1f}") -> str:
    """Return a number as text with a real minus sign; a dash if it is missing."""
    return "–" if value is None or pd.isna(value) else template.format(value).replace("-", "\N{MINUS SIGN}")


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, such as "1 run" or "2 runs"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def duration(seconds: float | None) -> str:
    """Return wall-clock time in a suitable unit; a dash if it is not known."""
    if seconds is None:
        return "–"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


# The figures, and the blocks that they are in.

TOGETHER = 4  # largest number of settings in a panel
MOST = 12  # rows of a panel with dots
STEP = 36  # pixels from a row to the next
ROW = 26  # pixels of a row of a heat map
POINTS = 40  # of a canary's line
SHORT = 16  # characters of a title above half a panel
FLAG = flags(QUANTITIES.values())[0]  # that distinguish lines of canaries
BAND = "Lines are means over seeds, bands from the lowest to the highest seed."
ALL_CONTRASTS = {"Each factor, with all other settings equal": True, "IID − non-IID in each setting": False}
STYLES = {0: "IID", 1: "Non-IID", 2: "records drawn at random"}  # by number of a line style
BEHIND: dict[str, Any] = {"facecolor": show.PAPER, "edgecolor": "none", "pad": 1}  # width of the text before a line


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


def _dots(rows: Rows, ends: tuple[float, float], template: str, rule: float | None, title: str, id_: str) -> Markup:
    """Return a panel with a row for each name: the means as numbers, and dots below, in bits."""
    figure, (axes,) = panels(height=38 + STEP * len(rows), margins=(6, 10, 4, 34))
    scale(axes.xaxis, *ends, "bits")
    axes.set(ylim=(STEP * len(rows), 0), yticks=[])
    if rule is not None:
        show.draw_rule(axes, x=rule)
    at: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    for place, (name, dots) in enumerate(rows.items()):
        lowered = re.sub("_([ure])\\b", lambda match: "ᵤᵣₑ"["ure".index(match[1])], name)
        axes.annotate(lowered, (0, STEP * place + 11), (0, 0), color=show.INK, **at)
        means = " / ".join(number(dot.mean, template) for dot in dots)
        axes.annotate(means, (1, STEP * place + 11), (-6, 0), ha="right", bbox=BEHIND, **at)
        for index, dot in enumerate(dots):
            y = STEP * place + 24 + (8 * index - 4 if len(dots) > 1 else 0)
            show.draw_interval(axes, y, dot.style, dot.mean, (dot.low, dot.high), dot.parts)
        if place:
            axes.axhline(STEP * place - 2, color=show.RULE, linewidth=0.75)
    return inline(figure, id_, title, " ".join(dot.text(template) for dots in rows.values() for dot in dots))


def overview(gathered: Gathered) -> list[Figure]:
    """Return mean exposure at the end of training: a row for each setting with both of its partitions.

    A seed without a run in one partition of a setting is also excluded from the other partition. No figure is returned
    for a single mean.
    """
    rows: dict[str, list[Dot]] = {}
    for line in gathered.lines:
        exposures = {setting: setting.exposures for setting in line.settings if setting.exposures}
        common = set.intersection(*map(set, exposures.values())) if exposures else set()
        for setting, by_seed in exposures.items():
            values = [value for seed, value in by_seed.items() if seed in common or not common]
            interval, parts = t_interval(np.array(values)), values if len(values) > 1 else ()
            name = f"{STYLES[setting.style]}, {line.label}"
            dot = Dot(name, setting.style, float(np.mean(values)), *interval, parts)
            rows.setdefault(line.label, []).append(dot)
    dots = [dot for of_row in rows.values() for dot in of_row]
    if len(dots) < 2:
        return []
    ceilings = {run.ceiling for run in gathered.runs if run.ceiling}
    ceiling = max(ceilings, default=None)
    highest = "the largest possible" + " of any run" * (len(ceilings) > 1)
    every = [value for dot in dots for value in (dot.mean, *dot.parts)]
    ends = min(0.0, *every), ceiling or 1.1 * max(every) or 1.0
    caption = (
        f"{PRIMARY.caption} at the end of training, in {PRIMARY.unit}, with 95% intervals over seeds (Student’s t) and "
        f"each seed (hollow).{f' Dotted: {ceiling:.1f}, {highest}, log₂(|R| + 1).' if ceiling else ''}"
    )
    image = _dots(rows, ends, "{:.1f}", ceiling, PRIMARY.caption, "overview")
    return [Figure(caption, [("", image)], legend_of(gathered.settings))]


def forest(frame: pd.DataFrame, id_: str = "difference") -> list[Figure]:
    """Return the differences in exposure: of each factor, and of the partitions in each setting."""
    frame = frame[(frame["quantity"] == PRIMARY.name) & (frame["test"] == "t") & frame["difference"].notna()]
    frame = frame.astype(dict.fromkeys(("difference", "low", "high"), "float64"))
    images = list[tuple[str, Markup]]()
    for title, is_main in ALL_CONTRASTS.items():
        rows: dict[str, list[Dot]] = {}
        for row in frame[frame["is_main"] == is_main].to_dict("records"):
            name = f"{row['a']} − {row['b']}, {row['setting'] or row['factor']}" if is_main else row["setting"]
            description = f"{name}, {'end of training' if row['at'] == END else row['at']}"
            dot = Dot(description, int(row["at"] != END), row["difference"], row["low"], row["high"])
            rows.setdefault(name, []).append(dot)
        dots = [dot for of_row in rows.values() for dot in of_row]
        furthest = 4 * max((abs(dot.mean) for dot in dots), default=0.0) + 0.1
        values = [value for dot in dots for value in (dot.low, dot.mean, dot.high) if not math.isnan(value)]
        low, high = max(-furthest, min([0.0, *values])), min(furthest, max([0.0, *values]))
        margin = 0.06 * (high - low) + 0.05
        for first in range(0, len(rows), MOST):
            part = dict(list(rows.items())[first : first + MOST])
            name = f"{id_}-{int(is_main)}-{first}"
            image = _dots(part, (low - margin, high + margin), "{:+.2f}", 0.0, f"Exposure, {title}", name)
            images.append((title, image))
    caption = (
        "Difference in mean exposure, a − b, with its 95% interval, at the end of training and at the first "
        "equal perplexity. Dotted: no difference. Intervals that end at the edge are cut."
    )
    return [Figure(caption, images, [(0, "end of training"), (1, "equal perplexity")])] if images else []


def curves(gathered: Gathered) -> list[Block]:
    """Return figures of every metric over training: few settings share a panel, others have one for each row."""
    begun = [setting for setting in gathered.settings if setting.shown_runs]
    absent = "; ".join(setting.label for setting in gathered.settings if not setting.shown_runs)
    note = f"{BAND}{f' These runs cannot be shown: {absent}.' if absent else ''}"
    quantities = panels_first(gathered.quantities) if begun else []
    if 0 < len(begun) <= TOGETHER:
        styles = {setting: style for style, setting in enumerate(begun)}
        images = [(title_of(quantity), _curve(gathered, quantity, styles, "all")) for quantity in quantities]
        legend = [(style, _named(setting)) for setting, style in styles.items()]
        return [Figure(f"Memorization and utility over {_x(gathered)}. {note}", images, legend)]
    rows = [(line.label, {one: one.style for one in line.settings if one.shown_runs}) for line in gathered.lines]
    blocks: list[Block] = []
    for quantity in quantities:
        images = [
            (label, _curve(gathered, quantity, styles, str(place)))
            for place, (label, styles) in enumerate(rows)
            if styles
        ]
        caption = f"{title_of(quantity)}, over {_x(gathered)}, each panel as long as its training. {note}"
        blocks.append(Fold(title_of(quantity), [Figure(caption, images, legend_of(begun))], quantity.is_primary))
    return blocks


def primary_curve(gathered: Gathered) -> list[Figure]:
    """Return mean exposure over training in one panel, for a report on few settings."""
    begun = [setting for setting in gathered.settings if setting.shown_runs][:TOGETHER]
    if not any(setting.exposures for setting in begun):
        return []
    panel = _curve(gathered, PRIMARY, {setting: style for style, setting in enumerate(begun)}, "first")
    legend = [(style, _named(setting)) for style, setting in enumerate(begun)]
    return [Figure(f"{PRIMARY.caption} over {_x(gathered)}. {BAND}", [("", panel)], legend)]


def _curve(gathered: Gathered, quantity: Quantity, styles: Mapping[Setting, int], id_: str) -> Markup:
    """Return a panel with the settings' curves, on the scale of all settings."""
    title, x = title_of(quantity), _x(gathered)
    measured = {setting: setting.curve(quantity, gathered.in_epochs) for setting in gathered.settings}
    lines = {setting: measured[setting] for setting in styles}
    figure, (axes,) = panels()
    last = max((line.x[-1] for line in lines.values() if len(line.x)), default=1.0)
    scale(axes.xaxis, 0, last or 1.0, x, is_whole=not gathered.in_epochs)
    heights = np.concatenate([values for line in measured.values() for values in (line.y, line.low, line.high)])
    runs = [run.results for setting in styles for run, _ in setting.shown_runs]
    by_style = {style: lines[setting] for setting, style in styles.items()}
    canaries = max(len(run.planted) for run in runs)
    draw_quantity(axes, quantity, by_style, heights[np.isfinite(heights)], canaries, runs)
    label_above(axes, unit_of(quantity))
    template = "{:.1f} canaries" if quantity.is_flag else quantity.format
    unit = "%" if quantity.is_percentage else f" {quantity.unit}" if quantity.of_canaries and quantity.unit else ""
    description = []
    for setting, line in lines.items():
        ends = (f"{template.format(line.y[end])}{unit} at {line.x[end]:.3g}" for end in (0, -1) if len(line.y))
        description.append(
            f"{setting.label}: " + (f"from {' to '.join(ends)} {x}." if len(line.y) else "not measured.")
        )
    return inline(figure, f"{quantity.name}-{id_}", f"{title} over {x}", " ".join(description))


def by_perplexity(gathered: Gathered) -> list[Block]:
    """Return exposure against perplexity, with a panel for each row of the tables."""
    rows = [(line.label, {one: path for one in line.settings if len(path := one.path) > 1}) for line in gathered.lines]
    images = [(label, _utility_panel(paths, f"line-{place}")) for place, (label, paths) in enumerate(rows) if paths]
    caption = (
        "Mean exposure against perplexity on test text, from one evaluation to the next; both axes are means "
        "over seeds. Better models are to the left. If a curve is below another curve, its models memorize "
        "less at an equal perplexity."
    )
    figure = Figure(caption, images, legend_of([setting for _, paths in rows for setting in paths]))
    return folded(figure, "Exposure against perplexity", most=2 * TOGETHER)


def _utility_panel(paths: Mapping[Setting, Floats], id_: str) -> Markup:
    figure, (axes,) = panels()
    draw_utility(axes, {setting.style: path for setting, path in paths.items()})
    axes.set_xlabel("perplexity, log scale", loc="right", labelpad=2)
    label_above(axes, "bits")
    description = []
    for setting, path in paths.items():
        ends = (f"{bits:.1f} bits at perplexity {perplexity:.4g}" for perplexity, bits, *_ in (path[0], path[-1]))
        description.append(f"{setting.label}: from {' to '.join(ends)}.")
    return inline(figure, f"utility-{id_}", "Exposure against perplexity", " ".join(description))


def traces(gathered: Gathered) -> list[Block]:
    """Return a panel for each setting, with a thin line for every canary of one run, by configuration."""
    images = list[tuple[str, Markup]]()
    for index, setting in enumerate(gathered.settings):
        run = (setting.shown_runs or [(setting.runs[0], 0)])[0][0]
        bits, flag = run.of_planted(PRIMARY.name), run.of_planted(FLAG.name)
        if bits.empty:
            continue
        rounds = bits.index[:: -math.ceil(len(bits) / POINTS)][::-1]
        xs = [(run.results.epochs_of(round_) or 0.0) if gathered.in_epochs else float(round_) for round_ in rounds]
        found = flag.iloc[-1] == 1 if len(flag) else pd.Series(False, bits.columns)
        groups = by_configuration(run.results.planted)
        columns = 2 if len(groups) > 1 and max(map(len, groups)) <= SHORT else 1
        rows = math.ceil(len(groups) / columns)
        size: dict[str, Any] = {"height": 32 + 92 * rows, "margins": (22, 6, 22, 30), "gaps": (22, 32)}
        figure, grid = panels(rows=rows, columns=columns, sharex=True, sharey=True, **size)
        scale(grid[0].xaxis, 0, max(xs) or 1.0, most=3, is_whole=not gathered.in_epochs)
        top = max(float(bits.to_numpy().max()), run.ceiling or 1.0)
        scale(grid[0].yaxis, min(0.0, float(bits.to_numpy().min())), 1.03 * top, most=2)
        description = []
        for axes, (name, planted) in zip(grid, groups.items(), strict=False):
            if run.ceiling:
                show.draw_rule(axes, y=run.ceiling)
            canaries = planted["canary"]
            memorized = canaries[found[canaries].to_numpy()]
            missed: dict[str, Any] = {"color": show.STRONG, "linewidth": 0.9, "linestyle": (0, (3, 2))}
            for ids, look in ((canaries[~canaries.isin(memorized)], missed), (memorized, {})):
                show.draw_threads(axes, xs, bits.loc[rounds, ids].to_numpy().T.tolist(), **look)
            axes.set_title(f"{name}: {len(memorized)}/{len(canaries)}", x=0, pad=5, color=show.INK)
            ends = bits.loc[rounds[-1], canaries]
            description.append(
                f"{name}: {len(memorized)} of {len(canaries)} canaries {FLAG.outcome}; exposures end between "
                f"{ends.min():.1f} and {ends.max():.1f} bits."
            )
        for axes in grid[len(groups) :]:
            axes.set_axis_off()
        grid[len(groups) - 1].set_xlabel(_x(gathered), loc="right", labelpad=2)
        title = f"Exposure of each canary, {setting.label}"
        images.append((setting.label, inline(figure, f"trace-{index}", title, " ".join(description))))
    caption = (
        f"Bits of exposure of each canary of the first seed, over {_x(gathered)}, by configuration. Solid: "
        f"{FLAG.outcome} at the last evaluation, as {FLAG.title} {FLAG.finds}; dashed: not. Numbers: canaries "
        f"{FLAG.outcome}, of all canaries."
    )
    return folded(Figure(caption, images), "Canary by canary", most=TOGETHER)


def configurations(gathered: Gathered) -> list[Block]:
    """Return a heat map of the outcome for each setting, with a row for each configuration of canaries."""
    measured = [quantity for quantity in gathered.quantities if quantity.of_canaries]
    images = list[tuple[str, Markup]]()
    for index, setting in enumerate(gathered.settings):
        outcomes = setting.outcomes(measured).set_index("planted")
        if shown := [quantity for quantity in measured if outcomes[quantity.name].notna().any()]:
            images.append((f"{setting.label} ({setting.seeds})", _map(setting, outcomes, shown, f"map-{index}")))
    caption = (
        "Outcome in each configuration, at the last evaluation, over all seeds: the share of memorized canaries, or a "
        "mean over canaries. A cell is shaded by its ratio to the largest possible value, or to the largest value of "
        "the column. A configuration is p_u and p_e, or a number of copies."
    )
    return folded(Figure(caption, images), "Settings", most=TOGETHER)


def _map(setting: Setting, outcomes: pd.DataFrame, quantities: Sequence[Quantity], id_: str) -> Markup:
    """Return a heat map with a row for each configuration, and a column for each quantity."""
    left = 14 + 6 * max(map(len, outcomes.index))
    figure, (axes,) = panels(height=ROW * len(outcomes) + 26, margins=(left, 6, 22, 4))
    columns, levels, description = list[str](), list[Floats](), list[str]()
    for x, quantity in enumerate(quantities):
        values = outcomes[quantity.name].to_numpy("float64")
        name, template, highest = f"{quantity.heading}, %", "{:.0f}", 100.0
        if not quantity.is_flag:
            name, template, highest = quantity.heading, quantity.format, float(np.nanmax(values))
        if quantity.is_primary:
            highest = setting.shown_runs[0][0].ceiling or highest
        shades = len(show.SHADES) * np.nan_to_num(values) / (highest or 1.0)
        levels.append(np.clip(np.floor(shades), 0, len(show.SHADES) - 1))
        texts = ["" if math.isnan(value) else template.format(value) for value in values]
        for y, (text, level) in enumerate(zip(texts, levels[-1], strict=True)):
            colour = show.ON_LOW if level < 4 else show.ON_HIGH
            axes.text(x + 0.5, y + 0.5, text, ha="center", va="center_baseline", color=colour)
        known = (f"{planted}: {text}" for planted, text in zip(outcomes.index, texts, strict=True) if text)
        description.append(f"{name}: {'; '.join(known)}.")
        columns.append(name)
    norm = BoundaryNorm(np.arange(len(show.SHADES) + 1) - 0.5, len(show.SHADES))
    look: dict[str, Any] = {"edgecolors": show.PAPER, "linewidth": 1.5}
    axes.pcolormesh(np.column_stack(levels), cmap=ListedColormap(show.SHADES), norm=norm, **look)
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(length=0, top=True, labeltop=True, labelbottom=False)
    axes.set_xticks(np.arange(len(columns)) + 0.5, columns)
    axes.set_yticks(np.arange(len(outcomes)) + 0.5, outcomes.index)
    axes.invert_yaxis()
    return inline(figure, id_, f"By configuration, {setting.label}", " ".join(description))


def legend_of(settings: Sequence[Setting]) -> list[tuple[int, str]]:
    """Return the line styles of the settings' partitions with their names."""
    return [(style, STYLES[style]) for style in sorted({setting.style for setting in settings})]


def _named(setting: Setting) -> str:
    unfinished = f", at round {setting.shown_runs[0][1]:,}, unfinished" if setting.is_unfinished else ""
    return f"{setting.label} ({setting.seeds}{unfinished})"


def _x(gathered: Gathered) -> str:
    return "epochs" if gathered.in_epochs else "rounds (central: steps)"
