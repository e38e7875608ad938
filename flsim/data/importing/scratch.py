"""A scratch folder next to the output, with the finished pieces of a long job, so that it can continue after a kill.

The folder is locked while a job runs, and the lock ends with the process. It contains the folder of a plan, which is
everything that the pieces depend on. No process writes outside the folder of its plan, so a worker can safely outlive
its parent for a moment.

Pieces can be hours of work, so only three kinds are removed: those of a completed import, those of an import whose
input is invalid, and the rest of an earlier removal. If there are pieces of another plan, an import is refused, because
sources or parameters can be mistyped; the error names their folder.

After a loss of power, the contents are consistent: the data of a piece is durable before its result, and the corpus
before its pieces are removed.
"""

import errno
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flsim.base.errors import InputError, RunFailed
from flsim.base.files import digest, held, make_folder, new_file, refuse_existing, sync, sync_folder, write_json
from flsim.base.pool import Pool, Task, WorkerDied, ignore
from flsim.base.progress import progress, say

# Regrouping on disk in bounded memory: files of lines in the order of hashes, which are read by ranges of hashes.
#  All lines of one hash are in one range, in the order of the files, and within a file in the order of its lines. A
# file is its lines, uint64 [lines] hashes, int64 [lines] ends of lines in bytes, and int64 the number of lines.

Range = tuple[str, int, int]  # file, first byte, and end


def hash_of(text: str) -> int:
    """Return the first 64 bits of a text's sha256, whose order is that of the complete sha256, except for ties."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def write_lines(path: Path, hashes: Sequence[int], lines: Iterable[bytes]) -> None:
    """Write a file, atomically, of lines that end with their only line feed; hashes, below 2**64, ascend."""
    ends = []
    size = 0
    with new_file(path) as partial, partial.open("wb") as file:
        for line in lines:
            file.write(line)
            size += len(line)
            ends.append(size)
        file.write(np.array(hashes, "<u8").tobytes())
        file.write(np.array([*ends, len(ends)], "<i8").tobytes())


def cuts(paths: Sequence[Path], ranges: int) -> NDArray[np.int64]:
    """Return the begin of each of `ranges` equal ranges of hashes in each file: int64 [files, ranges + 1], bytes."""
    bounds = np.array([(index << 64) // ranges for index in range(ranges)], np.uint64)
    starts_in_files = np.zeros((len(paths), ranges + 1), np.int64)
    for row, path in enumerate(paths):
        with path.open("rb") as file:
            file.seek(-8, 2)
            (lines,) = np.frombuffer(file.read(), "<i8")
            file.seek(-8 - 16 * int(lines), 2)
            hashes = np.frombuffer(file.read(8 * int(lines)), "<u8")
            ends = np.frombuffer(file.read(8 * int(lines)), "<i8")
        starts = np.concatenate([np.zeros(1, np.int64), ends])
        starts_in_files[row] = starts[np.append(np.searchsorted(hashes, bounds), lines)]
    return starts_in_files


def ranges_of(paths: Sequence[Path], cuts: NDArray[np.int64], index: int) -> list[Range]:
    """Return the lines of one range of hashes, from the files that have lines in this range."""
    bounds = zip(paths, cuts[:, index].tolist(), cuts[:, index + 1].tolist(), strict=True)
    return [(str(path), first, last) for path, first, last in bounds if first < last]


def read_lines(ranges: Iterable[Range]) -> Iterator[bytes]:
    """Yield the lines without their line feeds."""
    for path, first, last in ranges:
        with Path(path).open("rb") as file:
            file.seek(first)
            yield from file.read(last - first)[:-1].split(b"\n")


def lines_of(path: Path) -> Iterator[bytes]:
    (end,) = cuts([path], 1)[:, 1].tolist()
    yield from read_lines([(str(path), 0, end)]) if end else ()


CONTINUES = "repeat the command to continue"
REMOVED = "removed-"
MADE = "corpus"  # name of the complete output among the pieces, before it is moved to its place


class ResumableError(InputError):
    """An error that stops an import and leaves its pieces valid."""


@dataclass(frozen=True)
class Pieces:
    """The finished pieces of a plan, in a folder; a task is finished when its result exists."""

    out: Path
    folder: Path

    def run(self, pool: Pool, title: str, tasks: dict[str, Task], sizes: dict[str, int] | None = None) -> list[Any]:
        """Run the tasks that are not finished, and return all results; tasks with `sizes` in bytes report bytes."""
        files = {name: self.folder / f"{name}.json" for name in tasks}
        results = {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.exists()}
        missing = [name for name in tasks if name not in results]
        whole = sizes or dict.fromkeys(tasks, 1)
        reached: float = sum(whole[name] for name in results)
        with progress(title, sum(whole.values()), reached, "bytes" if sizes else "") as advance:

            def report(amount: float) -> None:
                nonlocal reached
                reached += amount
                advance(reached)

            def done(index: int, result: Any) -> None:
                name = missing[index]
                write_json(files[name], result)
                results[name] = result
                if not sizes:
                    report(1)

            pool.run([tasks[name] for name in missing], done, report if sizes else ignore)
        return [results[name] for name in tasks]

    def begin(self, plan: dict[str, Any]) -> None:
        """Create the folder, or keep the pieces in it; ResumableError for pieces of another plan, or an output."""
        others = [path for path in self.folder.parent.iterdir() if path.is_dir() and path != self.folder]
        for path in others:
            if not path.name.startswith(REMOVED):
                raise ResumableError(
                    f"{self.out}: an interrupted import had other sources or options; repeat its command, or remove "
                    f"{path} to start a new import"
                )
            shutil.rmtree(path, ignore_errors=True)
        if not self.folder.exists():
            refuse_existing(self.out)
            make_folder(self.folder)
            write_json(self.folder / "plan.json", plan)
            return
        self.refuse_existing_output()
        for partial in self.folder.glob(".*.partial-*"):
            partial.unlink(missing_ok=True)
        if (finished := len(list(self.folder.glob("*.json"))) - 1) > 0:
            say(f"{self.out}: continuing an interrupted import; {finished:,} pieces are finished")

    def refuse_existing_output(self) -> None:
        try:
            refuse_existing(self.out)
        except InputError as error:
            raise ResumableError(f"{self.out}: already exists; remove it or rename it") from error

    def finish(self, made: Path) -> None:
        """Move a complete folder to the place of the output, durably and atomically; ResumableError if it exists."""
        sync_folder(made)
        self.refuse_existing_output()
        made.rename(self.out)
        sync(self.out.parent)  # before pieces are removed, because a name is durable only after its folder is synced

    def remove(self) -> None:
        """Remove the pieces, renamed first, so that no interrupted removal leaves a part; then the lock."""
        if self.folder.exists():
            removed = self.folder.rename(self.folder.with_name(REMOVED + self.folder.name))
            sync(removed.parent)
            shutil.rmtree(removed, ignore_errors=True)
        (self.folder.parent / "lock").unlink()
        with suppress(OSError):  # the lock of the next import is in the folder
            self.folder.parent.rmdir()


@contextmanager
def scratch(out: Path, plan: dict[str, Any]) -> Iterator[Pieces]:
    """Yield the pieces of an import, locked, which are removed after success or invalid input, not after other errors.

    `plan` is everything that the pieces depend on.
    """
    folder = out.with_name(f".{out.name}.importing") if out.name else out  # the current folder or the root exist
    if not out.name or not folder.exists():
        refuse_existing(out)
    pieces = Pieces(out, folder / digest(json.dumps(plan, sort_keys=True))[:16])
    with ExitStack() as stack:
        _enter(stack, out, folder)
        try:
            pieces.begin(plan)
            yield pieces
        except WorkerDied:
            raise
        except ResumableError:
            say(f"{folder}: finished pieces remain in this folder; fix the cause, and {CONTINUES}")
            raise
        except InputError:
            pieces.remove()
            raise
        except KeyboardInterrupt:
            say(f"{folder}: interrupted; {CONTINUES}")
            raise
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise RunFailed(f"{folder}: {error.strerror}; free space on this disk, then {CONTINUES}") from error
        else:
            pieces.remove()


def _enter(stack: ExitStack, out: Path, folder: Path) -> None:
    """Make the folder, and hold its lock file until the stack closes; raise InputError if another import holds it."""
    lock = folder / "lock"
    while True:
        try:
            make_folder(folder)
            lock.touch(0o644)
        except FileNotFoundError:  # removed in the meantime
            continue
        except OSError as error:
            raise InputError(f"{out}: cannot be created ({error.strerror})") from error
        try:
            stack.enter_context(held(lock))
        except BlockingIOError as error:
            raise InputError(
                f"{out}: another import into this folder is running; wait for its end, or name another folder"
            ) from error
        except FileNotFoundError:  # an import that has just ended removed the file
            continue
        return
