"""The folder of a sweep, which is created once and can be continued; `flsim.results.sweeps` reads it.

sweep.json      all runs, their published rows, the settings that they share, commands and sessions
sweep.toml      the definition
configs/        the settings of each run
corpus/         the corpus, if the tier makes one
runs/           run folders
logs/           the output of each run
tuned.toml      the search that chose settings, if the tier names one

A later command can change what does not belong to the digest of a run: its length, rounds of evaluations, and machines.
"""

import json
import math
import platform
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, ClassVar

from rich.progress import Progress, TaskID

from flsim.base.errors import InputError
from flsim.base.files import digest, from_json, held, make_folder, new_file, write_json
from flsim.base.progress import LINES_EVERY, clock, say
from flsim.base.rng import stream
from flsim.base.settings import DIFFERENT, Natural, flat, settings, with_former_names, with_present_names
from flsim.base.terminal import bars, console
from flsim.data.corpus import Corpus, Split
from flsim.data.stores import located
from flsim.data.synthetic import SyntheticHParams, make_synthetic
from flsim.measures.built_in import PERPLEXITY
from flsim.results.rows import ON_SCREEN, in_short, is_run, read_run
from flsim.results.sweeps import FILE, RUNS
from flsim.runs import roundlog
from flsim.runs.config import Config, DataHParams, dump, from_working_directory, toml
from flsim.runs.config.files import KINDS
from flsim.runs.foresight import refuse_impossible, refuse_impossible_in
from flsim.runs.sweeps import definition
from flsim.runs.sweeps.definition import (
    Definition,
    Planned,
    Point,
    Range,
    SearchRule,
    Tier,
    TrialGroup,
    TuningOutcome,
    Values,
    merge,
    middle,
    planned_runs,
    slug,
)
from flsim.show.table import Column, markdown, note

PACKAGES = ("flsim-memorization", "torch", "flwr", "ray", "numpy")
CORPUS, CORPUS_SEED = "corpus", 0
LOCK = ".sweeping"
TUNED = "tuned.toml"
ENTRIES = {FILE, RUNS, CORPUS, "sweep.toml", "configs", "logs", TUNED}
SHARED_CORPUS, SHARED_TUNED = "data.corpus", "tuned"  # keys of shared settings
LENGTH = {"training.rounds", "training.steps", "training.epochs", "training.words"}
FREE = {*LENGTH, "evaluation.every", "evaluation.every_epochs"}


@dataclass(frozen=True)
class SweepFolder:
    path: Path

    file: ClassVar[str] = FILE
    entries: ClassVar[set[str]] = ENTRIES
    what: ClassVar[str] = "sweep"  # also the name of the command

    def run(self, name: str) -> Path:
        return self.path / RUNS / name

    def config(self, name: str) -> Path:
        return self.path / "configs" / f"{name}.toml"

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    def status(self, name: str, rounds: int) -> str:
        """Return the status in run.json; "waits" if the run has not started, or its length was increased."""
        try:
            known = from_json((self.run(name) / "run.json").read_text(encoding="utf-8"))
            status = str(known["status"])
            is_longer = status == "completed" and known["rounds"] != rounds
        except (OSError, ValueError, KeyError, TypeError):
            return "waits"
        return "waits" if is_longer else status

    def refuse_shorter(self, planned: Sequence[Planned], train: Split) -> None:
        """Raise InputError, before anything is written, for a run that has trained more rounds than it now should."""
        for run in planned:
            try:
                trained = int(from_json((self.run(run.name) / "run.json").read_text(encoding="utf-8"))["round"])
            except (OSError, ValueError, KeyError, TypeError):
                continue  # not started; `flsim run` refuses a damaged file
            rounds = run.config.rounds_over(run.config.trained_on(train))
            if trained > rounds:
                raise InputError(
                    f"{self.run(run.name)}: {trained:,} rounds are trained already, and this command has {rounds:,}; a "
                    f"run can only become longer; set at least {trained:,} rounds, or name another --out"
                )

    @contextmanager
    def hold_lock(self) -> Iterator[None]:
        """Lock the folder in the block; InputError if it is locked, has other files, or cannot be written."""
        try:
            make_folder(self.path)
            names = {path.name for path in self.path.iterdir() if not path.name.startswith(".")}
            if names - self.entries and self.file not in names:
                raise InputError(
                    f"{self.path}: this folder has files that do not belong to a {self.what}; name a new folder "
                    "with --out"
                )
            (self.path / LOCK).touch()
        except OSError as error:
            raise InputError(
                f"{self.path}: this folder cannot be written ({error.strerror}); name another --out"
            ) from error
        with ExitStack() as stack:
            try:
                stack.enter_context(held(self.path / LOCK))
            except BlockingIOError:
                raise InputError(
                    f"{self.path}: another `flsim {self.what}` uses this folder; wait for its end, or end it"
                ) from None
            except OSError:
                pass  # a filesystem without locks
            yield

    def write(
        self,
        source: Path,
        definition: Definition,
        tier: str,
        planned: Sequence[Planned],
        command: str,
        tuned: TuningOutcome | None = None,
        shared: Mapping[str, Any] | None = None,
    ) -> None:
        """Add runs to those of the sweep; `shared` settings, if any, are recorded and compared, see `shared_settings`.

        Raises InputError if the sweep was started at another tier, on another synthetic corpus, or with other settings.
        """
        known, synthetic = self._known(), definition.tiers[tier].corpus.synthetic
        corpus = None if synthetic is None else asdict(synthetic)
        if known and (known["tier"], known["name"]) != (tier, source.stem):
            raise InputError(
                f"{self.path}: this folder has sweep {known['name']} at tier {known['tier']}; name another --out"
            )
        if known and known.get("synthetic", corpus) != corpus:
            raise InputError(
                f"{self.path}: its corpus was created with other settings than those of {source}; name another --out"
            )
        if known and shared is not None and known.get("shared") is not None:
            refuse_other_settings(self.path, known["shared"], shared)
        runs = {run["name"]: run for run in known["runs"]} if known else {}
        commands = _commands(known, command, [run.name for run in planned if run.name not in runs])
        for run in planned:
            before = runs.get(run.name)
            if before is not None and before["digest"] != run.config.digest:
                raise InputError(
                    f"{self.path}: its run {run.name} has other settings than those of {source}; name another --out"
                )
            entry = {name: getattr(run, name) for name in ("name", "grid", "seed", "axes")}
            row = None if run.published is None else dict(run.published)
            runs[run.name] = entry | {"published": row, "digest": run.config.digest}
        for name in (RUNS, "configs", "logs"):
            make_folder(self.path / name)
        for run in planned:
            with new_file(self.config(run.name)) as partial:
                dump(run.config, partial)
        if source.resolve() != (self.path / "sweep.toml").resolve():
            with new_file(self.path / "sweep.toml") as partial:
                partial.write_bytes(source.read_bytes())
        if tuned:
            tuned.write(self.path / TUNED)
        published = definition.published
        places = {grid.name: place for place, grid in enumerate(definition.grids)}
        write_json(
            self.path / FILE,
            {
                "name": source.stem,
                "title": definition.title,
                "grids": [grid.name for grid in definition.grids],
                "question": definition.question,
                "tier": tier,
                "about": " ".join(definition.tiers[tier].about.split()),
                "source": published.source if published else None,
                "command": command,
                "commands": commands,
                # An old folder has no shared settings, and none are added later.
                "shared": known.get("shared") if known else shared,
                "synthetic": corpus,
                "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
                "sessions": known["sessions"] if known else [],
                "runs": sorted(runs.values(), key=lambda run: places.get(run["grid"], len(places))),
                **({"tuned": tuned.note, "chosen": tuned.keys} if tuned else {}),
            },
        )

    def add_session(self, session: Mapping[str, Any]) -> None:
        known = self._known()
        if known is not None:  # the run was not removed in the meantime
            write_json(self.path / FILE, {**known, "sessions": [*known["sessions"], session]})

    def _known(self) -> dict[str, Any] | None:
        if not (self.path / FILE).exists():
            return None
        try:
            known: dict[str, Any] = with_present_names(from_json((self.path / FILE).read_text(encoding="utf-8")))
            known["sessions"], known["tier"], known["name"]
            [(run["name"], run["grid"], run["digest"]) for run in known["runs"]]
            return known
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{self.path / FILE}: damaged; restore it, or name another --out") from error


def corpus_of(tier: Tier, source: Path, folder: Path) -> Path | str:
    """Return the path of a tier's corpus, which can be created later; raise InputError if a named corpus is missing."""
    if tier.corpus.path is None:
        return folder / CORPUS
    path = located(tier.corpus.path, source.parent)
    if isinstance(path, Path) and not path.exists():
        how = f"; create it with: {tier.corpus.how}" if tier.corpus.how else "; name another with --corpus"
        raise InputError(f"{path}: no such corpus{how}")
    return path


def open_corpus(tier: Tier, path: Path | str, folder: Path, seed: int = CORPUS_SEED) -> Corpus:
    """Open the corpus; create it first, from a seed, if it is a synthetic corpus of the sweep that does not exist."""
    corpus = corpus_or_its_settings(tier, path, folder)
    return corpus if isinstance(corpus, Corpus) else make_synthetic(folder / CORPUS, corpus, seed)


def refuse_impossible_runs(
    planned: Iterable[Planned], corpus: Corpus | SyntheticHParams | Split, is_trained_here: bool = True
) -> None:
    """Raise InputError, with the name of the run, for the first run that `flsim.runs.foresight` finds impossible."""
    for run in planned:
        try:
            if isinstance(corpus, Corpus):
                refuse_impossible_in(run.config, corpus, is_trained_here)
            elif isinstance(corpus, Split):
                refuse_impossible(run.config, corpus.layout, len(corpus), corpus.records, is_trained_here)
            else:
                layout, users, records = corpus.token_layout, corpus.users, corpus.most_records
                refuse_impossible(run.config, layout, users, records, is_trained_here)
        except InputError as error:
            raise InputError(f"{run.name}: {error}") from error


def corpus_or_its_settings(tier: Tier, path: Path | str, folder: Path) -> Corpus | SyntheticHParams:
    """Return the corpus of a tier, or the settings from which `open_corpus` will make it; InputError without either."""
    made = folder / CORPUS
    return (tier.corpus.synthetic if path == made and not made.exists() else None) or Corpus.open(path)


def shared_settings(
    definition: Definition, tier: Tier, overrides: Sequence[str], corpus: str, tuned: TuningOutcome | None = None
) -> dict[str, Any]:
    """Return the settings of all grids of a sweep by key, as values of JSON."""
    values: Values = {}
    for part in (definition.base, tier.set):
        merge(values, part)
    for override in overrides:
        toml.override_value(values, override, from_working_directory)
    settings = {key: value for key, value in flat(values) if key not in FREE and not key.startswith("system.")}
    settings |= {SHARED_CORPUS: corpus} | ({SHARED_TUNED: tuned.search} if tuned else {})
    return dict(json.loads(json.dumps(settings, default=str)))


def refuse_other_settings(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise InputError if settings that all runs of a folder share differ from those of a command for it."""
    defaults: dict[str, Any] = {}
    for kind in KINDS.values():
        defaults |= dict(flat(asdict(kind(DataHParams(Path())))))
    defaults = json.loads(json.dumps(defaults, default=str))
    for key in [*before, *(key for key in now if key not in before)]:
        old, new = (values.get(key, defaults.get(key)) for values in (before, now))
        if old == new:
            continue
        if key == SHARED_CORPUS:
            what = "its runs were trained on another corpus than that of this command"
        elif key == SHARED_TUNED:
            what = "its runs have settings of another search by `flsim tune` than this command"
        else:
            old, new = ("none" if value is None else json.dumps(value, ensure_ascii=False) for value in (old, new))
            what = f"its runs have {key} = {old}, and this command has {new}"
        raise InputError(
            f"{folder}: {what}; runs of one sweep must be equal in it; use the same value, or name another --out"
        )


def _commands(known: Mapping[str, Any] | None, command: str, added: Sequence[str]) -> list[dict[str, Any]]:
    """Return the commands so far, each with its new runs, and the new command unless it repeats another."""
    commands: list[dict[str, Any]] = []
    if known:
        first = {"command": known.get("command", ""), "runs": [run["name"] for run in known["runs"]]}
        commands = [*known.get("commands", [first])]
    is_repeated = not added and command in [entry["command"] for entry in commands]
    return commands if is_repeated else [*commands, {"command": command, "runs": [*added]}]


# Progress of all runs of a sweep: bars of those that train in a terminal, otherwise plain lines.


@dataclass(frozen=True)
class RunState:
    status: str  # "waits", "runs", or the final status in run.json
    done: float = 0.0  # share of its rounds, 0 to 1
    note: str = ""  # text next to the progress bar


def state_of(run: Path, began: float, is_finished: bool = False) -> RunState:
    """Return the state of a run's folder, which can be missing; without changes since `began` (s), the run waits.

    `is_finished` is whether the run was complete at that time, when the sweep was last continued.
    """
    try:
        known = from_json((run / "run.json").read_text(encoding="utf-8"))
        status, round_, rounds = str(known["status"]), int(known["round"]), int(known["rounds"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return RunState("waits")
    touched = (run / "run.json").stat().st_mtime
    is_over = status in {"completed", "diverged"}
    if is_over and (is_finished or touched >= began):
        return RunState(status, 1.0)
    if is_over or touched < began:
        return RunState("waits", note=f"stopped at {round_:,}" if round_ else "")
    last = roundlog.last(run)
    done, loss = last.get("round", round_), last.get("loss")
    note = f"{done:,}/{rounds:,}" + (f", loss {loss:.2f}" if isinstance(loss, int | float) and isfinite(loss) else "")
    return RunState("runs" if status == "running" else status, done / max(rounds, 1), note)


class Screen:
    def __init__(self, folder: SweepFolder, names: Sequence[str], began: float, finished: Collection[str] = ()) -> None:
        self._folder, self._names, self._began, self._finished = folder, names, began, frozenset(finished)
        self._said_at = time.monotonic()
        self._started: set[str] = set()
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    @contextmanager
    def live(self) -> Iterator["Screen"]:
        if not console.is_terminal:
            yield self
            return
        with bars() as self._bars:
            for name in ("", *self._names):
                self._tasks[name] = self._bars.add_task(
                    "", start=not name, total=1.0, title=name, status="", visible=not name
                )
            yield self
        self._bars = None

    def look(self) -> None:
        states = {name: self._state_of(name) for name in self._names}
        running = {name: state for name, state in states.items() if state.status == "runs"}
        new = [name for name in running if name not in self._started]
        self._started.update(new)
        if self._bars is not None:
            for name in new:
                self._bars.start_task(self._tasks[name])
            whole = sum(state.done for state in states.values()) / max(len(states), 1)
            self._bars.update(self._tasks[""], completed=whole, title=self._summary(states))
            for name, state in states.items():
                is_running = state.status == "runs"
                self._bars.update(self._tasks[name], completed=state.done, status=state.note, visible=is_running)
            return
        for name in new:
            say(f"{name}: started")
        if time.monotonic() - self._said_at >= LINES_EVERY:
            self._said_at = time.monotonic()
            if running:
                shares = ", ".join(f"{name} {100 * state.done:.0f}%" for name, state in running.items())
                say(f"{self._summary(states)}; {shares}")

    def ended(self, name: str, failure: str | None, remaining: int) -> None:
        state = self._state_of(name)
        over = state.status in {"completed", "diverged"}
        results = _results_in_short(self._folder.run(name)) if over else ""
        outcome = " ".join(filter(None, (state.status, results))) if over else f"failed: {failure}"
        say(f"{name}: {outcome} ({remaining} run{'s' * (remaining != 1)} remaining)")

    def _state_of(self, name: str) -> RunState:
        return state_of(self._folder.run(name), self._began, name in self._finished)

    def _summary(self, states: dict[str, RunState]) -> str:
        over = sum(state.status in {"completed", "diverged"} for state in states.values())
        return f"{over} of {len(states)} runs, {clock(time.time() - self._began)}"


def _results_in_short(run: Path) -> str:
    try:
        results = read_run(run)
        if results.status == "diverged":
            return f"at {results.round:,}"
        last = results.evaluation()
        measured = {quantity: results.of_planted(quantity.name, last) for quantity in ON_SCREEN}
        if any(values is None for quantity, values in measured.items() if quantity.is_flag):
            return ""
        return in_short({quantity: values for quantity, values in measured.items() if values is not None})
    except InputError:
        return ""


# The definition of a search for the settings of a sweep, its folder, and the runs of its trials.
#
# A trial is all runs of its group, over seeds and axes, with planted canaries that are not measured. Its perplexity is
# the geometric mean of their perplexities on test users. docs/tuning.md has an example of a file. The folder of a
# search:
#
#     tune.json       the search, so that no other one continues in the folder
#     tuned.toml      the outcome, once the search has ended
#     configs/        the settings of each trial's runs, at the length that was trained last
#     corpus/         the corpus, if the tier makes one
#     runs/           run folders
#     logs/           the output of each run

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
class Tuning(SearchRule):
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

    def groups(self) -> list[TrialGroup]:
        """Return the groups in the table's order; InputError if the file does not fit, or budgets are unequal."""
        names = [grid.name for grid in self.definition.grids]
        if set(names) != set(self.at.grids):
            raise InputError(
                f"{self.source}: tiers.{self.tier_name}.grids: the sweep has the grids {', '.join(names)}, and "
                f"each must be tuned; found {', '.join(self.at.grids) or 'none'}"
            )
        groups, sizes, axes = dict[str, TrialGroup](), dict[str, int](), set[str]()
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
                groups.setdefault(name, TrialGroup(name, grid, shared, ranges))
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

    def runs_of(self, group: TrialGroup, number: int, values: Point) -> list[Planned]:
        """Return the runs of a trial, by its number and its values."""
        return [
            replace(run, name=f"t{number:02d}-{run.name}")
            for run in self.planned(group.grid, values)
            if all(run.axes[axis] == value for axis, value in group.axes.items())
        ]

    def is_possible(self, group: TrialGroup, values: Point) -> bool:
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
