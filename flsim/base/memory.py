"""Peak memory of a process and all its descendants, sampled from /proc.

The measure is proportional set size: a page that k processes share counts 1/k in each of them, so the sum over
processes is the resident memory. Anonymous memory belongs to its process alone. It is kept apart from pages of mapped
files, which the system takes back when it needs them.

psutil is not used for two reasons. It gives the proportional set size as one number, without its anonymous part. It
also searches all processes of the machine for descendants, while a sample here costs some milliseconds for each
measured process.
"""

import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from flsim.base.errors import InputError

SAMPLE_EVERY = 0.1  # seconds


@dataclass(frozen=True)
class Memory:
    """Resident memory of processes, in bytes.

    Attributes:
        anonymous: memory that belongs to the processes alone.
        file: pages of mapped files, shared memory included.
    """

    anonymous: int = 0
    file: int = 0

    @property
    def total(self) -> int:
        return self.anonymous + self.file

    @classmethod
    def held_by(cls, process: int) -> "Memory":
        """Return the memory that a process and its descendants hold now; zero if the process has ended."""
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
    """Context manager that samples the memory of a process and keeps the largest values.

    The peaks in `anonymous`, `file` and `total` (bytes) may be of different moments.

    Args:
        process: number of the process.
        every: seconds between two samples.

    Raises:
        InputError: this system has no /proc/self/smaps_rollup.
    """

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
