"""The evaluation service on a real, local Ray: order, bounds, failures of the work and of its processes, memory."""

import os
import re
import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch
from evaluator_work import TIMEOUT, freeze, log, names, niceness, outcomes_of, poll_until, wait_for, work

from flsim.base.errors import RunFailed
from flsim.results.store import Evaluation, failures, log_evaluation, read_evaluations
from server.pool import evaluations
from server.pool.evaluations import NICENESS, EvaluationService, ServiceHParams, limit_memory

pytestmark = pytest.mark.usefixtures("local_ray")
FREE = "check that its share of the GPUs is free"


def test_nothing_waits_and_one_runs_at_a_time_in_order(service: EvaluationService, run: Path, tmp_path: Path) -> None:
    (tmp_path / "a.wait").touch()
    assert all(service.submit(run, run / name) for name in ("a", "bb", "ccc", "bb", "a"))
    assert service.poll(run) == []
    wait_for(tmp_path / "a.started")
    assert ray.available_resources()["CPU"] == 2  # all of them are the clients'
    assert service.drain(run, 0.1) == []
    assert service.pending(run) == 3  # what was there already is there once
    assert names(tmp_path) == ["a"]
    (tmp_path / "a.go").touch()
    ended = service.drain(run, TIMEOUT)
    assert outcomes_of(ended) == [("a", "stored", 1), ("bb", "stored", 1), ("ccc", "stored", 1)]
    assert names(tmp_path) == ["a", "bb", "ccc"]
    assert len({line[1] for line in log(tmp_path)}) == 1
    assert (service.pending(run), service.poll(run), service.drain(run)) == (0, [], [])
    assert read_evaluations(run) == ended
    assert all(each.cpu_seconds is not None and each.seconds >= 0 and each.reason is None for each in ended)
    assert service.submit(run, run / "a")  # once more, if someone wants it
    assert outcomes_of(service.drain(run, TIMEOUT)) == [("a", "stored", 1)]


def test_training_goes_first(service: EvaluationService, run: Path, tmp_path: Path) -> None:
    """One thread, and less of the processor than any other process of Ray; 19 is the lowest priority that there is."""
    service.submit(run, run / "a")
    others = ray.get(ray.remote(niceness).remote())
    assert len(service.drain(run, TIMEOUT)) == 1
    assert log(tmp_path)[0][2:4] == [str(min(19, others + NICENESS)), "1"]


def test_a_full_queue_says_so_and_loses_nothing(run: Path, tmp_path: Path) -> None:
    """An outcome that nobody asked for takes room, so what is kept is bounded, whoever forgets to ask."""
    service = EvaluationService(work, ServiceHParams(queue=3))
    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / "a.wait").touch()
    assert [service.submit(run, run / name) for name in "abcd"] == [True, True, True, False]
    assert service.submit(run, run / "c")  # is there
    assert service.submit(other, other / "e")  # another run has room of its own
    (tmp_path / "a.go").touch()
    assert outcomes_of(service.drain(other, TIMEOUT)) == [("e", "stored", 1)]
    for name in ("b", "c"):
        wait_for(tmp_path / f"{name}.started")
    assert service.pending(run) == 3
    assert not service.submit(run, run / "d")
    assert outcomes_of(service.drain(run, TIMEOUT)) == [(name, "stored", 1) for name in "abc"]
    assert service.submit(run, run / "d")
    assert outcomes_of(service.drain(run, TIMEOUT)) == [("d", "stored", 1)]
    service.close()
    assert sorted(names(tmp_path)) == ["a", "b", "c", "d", "e"]


def test_runs_take_turns_and_know_only_their_own(service: EvaluationService, tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("one", "two")]
    (tmp_path / "0.wait").touch()
    for run in runs:
        run.mkdir()
        for index in range(3):
            service.submit(run, run / str(index))
    (tmp_path / "0.go").touch()
    for run in runs:
        assert outcomes_of(service.drain(run, TIMEOUT)) == [(str(index), "stored", 1) for index in range(3)]
        assert len(read_evaluations(run)) == 3
    assert [(line[4], line[0]) for line in log(tmp_path)] == [
        ("one", "0"), ("one", "1"), ("two", "0"), ("one", "2"), ("two", "1"), ("two", "2")
    ]  # fmt: skip


def test_a_pool_works_on_several_at_a_time(run: Path, tmp_path: Path) -> None:
    service = EvaluationService(work, ServiceHParams(evaluators=2))
    for name in ("a", "b"):
        (tmp_path / f"{name}.wait").touch()
    for name in ("a", "b", "c"):
        service.submit(run, run / name)
    for name in ("a", "b"):
        wait_for(tmp_path / f"{name}.started")
    (tmp_path / "b.go").touch()
    assert poll_until(service, run) == [("b", "stored", 1)]
    assert poll_until(service, run) == [("c", "stored", 1)]
    (tmp_path / "a.go").touch()
    assert outcomes_of(service.drain(run, TIMEOUT)) == [("a", "stored", 1)]
    service.close()
    pids = {name: pid for name, pid, *_ in log(tmp_path)}
    assert pids["c"] == pids["b"] != pids["a"]


def test_a_failure_says_why_and_the_next_one_is_evaluated(service: EvaluationService, run: Path) -> None:
    """What the work raises is not tried again: it would raise it again."""
    for name in ("bad", "nan", "a"):
        service.submit(run, run / name)
    bad, nan, good = service.drain(run, TIMEOUT)
    assert (bad.outcome, bad.reason) == ("failed", r"KeyError: 'no such\ncorpus'")
    assert nan.outcome == "diverged"
    assert nan.reason == "round 3: 1 of 8 values of parameter embedding are not finite"
    assert outcomes_of([good]) == [("a", "stored", 1)]
    assert failures(run) == {"bad": bad.reason}


def test_forgetting_a_run_leaves_the_others(service: EvaluationService, run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / "a.wait").touch()
    for name in ("a", "b"):
        service.submit(run, run / name)
    service.submit(other, other / "c")
    wait_for(tmp_path / "a.started")
    service.forget(run)
    assert service.pending(run) == 0
    assert outcomes_of(service.drain(other, TIMEOUT)) == [("c", "stored", 1)]
    assert names(tmp_path) == ["a", "c"]
    assert read_evaluations(run) == []


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_work_that_kills_its_process_every_time_fails_and_holds_up_nobody(run: Path, tmp_path: Path) -> None:
    service = EvaluationService(work, ServiceHParams(retries=1))
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
    service = EvaluationService(work, ServiceHParams(deadline=2.0, retries=1))
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


@pytest.mark.slow
def test_a_process_that_never_starts_is_ordered_again_and_has_twice_as_long(
    monkeypatch: pytest.MonkeyPatch, run: Path
) -> None:
    """No machine of this cluster has a GPU, so that Ray never starts a process that holds one."""
    monkeypatch.setattr("server.pool.evaluations.START_DEADLINE", 0.2)
    service = EvaluationService(freeze, ServiceHParams(num_gpus=1.0, retries=2))
    service.submit(run, run / "a")
    (failed,) = service.drain(run, TIMEOUT)
    assert [line.reason for line in read_evaluations(run)] == [
        *(f"no process started within {seconds} s; {FREE}" for seconds in (0.2, 0.4)),
        f"it failed 3 times, last with: no process started within 0.8 s; {FREE}",
    ]
    assert failed.outcome == "failed"
    service.close()


def test_nothing_starts_before_the_first_submission(monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    service = EvaluationService(work)
    assert service.poll(run) == service.drain(run) == []
    service.close()
    with pytest.raises(RunFailed, match="needs Ray, which is not initialised"):
        service.submit(run, Path("a"))


def test_a_line_cut_short_and_a_later_success_are_no_failures(run: Path) -> None:
    for name in ("round-000001", "round-000002", "round-000003"):
        log_evaluation(run, Evaluation(f"{name}.safetensors", "failed", 4, 1.0, 9.0, reason="it died"))
    log_evaluation(run, Evaluation("round-000002.safetensors", "stored", 1, 1.0, 9.0))
    with (run / "evaluations.jsonl").open("a") as file:
        file.write('{"checkpoint": "round-0000')
    (run / "rows").mkdir()
    (run / "rows" / "round-000001.parquet").touch()
    assert failures(run) == {"round-000003.safetensors": "it died"}
    assert failures(run.parent) == {}


@pytest.mark.parametrize(
    ("gigabytes", "share", "expected"),
    [(140, 0.05, 0.05), (140, 1.0, 1.0), (140, 2.0, 1.0), (8, 0.05, 2**30 / 8e9), (0.5, 0.05, 1.0)],
)
def test_the_share_counts_but_1_gibibyte_is_the_least(
    gigabytes: float, share: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    fractions: list[float] = []
    about = SimpleNamespace(total_memory=int(gigabytes * 1e9))
    fakes = {"is_available": lambda: True, "get_device_properties": lambda _: about}
    for name, fake in {**fakes, "set_per_process_memory_fraction": fractions.append}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    limit_memory(share)
    assert fractions == [pytest.approx(expected)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, of which there is none")
def test_more_than_the_share_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluations, "MEMORY", 0)
    whole = torch.cuda.get_device_properties(0).total_memory
    try:
        limit_memory(0.02)
        torch.empty(int(0.01 * whole), dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(int(0.03 * whole), dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
