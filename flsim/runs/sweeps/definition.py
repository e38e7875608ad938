"""The definition of a sweep: a TOML file with a base, grids (products of axes), and tiers (scales).

Later settings replace earlier ones, in the order base, grid, tier, the tier's grid, axes. The axes of grids have the
published values; a tier gives as many, each at the position of the published value. docs/sweeps.md has an example.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from flsim.base.errors import InputError
from flsim.base.files import digest
from flsim.base.settings import Natural, settings, with_former_names
from flsim.data.corpus import Split
from flsim.data.stores import located
from flsim.data.synthetic import SyntheticHParams
from flsim.results.published import matching, published_rows
from flsim.runs.config import Config, from_working_directory, parse, toml
from flsim.runs.sweeps.search import TuningOutcome, Values, flat, merge, nested, read_outcome, slug

LONGEST_NAME = 200  # largest length of a run name in bytes; file systems allow 255, and names of logs are longer
# largest number of runs of a sweep; each has a folder, a file of settings and an entry in sweep.json
MOST_RUNS = 10_000
NOT_TRAINING = {"evaluation", "system"}  # sections
Axes = dict[str, list[Any]]


@settings
class Published:
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
    published: Published | None = None


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
    published: Published | None, grid: Grid, axes: Values, rows: list[dict[str, object]], source: str
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
