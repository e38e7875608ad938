"""A sweep's folder, read: which runs it is to have, what each stands for, and what came of it so far.

sweep.json      the runs' names, axes and published values; sessions: when it was at work, and what became of it
runs/NAME/      run folders
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flsim.base.errors import InputError
from flsim.base.files import from_json, inside
from flsim.results.copies import without_copies
from flsim.results.run_file import is_run
from flsim.results.store import RunResults, read_run
from flsim.results.sweep_file import FILE as FILE
from flsim.results.sweep_file import SWEEP_FILE
from flsim.results.sweep_file import is_sweep as is_sweep

RUNS = "runs"
WORLD = "data.world"  # the axis that makes twins


@dataclass(frozen=True, eq=False)
class SweepRun:
    """A run of a sweep.

    Attributes:
        name: of the run, and of its folder.
        grid: the block of rows that it is in.
        seed: of everything in it.
        axes: setting -> value, of those that the sweep varies.
        published: the published row that it is to be held against, as `flsim.results.published` gives it; or None.
        results: what is known of it; None before it began.
    """

    name: str
    grid: str
    seed: int
    axes: Mapping[str, Any]
    published: Mapping[str, Any] | None
    results: RunResults | None

    @property
    def row(self) -> tuple[Any, ...]:
        """Equal for the runs of a table's row, over seeds and both worlds: twins have the same row and seed."""
        return (self.grid, *((axis, value) for axis, value in self.axes.items() if axis != WORLD))


@dataclass(frozen=True, eq=False)
class Sweep:
    """A sweep on disk.

    Attributes:
        path: its folder.
        name, title, question: of the table.
        tier: the scale that it was run at.
        about: what that scale is.
        source: where the published values are from; None without any.
        command: that made it.
        versions: of the packages, when it was last at work.
        sessions: a mapping for each time that it was at work: began, seconds, peak_memory (bytes), cores, at_once,
            trained (names), failed (name -> why).
        runs: all, in the table's order.
    """

    path: Path
    name: str
    title: str
    question: str
    tier: str
    about: str
    source: str | None
    command: str
    versions: Mapping[str, str]
    sessions: Sequence[Mapping[str, Any]]
    runs: Sequence[SweepRun]


def read_sweep(path: Path) -> Sweep:
    """Everything that a sweep has found so far.

    Raises:
        InputError: not a sweep's folder, or a file of it or of one of its runs is damaged.
    """
    about = _read(path)
    found = {name: read_run(folder) for name in _names(path) if is_run(folder := _folder(path, name))}
    runs = [
        SweepRun(each["name"], each["grid"], each["seed"], each["axes"], each["published"], found.get(each["name"]))
        for each in about["runs"]
    ]
    texts = {name: about[name] for name in ("name", "title", "question", "tier", "about", "command", "source")}
    return Sweep(path, **texts, versions=about["versions"], sessions=about["sessions"], runs=runs)


def run_folders(paths: Sequence[Path]) -> list[Path]:
    """Run folders as they are; in place of a sweep's folder those of its runs that exist.

    Raises:
        InputError: a sweep.json that is damaged, a sweep of which no run has begun, or a run that is named twice.
    """
    found: list[Path] = []
    for path in paths:
        if not is_sweep(path):
            found.append(path)
            continue
        begun = [folder for name in _names(path) if is_run(folder := _folder(path, name))]
        if not begun:
            raise InputError(f"{path}: no run of this sweep has begun; `flsim sweep` goes on with it")
        found += begun
    names = [folder.resolve() for folder in found]
    for folder, name in zip(found, names, strict=True):
        if names.count(name) > 1:
            raise InputError(f"{folder}: named twice, by itself or by its sweep; name it once")
    return found


def read_shown(paths: Sequence[Path]) -> dict[Path, RunResults]:
    """Run folder -> results, of what a table or plot shows of these run and sweep folders: copies of a run once.

    Raises:
        InputError: as `run_folders`, `read_run` and `without_copies`.
    """
    found = {folder: read_run(folder) for folder in run_folders(paths)}
    of_sweeps = [results for folder, results in found.items() if folder not in paths]
    shown = without_copies(list(found.values()), of_sweeps)
    return {folder: results for folder, results in found.items() if results in shown}


def published_of(paths: Sequence[Path]) -> dict[Path, Mapping[str, Any]]:
    """Run folder -> the published row that it is to be held against, of the sweeps among the paths."""
    sweeps = [read_sweep(path) for path in paths if is_sweep(path)]
    return {_folder(sweep.path, run.name): run.published for sweep in sweeps for run in sweep.runs if run.published}


def _read(path: Path) -> dict[str, Any]:
    try:
        text = (path / FILE).read_text(encoding="utf-8")
        about: dict[str, Any] = from_json(text)
        SWEEP_FILE.validate_json(text, strict=True)
    except OSError as error:
        raise InputError(f"{path}: not a sweep's folder (it has no {FILE}); make one with `flsim sweep`") from error
    except ValidationError as error:
        raise InputError(f"{path / FILE}: does not describe a sweep; restore it, or sweep again") from error
    except ValueError as error:
        raise InputError(f"{path / FILE}: damaged, not JSON; restore it, or sweep again") from error
    return about


def _names(path: Path) -> list[str]:
    names: list[str] = [each["name"] for each in _read(path)["runs"]]
    for name in names:
        inside(path / RUNS, name)
    return names


def _folder(path: Path, name: str) -> Path:
    return path / RUNS / name
