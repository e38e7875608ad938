"""Paths of runs as people name them: run folders, sweeps, folders that hold runs, and whatever ``runs/*`` matches."""

from collections.abc import Sequence
from pathlib import Path

from flsim.base.progress import say
from flsim.results.run_file import is_run
from flsim.results.sweep_file import is_sweep


def expanded(paths: Sequence[Path | str]) -> list[Path]:
    """Return run folders and folders of sweeps in place of the paths that hold some, such as the folder of a demo.

    Among several paths, one that exists and holds neither is left out with one line on standard error: a pattern such
    as ``runs/*`` matches other folders too. A path that does not exist stays, as does a path that is alone, so that
    the reader of runs says what is wrong with it.
    """
    runs, skipped = list[Path](), list[Path]()
    for path in map(Path, paths):
        inside = [path] if is_run(path) or is_sweep(path) else runs_inside(path)
        if inside or len(paths) == 1 or not path.exists():
            runs += inside or [path]
        else:
            skipped.append(path)
    if not runs:
        return list(map(Path, paths))
    if skipped:
        say(f"left out, since there is no run in it: {', '.join(map(str, skipped))}")
    return runs


def runs_inside(folder: Path) -> list[Path]:
    """Return the run folders and sweeps directly inside a folder, in the order of their names."""
    return [path for path in sorted(folder.glob("*")) if is_run(path) or is_sweep(path)]
