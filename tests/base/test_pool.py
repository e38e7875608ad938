"""Tasks in processes: results and errors come back in order, dead workers are noticed, none outlives its parent."""

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

from flsim.base.errors import InputError
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
    """Dies, but not where the file is there."""
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


@pytest.mark.parametrize("workers", [1, 3])
def test_results_and_reports_come_back(workers: int) -> None:
    found: dict[int, int] = {}
    reported: list[float] = []
    with Pool(workers) as pool:
        pool.run([task(square, number) for number in range(20)], found.__setitem__, reported.append)
        pool.run([], found.__setitem__)
    assert found == {number: number * number for number in range(20)}
    assert sorted(reported) == list(range(20))


def test_the_error_of_the_first_task_that_fails_is_raised(tmp_path: Path) -> None:
    """Although a later one fails sooner."""
    with Pool(2) as pool, pytest.raises(InputError, match=r"^number 0$"):
        pool.run([task(refuse, 0, 0.5), task(refuse, 1)], lambda index, result: None)


def test_other_errors_say_where_they_come_from(tmp_path: Path) -> None:
    with Pool(2) as pool, pytest.raises(FileNotFoundError) as missing:
        pool.run([task(fail, tmp_path / "missing")], lambda index, result: None)
    assert missing.value.filename == str(tmp_path / "missing")
    with Pool(2) as pool, pytest.raises(RuntimeError, match="in break_down\n"):
        pool.run([task(break_down)], lambda index, result: None)


def test_a_task_whose_worker_dies_is_tried_once_more(tmp_path: Path) -> None:
    found: dict[int, Any] = {}
    with Pool(2) as pool:
        pool.run([task(square, 1), task(die, tmp_path / "died"), task(square, 2)], found.__setitem__)
    assert found == {0: 1, 1: "survived", 2: 4}


def test_a_task_whose_workers_die_is_named(tmp_path: Path) -> None:
    with (
        Pool(2) as pool,
        pytest.raises(WorkerDied, match=r"^die \(None,\): its process died 2 times \(signal 9\)"),
    ):
        pool.run([task(square, 1), task(die, None), task(square, 2)], lambda index, result: None)


def test_workers_load_what_their_tasks_need_only() -> None:
    found: dict[int, list[str]] = {}
    with Pool(2) as pool:
        pool.run([task(loaded)], found.__setitem__)
    assert "test_pool" in found[0]
    assert not {"torch", "flwr", "ray", "pyarrow", "pandas"} & set(found[0])


def test_no_worker_outlives_its_pool() -> None:
    before = children(os.getpid())  # of other tests
    with Pool(2) as pool:
        pool.run([task(square, number) for number in range(4)], lambda index, result: None)
        assert len(children(os.getpid())) > len(before)
    assert set(children(os.getpid())) <= set(before)


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
    """Does not come back for an age, and holds the interpreter's lock all the while."""
    return bool(re.match(r"(a+)+$", "a" * 60 + "b"))


def dawdle(report: Report, steps: int) -> int:
    for _ in range(steps):
        report(1)
        time.sleep(0.3)
    return steps


def test_a_task_that_hangs_is_ended() -> None:
    with Pool(2) as pool, pytest.raises(WorkerDied, match=r"the slow one: .*it hung"):
        pool.run([Task("the slow one", hang, (), silence=1.0)], lambda _index, _result: None)


def test_a_task_that_gives_signs_of_life_may_take_long() -> None:
    done: dict[int, int] = {}
    with Pool(1) as pool:
        pool.run([Task("long", dawdle, (12,), silence=3.0), Task("short", dawdle, (1,))], done.__setitem__)
    assert done == {0: 12, 1: 1}
