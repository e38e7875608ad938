"""Smooth steps of Adam and RMSProp amplify rounding by no more than is derived, whatever a processor rounds."""

import inspect

import torch
from hypothesis import given
from hypothesis import strategies as st
from smoothing import EPSILON, smooth_steps

from flsim.training import optimizers


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


def test_the_constants_are_torchs() -> None:
    """Which tests with smooth steps cannot tell."""
    adam, rmsprop = (inspect.signature(made).parameters for made in (torch.optim.Adam, torch.optim.RMSprop))
    assert (adam["betas"].default, adam["eps"].default) == (optimizers.BETAS, optimizers.EPSILON)
    assert (rmsprop["alpha"].default, rmsprop["eps"].default) == (optimizers.ALPHA, optimizers.EPSILON)
