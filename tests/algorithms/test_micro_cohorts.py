"""How many users train at once is chosen once for a run, recorded, and used again by resumed and verified runs."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from populations import InMemory
from stacking import LAYOUT, model_of, random_population, start_of
from torch._subclasses import FakeTensorMode

from flsim.algorithms.algorithm import FedAvgHParams
from flsim.algorithms.micro_cohorts import FILE, MicroCohorts
from flsim.algorithms.rounds import FederatedTraining
from flsim.algorithms.summation import RoundRequest, ShardReply
from flsim.models.architectures import ModelHParams
from flsim.training.cohort.engine import CohortEngine, StackedTrainer
from flsim.training.cohort.packing import PackedGroup
from flsim.training.update import LocalHParams, State
from server.federated.rounds import say_micro_cohorts

ROUNDS, LOST, SHARD = 5, 2, 1  # memory runs out in round LOST (from 0), in shard SHARD
PLENTY = 99
HPARAMS = LocalHParams(batch_size=3, learning_rate=0.1)


class Memory:
    """The memory of a device with room for so many users; `groups` are the sizes of the groups that trained."""

    def __init__(self) -> None:
        self.room, self.groups = PLENTY, list[int]()


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory, train = Memory(), StackedTrainer.train

    def limited(self: StackedTrainer, start: Any, group: PackedGroup, rate: float | None = None) -> Any:
        if len(group) > memory.room:
            raise torch.OutOfMemoryError(f"{len(group)} users")
        memory.groups.append(len(group))
        return train(self, start, group, rate)

    monkeypatch.setattr(StackedTrainer, "train", limited)
    return memory


def training_in(folder: Path | None, micro_cohort: int | None = 4, is_read_only: bool = False) -> FederatedTraining:
    """Return a training with 12 of 16 users in each round, in two shards, with float32 parameters."""
    return FederatedTraining(
        random_population(16, 5, LAYOUT),
        ModelHParams(3, 5),
        FedAvgHParams(rounds=ROUNDS, cohort=12),
        HPARAMS,
        shards=2,
        micro_cohort=micro_cohort,
        length=ROUNDS,
        micro_cohorts=MicroCohorts(folder, is_read_only),
    )


def trained(training: FederatedTraining, state: State, memory: Memory, runs_out: bool) -> Iterator[tuple[State, Any]]:
    """Yield the states after rounds, each with the groups of its shards; the new engine is that of a new process."""
    engine = training.engine_here()

    def send(asked: Sequence[RoundRequest]) -> list[ShardReply]:
        replies = []
        for request in asked:
            memory.room = 2 if runs_out and (request.round, request.shard) == (LOST, SHARD) else PLENTY
            memory.groups.clear()
            replies.append(ShardReply(request.round, request.shard, training.update(engine, request)))
            groups.append(tuple(memory.groups))
        return replies

    groups: list[tuple[int, ...]] = []
    for round_ in training.rounds(state, ROUNDS, send):
        yield round_.state, tuple(groups)
        groups.clear()


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines() if line]


def test_rounds_that_are_trained_again_have_the_same_groups(memory: Memory, tmp_path: Path) -> None:
    """Memory runs out once; processes that resume or verify use the recorded sizes, although their memory is enough."""
    training = training_in(tmp_path)
    first = list(trained(training, training.first_state(), memory, runs_out=True))
    for round_, (_, (plain, lost)) in enumerate(first):
        assert max(plain) > 2
        assert (max(lost) > 2) == (round_ < LOST)
    assert lines(tmp_path) == [{"users": 2, "shard": SHARD, "round": LOST}]
    for again in (training_in(tmp_path), training_in(tmp_path, is_read_only=True)):
        for begin in (0, 1, LOST):
            resumed = list(trained(again, first[begin][0], memory, runs_out=False))
            assert [groups for _, groups in resumed] == [groups for _, groups in first[begin + 1 :]]
            for (one, _), (other, _) in zip(resumed, first[begin + 1 :], strict=True):
                assert all(torch.equal(one.params[name], value) for name, value in other.params.items())
    assert len(lines(tmp_path)) == 1


def test_a_sum_after_a_lack_of_memory_equals_that_of_smaller_groups(memory: Memory) -> None:
    """Users who trained before memory ran out are summed again: groups of three and four users fit, and no third."""
    start = start_of(model_of(0).float())
    population = InMemory(LAYOUT, [[[1, 2, 3]] * 4, *[[[4, user % 9 + 1]] for user in range(10)]])
    engine, expected = (CohortEngine(start, LAYOUT, HPARAMS, micro_cohort=size) for size in (4, 2))
    add_updates = StackedTrainer.add_updates
    calls = []

    def shrinking(self: StackedTrainer, factors: Sequence[float], into: Any) -> None:
        calls.append(len(factors))
        memory.room = PLENTY if len(calls) < 2 or engine.micro_cohort < 4 else 2
        add_updates(self, factors, into)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StackedTrainer, "add_updates", shrinking)
        total = engine.train(start, population, range(11), 0, 0, 0.5)
    assert calls[:2] == [3, 4]
    assert engine.micro_cohort == 2
    other = expected.train(start, population, range(11), 0, 0, 0.5)
    assert all(torch.equal(total.delta[name], value) for name, value in other.delta.items())
    assert replace(total, delta={}) == replace(other, delta={})


def engine_that_chooses(users: int) -> CohortEngine:
    """Return an engine that stacks users, as on a GPU, and whose device has room for so many users."""
    return CohortEngine(start_of(model_of(0)), LAYOUT, HPARAMS, micro_cohort=users)


def test_the_first_choice_counts_for_all_processes(tmp_path: Path) -> None:
    """Later processes use the first choice. A size in the settings is not recorded, and has priority."""
    sizes = []
    for choice in (264, 100, 1000):
        engine = engine_that_chooses(choice)
        MicroCohorts(tmp_path).settle(engine, 0.4, is_set=False)
        sizes.append(engine.micro_cohort)
    assert sizes == [264] * 3
    assert lines(tmp_path) == [{"users": 264, "memory_share": 0.4, "device": "cpu"}]
    named = engine_that_chooses(7)
    MicroCohorts(tmp_path).settle(named, 0.4, is_set=True)
    assert named.micro_cohort == 7
    assert len(lines(tmp_path)) == 1


def test_without_a_folder_or_with_a_read_only_one_nothing_is_written(tmp_path: Path) -> None:
    for sizes in (MicroCohorts(), MicroCohorts(tmp_path, is_read_only=True)):
        sizes.settle(engine_that_chooses(264), 1.0, is_set=False)
        again = engine_that_chooses(100)
        sizes.settle(again, 1.0, is_set=False)
        assert again.micro_cohort == 264
    assert not (tmp_path / FILE).exists()


def test_a_processor_stacks_users_of_small_steps_and_records_nothing(memory: Memory, tmp_path: Path) -> None:
    """The settings decide; therefore, clients that may not write to the run folder need no message about the size."""
    training = training_in(tmp_path, micro_cohort=None)
    groups = [of_shards for _, of_shards in trained(training, training.first_state(), memory, runs_out=False)]
    assert [[len(of_shard) for of_shard in of_shards] for of_shards in groups] == [[1] * training.shards] * ROUNDS
    assert [sum(map(sum, of_shards)) for of_shards in groups] == [training.algorithm.cohort] * ROUNDS
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize(
    "damage",
    ['{"users": 9', '{"users": 0}\n', '{"users": true}\n', '{"users": 9, "shard": 1}\n', '{"users": 9.5}\n', "[9]\n"],
)
def test_damaged_lines_count_as_missing(damage: str, tmp_path: Path) -> None:
    """The next process chooses again, and adds a separate line, also after a line that a loss of power cut short."""
    (tmp_path / FILE).write_text(damage)
    for _ in range(2):
        engine = engine_that_chooses(50)
        MicroCohorts(tmp_path).settle(engine, 0.95, is_set=False)
        assert engine.micro_cohort == 50
    assert (tmp_path / FILE).read_text().count('"users": 50') == 1


def test_the_number_of_users_depends_on_total_and_not_on_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The users fill 0.9 of the share of memory, to the byte. The tensors are fake, and only claim to be on a GPU."""
    about = SimpleNamespace(total_memory=0, multi_processor_count=100)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    shapes = {name: value.shape for name, value in start_of(model_of(0)).items()}
    with FakeTensorMode():
        start = {name: torch.empty(shape, device="cuda") for name, shape in shapes.items()}
        fixed, per_user = StackedTrainer.memory(start, HPARAMS, LAYOUT)
        for users, share in ((1, 1.0), (7, 1.0), (7, 0.4), (150, 0.95)):
            about.total_memory = int((fixed + users * per_user) / 0.9 / share) + 2
            assert StackedTrainer.users_that_fit(start, HPARAMS, LAYOUT, share) == users
            about.total_memory -= 4
            assert StackedTrainer.users_that_fit(start, HPARAMS, LAYOUT, share) == max(users - 1, 1)
        about.total_memory = 2**60
        assert StackedTrainer.users_that_fit(start, HPARAMS, LAYOUT) == 2 * 100  # two for each multiprocessor


def test_a_message_reports_where_memory_ran_out(capsys: pytest.CaptureFixture[str]) -> None:
    say_micro_cohorts("one", [{"users": 264, "device": "cpu"}, {"users": 132, "shard": 1, "round": 49}, "nonsense"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("one: memory ran out in round 50; from then on 132 users of shard 1 train together")
