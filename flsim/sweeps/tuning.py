"""The definition of a search for the settings of a sweep, and the runs of its trials.

    sweep = "table1.toml"               # relative to this file
    by = ["data.world"]                 # groups: each grid in each world takes values of its own
    method = "grid"
    trials = 8
    halving = [0.25, 0.5, 1.0]
    seeds = [1000]                      # a sweep that takes the values refuses these
    [tiers.smoke]
    at = { "training.cohort" = [8] }    # the runs of a grid to try values on
    corpus_seed = 1                     # a corpus of the search's own, made as the tier's
    [tiers.smoke.grids.fedavg]
    "local.learning_rate" = { low = 0.1, high = 10.0 }

A trial is all runs of its group, over seeds and axes, with canaries planted and nothing measured of them. Its loss is
the mean logarithm of their perplexities on test users.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from flsim.base.errors import InputError
from flsim.base.files import digest
from flsim.data.corpus import Split
from flsim.measures.utility import PERPLEXITY
from flsim.results.run_file import is_run
from flsim.results.store import read_run
from flsim.runs.config import Config, toml
from flsim.show.formats import note
from flsim.show.layout import Column, markdown
from flsim.sweeps import definition
from flsim.sweeps.definition import Definition, Planned, Tier, planned_runs
from flsim.sweeps.folder import CORPUS_SEED
from flsim.sweeps.search import Point, Range, Rule, Trial
from flsim.sweeps.tuned import Tuned
from flsim.sweeps.values import Strict, Values, slug

OBJECTIVE = "perplexity on test users"


@dataclass(frozen=True)
class TuningTier(Strict):
    """The search at one tier of the sweep.

    Attributes:
        grids: ranges of settings, by grid; all grids of the sweep.
        at: values of axes that trials have; other runs of the sweep take the chosen values without a trial.
        corpus: folder or URI of a corpus of the search's own, relative to the file.
        corpus_seed: seed of a corpus of the search's own, in place of `corpus`; otherwise made as the tier's.
    """

    grids: dict[str, dict[str, Range]]
    at: dict[str, list[Any]] = field(default_factory=dict)
    corpus: str | None = None
    corpus_seed: int | None = None

    def __post_init__(self) -> None:
        if self.corpus is not None and self.corpus_seed is not None:
            raise InputError("corpus and corpus_seed both name the corpus of the search; remove one")
        if self.corpus_seed == CORPUS_SEED:
            raise InputError(f"corpus_seed {CORPUS_SEED} makes the sweep's own corpus; take another, or remove it")
        if any(not ranges for ranges in self.grids.values()):
            raise InputError("each grid needs a range of some setting")


@dataclass(frozen=True)
class Tuning(Rule):
    """The content of a file for `flsim tune`.

    Attributes:
        sweep: file of the sweep, relative to this one.
        tiers: searches by tier of the sweep.
        seeds: seeds of the trials' runs.
        by: axes of the sweep by which groups differ; grids are groups of their own.
    """

    sweep: str = ""
    tiers: dict[str, TuningTier] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    by: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sweep or not self.tiers or not self.seeds:
            raise InputError("sweep, tiers and seeds are needed: the file of a sweep, ranges by tier, a list of seeds")
        if len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise InputError(f"seeds must be different, and not negative, found {list(self.seeds)}")


@dataclass(frozen=True)
class Group:
    """The runs of a sweep that take the same values, and what is searched for them.

    Attributes:
        name: its name.
        grid: its grid.
        axes: values of the axes of `Tuning.by`.
        ranges: ranges by setting.
    """

    name: str
    grid: str
    axes: Values
    ranges: Mapping[str, Range]


@dataclass(frozen=True)
class Search:
    """A search at one tier.

    Attributes:
        source: its file.
        tuning: content of the file.
        at: the part of the tier.
        definition: the sweep.
        tier_name: name of the tier.
        corpus: folder or URI of the corpus of the search.
    """

    source: Path
    tuning: Tuning
    at: TuningTier
    definition: Definition
    tier_name: str
    corpus: Path | str

    @property
    def sweep(self) -> Path:
        """Return the file of the sweep."""
        return self.source.parent / self.tuning.sweep

    @property
    def tier(self) -> Tier:
        """Return the tier, which takes no values of an earlier search."""
        return replace(self.definition.tiers[self.tier_name], tuned=None)

    def planned(self, grid: str, values: Point) -> list[Planned]:
        """Return the runs of a grid that are trained in trials, with these values of settings, to measure utility.

        Raises:
            InputError: a value is impossible, or a setting is one of the grid's axes.
        """
        axes = {axis for its in self.definition.grids if its.name == grid for axis in its.axes}
        if varied := [name for name in values if name in axes]:
            raise InputError(
                f"{self.source}: tiers.{self.tier_name}.grids.{grid}: {varied[0]} is an axis of this grid in "
                f"{self.sweep}, which a search cannot choose; remove it from one of them"
            )
        overrides = [f"{name}={value!r}" for name, value in values.items()]
        runs = planned_runs(
            self.definition, self.tier, self.corpus, str(self.sweep), self.tuning.seeds, [grid], overrides
        )
        kept = [
            run
            for run in runs
            if all(run.axes[axis] in tried for axis, tried in self.at.at.items() if axis in run.axes)
        ]
        return [replace(run, config=measuring_utility(run.config)) for run in kept]

    def typical(self) -> list[Planned]:
        """Return the runs of all grids with the middle value of each range."""
        return [
            run
            for grid, ranges in self.at.grids.items()
            for run in self.planned(grid, {name: range_.at(0.5) for name, range_ in ranges.items()})
        ]

    def groups(self) -> list[Group]:
        """Return the groups in the table's order.

        Raises:
            InputError: the file does not fit the sweep, or groups have unequal budgets.
        """
        names = [grid.name for grid in self.definition.grids]
        if set(names) != set(self.at.grids):
            raise InputError(
                f"{self.source}: tiers.{self.tier_name}.grids: the sweep has {', '.join(names)}, and each must be "
                f"tuned, alike; found {', '.join(self.at.grids) or 'none'}"
            )
        groups, sizes, axes = dict[str, Group](), dict[str, int](), set[str]()
        for grid in names:
            ranges = self.at.grids[grid]
            middle = {name: range_.at(0.5) for name, range_ in ranges.items()}
            for run in self.planned(grid, middle):
                axes |= set(run.axes)
                if len(self.tuning.halving) > 1 and run.config.lasting(1).digest != run.config.lasting(2).digest:
                    raise InputError(
                        f"{self.source}: grid {grid} has a schedule that ends with training, so no trial can train on; "
                        f"set halving = [1.0]"
                    )
                own = {axis: run.axes[axis] for axis in self.tuning.by if axis in run.axes}
                name = "-".join([grid, *(slug(axis, value) for axis, value in own.items())])
                groups.setdefault(name, Group(name, grid, own, ranges))
                sizes[name] = sizes.get(name, 0) + 1
        for axis in {*self.tuning.by, *self.at.at} - axes:
            raise InputError(f"{self.source}: {axis}: no axis of {self.sweep}, or `at` leaves no run of a grid")
        if {group.grid for group in groups.values()} != set(names):
            raise InputError(f"{self.source}: tiers.{self.tier_name}.at leaves no run of some grid; name its values")
        if len(set(sizes.values())) > 1:
            sizes_text = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise InputError(
                f"{self.source}: unequal budgets, in runs a trial: {sizes_text}; equal them by `at` or `by`"
            )
        return list(groups.values())

    def runs_of(self, group: Group, trial: Trial) -> list[Planned]:
        """Return the runs of a trial."""
        runs = self.planned(group.grid, trial.values)
        own = [run for run in runs if all(run.axes[axis] == value for axis, value in group.axes.items())]
        return [replace(run, name=f"t{trial.number:02d}-{run.name}") for run in own]

    def is_possible(self, group: Group, values: Point) -> bool:
        """Return whether the settings of a group may have these values."""
        try:
            self.planned(group.grid, values)
        except InputError:
            return False
        return True

    def digest(self, runs: Sequence[Planned], train: Split, corpus: str) -> str:
        """Return the digest of the search: its rule and ranges, and the settings and lengths of its first runs."""
        about = [(run.name, run.config.digest, run.config.rounds_over(run.config.trained_on(train))) for run in runs]
        tuning = {name: value for name, value in asdict(self.tuning).items() if name not in {"sweep", "tiers"}}
        return digest(json.dumps([tuning, asdict(self.at), about, corpus], sort_keys=True, default=str))


def load(path: Path, tier: str) -> tuple[Tuning, TuningTier, Definition]:
    """Read a file for `flsim tune`, and its sweep.

    Raises:
        InputError: a file is missing or wrong, or has no such tier.
    """
    values = toml.read(path)
    if "sweep" not in values:
        raise InputError(f"{path}: not a search, as it names no sweep; see experiments/tune-table1.toml")
    tuning = toml.validate(Tuning, values, str(path))
    if tier not in tuning.tiers:
        raise InputError(f"{path}: has no tier {tier!r}; choose one of {', '.join(tuning.tiers)}")
    sweep = path.parent / tuning.sweep
    loaded = definition.load(sweep)
    definition.tier_of(loaded, tier, str(sweep))
    return tuning, tuning.tiers[tier], loaded


def measuring_utility(config: Config) -> Config:
    """Return the settings of a trial's run: one measurement, at the end, of utility alone.

    Canaries are planted as in the sweep: users whose records repeat one phrase make training less stable, and rates
    that were chosen without them made runs with them diverge.
    """
    return replace(
        config,
        evaluation=replace(config.evaluation, every=10**9, every_epochs=None, also=(), utility_only=True),
        system=replace(config.system, tracking=()),
    )


def shortened(config: Config, share: float, train: Split) -> tuple[Config, int]:
    """Return the settings of a run of a share of its length, and its number of rounds."""
    rounds = max(1, math.ceil(round(share * config.rounds_over(config.trained_on(train)), 6)))
    return config.lasting(rounds), rounds


def loss_after(folder: Path, round: int) -> float | None:
    """Return the logarithm of a run's perplexity after a round: infinite where it diverged, None before it is measured.

    Raises:
        InputError: the run is damaged.
    """
    if not is_run(folder):
        return None
    results = read_run(folder)
    perplexity = results.of_model(PERPLEXITY.name, round)
    if perplexity is not None:
        return math.log(perplexity) if 0 < perplexity < math.inf else math.inf
    return math.inf if results.status == "diverged" else None


def to_text(tuned: Tuned) -> str:
    """Return the chosen values as a table of at most 80 columns, with how they were chosen."""
    rows = [(group, name) for group in tuned.groups for name in group.values]
    tried = [sorted({trial.values[name] for trial in group.trials}) for group, name in rows]
    columns = [
        Column("Chosen", [f"{group.values[name]:g}" for group, name in rows]),
        Column("From", [f"{values[0]:g}" for values in tried]),
        Column("To", [f"{values[-1]:g}" for values in tried]),
        Column("Perp.", [f"{group.perplexity:.1f}" for group, _ in rows]),
        Column("Trials", [f"{len(group.trials)}" for group, _ in rows]),
        Column("Diverged", [f"{sum(trial.has_diverged for trial in group.trials)}" for group, _ in rows]),
    ]
    labels = [
        Column("Group", [group.name for group, _ in rows], is_number=False),
        Column("Setting", [name for _, name in rows], is_number=False),
    ]
    return markdown(labels, [columns], note(tuned.note))
