"""The definition of a search for the settings of a sweep, its folder, and the runs of its trials.

A trial is all runs of its group, over seeds and axes, with planted canaries that are not measured. Its perplexity is
the geometric mean of their perplexities on test users. docs/tuning.md has an example of a file. The folder of a search:

tune.json       the search, so that no other one continues in the folder
tuned.toml      the outcome, once the search has ended
configs/        the settings of each trial's runs, at the length that was trained last
corpus/         the corpus, if the tier makes one
runs/           run folders
logs/           the output of each run
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from flsim.base.errors import InputError
from flsim.base.files import digest, from_json, make_folder, new_file, write_json
from flsim.base.rng import stream
from flsim.base.settings import DIFFERENT, Natural, settings, with_former_names
from flsim.data.corpus import Corpus, Split
from flsim.data.stores import located
from flsim.measures.built_in import PERPLEXITY
from flsim.results.store import is_run, read_run
from flsim.results.sweeps import RUNS
from flsim.runs.config import Config, dump, toml
from flsim.runs.sweeps import definition
from flsim.runs.sweeps.definition import Definition, Planned, Tier, planned_runs
from flsim.runs.sweeps.folder import CORPUS, CORPUS_SEED, TUNED, SweepFolder, corpus_of, open_corpus
from flsim.runs.sweeps.search import Group, Point, Range, Rule, TuningOutcome, middle, slug
from flsim.show.table import Column, markdown, note

OBJECTIVE = "perplexity on test users"
TUNING_FILE = "tune.json"


@settings
class TuningTier:
    grids: dict[str, dict[str, Range]]  # ranges of settings, for each grid of the sweep
    # values of axes that trials have; other runs of the sweep use the chosen values without a trial
    at: dict[str, list[Any]] = field(default_factory=dict)
    corpus: str | None = None  # folder or URI of a corpus for the search only, relative to the file
    # seed of a corpus for the search only, instead of `corpus`; its other settings are those of the tier
    corpus_seed: int | None = None

    def __post_init__(self) -> None:
        if self.corpus is not None and self.corpus_seed is not None:
            raise InputError("corpus and corpus_seed both name the corpus of the search; remove one")
        if self.corpus_seed == CORPUS_SEED:
            raise InputError(f"corpus_seed {CORPUS_SEED} gives the corpus of the sweep; use another seed, or remove it")
        if any(not ranges for ranges in self.grids.values()):
            raise InputError("each grid needs a range of at least one setting")


@settings
class Tuning(Rule):
    sweep: str = ""  # file of the sweep, relative to this file
    tiers: dict[str, TuningTier] = field(default_factory=dict)  # searches by tier of the sweep
    seeds: Annotated[tuple[Natural, ...], DIFFERENT] = ()  # seeds of the trials' runs
    by: tuple[str, ...] = ()  # axes of the sweep by which groups differ; each grid is a separate group

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sweep or not self.tiers or not self.seeds:
            raise InputError(
                "sweep, tiers and seeds are required: the file of a sweep, ranges by tier, and a list of seeds"
            )


@dataclass(frozen=True)
class TuningFolder(SweepFolder):
    file: ClassVar[str] = TUNING_FILE
    entries: ClassVar[set[str]] = {TUNING_FILE, TUNED, RUNS, CORPUS, "configs", "logs"}
    what: ClassVar[str] = "tune"

    def begin(self, search: "Search", digest: str) -> None:
        """Create the folders and write tune.json; InputError if the folder has another search."""
        path = self.path / TUNING_FILE
        if path.exists():
            try:
                known: Any = from_json(path.read_text(encoding="utf-8"))["digest"]
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"{path}: damaged; restore it, or name another --out") from error
            if known != digest:
                raise InputError(
                    f"{self.path}: this folder has another search than {search.source}; name another --out"
                )
        for name in (RUNS, "configs", "logs"):
            make_folder(self.path / name)
        write_json(path, {"sweep": search.definition.title, "tier": search.tier_name, "digest": digest})

    def write_config(self, name: str, config: Config) -> Path:
        with new_file(self.config(name)) as partial:
            dump(config, partial)
        return self.config(name)

    def perplexity(self, name: str, round: int) -> float | None:
        """Return a run's perplexity after a round: infinite if it diverged, None before it is measured."""
        if not is_run(self.run(name)):
            return None
        results = read_run(self.run(name))
        perplexity = results.of_model(PERPLEXITY.name, round)
        if perplexity is not None:
            return perplexity if 0 < perplexity < math.inf else math.inf
        return math.inf if results.status == "diverged" else None


@dataclass(frozen=True)
class Search:
    source: Path  # its file
    tuning: Tuning  # content of the file
    at: TuningTier  # the settings of the tier
    definition: Definition  # the sweep
    tier_name: str  # name of the tier
    corpus: Path | str  # folder or URI of the corpus of the search, which can be created later

    @property
    def sweep(self) -> Path:
        return self.source.parent / self.tuning.sweep

    @property
    def tier(self) -> Tier:
        """Return the tier without values of an earlier search."""
        return replace(self.definition.tiers[self.tier_name], tuned=None)

    def open_corpus(self, folder: Path) -> Corpus:
        """Open the corpus; create it first if it is a synthetic corpus of this search that does not exist."""
        seed = CORPUS_SEED if self.at.corpus_seed is None else self.at.corpus_seed
        return open_corpus(self.tier, self.corpus, folder, seed)

    def planned(self, grid: str, values: Point) -> list[Planned]:
        """Return the runs of a grid in trials with these values; InputError if a value is impossible or on an axis."""
        axes = {axis for its in self.definition.grids if its.name == grid for axis in its.axes}
        if varied := [name for name in values if name in axes]:
            raise InputError(
                f"{self.source}: tiers.{self.tier_name}.grids.{grid}: {varied[0]} is an axis of this grid in "
                f"{self.sweep}, which a search cannot choose; remove it from one of them"
            )
        runs = planned_runs(
            self.definition,
            self.tier,
            self.corpus,
            str(self.sweep),
            seeds=self.tuning.seeds,
            only=[grid],
            overrides=[f"{name}={value!r}" for name, value in values.items()],
        )
        return [
            replace(run, config=measuring_utility(run.config))
            for run in runs
            if all(run.axes[axis] in tried for axis, tried in self.at.at.items() if axis in run.axes)
        ]

    def typical(self) -> list[Planned]:
        return [run for grid, ranges in self.at.grids.items() for run in self.planned(grid, middle(ranges))]

    def _in_the_middle(self, grid: str, ranges: Mapping[str, Range]) -> list[Planned]:
        """Return the runs of the middle of the ranges; an InputError also names the range and its file."""
        values = middle(ranges)
        try:
            return self.planned(grid, values)
        except InputError as error:
            if str(self.source) in str(error):
                raise
            tried = ", ".join(f"{name} = {value:g}" for name, value in values.items())
            raise InputError(
                f"{self.source}: tiers.{self.tier_name}.grids.{grid}: the middle of the ranges, {tried}, is "
                f"impossible: {error}"
            ) from error

    def groups(self) -> list[Group]:
        """Return the groups in the table's order; InputError if the file does not fit, or budgets are unequal."""
        names = [grid.name for grid in self.definition.grids]
        if set(names) != set(self.at.grids):
            raise InputError(
                f"{self.source}: tiers.{self.tier_name}.grids: the sweep has the grids {', '.join(names)}, and "
                f"each must be tuned; found {', '.join(self.at.grids) or 'none'}"
            )
        groups, sizes, axes = dict[str, Group](), dict[str, int](), set[str]()
        for grid in names:
            ranges = self.at.grids[grid]
            for run in self._in_the_middle(grid, ranges):
                axes |= set(run.axes)
                if len(self.tuning.halving) > 1 and run.config.lasting(1).digest != run.config.lasting(2).digest:
                    raise InputError(
                        f"{self.source}: grid {grid} has a schedule that ends with training, so trials cannot "
                        "be continued; set halving = [1.0]"
                    )
                shared = {axis: run.axes[axis] for axis in self.tuning.by if axis in run.axes}
                name = "-".join([grid, *(slug(axis, value) for axis, value in shared.items())])
                groups.setdefault(name, Group(name, grid, shared, ranges))
                sizes[name] = sizes.get(name, 0) + 1
            try:
                self.tuning.first_points(ranges, stream(self.tuning.seeds[0], "tuning", grid))
            except InputError as error:
                raise InputError(f"{self.source}: tiers.{self.tier_name}.grids.{grid}: {error}") from error
        for axis in {*self.tuning.by, *self.at.at} - axes:
            raise InputError(
                f"{self.source}: {axis} is not an axis of {self.sweep}, or `at` excludes all runs of a grid"
            )
        if {group.grid for group in groups.values()} != set(names):
            raise InputError(
                f"{self.source}: tiers.{self.tier_name}.at excludes all runs of a grid; list values of this grid"
            )
        if len(set(sizes.values())) > 1:
            sizes_text = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise InputError(
                f"{self.source}: groups have unequal numbers of runs per trial: {sizes_text}; make them equal "
                "with `at` or `by`"
            )
        return list(groups.values())

    def runs_of(self, group: Group, number: int, values: Point) -> list[Planned]:
        """Return the runs of a trial, by its number and its values."""
        return [
            replace(run, name=f"t{number:02d}-{run.name}")
            for run in self.planned(group.grid, values)
            if all(run.axes[axis] == value for axis, value in group.axes.items())
        ]

    def is_possible(self, group: Group, values: Point) -> bool:
        try:
            self.planned(group.grid, values)
        except InputError:
            return False
        return True

    def digest(self, runs: Sequence[Planned], train: Split, corpus: str) -> str:
        """Return the digest of the search: its rule and ranges, and the settings and lengths of its first runs."""
        entries = [(run.name, run.config.digest, run.config.rounds_over(run.config.trained_on(train))) for run in runs]
        tuning = {name: value for name, value in asdict(self.tuning).items() if name not in {"sweep", "tiers"}}
        search = with_former_names([tuning, asdict(self.at), entries, corpus])
        return digest(json.dumps(search, sort_keys=True, default=str))


def load_search(path: Path, tier: str, folder: Path) -> Search:
    """Read a file for `flsim tune`, and its sweep; InputError if one, its tier or a corpus does not fit."""
    values = toml.read(path)
    if "sweep" not in values:
        raise InputError(
            f"{path}: this file is not a search, because it names no sweep; see experiments/tune-table1.toml"
        )
    tuning = toml.validate(Tuning, values, str(path))
    if tier not in tuning.tiers:
        raise InputError(f"{path}: there is no tier {tier!r}; choose one of {', '.join(tuning.tiers)}")
    sweep, at = path.parent / tuning.sweep, tuning.tiers[tier]
    loaded = definition.load(sweep)
    sweep_tier = definition.tier_of(loaded, tier, str(sweep))
    if at.corpus_seed is not None and sweep_tier.corpus.synthetic is None:
        raise InputError(f"{path}: corpus_seed: the corpus of this tier is not synthetic; set corpus instead")
    corpus = corpus_of(sweep_tier, sweep, folder) if at.corpus is None else located(at.corpus, path.parent)
    if at.corpus is not None and isinstance(corpus, Path) and not corpus.exists():
        raise InputError(f"{corpus}: no such corpus; name another corpus in {path}")
    return Search(path, tuning, at, loaded, tier, corpus)


def measuring_utility(config: Config) -> Config:
    """Return the settings of a trial's run: one measurement, at the end, of utility only.

    Canaries are planted as in the sweep: users whose records repeat one phrase make training less stable, and runs with
    canaries can diverge at learning rates that were chosen without canaries.
    """
    return replace(
        config,
        evaluation=replace(config.evaluation, every=10**9, every_epochs=None, also=(), utility_only=True),
        system=replace(config.system, tracking=()),
    )


def shortened(config: Config, share: float, train: Split) -> tuple[Config, int]:
    rounds = max(1, math.ceil(round(share * config.rounds_over(config.trained_on(train)), 6)))
    return config.lasting(rounds), rounds


def tuned_to_text(tuned: TuningOutcome) -> str:
    """Return the chosen values as a table of at most 80 columns, with notes on the choice."""
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
