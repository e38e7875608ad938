"""The precision of products on an NVIDIA GPU."""

import pytest
import torch

from flsim.training.cohort.devices import products
from flsim.training.hparams import Precision

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.version.cuda is None or torch.cuda.get_device_capability()[0] < 8,
    reason="needs an NVIDIA GPU with TF32, of which there is none",
)


def test_a_product_on_a_gpu_has_the_precision_that_was_set() -> None:
    """TF32 keeps 10 bits of a factor's fraction, so 1 + 2^-12 times 1 becomes 1; float32 keeps it."""
    ones = torch.ones(128, 128, device="cuda")
    factor = torch.eye(128, device="cuda") * (1 + 2**-12)
    expected: dict[Precision, float] = {"float32": 1 + 2**-12, "tf32": 1.0, "bf16": 1 + 2**-12}
    for precision, value in expected.items():
        with products(precision, ones.device):
            assert torch.equal(ones @ factor, torch.full_like(ones, value))
            torch.get_float32_matmul_precision()
