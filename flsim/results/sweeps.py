"""Reading of a sweep's folder, and series of runs that differ only in the seed."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, InstanceOf, TypeAdapter, ValidationError, with_config
from pydantic_core import from_json
from typing_extensions import TypedDict

from flsim.base.errors import InputError
from flsim.base.files import inside
from flsim.base.progress import say
from flsim.base.settings import with_present_names
from flsim.results.published import with_question
from flsim.results.rows import KEY, RunResults, is_run, read_run, read_run_file, refuse_two_points, setting_of

# Series of runs that differ only in their seed: groups, averaged runs, intervals, names and copies.


@dataclass(frozen=True)
class Sample:
    """The runs of a series that can be averaged."""

    runs: list[RunResults]  # all runs of the series, in the order given
    taken: list[tuple[RunResults, int]]  # the averaged runs, each with its evaluated round
    left_out: dict[str, str]  # the reason for each other run, by name


def by_series(runs: Sequence[RunResults]) -> list[list[RunResults]]:
    """Return runs grouped by series, in the order given; an older run without a series is a separate group.

    A series does not fix the length of training. If a seed occurs twice, runs with equal numbers of rounds are a group.
    Raises InputError if two runs have the same series, seed and length.
    """
    groups: dict[tuple[str, int], list[RunResults]] = {}
    for index, run in enumerate(runs):
        known = run.series is not None and run.seed is not None
        groups.setdefault((run.series or "", -1) if known else ("", index), []).append(run)
    parts = [part for group in groups.values() for part in _by_length(group)]
    place = {id(run): index for index, run in enumerate(runs)}
    return sorted(parts, key=lambda part: place[id(part[0])])


def _by_length(group: list[RunResults]) -> list[list[RunResults]]:
    if len({run.seed for run in group}) == len(group):
        return [group]
    lengths: dict[int, dict[int | None, RunResults]] = {}
    for run in group:
        seeds = lengths.setdefault(run.rounds, {})
        if run.seed in seeds:
            names = f"{seeds[run.seed].name} and {run.name}"
            raise InputError(f"runs {names}: equal settings and seed {run.seed}; exclude one of them")
        seeds[run.seed] = run
    return [list(seeds.values()) for seeds in lengths.values()]


def named_apart(runs: Iterable[Path]) -> dict[Path, dict[str, str]]:
    """Return the ``setting`` and ``series`` of each run folder, with its rounds if a seed is twice in a series."""
    described = {path: read_run_file(path) for path in runs}
    series = {path: run["series"] or str(path) for path, run in described.items()}
    times = Counter((series[path], run["seed"]) for path, run in described.items())
    twice = {series for (series, _), count in times.items() if count > 1}
    lengths = {path: f", {run['rounds']:,} rounds" if series[path] in twice else "" for path, run in described.items()}
    return {
        path: {
            "setting": setting_of(run["partition"], run["label"]) + lengths[path],
            "series": series[path] + lengths[path],
        }
        for path, run in described.items()
    }


def sample(runs: Sequence[RunResults], round: int | None = None, epoch: float | None = None) -> Sample:
    """Return the runs of a series that can be averaged: with equal epochs, or rounds if epochs are unknown.

    Diverged runs are excluded, and those without an evaluation at this point, by default the end of completed runs.
    Raises InputError if the last evaluations are at different lengths, or no completed run was evaluated there.
    """
    refuse_two_points(round, epoch)
    is_last = round is None and epoch is None
    where = "yet" if round is None else f"at round {round}"
    where = where if epoch is None else f"at {epoch:g} epochs"
    taken, left_out, refused = [], {}, []
    for run in runs:
        why = " ".join(f": {run.reason}".split()) if run.reason else ""
        if run.status == "diverged" or (is_last and run.status != "completed"):
            status = "running or killed" if run.status == "running" else run.status
            left_out[run.name] = f"{status} at round {run.round} of {run.rounds}{why}"
            continue
        try:
            taken.append((run, run.at(round, epoch)))
        except InputError as error:
            left_out[run.name] = f"{run.status}, not evaluated {where}"
            if run.status == "completed" and run.evaluated:
                refused.append(error)
    if refused and not taken:
        raise refused[0]
    for run, round_ in taken[1:]:
        _refuse_unlike(*taken[0], run, round_, has_point=epoch is not None)
    return Sample(list(runs), taken, left_out)


def has_means(
    runs: Sequence[RunResults], round: int | None = None, epoch: float | None = None
) -> tuple[bool, InputError | None]:
    """Return whether some setting has two seeds to average, and the reason if a setting has no mean."""
    try:
        return any(len(sample(group, round, epoch).taken) > 1 for group in by_series(runs)), None
    except InputError as error:
        return False, error


def are_of_one_length(lengths: Collection[float]) -> bool:
    """Return whether these rounds or epochs are alike; corpora of different seeds can differ slightly in records."""
    return min(lengths) >= 0.99 * max(lengths)


def _refuse_unlike(first: RunResults, round_: int, run: RunResults, other: int, has_point: bool) -> None:
    names = f"runs {first.name} and {run.name}"
    epochs = [first.epochs_of(round_) or 0.0, run.epochs_of(other) or 0.0]
    is_alike = are_of_one_length(epochs) and max(epochs) > 0
    if not (has_point or round_ == other or is_alike):
        raise InputError(
            f"{names}: last evaluated at rounds {round_} and {other}, which cannot be averaged; name --round or --epoch"
        )
    if len(first.roster) != len(run.roster):
        raise InputError(f"{names}: have {len(first.roster)} and {len(run.roster)} canaries; exclude one of them")
    references = first.references(round_), run.references(other)
    if references[0] != references[1]:
        raise InputError(
            f"{names}: ranked among different numbers of references, so their exposures cannot be averaged; "
            "evaluate all runs with the same evaluation.references"
        )


# Settings that are not properties of the training.
LEFT_OUT = ("seed", "data.corpus", "system.")


def distinctions(runs: Sequence[RunResults]) -> list[str]:
    """Return the suffixes of run names: the values of settings in which runs with equal names differ."""
    named: dict[str, dict[str | None, list[Mapping[str, Any]]]] = {}
    for run in runs:
        named.setdefault(run.label, {}).setdefault(run.partition, []).append(run.settings)
    # names that differ in one partition also name the rows of the other, of which fewer runs may have started
    names = {label: set[str]().union(*map(differing, named[label].values())) for label in named}
    return [words_of(run, names[run.label]) for run in runs]


def differing(settings: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names in which settings of trainings differ."""
    names = {name for of_run in settings for name in of_run if not name.startswith(LEFT_OUT)}
    return {name for name in names if any(of_run.get(name) != settings[0].get(name) for of_run in settings)}


def words_of(run: RunResults, names: Collection[str]) -> str:
    """Return a run's values of some settings, such as ``", units 15"``, in the order of its configuration."""
    return "".join(f", {name.rpartition('.')[2]} {_text(run.settings[name])}" for name in run.settings if name in names)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def without_copies(runs: Sequence[RunResults], needed: Collection[RunResults] = ()) -> list[RunResults]:
    """Return the runs without copies of other runs, and print a line about each copy.

    Copies have the same identity and number of rounds. The copy with the most evaluations remains, or the first of
    equal copies. Raises InputError if two copies have different measurements of one model.
    """
    first_of: dict[tuple[str | None, int], RunResults] = {}
    for run in sorted(runs, key=lambda run: (run not in needed, -len(run.evaluated))):
        other = None if run.identity is None else first_of.setdefault((run.identity, run.rounds), run)
        if other is not None and other is not run:
            _refuse_different(other, run)
    remaining = [run for run in runs if run in needed or run.identity is None or run in first_of.values()]
    for run in runs:
        if run not in remaining:
            name = first_of[run.identity, run.rounds].name
            say(f"run {run.name}: has the settings, seed and rounds of {name}, and is shown once, as {name}")
    return remaining


def _refuse_different(run: RunResults, copy: RunResults) -> None:
    both = run.rows.merge(copy.rows, on=KEY, suffixes=("", "_of_copy"))
    differ = both[(both["value"] != both["value_of_copy"]) & both["value"].notna()]
    if not differ.empty:
        first = differ.iloc[0]
        raise InputError(
            f"runs {run.name} and {copy.name}: copies of one run, whose {first['metric']} of round "
            f"{first['round']} differ; exclude one of them"
        )


# The folder of a sweep: its planned runs, the published row of each, and their results so far.
#
#     sweep.json      the runs' names, axes and published values; sessions: times of work and their outcomes
#     runs/NAME/      run folders

RUNS = "runs"
NOT_SEARCHED = "Learning rates were not tuned: the sweep sets them, and they can favour one side."
Measured = TypeVar("Measured")
PARTITION = "data.partition"  # the axis of twins
FILE = "sweep.json"
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@with_config(ConfigDict(extra="allow"))
class PublishedValues(TypedDict, total=False):
    """A published row; other columns are numbers or texts of this table."""

    table: str
    data: str
    optimizer: str
    canaries: Count
    references: Count
    prefix: Count
    length: Count
    rs: Count
    bs: Count


class Session(TypedDict, total=False):
    """A session of work on the sweep."""

    began: str
    seconds: Seconds
    peak_memory: Count | None  # bytes
    cores: Count | None
    at_once: Count | None
    trained: list[str] | None  # names of runs
    failed: dict[str, str] | None  # reasons by run


class Command(TypedDict):
    """A command that added runs, or changed the length of runs."""

    command: str
    runs: list[str]


PublishedRow = Annotated[Mapping[str, Any], BeforeValidator(TypeAdapter(PublishedValues).validate_python)]
SessionOfWork = Annotated[Mapping[str, Any], BeforeValidator(TypeAdapter(Session).validate_python)]


@dataclass(frozen=True, eq=False)
class SweepRun:
    """A run of a sweep."""

    name: str  # name of the run and of its folder
    grid: str  # the block of rows that the run is in
    seed: Whole  # seed of everything in the run
    axes: Mapping[str, Any]  # values of the settings that the sweep varies, by name
    published: PublishedRow | None  # the published row to compare with, from `flsim.results.published`; or None
    results: InstanceOf[RunResults] | None = None  # results of the run; None before its start

    @property
    def row(self) -> tuple[Any, ...]:
        """Key of the run's row in a table, equal over seeds and partitions: twins have the same row and seed."""
        return (self.grid, *((axis, value) for axis, value in self.axes.items() if axis != PARTITION))


@dataclass(frozen=True, eq=False)
class Sweep:
    """A sweep on disk, with the content of sweep.json."""

    path: Path  # its folder
    name: str  # name, title, question: name, title and question of the table
    title: str
    question: str
    tier: str  # the scale of the sweep
    about: str  # a description of that scale
    source: str | None  # the source of the published values; None if there are none
    command: str  # the newest command
    versions: Mapping[str, str]  # versions of the packages in the last session
    sessions: Sequence[SessionOfWork]
    runs: Sequence[SweepRun]  # all runs, in the table's order
    tuned: str = ""  # sentences on the search that chose settings; empty if there was none
    # all commands that added runs, in order; for an older sweep without stored commands, the newest command
    commands: Sequence[Command] = ()
    chosen: Sequence[str] = ()  # the settings that the search chose, by key
    # names of the blocks of the table, trained or not; empty for an older sweep without stored names
    grids: Sequence[str] = ()

    @property
    def heading(self) -> str:
        """Title of the table, with the names of trained blocks if some blocks have no runs."""
        trained = list(dict.fromkeys(run.grid for run in self.runs))
        return self.title if set(trained) >= set(self.grids) else f"{self.title} ({', '.join(trained)} only)"


SWEEP = TypeAdapter(Sweep)


def read_sweep(path: Path) -> Sweep:
    """Return a sweep with its results so far; InputError if it is none, or a file of it or of a run is damaged."""
    sweep = _read(path)
    results = {name: read_run(folder) for name in _names(path) if is_run(folder := path / RUNS / name)}
    runs = [
        replace(run, published=with_question(run.published) if run.published else None, results=results.get(run.name))
        for run in sweep.runs
    ]
    newest = Command(command=sweep.command, runs=[run.name for run in runs])
    return replace(sweep, runs=runs, commands=sweep.commands or [newest])


def is_sweep(path: Path) -> bool:
    """Return whether a folder belongs to a sweep."""
    return (path / FILE).is_file()


def expanded(paths: Sequence[Path | str]) -> list[Path]:
    """Return paths, with folders that contain runs and sweeps, such as that of a demo, replaced by these.

    Among several paths, an existing path without a run is excluded with a line on standard error, because a pattern
    such as ``runs/*`` also matches other folders. Other paths remain, so that the reader of runs reports the error.
    """
    for path in paths:
        if not isinstance(path, str | PathLike):
            raise InputError(
                f"runs: found a {type(path).__name__}, not a path; name each run as an argument, as in *runs"
            )
    runs, skipped = list[Path](), list[Path]()
    for path in map(Path, paths):
        within = [path, *sorted(path.glob("*"))]  # the folder itself, or what is directly inside, by name
        inside = [one for one in within if is_run(one) or is_sweep(one)]
        inside = [path] if path in inside else inside
        if inside or len(paths) == 1 or not path.exists():
            runs += inside or [path]
        else:
            skipped.append(path)
    if not runs:
        return list(map(Path, paths))
    if skipped:
        say(f"excluded, because the folder has no run: {', '.join(map(str, skipped))}")
    return runs


def run_folders(paths: Sequence[Path]) -> list[Path]:
    """Return run folders, and those of started runs of sweeps; InputError for a run named twice, or without any run."""
    if not paths:
        raise InputError("no runs: name at least one run folder or sweep folder")
    folders: list[Path] = []
    for path in paths:
        if not is_sweep(path):
            folders.append(path)
            continue
        planned = _names(path)
        begun = [folder for name in planned if is_run(folder := path / RUNS / name)]
        if not begun:
            raise InputError(f"{path}: no run of this sweep has started; train it with `flsim sweep`")
        if missing := len(planned) - len(begun):
            say(f"{path}: {missing} of {len(planned)} runs have not started; repeat `flsim sweep` to train them")
        folders += begun
    names = [folder.resolve() for folder in folders]
    for folder, name in zip(folders, names, strict=True):
        if names.count(name) > 1:
            raise InputError(f"{folder}: named twice, directly or through its sweep; name it once")
    return folders


def over_runs(paths: Sequence[Path | str], measure: Callable[[Path], Measured]) -> dict[Path, Measured]:
    """Return the results of a function for each run folder; of several, those with InputError are only reported."""
    folders, measured = run_folders(expanded(paths)), dict[Path, Measured]()
    for folder in folders:
        try:
            measured[folder] = measure(folder)
        except InputError as error:
            if len(folders) == 1:
                raise
            say(f"excluded: {error}")
    if not measured:
        raise InputError(f"{', '.join(map(str, paths))}: no run has a result, for the reasons above")
    return measured


def read_shown(paths: Sequence[Path]) -> dict[Path, RunResults]:
    """Return the results of runs and sweeps that a table or plot shows, by run folder, without copies of a run."""
    by_folder = {folder: read_run(folder) for folder in run_folders(paths)}
    of_sweeps = [results for folder, results in by_folder.items() if folder not in paths]
    unique = without_copies(list(by_folder.values()), of_sweeps)
    return {folder: results for folder, results in by_folder.items() if results in unique}


def published_of(paths: Sequence[Path]) -> dict[Path, Mapping[str, Any]]:
    """Return the published row of each run folder of the sweeps among the paths."""
    sweeps = [read_sweep(path) for path in paths if is_sweep(path)]
    return {sweep.path / RUNS / run.name: run.published for sweep in sweeps for run in sweep.runs if run.published}


def tuned_notes(paths: Sequence[Path]) -> list[str]:
    """Return the distinct sentences on the choice of settings in the sweeps of the paths, with names if they differ."""
    by_note: dict[str, list[str]] = {}
    for sweep in dict.fromkeys(folder for path in paths if (folder := _sweep_of(path))):
        by_note.setdefault(_read(sweep).tuned or NOT_SEARCHED, []).append(sweep.name)
    if len(by_note) == 1:
        return list(by_note)
    return [f"{', '.join(names)}: {note}" for note, names in by_note.items()]


def _sweep_of(path: Path) -> Path | None:
    """Return the sweep folder of a path to a sweep or to a run of a sweep; None for other runs."""
    path = path.resolve()
    if is_sweep(path):
        return path
    sweep = path.parent.parent
    return sweep if path.parent.name == RUNS and is_sweep(sweep) and path.name in _names(sweep) else None


def _read(path: Path) -> Sweep:
    """Return a sweep without the results of its runs."""
    try:
        described = with_present_names(from_json((path / FILE).read_bytes()))
        return SWEEP.validate_python(dict(described, path=path))
    except OSError as error:
        raise InputError(f"{path}: not a sweep folder (it has no {FILE}); create one with `flsim sweep`") from error
    except (ValidationError, TypeError) as error:
        raise InputError(f"{path / FILE}: does not describe a sweep; restore it, or exclude this sweep") from error
    except ValueError as error:
        raise InputError(f"{path / FILE}: the file is damaged (not JSON); restore it, or exclude this sweep") from error


def _names(path: Path) -> list[str]:
    names = [run.name for run in _read(path).runs]
    for name in names:
        inside(path / RUNS, name)
    return names
