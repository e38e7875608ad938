"""Reading of a sweep's folder: the planned runs, the published row of each, and their results so far.

sweep.json      the runs' names, axes and published values; sessions: times of work and their outcomes
runs/NAME/      run folders
"""

from collections.abc import Callable, Mapping, Sequence
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
from flsim.results.seeds import without_copies
from flsim.results.store import RunResults, is_run, read_run

RUNS = "runs"
NOT_SEARCHED = "Learning rates were not tuned: the sweep sets them, and they can favour one side."
Measured = TypeVar("Measured")
PARTITION = "data.partition"  # the axis of twins
FILE = "sweep.json"
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@with_config(ConfigDict(extra="allow"))
class Published(TypedDict, total=False):
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


PublishedRow = Annotated[Mapping[str, Any], BeforeValidator(TypeAdapter(Published).validate_python)]
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
        replace(
            run,
            published=with_question(run.published) if run.published else None,
            results=results.get(run.name),
        )
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
        begun = [folder for name in _names(path) if is_run(folder := path / RUNS / name)]
        if not begun:
            raise InputError(f"{path}: no run of this sweep has started; train it with `flsim sweep`")
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
