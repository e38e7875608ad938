"""Failures of shards: custom code ends a run at the first try."""

import json
from pathlib import Path

import pytest
from helpers import TINY, Experiment

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
