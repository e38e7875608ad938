"""Tests that the cohort engine equals the local engine in sums, counts and losses, for random users and options."""

import math
import os
import subprocess
import sys
from functools import partial, reduce
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import CIFG, RECURRENT, random_network
from populations import InMemory
from smoothing import smooth_steps
from stacking import LAYOUT, assert_equal, model_of, start_of
from torch_positions import TorchPositionKernels, WideKernels, WidePositionKernels
from training_oracle import train_cohort

from flsim.models.architectures import ModelHParams
from flsim.models.language_model import Params
from flsim.training.cohort.engine import CohortEngine, StackedTrainer, bounds
from flsim.training.cohort.kernels import Kernels
from flsim.training.update import LocalHParams, UpdateSum

users_strategy = st.lists(st.lists(st.lists(st.integers(1, 9), max_size=6), max_size=7), min_size=1, max_size=5)
hparams_strategy = st.builds(
    LocalHParams,
    epochs=st.integers(1, 2),
    batch_size=st.integers(1, 8),
    learning_rate=st.sampled_from((0.05, 0.5)),
    optimizer=st.sampled_from(("sgd", "momentum", "adam", "rmsprop")),
    momentum=st.sampled_from((0.0, 0.9)),
    gradient_clip=st.none() | st.sampled_from((0.01, 0.3, 100.0)),
    proximal=st.sampled_from((0.0, 0.7)),
    max_records=st.none() | st.integers(1, 7),
)


def engine_of(start: Params, hparams: LocalHParams, users: int | None, kernels: Kernels | None) -> CohortEngine:
    """Return an engine that stacks users with these kernels; for None, the engine chooses how users train."""
    trainer = partial(StackedTrainer, start, hparams, LAYOUT, kernels=kernels) if kernels else None
    return CohortEngine(start, LAYOUT, hparams, users, trainer=trainer)


@settings(max_examples=50)
@given(
    users_strategy,
    hparams_strategy,
    st.sampled_from((CIFG, CIFG, *RECURRENT)),
    st.none() | st.floats(0.01, 2.0),
    st.integers(0, 100),
    st.integers(1, 6),
    st.sampled_from((None, WideKernels(), TorchPositionKernels(), WidePositionKernels())),
)
@smooth_steps()
def test_the_cohort_engine_equals_the_local_engine(
    users: list[list[list[int]]],
    hparams: LocalHParams,
    sizes: ModelHParams,
    clip: float | None,
    seed: int,
    micro_cohort: int,
    kernels: Kernels | None,
) -> None:
    """Sums are equal for all options, users without or with few records, and padded units. float64, 1e-10."""
    model, population = random_network(sizes, seed, 0.5, LAYOUT), InMemory(LAYOUT, users)
    start = {name: value.detach().clone() for name, value in model.trainable.items()}
    engine = (
        engine_of(start, hparams, micro_cohort, kernels) if sizes == CIFG else engine_of(start, hparams, None, None)
    )
    for round_ in range(2):  # the second round reuses the buffers of the first, with the same global parameters
        found = engine.train(start, population, range(len(users)), seed, round_, clip)
        assert_equal(found, train_cohort(model, population, range(len(users)), hparams, seed, round_, clip), 1e-10)


@pytest.mark.parametrize("kernels", [None, TorchPositionKernels()], ids=["default", "by position"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_user_that_was_drawn_twice_counts_twice(kernels: Kernels | None, clip: float | None) -> None:
    """The sum of a cohort with repeated users is the sum of single users in the local engine. float64, 1e-10."""
    users, cohort = [[[1, 2, 3], [4]], [[5, 6, 1, 1]], [], [[7], [3]]], [0, 0, 1, 2, 2, 3, 3, 3]
    model, population, hparams = model_of(0), InMemory(LAYOUT, users), LocalHParams(batch_size=2, learning_rate=0.5)
    alone = [train_cohort(model, population, [user], hparams, 0, 0, clip) for user in cohort]
    expected = reduce(UpdateSum.merge, alone)
    assert expected.counts.users == 8
    assert_equal(train_cohort(model, population, cohort, hparams, 0, 0, clip), expected, 1e-10)
    for micro_cohort in (1, 3, 8):
        engine = engine_of(start_of(model), hparams, micro_cohort, kernels)
        assert_equal(engine.train(start_of(model), population, cohort, 0, 0, clip), expected, 1e-10)


@given(st.integers(0, 2000), st.integers(1, 400))
def test_groups_are_few_and_of_nearly_equal_size(users: int, at_once: int) -> None:
    """The number of groups is the smallest that the largest size allows, and sizes differ by at most 1."""
    sizes = [end - first for first, end in pairwise(bounds(users, at_once))]
    assert sum(sizes) == users
    assert len(sizes) == math.ceil(users / at_once)
    assert max(sizes, default=0) <= at_once
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


RUNS_OUT = """
import resource, sys, torch
torch.set_num_threads(1)
from flsim.data.records import Layout
from flsim.models.architectures import CIFGLanguageModel
from flsim.models.architectures import ModelHParams
from flsim.models.language_model import Params
from flsim.training.cohort.engine import CohortEngine
from flsim.training.update import LocalHParams
from populations import InMemory
users = [[[user + 1, word + 1] for word in range(5)] for user in range(7)]
layout, hparams = Layout(20_000), LocalHParams(batch_size=2)
model = CIFGLanguageModel(20_000, ModelHParams(96, 64)).initialize(0)
start = {name: value.detach() for name, value in model.named_parameters()}
population = InMemory(layout, users)
expected = CohortEngine(start, layout, hparams, micro_cohort=1).train(start, population, range(7), 0, 0)
import flsim.training.cohort.engine  # code takes memory too, more where it has to be compiled
from flsim.base.progress import say
say("ready")  # which loads what prints
def train(room):
    taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + room, -1))
    return CohortEngine(start, layout, hparams, micro_cohort=100).train(start, population, range(7), 0, 0)

found = train(400 * 2**20)
counts = found.counts
assert (counts.users, counts.weight, counts.tokens) == (7, 35, expected.counts.tokens) == (7, 35, 105), found
for name, value in expected.delta.items():
    torch.testing.assert_close(found.delta[name], value, rtol=0, atol=1e-5)
say("equal sums")
train(2**20)
"""


def test_if_memory_runs_out_fewer_users_train_at_once_or_the_run_fails() -> None:
    """With 400 MB for seven users of a model of 8 MB, a micro-cohort of 100 shrinks to 50; with 1 MB, the run fails."""
    done = subprocess.run(
        [sys.executable, "-c", RUNS_OUT],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2] / "support",
        # Freed memory of 100 kB and more returns to the system, so that memory of the first sums is not available.
        env=os.environ | {"PYTHONPATH": ".", "MALLOC_MMAP_THRESHOLD_": "100000"},
    )
    first, second, *said = done.stderr.splitlines()
    assert (first, second) == ("ready", "cpu: out of memory; from now on, 50 users train together"), done.stderr
    assert done.returncode == 1
    assert "equal sums" in said, done.stderr
    assert said[-1].startswith("flsim.base.errors.RunFailed: cpu: not enough memory to train one user"), done.stderr


@pytest.mark.parametrize(
    ("micro_cohort", "kernels"),
    [(None, None), (1, Kernels()), (1, TorchPositionKernels())],
    ids=["local", "padded", "by position"],
)
def test_the_loss_is_exact_if_a_probability_underflows(micro_cohort: int | None, kernels: Kernels | None) -> None:
    """The loss of a target whose probability is 0 in float32 is a difference of logits, not infinity."""
    model = model_of(0).float()
    with torch.no_grad():
        model.output_bias[1] = -400.0
    population, hparams = InMemory(LAYOUT, [[[1]]]), LocalHParams(learning_rate=1e-3)
    engine = engine_of(start_of(model), hparams, micro_cohort, kernels)
    update = engine.train(start_of(model), population, [0], 0, 0)
    expected = train_cohort(model, population, [0], hparams, 0, 0)
    assert expected.counts.loss > 400
    assert update.counts.loss == pytest.approx(expected.counts.loss, rel=1e-6)


@pytest.mark.parametrize(
    ("micro_cohort", "kernels"),
    [(None, None), (3, None), (3, TorchPositionKernels())],
    ids=["one", "three", "by position"],
)
def test_a_non_finite_user_is_excluded_and_changes_no_sum(micro_cohort: int | None, kernels: Kernels | None) -> None:
    """The user is excluded with a factor of 0; infinity times 0 would be NaN. Others give word 1 a probability of 0."""
    model = model_of(0).float()
    with torch.no_grad():
        model.embedding[1], model.output_bias[1] = 1e37, -3e38
    start, hparams = start_of(model), LocalHParams(epochs=2)
    engine = engine_of(start, hparams, micro_cohort, kernels)
    actual, expected = (
        engine.train(start, InMemory(LAYOUT, users), range(3), 0, 0, 0.5)
        for users in ([[[1, 2]], [[3, 4]], []], [[], [[3, 4]], []])
    )
    assert (actual.counts.non_finite, actual.counts.users, actual.counts.weight) == (1, 3, 2.0)
    assert all(bool(torch.isfinite(value).all()) for value in actual.delta.values())
    assert float(actual.delta["output_bias"].abs().max()) > 0
    assert all(torch.equal(actual.delta[name], value) for name, value in expected.delta.items())
