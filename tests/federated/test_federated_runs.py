"""Tests of federated runs cover deadlines of replies, failures of custom code, and shares of GPUs and CPUs."""

import json

import pytest
from helpers import TINY, Experiment
from hypothesis import given
from hypothesis import strategies as st

from flsim.base.errors import InputError
from flsim.runs.config import SystemHParams
from server.federated.rounds import (
    FIRST,
    FLOOR,
    Deadline,
    client_gpu_shares,
    gpus_of_evaluators,
    refuse_tf32_without_gpu,
)
from server.pool.grid import ClientShare, places

SECONDS = st.floats(1e-3, 1e6)


@pytest.mark.parametrize(
    ("replies", "attempts"),
    [
        ([], [3600, 3600, 3600, 3600]),
        ([0.4, 0.1], [60, 120, 240, 3600]),
        ([2.0, 30.0, 1.0], [300, 600, 1200, 3600]),
        ([180.0], [1800, 3600, 3600, 3600]),
        ([1500.0], [3600, 3600, 3600, 3600]),
        ([2400.0], [4800, 4800, 4800, 4800]),
    ],
)
def test_deadlines_are_ten_times_the_longest_reply_and_double(replies: list[float], attempts: list[float]) -> None:
    deadline = Deadline(None)
    for seconds in replies:
        deadline.saw(seconds)
    assert [deadline.of_attempt(attempt, 3) for attempt in range(4)] == attempts


@given(st.lists(SECONDS, max_size=5), st.integers(0, 6))
def test_deadlines_have_a_minimum_and_the_last_is_at_least_an_hour(replies: list[float], retries: int) -> None:
    """For any replies, deadlines are at least the floor, twice the longest reply, and the previous deadline."""
    deadline = Deadline(None)
    for seconds in replies:
        deadline.saw(seconds)
    attempts = [deadline.of_attempt(attempt, retries) for attempt in range(retries + 1)]
    assert attempts == sorted(attempts)
    assert attempts[0] >= max([FLOOR, *(2 * seconds for seconds in replies)])
    assert attempts[-1] == deadline.patience >= FIRST


@given(st.floats(0.1, 1e5), st.lists(SECONDS, max_size=5))
def test_a_fixed_deadline_does_not_depend_on_replies(fixed: float, replies: list[float]) -> None:
    deadline = Deadline(fixed)
    for seconds in replies:
        deadline.saw(seconds)
    assert {deadline.of_attempt(attempt, 3) for attempt in range(4)} == {deadline.patience} == {fixed}


ALGORITHM = """from flsim.algorithms.algorithm import Algorithm


class Mine(Algorithm):
    def train(self, user):
        {line}
"""
MODEL = """import torch
from flsim.models.language_model import TrainableModel


class Mine(TrainableModel):
    calls = 0

    def __init__(self, vocabulary_size, hparams):
        super().__init__(vocabulary_size, hparams)
        self.words = torch.nn.Embedding(vocabulary_size, hparams.embedding)

    def forward(self, tokens):
        Mine.calls += 1
        if Mine.calls > 40:
            raise ValueError("late trouble")
        return self.words(tokens) @ self.words.weight.T
"""


def run_in_process(experiment: Experiment, setting: str) -> tuple[int, str]:
    own = f"{setting}=mine.py:Mine"
    done = experiment.call("run", experiment.config, "--out", "out", "--in-process", "--set", own, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("return user.trian()", "mine.py:6: AttributeError: 'LocalUser' object has no attribute 'trian'"),
        ("user.train()", "'NoneType' object has no attribute 'trained'; it needs train(user), which returns a "),
    ],
    ids=["raises", "returns nothing"],
)
def test_an_error_in_a_custom_algorithm_is_not_retried(experiment: Experiment, line: str, reason: str) -> None:
    experiment.config.write_text(TINY)
    (experiment.folder / "mine.py").write_text(ALGORITHM.format(line=line))
    code, stderr = run_in_process(experiment, "training.algorithm")
    assert code == 1
    assert stderr.splitlines()[-1].startswith("flsim: round 1: shard 0 failed with: ")
    assert reason in stderr.splitlines()[-1]


def test_a_later_error_in_a_custom_model_is_not_retried(experiment: Experiment) -> None:
    experiment.config.write_text(TINY.replace("units = 12\n", ""))
    (experiment.folder / "mine.py").write_text(MODEL)
    code, stderr = run_in_process(experiment, "model.architecture")
    assert code == 1
    assert "mine.py:15: ValueError: late trouble" in stderr.splitlines()[-1]


@pytest.mark.slow
def test_an_error_in_a_custom_algorithm_on_ray_is_not_retried(experiment: Experiment) -> None:
    experiment.config.write_text(TINY)
    (experiment.folder / "mine.py").write_text(ALGORITHM.format(line="return user.trian()"))
    options = ("--out", "out", "--set", "training.algorithm=mine.py:Mine", "--set", "system.shards=1")
    done = experiment.flsim("run", experiment.config, *options, check=False)
    assert done.returncode == 1
    assert "AttributeError: 'LocalUser' object has no attribute 'trian'" in done.stderr.splitlines()[-1]
    lines = (experiment.folder / "out" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines].count("client failed") == 1


@given(gpus=st.lists(st.integers(0, 16), min_size=1, max_size=4).filter(any))
def test_by_default_there_is_a_client_per_gpu_and_room_for_the_evaluator(gpus: list[int]) -> None:
    """Flower makes int(GPUs / share) clients of each node. No two share a GPU, and evaluators fit next to clients."""
    client, evaluation = client_gpu_shares(SystemHParams(), [float(count) for count in gpus])
    assert [int(count / client) for count in gpus] == gpus
    assert client > 0.5
    assert client + evaluation == pytest.approx(1)


def test_configured_shares_of_gpus_are_used() -> None:
    asked = SystemHParams(gpus_per_client=0.4, gpus_for_evaluation=0.2)
    assert client_gpu_shares(asked, [1.0]) == (0.4, 0.2)
    assert client_gpu_shares(SystemHParams(gpus_per_client=0, gpus_for_evaluation=1), [1.0]) == (0, 1)
    assert client_gpu_shares(SystemHParams(gpus_for_evaluation=0), [1.0]) == (1.0, 0)


def test_tf32_is_refused_if_clients_train_on_cpus() -> None:
    refuse_tf32_without_gpu("tf32", 0.95)
    refuse_tf32_without_gpu("bf16", 0.0)
    with pytest.raises(InputError, match='"tf32" needs an NVIDIA GPU'):
        refuse_tf32_without_gpu("tf32", 0.0)


EIGHT = {"CPU": 64.0, "GPU": 8.0}
ALL_HELD = "one: clients of system.gpus_per_client = 1 use all GPUs, so evaluators run on CPUs"


@pytest.mark.parametrize(
    ("system", "nodes", "shards", "expected"),
    [
        (SystemHParams(), [EIGHT], 8, 0.05),
        (SystemHParams(gpus_per_client=1.0), [EIGHT], 7, 0.05),
        (SystemHParams(gpus_per_client=1.0), [EIGHT], 8, ALL_HELD),
        (SystemHParams(gpus_per_client=2.0), [EIGHT], 8, ALL_HELD.replace("= 1", "= 2")),
        (SystemHParams(gpus_per_client=2.0), [EIGHT], 3, 0.05),
        (SystemHParams(gpus_per_client=1.0), [EIGHT, {"CPU": 3.0, "GPU": 4.0}], 20, 0.05),  # three CPUs for four GPUs
        (SystemHParams(gpus_per_client=1.0, gpus_for_evaluation=0.0), [EIGHT], 8, 0.0),
        (SystemHParams(gpus_per_client=1.0), [{"CPU": 4.0}], 2, 0.0),
        (SystemHParams(gpus_per_client=0.4, gpus_for_evaluation=0.1, evaluators=2), [EIGHT], 16, 0.1),
    ],
)
def test_evaluators_use_the_gpus_that_clients_leave_and_cpus_otherwise(
    system: SystemHParams,
    nodes: list[dict[str, float]],
    shards: int,
    expected: float | str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpus, printed = gpus_of_evaluators("one", system, nodes, shards), capsys.readouterr().err
    if isinstance(expected, str):
        assert (gpus, printed.startswith(expected), printed.count("\n")) == (0.0, True, 1)
    else:
        assert (gpus, printed) == (expected, "")


@pytest.mark.parametrize(
    ("system", "shards", "message"),
    [
        (SystemHParams(gpus_per_client=1.0, gpus_for_evaluation=0.1), 8, r"0 of 1 evaluators of .* = 0\.1; lower one"),
        (SystemHParams(gpus_per_client=0.5, gpus_for_evaluation=0.25, evaluators=3), 16, "GPUs for 0 of 3 evaluators"),
        (SystemHParams(gpus_per_client=0.5, gpus_for_evaluation=0.25, evaluators=3), 15, "GPUs for 2 of 3 evaluators"),
    ],
)
def test_evaluators_for_which_settings_leave_no_gpu_are_refused(
    system: SystemHParams, shards: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        gpus_of_evaluators("one", system, [EIGHT], shards)


# Tests of the number of client processes that fit a machine; tests/faults and test_flower.py test the rest of the grid.

SHARES = st.sampled_from([1.0, 0.95, 0.5, 0.4, 0.25, 0.2, 0.1])


@given(cpus=st.integers(0, 64), gpus=st.integers(0, 8), each=st.integers(1, 8), share=SHARES)
def test_the_greatest_number_of_clients_that_fit_is_used(cpus: int, gpus: int, each: int, share: float) -> None:
    """Each client's share is of a single GPU, in hundredths, as Ray counts shares."""
    on_cpus = ClientShare(each).fits({"CPU": float(cpus)})
    assert on_cpus * each <= cpus < (on_cpus + 1) * each
    both = ClientShare(each, share).fits({"CPU": float(cpus), "GPU": float(gpus)})
    assert both == min(on_cpus, gpus * (100 // round(100 * share)))


def test_clients_with_several_gpus_need_all_of_them() -> None:
    assert [ClientShare(1, 2.0).fits({"CPU": 64.0, "GPU": gpus}) for gpus in (1.0, 2.0, 5.0)] == [0, 1, 2]


@given(room=st.dictionaries(st.integers(0, 9), st.integers(-2, 5)), processes=st.integers(-1, 30))
def test_processes_are_placed_on_the_machine_with_the_most_room(room: dict[int, int], processes: int) -> None:
    """Each process goes to a machine with the most remaining room, and machines without room get no process."""
    machines = places(room, processes)
    assert len(machines) == min(max(processes, 0), sum(max(count, 0) for count in room.values()))
    left = dict(room)
    for machine in machines:
        assert left[machine] == max(left.values())
        left[machine] -= 1
