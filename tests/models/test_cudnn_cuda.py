"""cuDNN computes recurrences and convolutions on an NVIDIA GPU in float32, with equal bits in each repetition."""

import pytest
import torch

from flsim.models.architectures import ModelHParams, build
from flsim.models.language_model import loss_sum

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.version.cuda is None, reason="needs an NVIDIA GPU, of which there is none"
)
ARCHITECTURES = ["lstm", "gru", "convolutional"]
TOKENS = torch.arange(640).reshape(32, 20) + 1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_outputs_have_the_rounding_of_float32(architecture: str) -> None:
    """The tolerance is 512 roundings of 2^-24, for sums of some hundred terms over 20 tokens; TF32 rounds by 2^-11."""
    model = build(1_000, ModelHParams(architecture=architecture)).initialize(0)
    real = torch.ones_like(TOKENS, dtype=torch.bool)
    with torch.no_grad():
        actual = model.cuda().logits_at(TOKENS.cuda(), real.cuda()).cpu()
        exact = model.cpu().double().logits_at(TOKENS, real)
    assert float((actual - exact).norm() / exact.norm()) < 512 * 2**-24


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradients_have_equal_bits(architecture: str) -> None:
    model = build(1_000, ModelHParams(architecture=architecture)).initialize(0).cuda()

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        torch.autograd.backward(loss_sum(model, TOKENS.cuda(), TOKENS.flip(1).cuda())[0])
        return [value.grad.clone() for value in model.trainable.values() if value.grad is not None]

    first = gradients()
    assert first
    for _ in range(5):
        assert all(torch.equal(one, other) for one, other in zip(first, gradients(), strict=True))
