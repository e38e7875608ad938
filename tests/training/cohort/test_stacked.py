"""Stacked users against the local engine, in plain PyTorch: the same sums, counts and losses, whatever the options."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from populations import InMemory
from smoothing import smooth_steps
from stacking import (
    LAYOUT,
    amplification,
    assert_equal,
    assert_within,
    model_of,
    random_population,
    start_of,
    train_stacked,
)
from strategies import hparams_strategy, users_strategy
from training_oracle import train_cohort

from flsim.base.rng import stream
from flsim.data.vocabulary import Layout
from flsim.models.hparams import ModelHParams
from flsim.models.language_model import Params
from flsim.training.cohort.position_kernels import TorchPositionKernels
from flsim.training.cohort.stacked_trainer import GRAPHS, StackedTrainer
from flsim.training.cohort.steps import Participant
from flsim.training.hparams import LocalHParams


class Padded:
    """PyTorch's kernels, for a trainer that takes them for others and so adds units to the model."""

    def __getattr__(self, name: str) -> Any:
        return getattr(TorchPositionKernels(), name)


@settings(max_examples=50)
@given(
    users_strategy,
    hparams_strategy,
    st.none() | st.floats(0.01, 2.0),
    st.integers(0, 100),
    st.booleans(),
    st.booleans(),
)
@smooth_steps()
def test_it_equals_the_local_engine(
    users: list[list[list[int]]], hparams: LocalHParams, clip: float | None, seed: int, padded: bool, by_position: bool
) -> None:
    """Unequal lengths and numbers of steps, users without records or smaller than a batch. float64, 1e-10.

    With more units than the model has, too, and with more room than there are users.
    """
    model, population = model_of(seed), InMemory(LAYOUT, users)
    trainer = StackedTrainer(start_of(model), hparams, LAYOUT, 6, Padded() if padded else None, by_position=by_position)
    actual = train_stacked(trainer, start_of(model), population, hparams, seed, clip)
    assert_equal(actual, train_cohort(model, population, range(len(users)), hparams, seed, 0, clip), 1e-10)


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_nothing_is_left_of_the_users_before(optimizer: Any, by_position: bool) -> None:
    """Buffers, moments, losses: larger users first, then fewer and smaller ones, to the bit of a new trainer."""
    hparams = LocalHParams(batch_size=3, optimizer=optimizer, learning_rate=0.1, gradient_clip=1.0)
    start = start_of(model_of(0))
    used = StackedTrainer(start, hparams, LAYOUT, 5, by_position=by_position)
    train_stacked(used, start, random_population(5, 7, LAYOUT), hparams)
    small = random_population(3, 4, LAYOUT, seed=1)
    again = train_stacked(used, start, small, hparams)
    fresh = train_stacked(StackedTrainer(start, hparams, LAYOUT, 5, by_position=by_position), start, small, hparams)
    assert all(torch.equal(again.delta[name], value) for name, value in fresh.delta.items())
    assert again.counts.loss == fresh.counts.loss


def test_the_gradient_is_that_of_the_loss() -> None:
    """One step at learning rate 1 is minus the gradient: against central differences of the loss that it reports.

    float64 and h = 1e-5 leave an error of about h^2 plus 1e-16 / h.
    """
    hparams = LocalHParams(batch_size=4, learning_rate=1.0)
    start = start_of(model_of(3))
    trainer = StackedTrainer(start, hparams, LAYOUT, 1)
    packed = trainer.pack([Participant(random_population(3, 4, LAYOUT)[2], stream(0, "test"))])

    def loss(params: Params) -> float:
        losses, tokens = trainer.train(params, packed)
        return losses[0] / tokens[0]

    loss(start)
    update = {name: torch.zeros_like(value) for name, value in start.items()}
    trainer.add_updates([1.0], update)
    for name, value in start.items():
        for place in range(value.numel()):
            around = []
            for h in (1e-5, -1e-5):
                moved = {key: tensor.clone() for key, tensor in start.items()}
                moved[name].view(-1)[place] += h
                around.append(loss(moved))
            assert (around[1] - around[0]) / 2e-5 == pytest.approx(float(update[name].view(-1)[place]), abs=1e-8)


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_low_precision_stays_within_its_rounding(precision: Any, optimizer: Any, by_position: bool) -> None:
    """The error of the summed update, relative to its norm: what `rounding` derives."""
    layout = Layout(60)
    model, population = model_of(0, layout, ModelHParams(16, 24)), random_population(4, 100, layout)
    hparams = LocalHParams(learning_rate=0.1, batch_size=16, optimizer=optimizer, momentum=0.5, precision=precision)
    exact = train_cohort(model, population, range(4), hparams, 0, 0, 1e9)
    start = start_of(model.float())
    trainer = StackedTrainer(start, hparams, layout, 4, by_position=by_position)
    actual = train_stacked(trainer, start, population, hparams, clip=1e9)
    assert_within(actual, exact, start, precision, 7)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize(
    "others",
    [
        {},
        {"optimizer": "momentum", "momentum": 0.5, "batch_size": 40},
        {"optimizer": "adam", "learning_rate": 2.0, "gradient_clip": 0.25, "proximal": 0.1},
    ],
    ids=str,
)
@smooth_steps()
def test_shapes_as_cuda_graphs_round_them_up_change_rounding_alone(precision: Any, others: dict[str, Any]) -> None:
    """Both updates are as far from the exact one as rounding allows; users of 30 records take two steps at most."""
    layout = Layout(200)
    hparams = LocalHParams(**{"learning_rate": 0.1, "precision": precision, **others})
    population, start = random_population(6, 30, layout), start_of(model_of(0, layout, ModelHParams(16, 24)).float())
    exact, rounded = (StackedTrainer(start, hparams, layout, 6) for _ in range(2))
    rounded._rounding = GRAPHS
    expected, padded = (train_stacked(trainer, start, population, hparams) for trainer in (exact, rounded))
    assert_within(padded, expected, start, precision, 2, times=2 * amplification(hparams))


@pytest.mark.parametrize("by_position", [False, True])
def test_a_user_that_blows_up_is_left_out_and_spoils_nobody(by_position: bool) -> None:
    """Its factor is 0, and infinity times 0 would be NaN. Who does not meet word 1 gives it a probability of 0."""
    model = model_of(0).float()
    with torch.no_grad():
        model.embedding[1], model.output_bias[1] = 1e37, -3e38
    start, hparams = start_of(model), LocalHParams(epochs=2)
    population = InMemory(LAYOUT, [[[1, 2]], [[3, 4]], []])
    actual, expected = (
        train_stacked(
            StackedTrainer(start, hparams, LAYOUT, 3, by_position=by_position), start, users, hparams, clip=0.5
        )
        for users in (population, InMemory(LAYOUT, [[], [[3, 4]], []]))
    )
    assert (actual.counts.non_finite, actual.counts.users, actual.counts.weight) == (1, 3, 2.0)
    assert all(bool(torch.isfinite(value).all()) for value in actual.delta.values())
    assert float(actual.delta["output_bias"].abs().max()) > 0
    assert all(torch.equal(actual.delta[name], value) for name, value in expected.delta.items())


def held(thing: object) -> int:
    """Bytes of all tensors in an object of ours."""
    if isinstance(thing, torch.Tensor):
        return thing.numel() * thing.element_size()
    if isinstance(thing, dict):
        return sum(map(held, thing.values()))
    return sum(map(held, thing)) if isinstance(thing, list) else held(vars(thing)) if hasattr(thing, "_flat") else 0


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize(
    "hparams",
    [
        LocalHParams(batch_size=4),
        LocalHParams(batch_size=4, precision="bf16"),
        LocalHParams(batch_size=4, optimizer="adam", precision="bf16"),
        LocalHParams(batch_size=4, optimizer="momentum"),
    ],
    ids=str,
)
def test_the_memory_of_a_micro_cohort_is_what_was_said(hparams: LocalHParams, by_position: bool) -> None:
    """Of full batches of the longest records: buffers that hold no more than was said, and no less than 0.98 of it."""
    layout, users = Layout(200, record_words=6), 7
    start = start_of(model_of(0, layout, ModelHParams(16, 24)).float())
    population = InMemory(layout, [[[1] * 6] * 4] * users)
    trainer = StackedTrainer(start, hparams, layout, users, by_position=by_position)
    train_stacked(trainer, start, population, hparams)
    own = {name: value for name, value in vars(trainer).items() if name not in ("_like", "_order")}
    if trainer._low is trainer._weights:
        own.pop("_low")
    fixed, per_user = StackedTrainer.memory(start, hparams, layout, by_position)
    callers = sum(2 * 4 * value.numel() for value in start.values())  # `like` and where the round starts
    sums = 2 * sum(8 * value.numel() for value in start.values())
    assert 0.98 * (fixed + users * per_user) <= held(own) + callers + sums <= 1.02 * (fixed + users * per_user)


def test_what_does_not_fit_is_said_at_once() -> None:
    with pytest.raises(RuntimeError, match="allocate"):
        StackedTrainer(start_of(model_of(0)), LocalHParams(), LAYOUT, 10**13)
