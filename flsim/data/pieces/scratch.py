"""A folder beside the output where a long job keeps finished pieces, so that it can go on after it was killed.

The folder is named after the output, is locked while a job runs (the lock goes with the process, however that ends),
and holds one folder for each plan: what the pieces are a function of. Nobody writes outside the folder of their plan,
so a worker that outlives its parent for a moment does no harm.
"""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flsim.errors import InputError, RunFailed
from flsim.files import digest, refuse_existing, sync_folder, write_json
from flsim.pool import Pool, Task, WorkerDied, ignore
from flsim.progress import progress, say

CONTINUES = "the same command continues"
REMOVED = "removed-"


@dataclass(frozen=True)
class Scratch:
    """The locked folder of one output.

    Attributes:
        out: the output.
        folder: what is kept until the output is there.
    """

    out: Path
    folder: Path

    def plan(self, plan: dict[str, Any]) -> "Pieces":
        """The pieces of a plan: those that are there already if it was interrupted. Those of any other plan go."""
        text = json.dumps(plan, sort_keys=True)
        pieces = Pieces(self.out, self.folder / digest(text)[:16])
        if pieces.folder.exists():
            for partial in pieces.folder.glob(".*.partial-*"):
                partial.unlink(missing_ok=True)
            found = len(list(pieces.folder.glob("*.json"))) - 1
            if found > 0:
                say(f"{self.out}: continues an import that was interrupted; {found:,} pieces of it are there")
            return pieces
        others = [path for path in self.folder.iterdir() if path.is_dir()]
        if others:
            say(f"{self.out}: begins anew; the interrupted import had other sources or parameters")
        for path in others:
            _remove(path)
        pieces.folder.mkdir()
        write_json(pieces.folder / "plan.json", plan)
        return pieces

    def remove(self) -> None:
        """The lock goes last: whoever finds none has the folder to themselves."""
        for path in self.folder.iterdir():
            if path.is_dir():
                _remove(path)
            elif path.name != "lock":
                path.unlink(missing_ok=True)
        (self.folder / "lock").unlink()
        with suppress(OSError):  # the next import has its lock in it
            self.folder.rmdir()


@dataclass(frozen=True)
class Pieces:
    """What is finished of a plan, in a folder; a task is finished once its result is there."""

    out: Path
    folder: Path

    def run(
        self,
        pool: Pool,
        title: str,
        tasks: dict[str, Task],
        unit: str = "",
        work: Callable[[Any], float] | None = None,
        sizes: dict[str, int] | None = None,
        reporting: bool = False,
    ) -> list[Any]:
        """Run those tasks that are not finished.

        Args:
            pool: to run them in.
            title: of the progress.
            tasks: by names for files; what they return is JSON.
            unit: of the rate.
            work: how much of that unit a result stands for.
            sizes: how much of the whole each task is; by default they are alike.
            reporting: whether tasks themselves report that, bit by bit; progress counts those that are done otherwise.

        Returns:
            All tasks' results, in order.
        """
        results = {name: self._result(name) for name in tasks if (self.folder / f"{name}.json").exists()}
        missing = [name for name in tasks if name not in results]
        whole = sizes or dict.fromkeys(tasks, 1)
        reached: float = sum(whole[name] for name in results)
        worked = 0.0
        with progress(title, sum(whole.values()), reached, unit) as advance:

            def report(amount: float) -> None:
                nonlocal reached
                reached += amount
                advance(reached, work=worked if work else None)

            def done(index: int, result: Any) -> None:
                nonlocal worked
                name = missing[index]
                write_json(self.folder / f"{name}.json", result)
                results[name] = result
                worked += work(result) if work else 0
                if not reporting:
                    report(whole[name])

            pool.run([tasks[name] for name in missing], done, report if reporting else ignore)
        return [results[name] for name in tasks]

    def finish(self, made: Path) -> None:
        """Put a complete folder into the output's place, durably and in one step."""
        sync_folder(made)
        refuse_existing(self.out)
        (self.folder / "finished").touch()
        made.rename(self.out)

    def _result(self, name: str) -> Any:
        return json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))


@contextmanager
def scratch(out: Path) -> Iterator[Scratch]:
    """The scratch folder of an output: gone after success or bad input, kept after anything else.

    Raises:
        InputError: `out` exists, cannot be created, or is being made by another process.
        RunFailed: the disk is full.
    """
    folder = out.with_name(f".{out.name}.importing")
    if not folder.exists() or _is_needed(folder):
        refuse_existing(out)
    lock = _lock(out, folder)
    try:
        place = Scratch(out, folder)
        try:
            refuse_existing(out)
            yield place
        except WorkerDied:
            raise
        except InputError:
            place.remove()
            raise
        except KeyboardInterrupt:
            say(f"{folder}: interrupted; {CONTINUES}")
            raise
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise RunFailed(f"{folder}: {error.strerror}; make room on that disk, then {CONTINUES}") from error
        else:
            place.remove()
    finally:
        os.close(lock)


def _remove(pieces: Path) -> None:
    """Renamed first, so that half of them are never taken for all after a kill."""
    removed = pieces if pieces.name.startswith(REMOVED) else pieces.rename(pieces.with_name(REMOVED + pieces.name))
    shutil.rmtree(removed, ignore_errors=True)


def _is_needed(folder: Path) -> bool:
    """Whether pieces in it wait for the rest of their import; what a kill left of a finished one only goes."""
    plans = (path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(REMOVED))
    return any(not (path / "finished").exists() for path in plans)


def _lock(out: Path, folder: Path) -> int:
    """A locked descriptor of the folder's lock file; children do not inherit it."""
    path = folder / "lock"
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError as error:
            raise InputError(f"{out}: cannot be created ({error.strerror})") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_ino == path.stat().st_ino:
                return descriptor
        except BlockingIOError as error:
            os.close(descriptor)
            raise InputError(
                f"{out}: another import into it is running; wait for it, or name another folder"
            ) from error
        except FileNotFoundError:
            pass
        os.close(descriptor)
