"""Faults that tests inject into a process of a run, or into a folder that it writes to; some are temporary."""

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
ROOM = "96m"  # size of each small filesystem: enough for what Ray writes
OURS = {"ray::Client": "client", "ray::_Evaluator": "evaluator", "ray::train": "trainer"}


@dataclass(frozen=True)
class Harm:
    """A kind of fault; `strike` injects it into a process and returns what ends it, or raises psutil.Error."""

    name: str
    strike: Callable[[psutil.Process], Relief]
    seconds: float = 0.0  # the longest duration of the fault; 0 if nothing has to end it
    ends: frozenset[int] = frozenset()  # possible exit codes of a command with this fault, in addition to 0 and 1


def _signalled(number: signal.Signals, process: psutil.Process) -> Relief:
    process.send_signal(number)
    return lambda: None


def _stopped(process: psutil.Process) -> Relief:
    process.suspend()
    return process.resume


def _short_of_memory(process: psutil.Process) -> Relief:
    """Limit the address space of the process to its current size, so that the system refuses new memory."""
    soft, hard = process.rlimit(psutil.RLIMIT_AS)
    process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms, hard))
    return partial(process.rlimit, psutil.RLIMIT_AS, (soft, hard))


def _full(place: str, driver: psutil.Process) -> Relief:
    """Fill a folder of the process's own mount namespace, in which another filesystem has the same path."""
    theirs = Path(f"/proc/{driver.pid}/root{place}")
    try:
        is_small = theirs.stat().st_dev != Path(place).stat().st_dev
    except OSError:
        is_small = False
    if not is_small:
        raise psutil.NoSuchProcess(driver.pid)  # the process has ended, or has not mounted the filesystem yet
    return partial(fill(theirs).unlink, missing_ok=True)


CRASHES = frozenset({-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS})  # how C++ code ends if memory is refused
KILLED = Harm("killed", partial(_signalled, signal.SIGKILL), ends=frozenset({-signal.SIGKILL}))
TERMINATED = Harm(
    "terminated",
    partial(_signalled, signal.SIGTERM),
    ends=frozenset({-signal.SIGTERM, 128 + signal.SIGTERM}),  # before and after Python installs its signal handler
)
STOPPED = Harm("stopped", _stopped, seconds=30.0)
SHORT_OF_MEMORY = Harm("short of memory", _short_of_memory, seconds=20.0, ends=CRASHES)
TO_PROCESSES = (KILLED, TERMINATED, STOPPED, SHORT_OF_MEMORY)


@dataclass(frozen=True)
class Surroundings:
    """The `within` and `environment` of `helpers.start`, and the small filesystems that only this command has."""

    within: Sequence[str] = ()
    environment: Mapping[str, str] | None = None
    places: Sequence[str] = ()

    @property
    def harms(self) -> dict[str, Harm]:
        """Faults of the small filesystems, by the name of the filesystem."""
        names = ("TMPDIR", "/dev/shm")[: len(self.places)]
        return {
            name: Harm("full", partial(_full, place), seconds=20.0, ends=CRASHES)
            for name, place in zip(names, self.places, strict=True)
        }


@contextmanager
def small_places(temporary: str = ROOM, shared: str = ROOM) -> Iterator[Surroundings]:
    """Yield surroundings that give each command its own small TMPDIR and shared memory; none if mounts are refused."""
    with tempfile.TemporaryDirectory(prefix="small-", dir="/tmp") as folder:  # short, for Ray's sockets
        mounts = f"mount -t tmpfs -o size={temporary} t {folder}; mount -t tmpfs -o size={shared} s /dev/shm"
        within = ("unshare", "--mount", "sh", "-c", f'set -e; {mounts}; exec "$@"', "sh")
        try:
            subprocess.run([*within, "true"], capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            yield Surroundings()
        else:
            yield Surroundings(within, os.environ | {"TMPDIR": folder}, (folder, "/dev/shm"))


def kind_of(process: psutil.Process, driver: int) -> str:
    """Return the kind of a process of a run, such as "client", or its name; "" if the process has ended."""
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
    """Return the first word of a process's command line; "" if the process has ended."""
    with suppress(psutil.Error):
        return (process.cmdline() or [""])[0]
    return ""


def living(folder: Path) -> list[psutil.Process]:
    """Return the running processes whose working directory is this folder, whichever process is now their parent."""
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
    """Limit the total memory of all processes of a command; Linux kills a process if they need more."""
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
