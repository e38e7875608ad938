"""The evaluation service on a real, local Ray: order, failures, and a process that is killed."""

import logging
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import ray
import torch

from flsim.errors import Diverged, RunFailed
from flsim.evaluation.service import NICENESS, RETRIES, EvaluationService

TIMEOUT = 60.0  # seconds; nothing here takes more than a few


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    """Two CPUs; workers can import this file, and Ray does not warn of its own plans for GPU variables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])]))
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        yield
        ray.shutdown()


def note(folder: Path, line: str) -> None:
    with (folder / "log").open("a") as file:
        file.write(line + "\n")


def log(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "log").read_text().splitlines()]


def niceness() -> int:
    return os.nice(0)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} never came"
        time.sleep(0.01)


def work(folder: Path, checkpoint: str) -> list[int]:
    """Note who works on what, wait where the test wants it, and return as many rows as the name has letters."""
    name = Path(checkpoint).name
    note(folder, f"{name} {os.getpid()} {os.nice(0)} {torch.get_num_threads()}")
    (folder / f"{name}.started").touch()
    if (folder / f"{name}.wait").exists():
        wait_for(folder / f"{name}.go")
    if name == "nan":
        raise Diverged("round 3: 1 of 8 values of parameter embedding are not finite")
    if name == "bad":
        raise KeyError("no such\ncorpus")
    if name == "dies":
        os._exit(1)
    return [0] * len(name)


def poll_until_rows(service: EvaluationService) -> int:
    deadline = time.monotonic() + TIMEOUT
    while not (rows := service.poll()):
        assert time.monotonic() < deadline, "no evaluation finished"
    return rows


@pytest.fixture
def service(tmp_path: Path) -> Iterator[EvaluationService]:
    service = EvaluationService(partial(work, tmp_path))
    yield service
    service.close()


def test_nothing_waits_and_one_runs_at_a_time_in_order(service: EvaluationService, tmp_path: Path) -> None:
    (tmp_path / "a.wait").touch()
    began = time.monotonic()
    for name in ("a", "bb", "ccc", "a"):
        service.submit(tmp_path / name)
    assert service.poll() == 0
    assert time.monotonic() - began < 5
    wait_for(tmp_path / "a.started")
    assert ray.available_resources()["CPU"] == 2  # all of them are the clients'
    with pytest.raises(RunFailed, match="evaluation of a did not finish in time"):
        service.drain(0.1)
    assert service.pending == 4
    assert [line[0] for line in log(tmp_path)] == ["a"]
    (tmp_path / "a.go").touch()
    assert service.drain(TIMEOUT) == 1 + 2 + 3 + 1
    assert [line[0] for line in log(tmp_path)] == ["a", "bb", "ccc", "a"]
    assert len({line[1] for line in log(tmp_path)}) == 1
    assert (service.pending, service.poll(), service.drain(0)) == (0, 0, 0)


def test_training_goes_first(service: EvaluationService, tmp_path: Path) -> None:
    """One thread, and less of the processor than any other process of Ray; 19 is the lowest priority that there is."""
    service.submit(tmp_path / "a")
    others = ray.get(ray.remote(niceness).remote())
    assert service.drain(TIMEOUT) == 1
    assert log(tmp_path)[0][2:] == [str(min(19, others + NICENESS)), "1"]


def test_poll_collects_what_is_finished(service: EvaluationService, tmp_path: Path) -> None:
    (tmp_path / "bb.wait").touch()
    for name in ("a", "bb"):
        service.submit(tmp_path / name)
    assert (poll_until_rows(service), service.pending) == (1, 1)
    wait_for(tmp_path / "bb.started")
    assert service.poll() == 0
    (tmp_path / "bb.go").touch()
    assert service.drain(TIMEOUT) == 2


def test_a_failure_names_the_checkpoint_and_the_cause(service: EvaluationService, tmp_path: Path) -> None:
    """It is told once; what was submitted after it is still evaluated."""
    for name in ("bad", "a"):
        service.submit(tmp_path / name)
    with pytest.raises(RunFailed, match=r"^the evaluation of bad failed: KeyError: 'no such\\ncorpus'$") as caught:
        service.drain(TIMEOUT)
    assert not isinstance(caught.value, Diverged)
    assert service.drain(TIMEOUT) == 1


def test_a_diverged_model_stays_one(service: EvaluationService, tmp_path: Path) -> None:
    service.submit(tmp_path / "nan")
    wait_for(tmp_path / "nan.started")
    with pytest.raises(Diverged, match=r"^the evaluation of nan failed: round 3: 1 of 8 values of parameter embedding"):
        poll_until_rows(service)


def test_a_killed_process_is_replaced_and_its_work_done_again(service: EvaluationService, tmp_path: Path) -> None:
    (tmp_path / "bb.wait").touch()
    for name in ("a", "bb", "ccc", "dddd"):
        service.submit(tmp_path / name)
    assert poll_until_rows(service) == 1
    wait_for(tmp_path / "bb.started")
    killed = log(tmp_path)[-1][1]
    os.kill(int(killed), signal.SIGKILL)
    (tmp_path / "bb.go").touch()
    assert service.drain(TIMEOUT) == 2 + 3 + 4
    assert [line[0] for line in log(tmp_path)] == ["a", "bb", "bb", "ccc", "dddd"]
    assert [line[1] == killed for line in log(tmp_path)] == [True, True, False, False, False]


def test_work_that_kills_its_process_every_time_fails_the_run(service: EvaluationService, tmp_path: Path) -> None:
    service.submit(tmp_path / "dies")
    with pytest.raises(RunFailed, match="the evaluation of dies failed: Actor"):
        service.drain(TIMEOUT)
    assert len(log(tmp_path)) == 1 + RETRIES


def test_closing_forgets_what_is_pending_and_submitting_starts_anew(service: EvaluationService, tmp_path: Path) -> None:
    (tmp_path / "a.wait").touch()
    service.submit(tmp_path / "a")
    wait_for(tmp_path / "a.started")
    service.close()
    assert service.drain(0) == 0
    service.submit(tmp_path / "bb")
    assert service.drain(TIMEOUT) == 2


def test_nothing_starts_before_the_first_submission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    service = EvaluationService(partial(work, Path()))
    assert service.poll() == service.drain(0) == 0
    service.close()
    with pytest.raises(RunFailed, match="needs Ray, which is not initialised"):
        service.submit(Path("a"))
