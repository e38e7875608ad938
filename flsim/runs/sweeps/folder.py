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
import platform
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar

from rich.progress import Progress, TaskID

from flsim.base.errors import InputError
from flsim.base.files import from_json, held, make_folder, new_file, write_json
from flsim.base.progress import LINES_EVERY, clock, say
from flsim.base.settings import flat, with_present_names
from flsim.base.terminal import bars, console
from flsim.data.corpus import Corpus, Split
from flsim.data.stores import located
from flsim.data.synthetic import SyntheticHParams, make_synthetic
from flsim.results.rows import ON_SCREEN, in_short
from flsim.results.store import read_run
from flsim.results.sweeps import FILE, RUNS
from flsim.runs import roundlog
from flsim.runs.config import DataHParams, dump, from_working_directory, toml
from flsim.runs.config.files import KINDS
from flsim.runs.foresight import refuse_impossible, refuse_impossible_in
from flsim.runs.sweeps.definition import Definition, Planned, Tier
from flsim.runs.sweeps.search import TuningOutcome, Values, merge

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
class State:
    status: str  # "waits", "runs", or the final status in run.json
    done: float = 0.0  # share of its rounds, 0 to 1
    note: str = ""  # text next to the progress bar


def state_of(run: Path, began: float, is_finished: bool = False) -> State:
    """Return the state of a run's folder, which can be missing; without changes since `began` (s), the run waits.

    `is_finished` is whether the run was complete at that time, when the sweep was last continued.
    """
    try:
        known = from_json((run / "run.json").read_text(encoding="utf-8"))
        status, round_, rounds = str(known["status"]), int(known["round"]), int(known["rounds"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return State("waits")
    touched = (run / "run.json").stat().st_mtime
    is_over = status in {"completed", "diverged"}
    if is_over and (is_finished or touched >= began):
        return State(status, 1.0)
    if is_over or touched < began:
        return State("waits", note=f"stopped at {round_:,}" if round_ else "")
    last = roundlog.last(run)
    done, loss = last.get("round", round_), last.get("loss")
    note = f"{done:,}/{rounds:,}" + (f", loss {loss:.2f}" if isinstance(loss, int | float) and isfinite(loss) else "")
    return State("runs" if status == "running" else status, done / max(rounds, 1), note)


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

    def _state_of(self, name: str) -> State:
        return state_of(self._folder.run(name), self._began, name in self._finished)

    def _summary(self, states: dict[str, State]) -> str:
        over = sum(state.status in {"completed", "diverged"} for state in states.values())
        return f"{over} of {len(states)} runs, {clock(time.time() - self._began)}"


def _results_in_short(run: Path) -> str:
    """Return the results of an ended run in a few words."""
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
