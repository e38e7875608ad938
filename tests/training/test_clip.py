"""The clip against its laws: its norm is that of the whole update, directions stay, nothing overflows or vanishes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from flsim.models.language_model import Params
from flsim.training.update import UpdateSum, clip_factor, global_norm

LARGEST = float(np.float32(3e38))
ELEMENTS = st.floats(-LARGEST, LARGEST, width=32)
UPDATES = st.lists(arrays(np.float32, st.integers(1, 5), elements=ELEMENTS), min_size=1, max_size=4)


def params(tensors: list[np.ndarray]) -> Params:
    return {str(index): torch.from_numpy(tensor).double() for index, tensor in enumerate(tensors)}


def exact_norm(update: Params) -> float:
    """Over all coordinates as one vector; `math.hypot` neither overflows nor underflows."""
    return math.hypot(*(value for tensor in update.values() for value in tensor.tolist()))


@given(tensors=UPDATES, bound=st.floats(1e-6, 1e6))
def test_a_clipped_update_is_within_the_bound_as_a_whole_and_keeps_its_direction(
    tensors: list[np.ndarray],
    bound: float,
) -> None:
    update = params(tensors)
    clipped = UpdateSum.of_user(update, 7, 1.0, 5, clip=bound)
    before, after = exact_norm(update), exact_norm(clipped.delta)
    assert after <= bound * (1 + 1e-12)
    assert global_norm(update) == pytest.approx(before, rel=1e-12)
    assert clipped.counts.clipped == (global_norm(update) > bound)
    if clipped.counts.clipped:
        assert after == pytest.approx(bound, rel=1e-12)
        for name, value in update.items():
            torch.testing.assert_close(clipped.delta[name], value * (bound / before), rtol=1e-12, atol=0)
    else:
        assert all(torch.equal(clipped.delta[name], value) for name, value in update.items())
    assert (clipped.counts.weight, clipped.counts.users, clipped.counts.examples, clipped.counts.within) == (
        1.0,
        1,
        7,
        1 - clipped.counts.clipped,
    )
    assert clipped.counts.norms == pytest.approx(before, rel=1e-12)


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite_is_counted_and_never_becomes_a_number(value: float, clip: float | None) -> None:
    """Infinity times 0 is NaN, and min(1, S / NaN) is 1 in some languages: neither may pass."""
    update = {"a": torch.tensor([1.0, value], dtype=torch.float64), "b": torch.ones(2, dtype=torch.float64)}
    refused = UpdateSum.of_user(update, 3, 1.0, 5, clip=clip)
    assert (refused.counts.non_finite, refused.counts.clipped, refused.counts.within, refused.counts.users) == (
        1,
        0,
        0,
        1,
    )
    assert not refused.is_finite
    good = UpdateSum.of_user({name: torch.ones_like(of) for name, of in update.items()}, 3, 1.0, 5, clip=clip)
    assert not good.merge(refused).is_finite
    assert good.is_finite
    with pytest.raises(ValueError, match="cannot be clipped"):
        clip_factor(global_norm(update), 0.2)
