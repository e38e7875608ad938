"""The deadline follows how long replies take; one that was too short is made up for before a run fails."""

import json
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from helpers import TINY, Experiment
from hypothesis import given
from hypothesis import strategies as st

from flsim.base.errors import InputError
from flsim.runs.config import SystemHParams
from server.federated.launch import (
    InProcessGrid,
    client_gpu_shares,
    gpus_of_evaluators,
    refuse_tf32_without_gpu,
    take_gpus,
)
from server.federated.rounds import FIRST, FLOOR, Deadline
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
def test_it_is_ten_times_the_longest_reply_and_doubles(replies: list[float], attempts: list[float]) -> None:
    deadline = Deadline(None)
    for seconds in replies:
        deadline.saw(seconds)
    assert [deadline.of_attempt(attempt, 3) for attempt in range(4)] == attempts


@given(st.lists(SECONDS, max_size=5), st.integers(0, 6))
def test_no_attempt_is_hasty_and_the_last_has_an_hour(replies: list[float], retries: int) -> None:
    """Whatever was measured: never below the floor nor twice the longest reply, never shorter than the one before."""
    deadline = Deadline(None)
    for seconds in replies:
        deadline.saw(seconds)
    attempts = [deadline.of_attempt(attempt, retries) for attempt in range(retries + 1)]
    assert attempts == sorted(attempts)
    assert attempts[0] >= max([FLOOR, *(2 * seconds for seconds in replies)])
    assert attempts[-1] == deadline.patience >= FIRST


@given(st.floats(0.1, 1e5), st.lists(SECONDS, max_size=5))
def test_a_number_holds_whatever_is_measured(fixed: float, replies: list[float]) -> None:
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


def run_in_process(experiment: Experiment, setting: str) -> tuple[int, str, Path]:
    out = experiment.folder / "out"
    done = experiment.call(
        "run", experiment.config, "--out", out, "--in-process", "--set", f"{setting}=mine.py:Mine", check=False
    )
    return done.returncode, done.stderr, out


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("return user.trian()", "mine.py:6: AttributeError: 'LocalUser' object has no attribute 'trian'"),
        ("user.train()", "'NoneType' object has no attribute 'trained'; it needs train(user), which returns a "),
    ],
    ids=["raises", "returns nothing"],
)
def test_an_algorithm_fails_at_the_first_try(experiment: Experiment, line: str, reason: str) -> None:
    experiment.config.write_text(TINY)
    (experiment.folder / "mine.py").write_text(ALGORITHM.format(line=line))
    code, stderr, out = run_in_process(experiment, "training.algorithm")
    assert code == 1
    assert stderr.splitlines()[-1].startswith("flsim: round 1: shard 0 failed with: ")
    assert reason in stderr.splitlines()[-1]
    assert_one_try(out)


def test_a_model_that_fails_later_fails_at_the_first_try(experiment: Experiment) -> None:
    experiment.config.write_text(TINY.replace("units = 12\n", ""))
    (experiment.folder / "mine.py").write_text(MODEL)
    code, stderr, out = run_in_process(experiment, "model.architecture")
    assert code == 1
    assert "mine.py:15: ValueError: late trouble" in stderr.splitlines()[-1]
    assert_one_try(out)


def assert_one_try(out: Path) -> None:
    failures = [
        line for line in (out / "log.jsonl").read_text().splitlines() if json.loads(line)["event"] == "client failed"
    ]
    assert len(failures) == 1


@pytest.mark.slow
def test_on_ray_too(experiment: Experiment) -> None:
    experiment.config.write_text(TINY)
    (experiment.folder / "mine.py").write_text(ALGORITHM.format(line="return user.trian()"))
    options = ("--out", "out", "--set", "training.algorithm=mine.py:Mine", "--set", "system.shards=1")
    done = experiment.flsim("run", experiment.config, *options, check=False)
    assert done.returncode == 1
    assert "AttributeError: 'LocalUser' object has no attribute 'trian'" in done.stderr.splitlines()[-1]
    assert_one_try(experiment.folder / "out")


app = ClientApp()
served: list[int] = []
APP = f"{Path(__file__).stem}:app"


@app.train()
def reply_with_its_number(message: Message, context: Context) -> Message:
    number = message.content.config_records["asked"]["number"]
    served.append(number)
    if number < 0:
        raise ValueError(f"{number} is\nbelow 0")
    about = ConfigRecord({"number": number, "run": context.run_id, **context.node_config})
    return Message(RecordDict({"about": about}), reply_to=message)


def request(node: int, number: int) -> Message:
    return Message(RecordDict({"asked": ConfigRecord({"number": number})}), node, "train", group_id="1")


def about(reply: Message) -> tuple[int, int, int]:
    record = reply.content.config_records["about"]
    return record["partition-id"], record["num-partitions"], record["number"]


@pytest.fixture
def grid() -> InProcessGrid:
    served.clear()
    return InProcessGrid(APP, 3)


def test_each_pull_answers_one_message_in_the_order_of_pushing(grid: InProcessGrid) -> None:
    ids = grid.push_messages([request(2, 5), request(0, 6), request(1, 7)])
    assert served == []
    replies = [grid.pull_messages(ids) for _ in range(4)]
    assert [[about(reply) for reply in some] for some in replies] == [[(2, 3, 5)], [(0, 3, 6)], [(1, 3, 7)], []]
    assert [reply.metadata.reply_to_message_id for (reply,) in replies[:3]] == ids


def test_only_what_is_asked_for_is_answered(grid: InProcessGrid) -> None:
    first, second = grid.push_messages([request(0, 1), request(1, 2)])
    assert about(grid.pull_messages([second])[0]) == (1, 3, 2)
    assert grid.pull_messages([second]) == []
    assert about(grid.pull_messages([first])[0]) == (0, 3, 1)


def test_a_newer_message_to_a_node_replaces_an_unanswered_one(grid: InProcessGrid) -> None:
    old = grid.push_messages([request(0, 1), request(1, 2)])
    new = grid.push_messages([request(0, 3)])
    assert [about(reply) for _ in range(3) for reply in grid.pull_messages([*old, *new])] == [(1, 3, 2), (0, 3, 3)]
    assert served == [2, 3]


def test_an_error_is_an_answer_with_its_reason_in_a_line(grid: InProcessGrid) -> None:
    bad, good = grid.send_and_receive([request(0, -1), request(1, 1)])
    assert bad.has_error()
    assert bad.error.reason == "ValueError: -1 is below 0"
    assert about(good) == (1, 3, 1)


def test_each_grid_is_a_run_of_its_own_to_clients(grid: InProcessGrid) -> None:
    """So that a client that trained a run opens it anew for the next grid."""
    replies = [one.send_and_receive([request(0, 1)])[0] for one in (grid, InProcessGrid(APP, 1))]
    first, second = (reply.content.config_records["about"]["run"] for reply in replies)
    assert first != second


@given(gpus=st.lists(st.integers(0, 16), min_size=1, max_size=4).filter(any))
def test_by_default_there_is_a_client_per_gpu_and_room_for_the_evaluator(gpus: list[int]) -> None:
    """Flower makes int(GPUs / share) clients of each node; each must fit on a GPU of its own, and so must the rest."""
    client, evaluation = client_gpu_shares(SystemHParams(), [float(count) for count in gpus])
    assert [int(count / client) for count in gpus] == gpus
    assert client > 0.5
    assert client + evaluation == pytest.approx(1)


def test_what_is_asked_for_is_given() -> None:
    asked = SystemHParams(gpus_per_client=0.4, gpus_for_evaluation=0.2)
    assert client_gpu_shares(asked, [1.0]) == (0.4, 0.2)
    assert client_gpu_shares(SystemHParams(gpus_per_client=0, gpus_for_evaluation=1), [1.0]) == (0, 1)
    assert client_gpu_shares(SystemHParams(gpus_for_evaluation=0), [1.0]) == (1.0, 0)


def test_tf32_is_refused_where_clients_train_on_cpus() -> None:
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


def test_processes_fill_a_gpu_before_the_next_or_hold_several_whole() -> None:
    free = [1.0] * 3
    assert take_gpus(free, 0.4, 3) == 3
    assert free == pytest.approx([0.2, 0.6, 1.0])
    assert (take_gpus(free, 2.0, 1), take_gpus(free, 0.0, 5)) == (0, 0)
    free = [1.0] * 3
    assert (take_gpus(free, 2.0, 2), free) == (1, [0.0, 0.0, 1.0])


# How many client processes a machine has room for; the rest of the grid is in tests/faults and test_flower.py.


SHARES = st.sampled_from([1.0, 0.95, 0.5, 0.4, 0.25, 0.2, 0.1])


@given(cpus=st.integers(0, 64), gpus=st.integers(0, 8), each=st.integers(1, 8), share=SHARES)
def test_as_many_as_fit_and_no_more(cpus: int, gpus: int, each: int, share: float) -> None:
    """Shares of GPUs are taken of one GPU each; hundredths, as Ray counts them."""
    on_cpus = ClientShare(each).fits({"CPU": float(cpus)})
    assert on_cpus * each <= cpus < (on_cpus + 1) * each
    both = ClientShare(each, share).fits({"CPU": float(cpus), "GPU": float(gpus)})
    assert both == min(on_cpus, gpus * (100 // round(100 * share)))


def test_whole_gpus_and_several() -> None:
    assert [ClientShare(1, 2.0).fits({"CPU": 64.0, "GPU": gpus}) for gpus in (1.0, 2.0, 5.0)] == [0, 1, 2]


@given(room=st.dictionaries(st.integers(0, 9), st.integers(-2, 5)), processes=st.integers(-1, 30))
def test_processes_go_where_most_room_is(room: dict[int, int], processes: int) -> None:
    """A machine that is already overfull gets none; where room is equal the first machine gets the process."""
    machines = places(room, processes)
    assert len(machines) == min(max(processes, 0), sum(max(count, 0) for count in room.values()))
    left = dict(room)
    for machine in machines:
        assert left[machine] == max(left.values())
        left[machine] -= 1
