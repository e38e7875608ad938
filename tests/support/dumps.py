"""Helpers for tests of data: small dumps and JSON lines, contents of folders, and memory of processes."""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from xml.sax.saxutils import quoteattr

import pytest

DECLARATION = '<?xml version="1.0" encoding="utf-8"?>\n'


def row(**attributes: str) -> str:
    return "  <row " + " ".join(f"{name}={quoteattr(value)}" for name, value in attributes.items()) + " />\n"


def question(owner: str, body: str) -> str:
    return row(Id="1", PostTypeId="1", Body=body, OwnerUserId=owner)


def dump(rows: Iterable[str], head: str = DECLARATION) -> str:
    return f"{head}<posts>\n{''.join(rows)}</posts>\n"


def write_dump(path: Path, rows: Iterable[str], head: str = DECLARATION) -> Path:
    path.write_bytes(dump(rows, head).encode())
    return path


def write_jsonl(path: Path, posts: Iterable[tuple[str | int, str]]) -> Path:
    path.write_text("".join(json.dumps({"user": user, "text": text}) + "\n" for user, text in posts), "utf-8")
    return path


def folder_bytes(folder: Path, without: str = "") -> dict[str, bytes]:
    """Return the content of each file of a folder by relative path, except the file with the path `without`."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name != without}


def peak_kilobytes(code: str, *arguments: Path) -> int:
    """Return the peak memory of a Python process plus that of its largest child process.

    The peak of the total would depend on which peaks of processes coincide, and so on the load of the machine. Pages of
    files do not count, because the system can reclaim them.
    """
    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("memory is read from /proc/PID/smaps_rollup, which this system has not")
    peaks = Counter[int]()
    with subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peaks |= Counter({pid: _kilobytes(pid) for pid in (process.pid, *children(process.pid))})
            time.sleep(0.005)
    assert process.returncode == 0
    return peaks.pop(process.pid) + max(peaks.values(), default=0)


def _kilobytes(pid: int) -> int:
    """Return the memory of a process without pages of files and of its parent; shared memory counts as 1/n."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Dirty:", "Pss_Shmem:")))
    return 0  # the process has ended


def peak_of_reading(path: Path, format: str) -> int:
    """Return the peak memory of a process that reads all posts of a file."""
    code = f"""
import sys
from collections import Counter
from pathlib import Path
from flsim.data.formats.known import FORMATS
path, format = Path(sys.argv[1]), FORMATS["{format}"]
for part in format.parts(path, path, ("user", "text")):
    sum(1 for _ in format.read(part, Counter()))
"""
    return peak_kilobytes(code, path)


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie, for which its parent has not waited yet, does not."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def children(pid: int) -> list[int]:
    """Return the ids of the child processes of a process that have not been waited for."""
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []
