"""Tests of tasks in processes: results and errors in order, dead workers, and workers whose parent ends."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from dumps import alive, children
from waiting import wait_until

from flsim.base import machine
from flsim.base.errors import InputError
from flsim.base.machine import Memory, machine_memory, refuse_beyond_memory
from flsim.base.pool import Pool, Report, Task, WorkerDied


def square(report: Report, number: int) -> int:
    report(number)
    return number * number


def refuse(_report: Report, number: int, patience: float = 0) -> None:
    time.sleep(patience)
    raise InputError(f"number {number}")


def fail(_report: Report, path: Path) -> bytes:
    return path.read_bytes()


class Unportable(Exception):  # noqa: N818
    def __init__(self, one: object, two: object) -> None:
        super().__init__()


def break_down(_report: Report) -> None:
    raise Unportable(1, 2)


def die(_report: Report, survives: Path | None) -> str:
    """Kill the worker, unless the file exists."""
    if survives is not None:
        if survives.exists():
            return "survived"
        survives.touch()
    os.kill(os.getpid(), signal.SIGKILL)
    return "unreachable"


def loaded(_report: Report) -> list[str]:
    return sorted(sys.modules)


def task(function: Any, *arguments: Any) -> Task:
    return Task(f"{function.__name__} {arguments}", function, arguments)


def test_results_and_reports_come_back_and_no_worker_outlives_its_pool() -> None:
    before = children(os.getpid())  # processes of other tests
    found: dict[int, int] = {}
    reported: list[float] = []
    with Pool(3) as pool:
        pool.run([task(square, number) for number in range(20)], found.__setitem__, reported.append)
        pool.run([], found.__setitem__)
        assert len(children(os.getpid())) > len(before)
    assert set(children(os.getpid())) <= set(before)
    assert found == {number: number * number for number in range(20)}
    assert sorted(reported) == list(range(20))


def test_errors_have_their_origin_and_the_first_task_has_priority(tmp_path: Path) -> None:
    """The error of the first task that fails is raised, although a later task fails sooner."""
    with Pool(2) as pool, pytest.raises(InputError, match=r"^number 0$"):
        pool.run([task(refuse, 0, 0.5), task(refuse, 1)], lambda index, result: None)
    with Pool(2) as pool, pytest.raises(FileNotFoundError) as missing:
        pool.run([task(fail, tmp_path / "missing")], lambda index, result: None)
    assert missing.value.filename == str(tmp_path / "missing")
    with Pool(2) as pool, pytest.raises(RuntimeError, match="in break_down\n"):
        pool.run([task(break_down)], lambda index, result: None)


def test_a_task_whose_worker_dies_is_tried_once_more(tmp_path: Path) -> None:
    found: dict[int, Any] = {}
    with Pool(2) as pool:
        pool.run([task(loaded), task(die, tmp_path / "died"), task(square, 2)], found.__setitem__)
        assert (found[1], found[2]) == ("survived", 4)
        assert not {"torch", "flwr", "ray", "pyarrow", "pandas"} & set(found[0]), "a worker loads what its task needs"
        with pytest.raises(WorkerDied, match=r"^die \(None,\): its process died 2 times \(signal 9\)"):
            pool.run([task(square, 1), task(die, None), task(square, 2)], lambda index, result: None)


SLEEPERS = """
import time
from flsim.base.pool import Pool, Task
def main():
    with Pool(2) as pool:
        pool.run([Task("sleep", _call, (time.sleep, 600))] * 2, print)
from test_pool import _call
main()
"""


def _call(_report: Report, function: Any, *arguments: Any) -> Any:
    return function(*arguments)


def test_busy_workers_end_with_a_killed_parent() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", SLEEPERS], env=environment) as parent:
        wait_until(lambda: len(children(parent.pid)) == 2)
        workers = children(parent.pid)
        parent.kill()
    wait_until(lambda: not any(map(alive, workers)))


def hang(_report: Report) -> bool:
    """Run practically for ever, and hold the interpreter's lock all the while."""
    return bool(re.match(r"(a+)+$", "a" * 60 + "b"))


def dawdle(report: Report, steps: int) -> int:
    for _ in range(steps):
        report(1)
        time.sleep(0.3)
    return steps


def test_a_task_that_hangs_is_ended() -> None:
    with Pool(2) as pool, pytest.raises(WorkerDied, match=r"the slow one: .*it hung"):
        pool.run([Task("the slow one", hang, (), silence=1.0)], lambda _index, _result: None)


def test_a_task_that_reports_progress_may_take_long() -> None:
    done: dict[int, int] = {}
    with Pool(1) as pool:
        pool.run([Task("long", dawdle, (7,), silence=1.5), Task("short", dawdle, (1,))], done.__setitem__)
    assert done == {0: 7, 1: 1}


# Memory of a machine, of a container, and of processes.

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
    limit.write_text("9" * 18)  # version 1 writes "no limit" as a huge number
    assert machine_memory() == whole


@pytest.mark.parametrize(
    ("group", "folder", "files"),
    [
        ("0::/pod/a", "pod/a", {"cpu.max": "{} 100000"}),  # version 2
        ("3:cpu,cpuacct:/pod/a", "cpu/pod/a", {"cpu.cfs_quota_us": "{}", "cpu.cfs_period_us": "100000"}),  # version 1
    ],
)
def test_a_container_has_the_cores_of_its_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, folder: str, files: dict[str, str]
) -> None:
    """A part of a core does not count, but there is at least one core."""
    (tmp_path / "cgroup").write_text(f"{group}\n")
    monkeypatch.setattr(machine, "GROUP", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "GROUPS", tmp_path)
    allowed = machine.cores()
    (tmp_path / folder).mkdir(parents=True)
    for quota, expected in (("max", allowed), ("-1", allowed), ("150000", 1), ("50000", 1), ("9900000", allowed)):
        for name, content in files.items():
            (tmp_path / folder / name).write_text(content.format(quota) + "\n")
        assert machine.cores() == min(allowed, expected)


# The memory of a process includes its descendants, with shared pages counted once.

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


def test_memory_includes_all_descendants_and_separates_own_from_mapped(tmp_path: Path) -> None:
    """Two processes allocate 64 MB each; a file of 128 MB that both of them map counts once."""
    (tmp_path / "hold.py").write_text(HOLD)
    (tmp_path / "file").write_bytes(bytes(128 * MEGABYTE))
    before = Memory.held_by(os.getpid())
    with subprocess.Popen(
        [sys.executable, "hold.py", "file", "nested"], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        holder.stdout.readline()
        after = Memory.held_by(os.getpid())
        holder.communicate()
    own, mapped = after.anonymous - before.anonymous, after.file - before.file
    assert 2 * 64 <= own / MEGABYTE < 2 * (64 + 24)
    # Libraries count less if other processes of the machine begin to share them during the test.
    assert 128 - 12 <= mapped / MEGABYTE < 128 + 24
    assert Memory.held_by(holder.pid) == Memory(), "after its end"
