"""Tests of clients that die, hang, run out of memory or fail on a user: flsim repeats lost requests and logs causes."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faulty import OPTIONS, assert_equal_runs, begin, digests, ended, events, go_on, kill, sick_client, wait_for
from helpers import Experiment, start, wait_for_round

HERE = Path()  # replaced by the experiment's folder in the clients that run the functions below


def dies_with_user_seven(users: list[int]) -> None:
    if 7 in users:
        os.kill(os.getpid(), signal.SIGKILL)


def has_no_memory_for_user_seven(users: list[int]) -> None:
    if 7 in users:
        bytearray(1 << 50)


def has_no_memory_once(users: list[int]) -> None:
    there = HERE / "there_was_none"
    if len(users) and not there.exists():
        there.touch()
        bytearray(1 << 50)


def is_slow(users: list[int]) -> None:
    if len(users) and (HERE / "all_are_slow").exists():
        time.sleep(9)


@pytest.mark.slow
def test_clients_that_are_killed_or_hang_are_replaced_and_change_nothing(
    experiment: Experiment, undisturbed: Path
) -> None:
    """All clients are killed. Their replacements start more slowly than all attempts allow, and one of them hangs."""
    hurt, none_starts = experiment.folder / "hurt", experiment.folder / "none_starts"
    process, workers = begin(experiment, "hurt", "system.deadline=5", "system.retries=2", until_round=5)
    none_starts.touch()
    for worker in workers:
        kill(worker)
    wait_for(hurt / "log.jsonl", "client failed")
    time.sleep(1 + 5 + 2 + 5 + 1)  # pause, deadline, pause, deadline: the time of all attempts
    none_starts.unlink()
    go_on(experiment)
    rounds = len(digests(hurt))
    others = wait_for_round(hurt, rounds + 2)
    kill(int(others[0].split("/")[1]), signal.SIGSTOP)
    code, printed = ended(experiment, process)
    assert code == 0, printed
    assert_equal_runs(hurt, undisturbed)
    assert "the client process ended without a reply" in events(hurt)


@pytest.fixture
def hasty(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the default deadline of commands to the time of the longest reply, at least two seconds."""
    folder = experiment.folder / "hasty"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import server.federated.rounds as its\nits.FLOOR, its.FACTOR = 2.0, 1.0\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.nightly
@pytest.mark.usefixtures("hasty")
def test_the_deadline_replaces_a_client_that_hangs_within_a_minute(experiment: Experiment, undisturbed: Path) -> None:
    process, workers = begin(experiment, "hung", until_round=5)
    kill(workers[0], signal.SIGSTOP)
    go_on(experiment)
    code, printed = ended(experiment, process)  # within two minutes
    assert code == 0, printed
    assert_equal_runs(experiment.folder / "hung", undisturbed)
    log = (experiment.folder / "hung" / "log.jsonl").read_text()
    waited = re.findall(r'"shard asked again".*"reason": "no reply within (\S+) s"', log)
    assert waited
    assert all(2 <= float(seconds) < 60 for seconds in waited)


@pytest.mark.nightly
@pytest.mark.usefixtures("hasty")
def test_a_run_survives_rounds_that_become_much_slower(experiment: Experiment, undisturbed: Path) -> None:
    """Clients become so slow that all attempts at a round except the last exceed their deadlines."""
    sick_client(experiment, is_slow, most=6)
    tired, all_are_slow = experiment.folder / "tired", experiment.folder / "all_are_slow"
    process = start(experiment, "--out", "tired", *OPTIONS, "--set", "system.retries=2")
    wait_for_round(tired, 6)
    all_are_slow.touch()
    go_on(experiment)
    wait_for_round(tired, 7)
    all_are_slow.unlink()
    code, printed = ended(experiment, process)
    assert code == 0, printed
    assert_equal_runs(tired, undisturbed)
    log = (tired / "log.jsonl").read_text()
    assert len(set(re.findall(r'"shard asked again".*"reason": "(no reply within \S+ s)"', log))) >= 2


@pytest.mark.nightly
def test_a_client_that_runs_out_of_memory_once_is_asked_again(experiment: Experiment, undisturbed: Path) -> None:
    sick_client(experiment, has_no_memory_once)
    experiment.flsim("run", experiment.config, "--out", "poor", *OPTIONS)
    assert_equal_runs(experiment.folder / "poor", undisturbed)
    log = (experiment.folder / "poor" / "log.jsonl").read_text()
    assert re.search(r'"client failed".*"reason": "MemoryError', log)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("harm", "retries", "reason"),
    [(dies_with_user_seven, 1, "its process died"), (has_no_memory_for_user_seven, 0, "MemoryError")],
)
def test_a_user_that_no_client_can_train_ends_the_run_with_the_reason(
    experiment: Experiment, harm: Callable[[list[int]], None], retries: int, reason: str
) -> None:
    sick_client(experiment, harm)
    process = start(experiment, "--out", "poisoned", *OPTIONS, "--set", f"system.retries={retries}")
    code, said = ended(experiment, process)
    assert code == 1
    expected = rf"flsim: round \d+: shard 0 failed {retries + 1} times, last with: {reason}"
    assert re.match(expected, said), said
