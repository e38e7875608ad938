"""What a sweep is: a TOML file with a base, blocks of rows as products of axes, and tiers that scale them.

    title = "Thakkar et al. (2020), Table 1"
    question = "What does each part of federated learning do to memorization?"

    [published]                         # the rows to hold results against
    file = "thakkar2020.csv"
    table = "1"
    source = "Thakkar et al. (2020), Table 1"
    columns = { "data.world" = "data", "training.cohort" = "batch_size" }

    [base.evaluation]                   # settings of all runs
    references = 2_000_000

    [[grids]]                           # a run for each choice of values of all axes
    name = "fedavg"
    published = { optimizer = "FedAvg" }
    set = { training.rounds = 8_000 }
    axes = { "data.world" = ["iid", "non-iid"], "training.cohort" = [500, 1000] }

    [tiers.smoke]
    about = "400 users."
    corpus = { synthetic = { users = 400 } }
    set = { canaries.p_u = [0.01] }
    grids.fedavg = { set = { training.rounds = 100 }, axes = { "training.cohort" = [4, 8] } }

Later settings win: of the base, the grid, the tier, the tier's grid, the axes. The grids' own axes are the published
ones; a tier that gives others gives as many, each in the place of the one that it stands for.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict

from flsim.base.errors import InputError
from flsim.data.corpus import Split
from flsim.data.stores import located
from flsim.data.synthetic import SyntheticHParams
from flsim.results.published import matching, published_rows
from flsim.runs.config import Config, from_working_directory, parse, toml

LONGEST_NAME = 200  # bytes of a run's name; file systems take 255, and logs and partial files say more
Values = dict[str, Any]
Axes = dict[str, list[Any]]


@dataclass(frozen=True)
class Strict:
    """An unknown key is an error, never ignored."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Published(Strict):
    """What results are held against.

    Attributes:
        file: of experiments/.
        table: value of its column "table".
        source: in words.
        columns: axis -> the column that has its values.
    """

    file: str
    table: str
    source: str
    columns: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Grid(Strict):
    """A block of rows.

    Attributes:
        name: of the block.
        axes: setting -> values, as published; a table of settings may be a value, and is merged into its section.
        set: settings of all its runs.
        published: columns and their values, which all its rows have; None where they are not of the published table.
    """

    name: str
    axes: Axes
    set: Values = field(default_factory=dict)
    published: Values | None = None


@dataclass(frozen=True)
class TierGrid(Strict):
    """What a tier changes of a grid."""

    set: Values = field(default_factory=dict)
    axes: Axes = field(default_factory=dict)


@dataclass(frozen=True)
class TierCorpus(Strict):
    """What a tier trains on: one of both.

    Attributes:
        synthetic: a corpus that the sweep makes.
        path: one that is there, relative to the definition, or its URI.
        how: the command that makes that.
    """

    synthetic: SyntheticHParams | None = None
    path: Path | str | None = None
    how: str = ""

    def __post_init__(self) -> None:
        if (self.synthetic is None) == (self.path is None):
            raise InputError("a tier's corpus is either synthetic or a path")


@dataclass(frozen=True)
class Tier(Strict):
    """A scale.

    Attributes:
        about: how users, cohorts and canaries are scaled, for people.
        corpus: what is trained on.
        seeds: of the runs.
        set: settings of all runs.
        grids: name -> what is different in it.
        whole_cluster: runs take all machines, one after another; else as many run at once as fit.
    """

    about: str
    corpus: TierCorpus
    seeds: tuple[int, ...] = (0,)
    set: Values = field(default_factory=dict)
    grids: dict[str, TierGrid] = field(default_factory=dict)
    whole_cluster: bool = False


@dataclass(frozen=True)
class Definition(Strict):
    """A sweep file."""

    title: str
    question: str
    grids: tuple[Grid, ...]
    tiers: dict[str, Tier]
    base: Values = field(default_factory=dict)
    published: Published | None = None


@dataclass(frozen=True)
class Planned:
    """A run that a sweep is to have.

    Attributes:
        name: of the run and its folder.
        grid: its block.
        seed: of everything in it.
        axes: setting -> value, of those that the sweep varies.
        published: the row that it stands for; None where there is none.
        config: all its settings.
    """

    name: str
    grid: str
    seed: int
    axes: Values
    published: Mapping[str, Any] | None
    config: Config


def load(path: Path) -> Definition:
    """Read a sweep file.

    Raises:
        InputError: no such file, not TOML, or not as above.
    """
    values = toml.read(path)
    if "grids" not in values:
        raise InputError(f"{path}: not a sweep, as it has no grids; a run's configuration is for `flsim run`")
    definition = toml.validate(Definition, values, str(path))
    names = [grid.name for grid in definition.grids]
    if not names or len(set(names)) < len(names):
        raise InputError(f"{path}: grids need different names, and there must be one; found {names}")
    for name in (*names, *definition.tiers):  # of folders, with more behind them
        if not re.fullmatch(r"\w[\w.+-]{0,60}", name):
            raise InputError(f"{path}: {name!r:.80}: names are of letters, digits and .+-_, of 61 at most; rename it")
    for name, tier in definition.tiers.items():
        unknown = [grid for grid in tier.grids if grid not in names]
        if unknown:
            raise InputError(f"{path}: tiers.{name}.grids.{unknown[0]}: no such grid; there are {', '.join(names)}")
    return definition


def tier_of(definition: Definition, name: str, source: str) -> Tier:
    """Raises InputError where there is no such tier."""
    if name not in definition.tiers:
        raise InputError(f"{source}: has no tier {name!r}; choose of {', '.join(definition.tiers)}")
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
    """All runs, in the table's order: grid by grid, the first axis varying slowest, seeds fastest.

    Args:
        definition: of the sweep.
        tier: one of its tiers.
        corpus: what is trained on.
        source: the definition's file, for messages; a user's own code is relative to its folder.
        seeds: in place of the tier's.
        only: names of the grids to take; all where empty.
        overrides: of all runs, as ``section.key=value``; paths in them are relative to the working directory.

    Raises:
        InputError: no such grid, a run's settings are wrong, an override is of what runs differ in, axes of a tier do
            not fit, or a published row is missing.
    """
    only, grids = list(only), [grid.name for grid in definition.grids]
    for name in only:
        if name not in grids:
            raise InputError(f"{source}: has no grid {name!r}; choose of {', '.join(grids)}")
    rows = published_rows(definition.published.file, definition.published.table) if definition.published else []
    runs = []
    for grid in definition.grids:
        if only and grid.name not in only:
            continue
        change = tier.grids.get(grid.name, TierGrid())
        settings: Values = {}
        for part in (definition.base, grid.set, tier.set, change.set, {"data": {"corpus": str(located(corpus))}}):
            _merge(settings, part)
        for theirs, ours in _points(grid, change, source):
            _refuse_what_runs_differ_in(overrides, ours, f"{source}: grids.{grid.name}")
            row = _published(definition.published, grid, theirs, rows, source)
            for seed in tier.seeds if seeds is None else seeds:
                values = deepcopy(settings)
                for key, value in ours.items():
                    _merge(values, _nested(key, value))
                values["seed"] = seed
                for override in overrides:
                    toml.override_value(values, override, from_working_directory)
                name = "-".join([grid.name, *(_slug(key, value) for key, value in ours.items()), f"seed{seed}"])
                config = parse(values, f"{source}, {name}", Path(source).parent)
                runs.append(Planned(name, grid.name, seed, ours, row, config))
    _refuse_names(runs, source)
    return runs


def _refuse_names(runs: Sequence[Planned], source: str) -> None:
    """Raises InputError where two runs would share a folder, or one could have none."""
    names = [run.name for run in runs]
    for name in names:
        if names.count(name) > 1 or len(name.encode()) > LONGEST_NAME:
            why = "too long" if len(name.encode()) > LONGEST_NAME else "the name of two runs"
            raise InputError(f"{source}: {name:.80}: {why}; give axes values that read differently, and shortly")


def _refuse_what_runs_differ_in(overrides: Iterable[str], axes: Values, where: str) -> None:
    """Raises InputError for a setting that is not for all runs: their names and rows would no longer be true."""
    for override in overrides:
        key = override.partition("=")[0].strip()
        option = {"seed": "--seeds", "data.corpus": "--corpus"}.get(key)
        if option:
            raise InputError(f"--set {key}: of a sweep that is for {option}")
        if key in axes:
            raise InputError(f"--set {key}: {where} varies it; take other grids with --only, or edit the file")


def longest_first(planned: Sequence[Planned], train: Split) -> list[Planned]:
    """The order in which runs are started: those of most epochs first, so that none is left alone at the end."""

    def epochs(run: Planned) -> float:
        return run.config.rounds_over(train) / run.config.rounds_per_epoch(train)

    return sorted(planned, key=epochs, reverse=True)


def _points(grid: Grid, change: TierGrid, source: str) -> list[tuple[Values, Values]]:
    """The published values of the axes, flat, and for each the tier's."""
    for axis, values in change.axes.items():
        if len(values) != len(grid.axes.get(axis, ())):
            raise InputError(
                f"{source}: grids.{grid.name}: axis {axis} has {len(values)} values in a tier, and "
                f"{len(grid.axes.get(axis, ()))} as published; each of a tier's stands for the one in its place"
            )
    theirs = [[(axis, value) for value in values] for axis, values in grid.axes.items()]
    ours = [[(axis, value) for value in change.axes.get(axis, values)] for axis, values in grid.axes.items()]
    return [(_flat(a), _flat(b)) for a, b in zip(product(*theirs), product(*ours), strict=True)]


def _flat(point: Iterable[tuple[str, Any]]) -> Values:
    flat: Values = {}
    for axis, value in point:
        flat |= {f"{axis}.{key}": each for key, each in value.items()} if isinstance(value, Mapping) else {axis: value}
    return flat


def _published(
    of: Published | None, grid: Grid, axes: Values, rows: list[dict[str, object]], source: str
) -> Mapping[str, Any] | None:
    if of is None or grid.published is None:
        return None
    keys = grid.published | {column: _single(axes[axis]) for axis, column in of.columns.items() if axis in axes}
    found = matching(rows, keys)
    if found is None:
        said = ", ".join(f"{column} {value}" for column, value in keys.items())
        raise InputError(f"{source}: grids.{grid.name}: table {of.table} of {of.file} has no row with {said}")
    return found


def _single(value: Any) -> Any:
    """What a list of one holds, since that is what a table says."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _merge(into: Values, values: Mapping[str, Any]) -> None:
    """Sections are merged, everything else is replaced."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            into[key] = into[key] if isinstance(into.get(key), dict) else {}
            _merge(into[key], value)
        else:
            into[key] = deepcopy(value)


def _nested(key: str, value: Any) -> Values:
    *sections, name = key.split(".")
    nested: Values = {name: value}
    for section in reversed(sections):
        nested = {section: nested}
    return nested


def _slug(key: str, value: Any) -> str:
    """Part of a folder's name: words as they are, numbers after the setting's name."""
    text = re.sub(r"[^A-Za-z0-9.]+", "-", str(value)).strip("-")
    return text if isinstance(value, str) else f"{key.rpartition('.')[2]}{text}"
