"""The definition of a sweep: a TOML file with a base, grids (products of axes), and tiers (scales).

Later settings replace earlier ones, in the order base, grid, tier, the tier's grid, axes. The axes of grids have the
published values; a tier gives as many, each at the position of the published value. docs/sweeps.md has an example.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tomli_w

from flsim.base.errors import InputError, RunFailed
from flsim.base.files import digest, new_file
from flsim.base.settings import Natural, Whole, bounds, settings, with_former_names
from flsim.data.corpus import Split
from flsim.data.stores import located
from flsim.data.synthetic import SyntheticHParams
from flsim.results.published import matching, published_rows
from flsim.runs.config import Config, from_working_directory, parse, toml

# The search for values of settings by loss only, and the file with its result.
#
# Successive halving: Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization"
# (2016). All trials train for a share of the length. The better half continues, until the last trials are complete.
#
# `search` is a generator that yields the trials to measure and receives their perplexities. If a tier of a sweep names
# the file (``tuned = "..."``), its runs use the chosen values, but neither the seeds nor another corpus of the search.

Point = dict[str, float]
Values = dict[str, Any]  # settings of a sweep as nested tables
FEWEST, MOST = 8, 1_000  # smallest and largest number of trials
DIGITS = 4  # significant digits of a searched value, so that names and tables are short
DIGEST_DIGITS = 12  # digits of a digest in messages


@settings
class Range:
    low: float  # its smallest value
    high: float  # its largest value
    # "log" spaces and draws the logarithms of values evenly, "linear" the values
    scale: Literal["log", "linear"] = "log"
    # number of values of method "grid"; can be omitted if it is the only setting
    points: Annotated[Whole, bounds(ge=2)] | None = None

    def __post_init__(self) -> None:
        if not self.low < self.high or (self.scale == "log" and self.low <= 0):
            raise InputError(f"a range needs low < high, both above 0 on a log scale, found {self.low} and {self.high}")

    def at(self, share: float) -> float:
        """Return the value at a share of the range; a share below 0 or above 1 is outside of the range."""
        linear = self.scale == "linear"
        value = self.low + share * (self.high - self.low) if linear else self.low * (self.high / self.low) ** share
        return float(f"{value:.{DIGITS}g}")

    def share(self, value: float) -> float:
        """Return the share of the range of a value: the inverse of `at`, except for rounding."""
        if self.scale == "linear":
            return (value - self.low) / (self.high - self.low)
        return math.log(value / self.low) / math.log(self.high / self.low)


def merge(into: Values, values: Mapping[str, Any]) -> None:
    """Merge sections, and replace all other values."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            into[key] = into[key] if isinstance(into.get(key), dict) else {}
            merge(into[key], value)
        else:
            into[key] = deepcopy(value)


def nested(key: str, value: Any) -> Values:
    """Return the nested tables of a key, such as ``local.learning_rate``, with its value."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return dict(value)


def slug(key: str, value: Any) -> str:
    """Return a part of a folder's name: words unchanged, numbers after the name of the setting."""
    text = re.sub(r"[^A-Za-z0-9.]+", "-", str(value)).strip("-")
    return text if isinstance(value, str) else f"{key.rpartition('.')[2]}{text}"


def flat(point: Iterable[tuple[str, Any]]) -> Values:
    """Return the values of axes, with those of a table as separate keys."""
    values: Values = {}
    for axis, value in point:
        inner = {f"{axis}.{key}": item for key, item in value.items()} if isinstance(value, Mapping) else {axis: value}
        values |= inner
    return values


def middle(ranges: Mapping[str, Range]) -> Point:
    return {name: range_.at(0.5) for name, range_ in ranges.items()}


@dataclass(frozen=True)
class TrialGroup:
    name: str
    grid: str
    axes: Values
    ranges: Mapping[str, Range]


@dataclass(frozen=True)
class Trial:
    values: Point  # values of the searched settings
    # geometric mean over its runs after each share of training that it reached; infinite if a run diverged
    perplexities: list[float] = field(default_factory=list)

    @property
    def has_diverged(self) -> bool:
        return math.inf in self.perplexities


@dataclass(frozen=True)
class GroupOutcome:
    name: str  # name, grid, axes: see `Group`
    grid: str
    axes: Values
    values: Point  # the chosen values, by setting
    perplexity: float  # perplexity of the chosen trial at the end of training
    widenings: int  # number of extensions of its range
    trials: tuple[Trial, ...]  # all its trials

    @property
    def is_limited_by_stability(self) -> bool:
        """Return whether all trials at an adjacent value diverged; else both adjacent values have larger losses."""
        for (name, value), side in product(self.values.items(), (-1, 1)):
            values = [(side * trial.values[name], trial.has_diverged) for trial in self.trials]
            beyond = [(other, has_diverged) for other, has_diverged in values if other > side * value]
            if beyond and all(has_diverged for other, has_diverged in beyond if other == min(beyond)[0]):
                return True
        return False


@settings
class SearchRule:
    """The rule of a search, which is the same for all groups."""

    # "grid" takes all products of evenly spaced values, "random" draws values
    method: Literal["grid", "random"] = "grid"
    trials: Annotated[Whole, bounds(ge=FEWEST, le=MOST)] = 8  # number of trials before the range is extended
    # ascending shares of the length of training after which the better half of the trials continues; the last share is
    # 1
    halving: tuple[float, ...] = (0.25, 0.5, 1.0)
    widenings: Natural = 3  # largest number of extensions of the range of a group

    def __post_init__(self) -> None:
        shares = (0.0, *self.halving)
        if shares[-1] != 1 or any(low >= high for low, high in pairwise(shares)):
            raise InputError(f"halving must list ascending shares above 0 that end with 1, found {list(self.halving)}")

    def first_points(self, ranges: Mapping[str, Range], rng: np.random.Generator) -> list[Point]:
        """Return the values of the first trials; raise InputError if the points of a grid are not `trials`."""
        if self.method == "random":
            return [{name: range_.at(rng.random()) for name, range_ in ranges.items()} for _ in range(self.trials)]
        counts = [range_.points or (self.trials if len(ranges) == 1 else 0) for range_ in ranges.values()]
        if math.prod(counts) != self.trials:
            raise InputError(f"the points of {', '.join(ranges)} must multiply to trials ({self.trials}); set points")
        spaced = [
            [range_.at(place / (count - 1)) for place in range(count)]
            for range_, count in zip(ranges.values(), counts, strict=True)
        ]
        return [dict(zip(ranges, values, strict=True)) for values in product(*spaced)]

    def points_beyond(
        self, ranges: Mapping[str, Range], best: Point, name: str, side: int, rng: np.random.Generator
    ) -> list[Point]:
        """Return values beyond the best value of a setting, on one side: half as many as the range had.

        A grid continues with its steps, the other settings at their best. A random search draws within half the range.
        """
        range_, start = ranges[name], ranges[name].share(best[name])
        if self.method == "grid":
            count = range_.points or self.trials
            steps = range(1, max(1, count // 2) + 1)
            return [best | {name: range_.at(start + side * step / (count - 1))} for step in steps]
        return [
            {other: ranges[other].at(rng.random()) for other in ranges} | {name: range_.at(start + side * share / 2)}
            for share in rng.random(self.trials // 2).tolist()
        ]


def search(
    group: TrialGroup, rule: SearchRule, rng: np.random.Generator, is_possible: Callable[[Point], bool] = lambda _: True
) -> Generator[tuple[float, dict[int, Trial]], list[float], GroupOutcome]:
    """Search for the values of a group with the lowest perplexity.

    The best value of each setting must be between those of other trials. Otherwise there are further trials beyond,
    unless these values are impossible. Yields a share of training and the trials to measure after it, by number, and is
    sent their perplexities. RunFailed if all trials diverged, or the best is at the edge after all extensions.
    """
    trials = [Trial(values) for values in rule.first_points(group.ranges, rng)]
    new = dict(enumerate(trials))
    for widenings in range(rule.widenings + 1):
        remaining = new
        for share in rule.halving:
            perplexities = yield share, remaining
            for trial, perplexity in zip(remaining.values(), perplexities, strict=True):
                trial.perplexities.append(perplexity)
            remaining = better_half(remaining)
        complete = [trial for trial in trials if len(trial.perplexities) == len(rule.halving)]
        best = min(complete, key=lambda trial: trial.perplexities[-1], default=trials[0])  # of equal trials, the first
        if best.has_diverged:
            raise RunFailed(
                f"group {group.name}: all {len(trials)} trials diverged; search lower values of "
                f"{', '.join(group.ranges)}"
            )
        sides = open_sides([trial.values for trial in trials], best.values)
        points = [at for name, side in sides for at in rule.points_beyond(group.ranges, best.values, name, side, rng)]
        possible = [point for point in points if is_possible(point)]
        if not possible:
            return GroupOutcome(
                name=group.name,
                grid=group.grid,
                axes=group.axes,
                values=best.values,
                perplexity=best.perplexities[-1],
                widenings=widenings,
                trials=tuple(trials),
            )
        new = {len(trials) + place: Trial(point) for place, point in enumerate(possible)}
        trials += new.values()
    settings = ", ".join(f"{name} {best.values[name]:g}" for name, _ in sides)
    raise RunFailed(
        f"group {group.name}: the best {settings} is at the edge after {widenings} extensions; search a range "
        "around this value"
    )


def better_half(trials: Mapping[int, Trial]) -> dict[int, Trial]:
    """Return the better half by last perplexity, rounded up, in order, without diverged ones; of equals the earlier."""
    better = sorted(trials, key=lambda number: trials[number].perplexities[-1])[: (len(trials) + 1) // 2]
    return {number: trials[number] for number in sorted(better) if not trials[number].has_diverged}


def open_sides(points: Sequence[Point], best: Point) -> list[tuple[str, int]]:
    """Return the settings and sides, -1 or 1, on which no point has a value beyond the best value."""
    return [
        (name, side)
        for name, value in best.items()
        for side in (-1, 1)
        if all(side * point[name] <= side * value for point in points)
    ]


@dataclass(frozen=True)
class TuningOutcome:
    title: str  # title, tier: the sweep's title, and the tier
    tier: str
    training: str  # digest of the grids and settings of training; see `flsim.runs.sweeps.definition.training_digest`
    search: str  # digest of the search: its settings, and those of its first runs
    objective: str  # the minimized quantity, in words
    method: str  # method, trials, halving: see `Rule`
    trials: int
    halving: tuple[float, ...]
    runs: int  # number of runs of a trial, over seeds and axes
    by: tuple[str, ...]  # axes of the sweep by which groups differ
    seeds: tuple[int, ...]  # seeds of the search
    corpus: str  # digest of the corpus of the search
    has_own_corpus: bool  # whether the corpora of the search and the sweep differ
    groups: tuple[GroupOutcome, ...]  # results by group
    source: str = ""  # the file; empty in the file itself

    def values_for(self, grid: str, axes: Values, overrides: Iterable[str] = ()) -> Point:
        """Return the chosen values for a run; InputError if it belongs to no group, or an override changes a value."""
        for group in self.groups:
            if group.grid == grid and all(axes.get(axis) == value for axis, value in group.axes.items()):
                for override in overrides:
                    key = override.partition("=")[0].strip()
                    if any(toml.replaces(override, chosen) for chosen in group.values):
                        raise InputError(
                            f"--set {key}: the search in {self.source} chose this setting; remove `tuned` from "
                            "the tier to set it"
                        )
                return group.values
        point = ", ".join(f"{axis} {value}" for axis, value in axes.items())
        raise InputError(f"{self.source}: no values were tuned for grid {grid} with {point}; tune it with `flsim tune`")

    def refuse_seed(self, seed: int) -> None:
        if seed in self.seeds:
            raise InputError(
                f"seed {seed}: {self.source} was tuned on this seed, so results of this seed must not be "
                "reported; choose other seeds"
            )

    def refuse_corpus(self, digest: str, where: object) -> None:
        if self.has_own_corpus and digest == self.corpus:
            raise InputError(
                f"{where}: {self.source} was tuned on this corpus, so results on it must not be reported; use "
                "another corpus"
            )

    @property
    def keys(self) -> list[str]:
        """Return the settings that were chosen, such as ``local.learning_rate``."""
        return sorted({key for group in self.groups for key in group.values})

    @property
    def note(self) -> str:
        """Return sentences below a table on how the values were chosen."""
        shares = ", ".join(f"{100 * share:g}%" for share in self.halving[:-1])
        widened = [group.name for group in self.groups if group.widenings]
        unstable = sum(group.is_limited_by_stability for group in self.groups)
        parts = [
            f"Settings were chosen by {self.objective} only, never by canaries (search "
            f"{self.search[:DIGEST_DIGITS]}): {_chosen(self.groups)}.",
            f"Each group had the same budget{' before ranges were widened' if widened else ''}: {self.trials} trials "
            f"({self.method}) of {self.runs} {'run' if self.runs == 1 else 'runs'}"
            f"{f', halved after {shares} of training' if shares else ''}, on seeds {', '.join(map(str, self.seeds))}"
            f"{' and a separate corpus' if self.has_own_corpus else ''}.",
        ]
        if widened:
            parts.append(f"Ranges were extended, with more trials, for {', '.join(widened)}.")
        if unstable:
            parts.append(
                f"Stability limits {unstable} of {len(self.groups)} groups: trials at an adjacent value diverged."
            )
        return " ".join(parts)

    def write(self, path: Path) -> None:
        values = asdict(self)
        del values["source"]
        with new_file(path) as partial:
            header = "# Written by `flsim tune`; name it in a tier of the sweep."
            partial.write_text(f"{header}\n\n{tomli_w.dumps(values)}", encoding="utf-8")


def _chosen(groups: Iterable[GroupOutcome]) -> str:
    """Return the chosen values in words, each with its groups."""
    names: dict[str, list[str]] = {}
    for group in groups:
        names.setdefault(", ".join(f"{key} {value:g}" for key, value in group.values.items()), []).append(group.name)
    return "; ".join(f"{text} for {', '.join(of_text)}" for text, of_text in names.items())


def read_outcome(path: Path) -> TuningOutcome:
    """Read the result of a search; InputError if there is no such file, or it has no result."""
    if not path.exists():
        raise InputError(f"{path}: no such file, but a tier needs its settings; create it with `flsim tune`")
    tuned = toml.validate(TuningOutcome, toml.read(path), str(path))
    for group in tuned.groups:
        if not math.isfinite(group.perplexity) or not group.values:
            raise InputError(
                f"{path}: group {group.name} has no chosen values; create the file again with `flsim tune`"
            )
    return replace(tuned, source=str(path))


# The definition of a sweep: its file, its tiers, and the runs that it plans.

LONGEST_NAME = 200  # largest length of a run name in bytes; file systems allow 255, and names of logs are longer
# largest number of runs of a sweep; each has a folder, a file of settings and an entry in sweep.json
MOST_RUNS = 10_000
NOT_TRAINING = {"evaluation", "system"}  # sections
Axes = dict[str, list[Any]]


@settings
class PublishedTable:
    """The published table with which results are compared."""

    file: str  # a file of experiments/
    table: str  # value of its column "table"
    source: str  # name of the publication
    columns: dict[str, str] = field(default_factory=dict)  # the column with the values of each axis, by axis


@settings
class Grid:
    name: str  # name of the block
    # published values of settings, by setting. A value can be a table of settings, which is merged into its section.
    axes: Axes
    set: Values = field(default_factory=dict)  # settings of all its runs
    # columns and values of all its published rows; None if the rows are not in the published table
    published: Values | None = None


@settings
class TierGrid:
    set: Values = field(default_factory=dict)
    axes: Axes = field(default_factory=dict)


@settings
class TierCorpus:
    """The corpus of a tier, with either `synthetic` or `path`."""

    synthetic: SyntheticHParams | None = None  # settings of a corpus that the sweep creates
    path: Path | str | None = None  # an existing corpus, relative to the definition, or its URI
    how: str = ""  # the command that creates the corpus of `path`

    def __post_init__(self) -> None:
        if (self.synthetic is None) == (self.path is None):
            raise InputError("the corpus of a tier must be either synthetic or a path")


@settings
class Tier:
    corpus: TierCorpus  # the training corpus
    about: str = ""  # description of the scale of users, cohorts and canaries
    seeds: tuple[Natural, ...] = (0,)  # seeds of the runs
    set: Values = field(default_factory=dict)  # settings of all runs
    grids: dict[str, TierGrid] = field(default_factory=dict)  # changes of grids, by name
    # whether each run uses all machines; otherwise, as many runs as possible train at the same time
    whole_cluster: bool = False
    tuned: Path | None = None  # outcome of `flsim tune`, relative to the definition, with values for its runs


@settings
class Definition:
    title: str
    grids: tuple[Grid, ...]
    tiers: dict[str, Tier]
    question: str = ""
    base: Values = field(default_factory=dict)
    published: PublishedTable | None = None


@dataclass(frozen=True)
class Planned:
    name: str  # name of the run and its folder
    grid: str  # its block
    seed: int  # seed of everything in the run
    axes: Values  # values of the settings that the sweep varies, by setting
    published: Mapping[str, Any] | None  # its published row; None if there is none
    config: Config  # all its settings


def load(path: Path) -> Definition:
    """Read a sweep file; InputError if there is none, or it is not a TOML definition of a sweep."""
    values = toml.read(path)
    if "grids" not in values:
        raise InputError(
            f"{path}: this file is not a sweep, because it has no grids; use `flsim run` for the configuration of a run"
        )
    definition = toml.validate(Definition, values, str(path))
    names = [grid.name for grid in definition.grids]
    if not names or len(set(names)) < len(names):
        raise InputError(f"{path}: there must be at least one grid, and names of grids must differ; found {names}")
    for name in (*names, *definition.tiers):  # names of folders, to which more text is appended
        if not re.fullmatch(r"\w[\w.+-]{0,60}", name):
            raise InputError(
                f"{path}: {name!r:.80}: names must have letters, digits and .+-_, at most 61 characters; rename "
                "the grid"
            )
    for grid in definition.grids:
        if "seed" in grid.axes:
            raise InputError(f"{path}: grids.{grid.name}: seed cannot be an axis; use seeds of a tier, or --seeds")
        of_data = grid.axes.get("data", ())
        if "data.corpus" in grid.axes or any(isinstance(value, Mapping) and "corpus" in value for value in of_data):
            raise InputError(
                f"{path}: grids.{grid.name}: data.corpus cannot be an axis, because runs of a sweep have one corpus; "
                "use a tier, or another --out with --corpus, for each corpus"
            )
    for name, tier in definition.tiers.items():
        unknown = [grid for grid in tier.grids if grid not in names]
        if unknown:
            raise InputError(f"{path}: tiers.{name}.grids.{unknown[0]}: no such grid; the grids are {', '.join(names)}")
    return definition


def tier_of(definition: Definition, name: str, source: str) -> Tier:
    if name not in definition.tiers:
        raise InputError(f"{source}: there is no tier {name!r}; choose one of {', '.join(definition.tiers)}")
    return definition.tiers[name]


def planned_runs(
    definition: Definition,
    tier: Tier,
    corpus: Path | str,
    source: str,
    seeds: Sequence[int] | None = None,
    only: Iterable[str] = (),
    overrides: Sequence[str] = (),
) -> list[Planned]:
    """Return all runs in the order of the table: by grid, then by axes (the first varies slowest), then by seed.

    InputError for an unknown grid, no or too many runs, wrong settings, or names that are not valid for folders; for a
    missing published row, or an override of a setting in which runs differ.
    """
    only, grids = list(only), [grid.name for grid in definition.grids]
    for name in only:
        if name not in grids:
            raise InputError(f"{source}: there is no grid {name!r}; choose one of {', '.join(grids)}")
    rows = published_rows(definition.published.file, definition.published.table) if definition.published else []
    tuned, runs = tuned_of(definition, tier, source), []
    seeds = tier.seeds if seeds is None else seeds
    _refuse_number({grid.name: grid.axes for grid in definition.grids if not only or grid.name in only}, seeds, source)
    for grid in definition.grids:
        if only and grid.name not in only:
            continue
        change = tier.grids.get(grid.name, TierGrid())
        settings: Values = {}
        for part in (definition.base, grid.set, tier.set, change.set, {"data": {"corpus": str(located(corpus))}}):
            merge(settings, part)
        for published_axes, axes in _points(grid, change, source):
            _refuse_what_runs_differ_in(overrides, axes, f"{source}: grids.{grid.name}")
            row = _published(definition.published, grid, published_axes, rows, source)
            chosen = tuned.values_for(grid.name, axes, overrides) if tuned else {}
            for seed in seeds:
                values = deepcopy(settings)
                for key, value in (axes | chosen).items():
                    merge(values, nested(key, value))
                if tuned:
                    tuned.refuse_seed(seed)
                values["seed"] = seed
                for override in overrides:
                    toml.override_value(values, override, from_working_directory)
                name = "-".join([grid.name, *(slug(key, value) for key, value in axes.items()), f"seed{seed}"])
                config = parse(values, f"{source}, {name}", Path(source).parent)
                runs.append(Planned(name, grid.name, seed, axes, row, config))
    for name, count in Counter(run.name for run in runs).items():
        if count > 1 or len(name.encode()) > LONGEST_NAME:
            why = "too long" if len(name.encode()) > LONGEST_NAME else "shared by two runs"
            raise InputError(f"{source}: name {name:.80} is {why}; use short, distinct values")
    return runs


def tuned_of(definition: Definition, tier: Tier, source: str) -> TuningOutcome | None:
    """Return the outcome of the search that a tier names, or None; InputError if it is of another sweep or tier."""
    if tier.tuned is None:
        return None
    tuned = read_outcome(Path(source).parent / tier.tuned)
    if tuned.title != definition.title or definition.tiers.get(tuned.tier) != tier:
        raise InputError(
            f"{tuned.source}: this file is for tier {tuned.tier} of {tuned.title!r}; run `flsim tune` for this sweep"
        )
    if tuned.training != training_digest(definition, tier, {name for group in tuned.groups for name in group.values}):
        raise InputError(
            f"{tuned.source}: this file is for other grids or settings of training than those of {source}; run "
            "`flsim tune`"
        )
    return tuned


def training_digest(definition: Definition, tier: Tier, chosen: Collection[str]) -> str:
    """Return the digest of grids and settings of a tier, without settings of evaluation."""
    parts = [definition.base, tier.set, *(grid.set for grid in definition.grids)]
    parts += [change.set for change in tier.grids.values()]
    settings = [
        {
            name: value
            for name, value in flat(part.items()).items()
            if name.partition(".")[0] not in NOT_TRAINING and name not in chosen
        }
        for part in parts
    ]
    axes = [(grid.name, grid.axes) for grid in definition.grids]
    tier_axes = [(name, change.axes) for name, change in tier.grids.items()]
    return digest(json.dumps(with_former_names([settings, axes, tier_axes]), sort_keys=True, default=str))


def longest_first(planned: Sequence[Planned], train: Split) -> list[Planned]:
    """Return the order in which runs are started: most epochs first, so that no long run is last."""

    def epochs(run: Planned) -> float:
        users = run.config.trained_on(train)
        return run.config.rounds_over(users) / run.config.rounds_per_epoch(users)

    return sorted(planned, key=epochs, reverse=True)


def _points(grid: Grid, change: TierGrid, source: str) -> list[tuple[Values, Values]]:
    for axis, values in change.axes.items():
        if len(values) != len(grid.axes.get(axis, ())):
            raise InputError(
                f"{source}: grids.{grid.name}: axis {axis} has {len(values)} values in a tier, and "
                f"{len(grid.axes.get(axis, ()))} as published; each value of a tier replaces the published "
                "value at the same position"
            )
    published_axes = [[(axis, value) for value in values] for axis, values in grid.axes.items()]
    axes = [[(axis, value) for value in change.axes.get(axis, values)] for axis, values in grid.axes.items()]
    return [(flat(a), flat(b)) for a, b in zip(product(*published_axes), product(*axes), strict=True)]


def _published(
    published: PublishedTable | None, grid: Grid, axes: Values, rows: list[dict[str, object]], source: str
) -> Mapping[str, Any] | None:
    if published is None or grid.published is None:
        return None
    of_axes = {column: axes[axis] for axis, column in published.columns.items() if axis in axes}
    # a published table has the only element of a list
    single = {key: v[0] if isinstance(v, list) and len(v) == 1 else v for key, v in of_axes.items()}
    keys = grid.published | single
    row = matching(rows, keys)
    if row is None:
        keys_text = ", ".join(f"{column} {value}" for column, value in keys.items())
        raise InputError(
            f"{source}: grids.{grid.name}: table {published.table} of {published.file} has no row with {keys_text}"
        )
    return row


def _refuse_what_runs_differ_in(overrides: Iterable[str], axes: Values, where: str) -> None:
    """Raise InputError for an override of a setting in which runs differ: names and published rows would be wrong."""
    for override in overrides:
        key = override.partition("=")[0].strip()
        for setting, option in (("seed", "--seeds"), ("data.corpus", "--corpus")):
            if toml.replaces(override, setting):
                raise InputError(f"--set {key}: in a sweep, use {option} for {setting}, and --set for other settings")
        for axis in axes:
            if toml.replaces(override, axis):
                what = "it" if axis == key else axis
                raise InputError(
                    f"--set {key}: {where} varies {what}; choose other grids with --only, or edit the file"
                )


def _refuse_number(axes: Mapping[str, Mapping[str, Sequence[Any]]], seeds: Sequence[int], source: str) -> None:
    """Raise InputError if there are no runs, or more than `MOST_RUNS`, before any run is created."""
    for grid, values_of in axes.items():
        for axis, values in values_of.items():
            if not values:
                raise InputError(f"{source}: grids.{grid}: axis {axis} has no values; list at least one")
    if not seeds:
        raise InputError(f"{source}: seeds has no values; list at least one")
    trained = seeds.stop - seeds.start if isinstance(seeds, range) else len(seeds)  # `len` of a range overflows
    runs = sum(math.prod(map(len, values_of.values())) for values_of in axes.values()) * trained
    if runs > MOST_RUNS:
        raise InputError(
            f"{source}: the sweep has {runs:,} runs, more than {MOST_RUNS:,}; name fewer grids (--only), seeds "
            "or values of axes"
        )
    if max(seeds) >= 2**63:
        raise InputError(f"{source}: seeds: found {max(seeds)!s:.20}..., more than 64 bits; use smaller seeds")
