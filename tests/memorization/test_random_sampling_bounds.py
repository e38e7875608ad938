"""Bounds on a next word's cost hold for every output, however far from where they are tight."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flsim.base.rng import stream
from flsim.measures.memorization.random_sampling import OutputBounds

V, D = 40, 6


def layer(seed: int, spread: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """E [V, D], b [V], and 5 outputs [5, D] that are near each other."""
    rng = stream(seed, "test output layer")
    weight, bias = spread * rng.normal(size=(V, D)), spread * rng.normal(size=V)
    outputs = rng.normal(size=D) + 0.3 * rng.normal(size=(5, D))
    return torch.tensor(weight, dtype=dtype), torch.tensor(bias, dtype=dtype), torch.tensor(outputs, dtype=dtype)


def around(seed: int, spread: float, summed: int, dtype: torch.dtype) -> tuple[OutputBounds, Tensor, Tensor, Tensor]:
    weight, bias, outputs = layer(seed, spread, dtype)
    likely = (outputs @ weight.T + bias).softmax(1).mean(0)
    return OutputBounds(weight, bias, outputs, likely, summed), weight, bias, outputs


@settings(max_examples=60, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.0, 0.01, 0.3, 1.0, 5.0]),
    far=st.sampled_from([0.0, 1e-4, 0.1, 1.0, 10.0, 100.0]),
    summed=st.sampled_from([0, 1, 4, 20, V, 2 * V]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_the_truth_lies_between(seed: int, spread: float, far: float, summed: int, dtype: torch.dtype) -> None:
    """The truth is computed in float64 with numpy, from the same numbers."""
    bounds, weight, bias, outputs = around(seed, spread, summed, dtype)
    reached = outputs + far * torch.from_numpy(stream(seed, "away").normal(size=outputs.shape)).to(dtype)
    logits = reached.double().numpy() @ weight.double().numpy().T + bias.double().numpy()
    truth = np.logaddexp.reduce(logits, axis=1)
    rounding = bounds.rounding(reached).numpy()
    low, high = bounds.log_sum_exp(reached)
    assert (low.numpy() - rounding <= truth).all()
    assert (truth <= high.numpy() + rounding).all()
    assert (np.abs(bounds.exact_log_sum_exp(reached).numpy() - truth) <= rounding).all()
    center = outputs.mean(0, keepdim=True)  # where the bounds are tight
    exact = torch.logsumexp(center.double() @ weight.double().T + bias.double(), 1)
    for bound in bounds.log_sum_exp(center):
        torch.testing.assert_close(bound.double(), exact, rtol=1e-5, atol=1e-5)
    rows, words = (torch.from_numpy(ids.ravel()) for ids in np.indices(logits.shape))
    assert (bounds.logits_at_most(reached, rows, words).numpy() >= logits.ravel() - rounding[rows]).all()
    assert (np.abs(bounds.logits(reached, rows, words).numpy() - logits.ravel()) <= rounding[rows]).all()


def test_reduced_precision_of_products_is_allowed_for() -> None:
    """Where torch may round float32 factors, bounds that trust float32 would say too much."""
    bounds, _, _, outputs = around(3, 1.0, 4, torch.float32)
    precise = bounds.rounding(outputs)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert (bounds.rounding(outputs) > 1000 * precise).all()
    finally:
        torch.set_float32_matmul_precision(before)
