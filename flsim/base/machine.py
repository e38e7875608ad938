"""The memory and the devices of this machine, and errors about settings that exceed them; versions of libraries."""

import importlib.util
import os
import platform
import shlex
import threading
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from flsim.base.errors import InputError
from flsim.base.files import digest

DEVICES = ("cpu", "cuda")  # types of devices in torch
GROUP = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


def machine_memory() -> int:
    """Return the memory that this process and its children may use in total, bytes: a container may limit it."""
    limit = of_group("memory", "memory.max", "memory.limit_in_bytes").strip()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, int(limit)) if limit.isdigit() else total


def cores() -> int:
    """Return the number of CPU cores that this process may use; affinity (`taskset`) and a container may limit it."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, period = of_group("cpu", "cpu.max").split() or (
        of_group("cpu", name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    )
    return max(1, min(allowed, int(quota) // int(period))) if quota.isdigit() and period.isdigit() else allowed


def of_group(controller: str, *names: str) -> str:
    """Return the first existing file of a controller in the control group of this process; empty without one."""
    for line in text_of(GROUP).splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = GROUPS / (controller if controllers else "")
        for folder in (root / group.lstrip("/"), root):  # in a container, the path of the group can be invisible
            for name in names:
                if (folder / name).is_file():
                    return text_of(folder / name)
    return ""


def text_of(path: Path) -> str:
    """Return the text of a file of the kernel; empty if there is none."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def refuse_missing_device(device: str, name: str = "device") -> None:
    """Raise InputError if torch has no such device here, or flsim does not support it, such as "meta" and "mps"."""
    import torch

    try:
        if torch.device(device).type not in DEVICES:
            raise InputError(
                f"{name} {shlex.quote(str(device))}: flsim supports {' and '.join(DEVICES)}; use one of them"
            )
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        raise InputError(f"{name} {shlex.quote(str(device))}: torch finds no such device; use cpu") from error


def refuse_beyond_memory(needed: float, what: str, remedy: str, gpu: float | None = None) -> None:
    """Raise InputError, which ends in `remedy`, if `what` needs more bytes than this machine or a GPU's share has."""
    memory, of = (machine_memory(), "this machine has") if gpu is None else (gpu, "its share of a GPU has")
    if needed > memory:
        raise InputError(
            f"{what} needs {needed / 1e9:,.0f} GB of memory at least, and {of} {memory / 1e9:,.0f} GB; {remedy}"
        )


# Peak memory of a process and all its descendants, sampled from /proc, in milliseconds for each measured process.
#  A page that k processes share counts 1/k in each of them (proportional set size). Anonymous memory is counted
# separately from pages of mapped files, which the system can reclaim, as psutil does not.

SAMPLE_EVERY = 0.1  # seconds


@dataclass(frozen=True)
class Memory:
    """Resident memory of processes, in bytes."""

    anonymous: int = 0  # memory that belongs only to these processes
    file: int = 0  # pages of mapped files, shared memory included

    @property
    def total(self) -> int:
        return self.anonymous + self.file

    @classmethod
    def held_by(cls, process: int) -> "Memory":
        """Return the memory that a process and its descendants use now; zero if the process has ended."""
        sizes = {"Pss_Anon:": 0, "Pss_File:": 0, "Pss_Shmem:": 0}
        below: list[Memory] = []
        with suppress(OSError):
            folder = Path("/proc") / str(process)
            for line in (folder / "smaps_rollup").read_text().splitlines()[1:]:
                name, kilobytes = line.split()[:2]
                if name in sizes:
                    sizes[name] = 1024 * int(kilobytes)
            for task in (folder / "task").iterdir():
                below += [cls.held_by(int(child)) for child in (task / "children").read_text().split()]
        anonymous, file, shared = sizes.values()
        return cls(anonymous + sum(one.anonymous for one in below), file + shared + sum(one.file for one in below))


class PeakMemory:
    """A context manager that samples a process's memory every `every` seconds; its peaks can differ in time."""

    def __init__(self, process: int, every: float = SAMPLE_EVERY) -> None:
        if not Path("/proc/self/smaps_rollup").exists():
            raise InputError("memory is read from /proc/self/smaps_rollup, which this system lacks")
        self.anonymous = self.file = self.total = 0
        self._process, self._every = process, every
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            now = Memory.held_by(self._process)
            self.anonymous = max(self.anonymous, now.anonymous)
            self.file = max(self.file, now.file)
            self.total = max(self.total, now.total)
            if self._over.wait(self._every):
                return


# Versions of everything that determines the numbers of a run: equal versions give equal bits on equal processors.

PACKAGES = ("flsim", "clients", "server")  # packages whose code runs on all nodes
LIBRARIES = ("torch", "numpy", "scipy", "pyarrow", "safetensors", "flwr", "ray")


def versions() -> dict[str, str]:
    """Return the versions of what determines a run's numbers: "python", "machine", libraries, and the code's digest."""
    installed = {"python": platform.python_version(), "machine": platform.machine()}
    for name in LIBRARIES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return {**installed, "flsim": code_digest()}


def code_digest() -> str:
    """Return the sha256 over names and bytes of the source files of `PACKAGES`, that this process imports."""
    parts: list[bytes | str] = []
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            folder = Path(spec.origin).parent
            for path in sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).parts):
                parts += [f"{name}/{path.relative_to(folder).as_posix()}", path.read_bytes()]
    return digest(*parts)


def processor() -> str:
    """Return the model of the processor, from Linux; empty if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
