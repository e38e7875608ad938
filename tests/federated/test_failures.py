"""Failures of shards: custom code ends a run at the first try; a user is blamed only if other users do not fail."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from helpers import TINY, Experiment
from hypothesis import given
from hypothesis import strategies as st

from flsim.algorithms.summation import RoundRequest
from flsim.runs.config import load
from flsim.runs.folder import Run
from server.federated.exchange import ShardFailed, culprit, explain

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
    assert_no_one_was_blamed(stderr, out)


def test_a_model_that_fails_later_fails_at_the_first_try(experiment: Experiment) -> None:
    experiment.config.write_text(TINY.replace("units = 12\n", ""))
    (experiment.folder / "mine.py").write_text(MODEL)
    code, stderr, out = run_in_process(experiment, "model.architecture")
    assert code == 1
    assert "mine.py:15: ValueError: late trouble" in stderr.splitlines()[-1]
    assert_no_one_was_blamed(stderr, out)


def assert_no_one_was_blamed(stderr: str, out: Path) -> None:
    assert "remove this user" not in stderr
    assert "searching for the user" not in stderr
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
    assert_no_one_was_blamed(done.stderr, experiment.folder / "out")


def user_three(users: list[int]) -> bool:
    return 3 in users


BLAMED = "user 3 (train3) makes the round fail even without other users; remove this user"
ALL = "so the cause is not a user"


@pytest.mark.parametrize(
    ("fails", "cohort", "message"),
    [
        (user_three, [3], BLAMED),
        (user_three, [1, 3, 4, 8], BLAMED),
        (bool, [3], ALL),
        (bool, [1, 3, 4, 8], ALL),
        (lambda users: len(users) > 1, [1, 3, 4, 8], "none of its users is the single cause"),
    ],
)
def test_a_user_is_blamed_only_where_another_one_passes(
    experiment: Experiment, fails: Callable[[list[int]], bool], cohort: list[int], message: str
) -> None:
    run = Run.create(load(experiment.config), experiment.folder / "run")
    request = RoundRequest(0, 0, np.array(cohort), {})

    def ask(asked: RoundRequest) -> dict[int, str]:
        return {0: "its process died"} if fails(asked.users.tolist()) else {}

    assert message in str(explain(run, ShardFailed(request, 4, "its process died"), ask))


@given(users=st.integers(1, 300), data=st.data())
def test_whoever_fails_alone_is_found_in_few_tries(users: int, data: st.DataObject) -> None:
    guilty = data.draw(st.sets(st.integers(0, users - 1), min_size=1))
    tries = 0

    def fails(some: Sequence[int]) -> bool:
        nonlocal tries
        tries += 1
        return not guilty.isdisjoint(some)

    assert culprit(range(users), fails) in guilty
    assert tries <= math.ceil(math.log2(users)) + 2  # nobody, each half, and the one in the end


@given(users=st.integers(0, 100), needed=st.integers(2, 100))
def test_nobody_is_blamed_for_what_many_do_together(users: int, needed: int) -> None:
    assert culprit(range(users), lambda some: len(some) >= needed) is None


@given(users=st.integers(0, 100))
def test_nobody_is_blamed_where_all_fails_or_nothing(users: int) -> None:
    assert culprit(range(users), lambda some: True) is None
    assert culprit(range(users), lambda some: False) is None
