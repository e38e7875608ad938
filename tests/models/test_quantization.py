"""Weights of few bits: how many values, how far off, and which model is measured."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flsim.models.cifg import CIFGLanguageModel
from flsim.models.hparams import ModelHParams
from flsim.models.quantization import quantized


def model(scale: float = 1.0) -> CIFGLanguageModel:
    made = CIFGLanguageModel(50, ModelHParams(6, 9)).initialize(0).double()
    with torch.no_grad():
        made.embedding.mul_(scale)
        made.embedding[7] = 0.0
    return made


@settings(max_examples=30)
@given(bits=st.integers(2, 16), scale=st.sampled_from((1e-3, 1.0, 100.0)))
def test_few_values_evenly_spaced_and_half_a_step_off_at_most(bits: int, scale: float) -> None:
    """The ends may be half a step off, as 0 has to be one of the values. The step is float32: of the last of 2^bits
    values it misses 2^bits 2^-24 steps at most, and once more in the quotient."""
    made = model(scale)
    rounding = 2.0 ** (bits - 23)
    for name, value in quantized(made, bits).state_dict().items():
        trained = made.state_dict()[name]
        step = float(trained.max().clamp(min=0) - trained.min().clamp(max=0)) / (2**bits - 1)
        assert len(set(value.flatten().tolist())) <= 2**bits
        assert float((value - trained).abs().max()) <= step * (0.5 + rounding)
        if step:
            places = value / step
            torch.testing.assert_close(places, places.round(), rtol=0, atol=rounding)
    assert not quantized(made, bits).embedding[7].any()


def test_the_trained_model_stays_as_it_is() -> None:
    made = model()
    before = {name: value.clone() for name, value in made.named_parameters()}
    coarse = quantized(made, 2).state_dict()
    assert all(torch.equal(value, before[name]) for name, value in made.named_parameters())
    assert len(set(coarse["projection"].flatten().tolist())) <= 4 < len(set(made.projection.flatten().tolist()))
    assert coarse["output_bias"].eq(0).all()  # all equal: no step to round to
