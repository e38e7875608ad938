"""Smooth steps of Adam and RMSProp amplify rounding by no more than is derived, whatever a processor rounds."""

import inspect
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from smoothing import EPSILON, amplified, smooth_steps
from stacking import model_of, random_population, relative_error, start_of, train_stacked
from torch import Tensor

from flsim.base.rng import stream
from flsim.data.vocabulary import Layout
from flsim.models.hparams import ModelHParams
from flsim.training import optimizers
from flsim.training.cohort.kernels import TorchKernels
from flsim.training.cohort.stacked import StackedTrainer
from flsim.training.hparams import LocalHParams

LAYOUT = Layout(40, record_words=4)
ROUNDED = math.sqrt(12) * 2**-24  # of a gradient's norm, as `stacking.rounding` has it
HPARAMS = LocalHParams(batch_size=4, learning_rate=2.0, optimizer="adam", proximal=0.3, gradient_clip=0.25)


def last_step(optimizer: str, gradients: list[float]) -> float:
    """What a rate of 1 has moved a weight of 0 by in the last step."""
    weight = torch.zeros(1, dtype=torch.float64)
    step = getattr(torch.optim, optimizer)([weight], lr=1.0)
    for gradient in gradients:
        weight.zero_()
        weight.grad = torch.tensor([gradient], dtype=torch.float64)
        step.step()
    return weight.item()


@given(
    st.sampled_from(("Adam", "RMSprop")),
    st.lists(st.tuples(st.floats(-9, 9), st.floats(-1, 1)), min_size=1, max_size=14),
    st.sampled_from((1e-6, 1e-3, 0.1)),
)
@smooth_steps()
def test_a_step_moves_by_hardly_more_than_its_gradients(
    optimizer: str, gradients: list[tuple[float, float]], size: float
) -> None:
    exact = last_step(optimizer, [gradient for gradient, _ in gradients])
    off = last_step(optimizer, [gradient + size * error for gradient, error in gradients])
    most = {"Adam": 1.01, "RMSprop": 1.5}[optimizer] * size / EPSILON
    assert abs(off - exact) <= most + 1e-14


def trained_with(error: float, seed: int = 0) -> Any:
    """The update of three users in float64, where each step's gradient is off by so much of its norm."""
    rng = stream(seed, "test", "errors")

    class Rounded(TorchKernels):
        def optimize(self, weight: Tensor, low: Tensor | None, gradient: Tensor, *others: Any) -> None:
            noise = torch.from_numpy(rng.normal(size=tuple(gradient.shape)))
            super().optimize(weight, low, gradient + error * gradient.norm() / noise.norm() * noise, *others)

    start = start_of(model_of(0, LAYOUT, ModelHParams(6, 19)))
    trainer = StackedTrainer(start, HPARAMS, LAYOUT, 3, Rounded())
    return train_stacked(trainer, start, random_population(3, 5, LAYOUT), HPARAMS, clip=0.5).delta


@pytest.mark.parametrize("smooth", [True, False])
def test_gradients_that_are_rounded_in_any_way_stay_within_the_bound_of_smooth_steps(smooth: bool) -> None:
    """What `interpreted.py` trains, and all that rounding is allowed; with torch's own epsilon errors blow up.

    The bound is of a step; an error of the first one changes the gradient of the second by at most as much again.
    """
    with smooth_steps() if smooth else nullcontext():
        exact = trained_with(0.0)
        largest = max(relative_error(trained_with(ROUNDED, seed), exact) for seed in range(20))
    bound = 2 * amplified(HPARAMS.gradient_clip or 0.0) * ROUNDED
    assert largest < bound if smooth else largest > 10 * bound


def test_the_constants_are_torchs() -> None:
    """Which tests with smooth steps cannot tell."""
    adam, rmsprop = (inspect.signature(made).parameters for made in (torch.optim.Adam, torch.optim.RMSprop))
    assert (adam["betas"].default, adam["eps"].default) == (optimizers.BETAS, optimizers.EPSILON)
    assert (rmsprop["alpha"].default, rmsprop["eps"].default) == (optimizers.ALPHA, optimizers.EPSILON)
