"""The figure at the top of a report: mean exposure in each setting, or in each technique and world, as dots."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from flsim.base.statistics import t_interval
from flsim.measures.built_in import PRIMARY, QUANTITIES
from flsim.measures.quantity import flags
from flsim.report.blocks import Cell, Dots, number, plural
from flsim.report.factors import name_of
from flsim.report.figures import ceiling_of, style_of
from flsim.report.gather import Gathered, RunView, Setting
from flsim.report.svg import Axis, decoration, image, labels, marker
from flsim.results.run_file import WORLDS, setting_of

MOST = 12  # rows
WIDTH, HIGH, MARGIN = 340, 26, 8  # pixels of a row
LINE, PALE = 10, 20  # height of its line, and of the marks of what the mean is over
AT_CEILING = 84  # pixels beside the ceiling's name that have no tick
FLAG = flags(QUANTITIES.values())[0]


@dataclass(frozen=True)
class _Row:
    """Settings that share a row, with their mean exposure.

    Attributes:
        label: name of the row.
        settings: the settings; one unless the row is of a technique and world.
        means: mean over the settings for each seed that all of them have; the mean over all if there is none.
        parts: the means of the settings, or of the seeds of one setting.
        seeds: number of seeds that all the settings have, which `means` are over.
        begun: number of seeds with a run in any of the settings, whatever its outcome.
        diverged: number of seeds with a run that diverged.
    """

    label: str
    settings: Sequence[Setting]
    means: Sequence[float]
    parts: Sequence[float]
    seeds: int
    begun: int
    diverged: int

    @property
    def mean(self) -> float:
        return float(np.mean(self.means))

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95% interval over seeds, Student's t; NaN below two seeds."""
        return t_interval(np.array(self.means))

    @property
    def count(self) -> str:
        """Return the number of seeds where some are lost, such as "3 of 5 seeds, 2 diverged"; empty where none is."""
        if self.seeds == self.begun:
            return ""
        seeds = f"{self.seeds} of {plural(self.begun, 'seed')}" if self.seeds else "no seed in all settings"
        return seeds + f", {self.diverged} diverged" * bool(self.diverged)

    @property
    def text(self) -> str:
        return self.value + (f" · {self.count}" if self.count else "")

    @property
    def value(self) -> str:
        low, high = self.interval
        interval = "" if math.isnan(low) else f" ({number(low)} to {number(high)})"
        shares = [share for setting in self.settings if (share := setting.share(FLAG.name)) is not None]
        memorized = f" · {FLAG.heading} {np.mean(shares):.0%}" if shares else ""
        unfinished = ", unfinished" if any(setting.is_unfinished for setting in self.settings) else ""
        return f"{number(self.mean)} {PRIMARY.unit}{interval}{memorized}{unfinished}"


def overview(gathered: Gathered) -> list[Dots]:
    """Return the figure: a row for each setting if they are few, else for each technique and world.

    Techniques that were trained in both worlds in equally many settings share rows as well. A seed that one world of a
    setting lacks is left out of the other, too. No figure is returned for one row, or for more than a dozen.
    """
    begun: dict[Setting, list[RunView]] = {}  # all runs of each setting, also those of seeds that a pair leaves out
    for line in gathered.lines:
        for setting in line.paired if line.is_pair else line.settings:
            begun[setting] = [run for own in line.settings if own.world == setting.world for run in own.runs]
    measured = [setting for setting in begun if setting.shown_runs and setting.mean(PRIMARY.name) is not None]
    groups: dict[tuple[str, str | None], list[Setting]] = {}
    for setting in measured:
        groups.setdefault((name_of(setting), setting.world), []).append(setting)
    is_grouped = len(measured) > MOST or _is_balanced(groups)
    if is_grouped:
        order, names = [*WORLDS, None], list(dict.fromkeys(name for name, _ in groups))
        places = sorted(groups, key=lambda group: (names.index(group[0]), order.index(group[1])))
        rows = [_row(setting_of(world, name), groups[name, world], begun) for name, world in places]
    else:
        rows = [_row(setting.label, [setting], begun) for setting in measured]
    if not 1 < len(rows) <= MOST:
        return []
    ceilings = [bound for setting in measured if (bound := ceiling_of(setting)) is not None]
    ceiling = max(ceilings) if ceilings else None
    ends = [end for row in rows for end in (*row.parts, row.mean, *row.interval) if not math.isnan(end)]
    axis = Axis(0.0, ceiling or 1.05 * max(ends) or 1.0, most=4)  # an interval may reach further; exposure cannot
    strips = [(row.label, _strip(row, axis, ceiling, index), _words(row)) for index, row in enumerate(rows)]
    return [Dots(_caption(rows, is_grouped, ceiling), strips, _scale(axis, ceiling))]


def _is_balanced(groups: Mapping[tuple[str, str | None], Sequence[Setting]]) -> bool:
    """Return whether several techniques have both worlds, each in the same number of settings above one."""
    names = {name for name, _ in groups}
    sizes = {len(settings) for settings in groups.values()}
    is_crossed = {*groups} == {(name, world) for name in names for world in WORLDS}
    return len(names) > 1 and is_crossed and len(sizes) == 1 and sizes != {1}


def _row(label: str, settings: Sequence[Setting], begun: Mapping[Setting, Sequence[RunView]]) -> _Row:
    by_seed = [
        {
            run.results.seed if run.results.seed is not None else -place: float(values[round_])
            for place, (run, round_) in enumerate(setting.shown_runs, 1)
            if round_ in (values := run.over_rounds(PRIMARY.name)).index
        }
        for setting in settings
    ]
    seeds = sorted(set.intersection(*map(set, by_seed)))
    of_settings = [float(np.mean(list(values.values()))) for values in by_seed]
    means = [float(np.mean([values[seed] for values in by_seed])) for seed in seeds] or [float(np.mean(of_settings))]
    parts = of_settings if len(settings) > 1 else means if len(means) > 1 else []
    runs = [run.results for setting in settings for run in begun[setting]]
    every, diverged = {run.seed for run in runs}, {run.seed for run in runs if run.status == "diverged"}
    total = len(seeds) if None in every else len(every)  # older runs do not say their seed
    return _Row(label, settings, means, parts, len(seeds), total, len(diverged))


def _words(row: _Row) -> Cell:
    return Markup("{} <small>{}</small>").format(row.value, row.count) if row.count else row.value


def _caption(rows: Sequence[_Row], is_grouped: bool, ceiling: float | None) -> str:
    has_seeds = any(len(row.means) > 1 for row in rows)
    over = " and ".join(["settings"] * is_grouped + ["seeds"] * has_seeds)
    text = f"{PRIMARY.caption} at the end of training, in {PRIMARY.unit}"
    text += f": means over {over}" if over else ""
    text += ", with 95% intervals over seeds (Student’s t)" if has_seeds else "; one seed, so without intervals"
    if any(row.parts for row in rows):
        text += f". Pale marks below: each {'setting' if is_grouped else 'seed'}"
    worlds = {setting.world for row in rows for setting in row.settings}
    if len(worlds) > 1 and any(row.diverged for row in rows):
        text += ". A seed that diverged in one world is left out of both"
    text += ". Dotted: the ceiling, log₂(|R| + 1)" if ceiling else ""
    return f"{text}. {FLAG.heading}: share of the planted canaries that {FLAG.title} {FLAG.finds}."


def _at(axis: Axis, value: float) -> float:
    return MARGIN + (WIDTH - 2 * MARGIN) * min(1.0, max(0.0, axis.at(value)))


def _strip(row: _Row, axis: Axis, ceiling: float | None, index: int) -> Markup:
    """Return the drawing of one row: its mean, the interval, and the means that it is over."""
    style = style_of(row.settings[0])
    content = Markup('<path class="g" d="M{},{}H{}"/>').format(MARGIN, LINE, WIDTH - MARGIN)
    if ceiling is not None:
        content += Markup('<path class="rule" d="M{:.1f},0V{}"/>').format(_at(axis, ceiling), HIGH)
    pale = "".join(marker(style, _at(axis, value), PALE) for value in row.parts)
    low, high = row.interval
    content += Markup('<g class="s{}">').format(style)
    content += Markup('<path class="m pale" d="{}"/>').format(pale) if pale else ""
    if not math.isnan(low):
        content += Markup('<path class="span" d="M{:.1f},{}H{:.1f}"/>').format(_at(axis, low), LINE, _at(axis, high))
    content += Markup('<path class="m" d="{}"/></g>').format(marker(style, _at(axis, row.mean), LINE))
    told = f"{row.text}. From {number(axis.low)} to {number(axis.high)} {PRIMARY.unit}."
    return image(f"overview-{index}", f"{PRIMARY.caption}, {row.label}", told, WIDTH, HIGH, content)


def _scale(axis: Axis, ceiling: float | None) -> Markup:
    """Return the axis below the rows."""
    content = Markup('<path class="a" d="M{},1H{}"/>').format(MARGIN, WIDTH - MARGIN)
    room = WIDTH - MARGIN - AT_CEILING * (ceiling is not None)
    ticks = [tick for tick in axis.ticks if _at(axis, tick) <= room]
    for tick, label in zip(ticks, labels(ticks), strict=True):
        content += Markup('<path class="a" d="M{:.1f},1v3.5"/>').format(_at(axis, tick))
        text = f"{label} {PRIMARY.unit}" if tick == ticks[-1] else label
        content += Markup('<text class="t" x="{:.1f}" y="16" text-anchor="middle">{}</text>').format(
            _at(axis, tick), text
        )
    if ceiling is not None:
        content += Markup('<text class="t" x="{:.1f}" y="16" text-anchor="end">ceiling {}</text>').format(
            WIDTH - MARGIN + 6, number(ceiling)
        )
    return decoration(WIDTH, 20, content)
