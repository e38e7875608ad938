"""The cohort engine against the local one: the same sums, counts and losses, whatever the users and the options."""

import math
import os
import subprocess
import sys
from functools import reduce
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from populations import InMemory
from smoothing import smooth_steps
from stacking import LAYOUT, assert_equal, model_of, start_of
from strategies import hparams_strategy, users_strategy
from training_oracle import train_cohort

from flsim.training.cohort.engine import CohortEngine, bounds
from flsim.training.hparams import LocalHParams
from flsim.training.update import UpdateSum


@settings(max_examples=60)
@given(
    users_strategy,
    hparams_strategy,
    st.none() | st.floats(0.01, 2.0),
    st.integers(0, 100),
    st.integers(1, 3),
    st.booleans(),
)
@smooth_steps()
def test_it_equals_the_local_engine(
    users: list[list[list[int]]],
    hparams: LocalHParams,
    clip: float | None,
    seed: int,
    micro_cohort: int,
    by_position: bool,
) -> None:
    """Unequal lengths, users without records, users smaller than a batch, all options. float64, 1e-10.

    A clip that a norm meets to the last bit may count on either side; random norms do not.
    """
    model, population = model_of(seed), InMemory(LAYOUT, users)
    start = start_of(model)
    engine = CohortEngine(start, LAYOUT, hparams, micro_cohort, by_position=by_position)
    for round_ in range(2):  # the second meets the buffers of the first, and the same global parameters
        found = engine.train(start, population, range(len(users)), seed, round_, clip)
        assert_equal(found, train_cohort(model, population, range(len(users)), hparams, seed, round_, clip), 1e-10)


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_user_that_was_drawn_twice_counts_twice(by_position: bool, clip: float | None) -> None:
    """Cohorts with replacement: the sum is that of their users one at a time, by the local engine. float64, 1e-10."""
    users, cohort = [[[1, 2, 3], [4]], [[5, 6, 1, 1]], [], [[7], [3]]], [0, 0, 1, 2, 2, 3, 3, 3]
    model, population, hparams = model_of(0), InMemory(LAYOUT, users), LocalHParams(batch_size=2, learning_rate=0.5)
    alone = [train_cohort(model, population, [user], hparams, 0, 0, clip) for user in cohort]
    expected = reduce(UpdateSum.merge, alone)
    assert expected.counts.users == 8
    assert_equal(train_cohort(model, population, cohort, hparams, 0, 0, clip), expected, 1e-10)
    for micro_cohort in (1, 3, 8):
        engine = CohortEngine(start_of(model), LAYOUT, hparams, micro_cohort, by_position=by_position)
        assert_equal(engine.train(start_of(model), population, cohort, 0, 0, clip), expected, 1e-10)


@given(st.integers(0, 2000), st.integers(1, 400))
def test_groups_are_few_and_of_like_size(users: int, at_once: int) -> None:
    """Groups are as few as the largest size allows, and their sizes differ by 1 at most."""
    sizes = [end - first for first, end in pairwise(bounds(users, at_once))]
    assert sum(sizes) == users
    assert len(sizes) == math.ceil(users / at_once)
    assert max(sizes, default=0) <= at_once
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


RUNS_OUT = """
import resource, sys, torch
torch.set_num_threads(1)
from flsim.data.vocabulary import Layout
from flsim.models.cifg import CIFGLanguageModel
from flsim.models.hparams import ModelHParams
from flsim.training.cohort.engine import CohortEngine
from flsim.training.hparams import LocalHParams
from populations import InMemory
users = [[[user + 1, word + 1] for word in range(5)] for user in range(7)]
layout, hparams = Layout(20_000), LocalHParams(batch_size=2)
model = CIFGLanguageModel(20_000, ModelHParams(96, 64)).initialize(0)
start = {name: value.detach() for name, value in model.named_parameters()}
population = InMemory(layout, users)
expected = CohortEngine(start, layout, hparams, micro_cohort=1).train(start, population, range(7), 0, 0)
import flsim.training.cohort.stacked_trainer  # code takes memory too, more where it has to be compiled
from flsim.base.progress import say
say("ready")  # which loads what prints
room = int(sys.argv[1])
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + room, taken + room))
found = CohortEngine(start, layout, hparams, micro_cohort=100).train(start, population, range(7), 0, 0)
counts = found.counts
assert (counts.users, counts.weight, counts.tokens) == (7, 35, expected.counts.tokens) == (7, 35, 105), found
for name, value in expected.delta.items():
    torch.testing.assert_close(found.delta[name], value, rtol=0, atol=1e-5)
"""


def run_in(room: int) -> subprocess.CompletedProcess[str]:
    """Seven users of a model of 8 MB, 100 at once, in a process that may take so many bytes more."""
    command = [sys.executable, "-c", RUNS_OUT, str(room)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2] / "support",
        env=os.environ | {"PYTHONPATH": "."},
    )


def test_where_memory_runs_out_fewer_users_train_at_once_and_the_sum_is_the_same() -> None:
    done = run_in(400 * 2**20)
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    assert said[:2] == ["ready", "cpu: out of memory; from now on, 50 users train together"]
    assert len(said) > 2
    assert "Traceback" not in done.stderr


def test_memory_for_not_even_one_user_is_a_failure_that_says_so() -> None:
    done = run_in(2**20)
    assert done.returncode == 1
    assert "RunFailed: cpu: not enough memory to train one user" in done.stderr


@pytest.mark.parametrize(("micro_cohort", "by_position"), [(None, False), (1, False), (1, True)])
def test_a_loss_beyond_what_probabilities_can_hold_is_exact(micro_cohort: int | None, by_position: bool) -> None:
    """A target whose probability is 0 in float32 costs its logits' difference, not infinity."""
    model = model_of(0).float()
    with torch.no_grad():
        model.output_bias[1] = -400.0
    population, hparams = InMemory(LAYOUT, [[[1]]]), LocalHParams(learning_rate=1e-3)
    engine = CohortEngine(start_of(model), LAYOUT, hparams, micro_cohort, by_position=by_position)
    update = engine.train(start_of(model), population, [0], 0, 0)
    expected = train_cohort(model, population, [0], hparams, 0, 0)
    assert expected.counts.loss > 400
    assert update.counts.loss == pytest.approx(expected.counts.loss, rel=1e-6)


def test_a_user_that_blows_up_is_counted_and_left_out_of_a_clipped_sum() -> None:
    model, hparams = model_of(0).float(), LocalHParams(epochs=2, learning_rate=3e38)
    population, start = InMemory(LAYOUT, [[[1, 2]], [[3, 4]], []]), start_of(model)
    found = CohortEngine(start, LAYOUT, hparams).train(start, population, range(3), 0, 0, 0.5)
    expected = train_cohort(model, population, range(3), hparams, 0, 0, 0.5)
    assert (
        (found.counts.non_finite, found.counts.users, found.counts.weight)
        == (expected.counts.non_finite, 3, expected.counts.weight)
        == (2, 3, 1)
    )
    for name, value in expected.delta.items():
        assert torch.isfinite(found.delta[name]).all()
        torch.testing.assert_close(found.delta[name], value)
