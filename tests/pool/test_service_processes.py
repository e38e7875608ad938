"""The evaluation service on a real, local Ray: processes that are killed, hang, never start, or run out of memory."""

import os
import re
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from evaluator_work import TIMEOUT, freeze, log, names, outcomes_of, poll_until, wait_for, work

from flsim.results.evaluations import failures, read_evaluations
from server.pool.evaluations import EvaluationService, ServiceHParams

pytestmark = pytest.mark.usefixtures("local_ray")
FREE = "check that its share of the GPUs is free"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "reason"), [("hungry", "MemoryError: too large"), ("starved", "RuntimeError: .*can't allocate memory")]
)
def test_who_runs_out_of_memory_is_replaced(
    service: EvaluationService, run: Path, tmp_path: Path, name: str, reason: str
) -> None:
    """The others go first. Python's own error, and torch's on a CPU."""
    for checkpoint in (name, "a"):
        service.submit(run, run / checkpoint)
    assert outcomes_of(service.drain(run, TIMEOUT)) == [("a", "stored", 1), (name, "stored", 2)]
    (first, one), (second, two), (third, three) = ((line[0], line[1]) for line in log(tmp_path))
    assert (first, second, third) == (name, "a", name)
    assert one != two == three
    why, *others = (attempt.reason for attempt in read_evaluations(run))
    assert re.match(reason, str(why))
    assert others == [None, None]


def test_a_killed_process_is_replaced_and_its_work_done_again(
    service: EvaluationService, run: Path, tmp_path: Path
) -> None:
    """Twice."""
    (tmp_path / "bb.wait").touch()
    for name in ("a", "bb"):
        service.submit(run, run / name)
    assert poll_until(service, run) == [("a", "stored", 1)]
    for _ in range(2):
        wait_for(tmp_path / "bb.started", partial(service.poll, run))
        (tmp_path / "bb.started").unlink()
        os.kill(int(log(tmp_path)[-1][1]), signal.SIGKILL)
    (tmp_path / "bb.go").touch()
    service.submit(run, run / "ccc")
    assert sorted(outcomes_of(service.drain(run, TIMEOUT))) == [("bb", "stored", 3), ("ccc", "stored", 1)]
    assert sorted(names(tmp_path)) == ["a", "bb", "bb", "bb", "ccc"]
    outcomes = [attempt.outcome for attempt in read_evaluations(run) if attempt.checkpoint == "bb"]
    assert outcomes == ["retried", "retried", "stored"]


def test_a_process_killed_while_idle_costs_one_attempt(service: EvaluationService, run: Path, tmp_path: Path) -> None:
    service.submit(run, run / "a")
    service.drain(run, TIMEOUT)
    os.kill(int(log(tmp_path)[0][1]), signal.SIGKILL)
    service.submit(run, run / "bb")
    (bb,) = service.drain(run, TIMEOUT)
    assert (bb.checkpoint, bb.outcome) == ("bb", "stored")
    assert names(tmp_path) == ["a", "bb"]


def test_work_that_kills_its_process_every_time_fails_and_holds_up_nobody(run: Path, tmp_path: Path) -> None:
    service = EvaluationService(partial(work, tmp_path), ServiceHParams(retries=1))
    for name in ("dies", "a"):
        service.submit(run, run / name)
    first, dead = service.drain(run, TIMEOUT)
    assert outcomes_of([first, dead]) == [("a", "stored", 1), ("dies", "failed", 2)]
    assert str(dead.reason).startswith("it failed 2 times, last with: its process died: ")
    assert names(tmp_path) == ["dies", "a", "dies"]
    assert [attempt.outcome for attempt in read_evaluations(run)] == ["retried", "stored", "failed"]
    assert failures(run) == {"dies": dead.reason}
    service.submit(run, run / "a")
    assert outcomes_of(service.drain(run, TIMEOUT)) == [("a", "stored", 1)]
    service.close()


@pytest.mark.slow
def test_who_takes_too_long_is_killed(run: Path, tmp_path: Path) -> None:
    """The first process waits for what never comes; the second one is frozen, and could not end itself."""
    service = EvaluationService(partial(work, tmp_path), ServiceHParams(deadline=2.0, retries=1))
    (tmp_path / "hangs.wait").touch()
    service.submit(run, run / "hangs")
    wait_for(tmp_path / "hangs.started")
    (tmp_path / "hangs.started").unlink()
    wait_for(tmp_path / "hangs.started", partial(service.poll, run))
    os.kill(int(log(tmp_path)[1][1]), signal.SIGSTOP)
    service.submit(run, run / "a")
    hung, good = service.drain(run, TIMEOUT)
    assert outcomes_of([hung, good]) == [("hangs", "failed", 2), ("a", "stored", 1)]
    assert hung.reason == "it failed 2 times, last with: no result within 2 s"
    assert [attempt.outcome for attempt in read_evaluations(run)] == ["retried", "failed", "stored"]
    deadline = time.monotonic() + TIMEOUT
    for pid in {line[1] for line in log(tmp_path) if line[0] == "hangs"}:
        while Path("/proc", pid).exists():
            assert time.monotonic() < deadline, f"{pid} lives on"
            time.sleep(0.01)
    service.close()


@pytest.mark.nightly
def test_work_that_freezes_at_once_has_no_more_time_than_other_work(run: Path) -> None:
    """Three times: it was luck whether Ray's reply that the process runs had left before, and a start has minutes."""
    service = EvaluationService(freeze, ServiceHParams(deadline=0.5, retries=2))
    service.submit(run, run / "a")
    assert outcomes_of(service.drain(run, TIMEOUT)) == [("a", "failed", 3)]
    service.close()


def test_a_process_that_never_starts_is_ordered_again_and_has_twice_as_long(
    monkeypatch: pytest.MonkeyPatch, run: Path
) -> None:
    """No machine of this cluster has a GPU, so that Ray never starts a process that holds one."""
    monkeypatch.setattr("server.pool.evaluations.START_DEADLINE", 0.2)
    service = EvaluationService(freeze, ServiceHParams(num_gpus=1.0, retries=2))
    service.submit(run, run / "a")
    (failed,) = service.drain(run, TIMEOUT)
    assert [line.reason for line in read_evaluations(run)] == [
        *(f"no process started for it within {seconds} s; {FREE}" for seconds in (0.2, 0.4)),
        f"it failed 3 times, last with: no process started for it within 0.8 s; {FREE}",
    ]
    assert failed.outcome == "failed"
    service.close()
