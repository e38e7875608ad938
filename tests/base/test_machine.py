"""Memory of a machine, of a container, and of processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flsim.base import machine
from flsim.base.errors import InputError
from flsim.base.machine import Memory, machine_memory, refuse_beyond_memory

LIMIT = 1 << 20  # bytes; any machine has more


@pytest.mark.parametrize(
    ("group", "file"),
    [
        ("0::/pod/a", "pod/a/memory.max"),  # version 2
        ("0::/not/visible/in/a/container", "memory.max"),
        ("3:cpu,cpuacct:/pod/a\n2:memory:/pod/a", "memory/pod/a/memory.limit_in_bytes"),  # version 1
    ],
)
def test_a_container_has_the_memory_of_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, file: str
) -> None:
    (tmp_path / "cgroup").write_text(f"{group}\n")
    monkeypatch.setattr(machine, "GROUP", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "GROUPS", tmp_path)
    whole = machine_memory()
    assert whole > LIMIT
    limit = tmp_path / file
    limit.parent.mkdir(parents=True, exist_ok=True)
    limit.write_text("max\n")
    assert machine_memory() == whole
    limit.write_text(f"{LIMIT}\n")
    assert machine_memory() == LIMIT
    refuse_beyond_memory(LIMIT, "a model", "take a smaller one")
    with pytest.raises(InputError, match="a model needs 0 GB of memory at least, and this machine has 0 GB; take a"):
        refuse_beyond_memory(LIMIT + 1, "a model", "take a smaller one")
    limit.write_text("9" * 18)  # version 1 has a huge number for no limit
    assert machine_memory() == whole


# Memory is that of a process and its descendants, shared pages counted once.


MEGABYTE = 2**20
HOLD = """
import mmap, subprocess, sys
from pathlib import Path
own = b"x" * (64 * 2**20)
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
total = sum(mapped[::mmap.PAGESIZE])
below = [subprocess.Popen([sys.executable, *sys.argv[:2]], stdin=subprocess.PIPE)] if sys.argv[2:] else []
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("nested", "processes"), [((), 1), (("nested",), 2)])
def test_memory_is_that_of_all_descendants_and_tells_own_from_mapped(
    tmp_path: Path, nested: tuple[str, ...], processes: int
) -> None:
    """Each holds 64 MB of its own; a file of 128 MB that all of them map counts once."""
    (tmp_path / "hold.py").write_text(HOLD)
    (tmp_path / "file").write_bytes(bytes(128 * MEGABYTE))
    before = Memory.held_by(os.getpid())
    with subprocess.Popen(
        [sys.executable, "hold.py", "file", *nested], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        for _ in range(processes):
            holder.stdout.readline()
        after = Memory.held_by(os.getpid())
        holder.communicate()
    own, mapped = after.anonymous - before.anonymous, after.file - before.file
    assert 64 * processes <= own / MEGABYTE < 64 * processes + 24 * processes
    # Libraries count less where other processes of the machine begin to share them meanwhile.
    assert 128 - 12 <= mapped / MEGABYTE < 128 + 24


def test_a_process_that_has_ended_uses_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    assert Memory.held_by(ended.pid) == Memory()
