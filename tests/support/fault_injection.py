"""Faults that are injected into a process of a run, or into a place that it writes to, some of them temporary."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest
from faulty import fill

Relief = Callable[[], object]
ROOM = "96m"  # of each small place: for what Ray needs by itself
OURS = {"ray::Client": "client", "ray::_Evaluator": "evaluator", "ray::train": "trainer"}


@dataclass(frozen=True)
class Harm:
    """A kind of harm; `strike` does it to a process and returns what ends it, or raises psutil.Error."""

    name: str
    strike: Callable[[psutil.Process], Relief]
    seconds: float = 0.0  # the most that it lasts; 0 if there is nothing to end
    ends: frozenset[int] = frozenset()  # exit codes of a command that comes to harm, in addition to 0 and 1


def _signalled(number: signal.Signals, process: psutil.Process) -> Relief:
    process.send_signal(number)
    return lambda: None


def _stopped(process: psutil.Process) -> Relief:
    process.suspend()
    return process.resume


def _short_of_memory(process: psutil.Process) -> Relief:
    """What the process maps from now on is refused."""
    soft, hard = process.rlimit(psutil.RLIMIT_AS)
    process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms, hard))
    return partial(process.rlimit, psutil.RLIMIT_AS, (soft, hard))


def _full(place: str, driver: psutil.Process) -> Relief:
    """The place as the process sees it, which is not ours of the same name."""
    theirs = Path(f"/proc/{driver.pid}/root{place}")
    try:
        is_small = theirs.stat().st_dev != Path(place).stat().st_dev
    except OSError:
        is_small = False
    if not is_small:
        raise psutil.NoSuchProcess(driver.pid)  # it ended, or has not got so far as to mount it
    return partial(fill(theirs).unlink, missing_ok=True)


CRASHES = frozenset({-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS})  # what C++ makes of memory that is not there
KILLED = Harm("killed", partial(_signalled, signal.SIGKILL), ends=frozenset({-signal.SIGKILL}))
TERMINATED = Harm(
    "terminated",
    partial(_signalled, signal.SIGTERM),
    ends=frozenset({-signal.SIGTERM, 128 + signal.SIGTERM}),  # before Python listens, and after
)
STOPPED = Harm("stopped", _stopped, seconds=30.0)
SHORT_OF_MEMORY = Harm("short of memory", _short_of_memory, seconds=20.0, ends=CRASHES)
TO_PROCESSES = (KILLED, TERMINATED, STOPPED, SHORT_OF_MEMORY)


@dataclass(frozen=True)
class Surroundings:
    """What `helpers.start` is to run a command within, and the small filesystems that only the command has."""

    within: Sequence[str] = ()
    environment: Mapping[str, str] | None = None
    places: Sequence[str] = ()

    @property
    def harms(self) -> dict[str, Harm]:
        """By the name of the place."""
        names = ("TMPDIR", "/dev/shm")[: len(self.places)]
        return {
            name: Harm("full", partial(_full, place), seconds=20.0, ends=CRASHES)
            for name, place in zip(names, self.places, strict=True)
        }


@contextmanager
def small_places(temporary: str = ROOM, shared: str = ROOM) -> Iterator[Surroundings]:
    """A TMPDIR and shared memory of its own for each command, each of a size; none where that is not allowed."""
    with tempfile.TemporaryDirectory(prefix="small-", dir="/tmp") as folder:  # short: Ray's sockets lie there
        mounts = f"mount -t tmpfs -o size={temporary} t {folder}; mount -t tmpfs -o size={shared} s /dev/shm"
        within = ("unshare", "--mount", "sh", "-c", f'set -e; {mounts}; exec "$@"', "sh")
        try:
            subprocess.run([*within, "true"], capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            yield Surroundings()
        else:
            yield Surroundings(within, os.environ | {"TMPDIR": folder}, (folder, "/dev/shm"))


def kind_of(process: psutil.Process, driver: int) -> str:
    """What a person calls it; nothing where it has ended."""
    with suppress(psutil.NoSuchProcess):
        if process.status() == psutil.STATUS_ZOMBIE:
            return ""
        if process.pid == driver:
            return "driver"
        title = title_of(process)
        ours = next((kind for prefix, kind in OURS.items() if title.startswith(prefix)), None)
        return ours or (process.name() if process.name() in ("raylet", "gcs_server") else "other") if title else ""
    return ""


def title_of(process: psutil.Process) -> str:
    """The first part of its command line; nothing where it has ended."""
    with suppress(psutil.Error):
        return (process.cmdline() or [""])[0]
    return ""


def living(folder: Path) -> list[psutil.Process]:
    """Processes that were started there, whoever they belong to now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@contextmanager
def little_memory(megabytes: int) -> Iterator[Surroundings]:
    """All of a command's processes together have so much; Linux kills one where that is not enough."""
    root = Path("/sys/fs/cgroup")
    group = (root / "memory" if (root / "memory").is_dir() else root) / f"flsim-{os.getpid()}"
    try:
        group.mkdir()
        names = [name for name in ("memory.limit_in_bytes", "memory.max") if (group / name).exists()]
        (group / names[0]).write_text(str(megabytes << 20))
    except (OSError, IndexError) as error:
        pytest.skip(f"memory cannot be limited here: {error}")
    try:
        yield Surroundings(("sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"))
    finally:
        left = [psutil.Process(int(number)) for number in (group / "cgroup.procs").read_text().split()]
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=60)
        group.rmdir()
