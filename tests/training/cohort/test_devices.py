"""The precision of products on GPUs is set and put back, so that torch's functions that read it never raise."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import product as pairs_of

import pytest
import torch

from flsim.training.cohort.devices import float32_products, products
from flsim.training.hparams import Precision

GPU, CPU = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
OLDER, NEWER = ("highest", "high", "medium"), ("none", "ieee", "tf32")


def readings() -> tuple[object, ...]:
    """What torch's functions answer; where they raise, that they do."""
    answers: list[object] = [GPU.fp32_precision, CPU.fp32_precision]
    for read in (torch.get_float32_matmul_precision, lambda: GPU.allow_tf32):
        try:
            answers.append(read())
        except RuntimeError as error:
            answers.append(type(error))
    return tuple(answers)


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    older, newer = torch.get_float32_matmul_precision(), (GPU.fp32_precision, CPU.fp32_precision)
    yield
    torch.set_float32_matmul_precision(older)
    GPU.fp32_precision, CPU.fp32_precision = newer


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
@pytest.mark.parametrize(("older", "gpu", "cpu"), [*pairs_of(OLDER, NEWER, ("none", "ieee", "tf32", "bf16"))])
def test_readers_agree_in_the_block_and_find_the_former_settings_after_it(
    precision: Precision, older: str, gpu: str, cpu: str
) -> None:
    """Whatever the former settings were, contradictions included, and also after an error."""
    torch.set_float32_matmul_precision(older)
    GPU.fp32_precision, CPU.fp32_precision = gpu, cpu
    before = readings()
    is_tf32 = precision == "tf32"
    with suppress(ZeroDivisionError), float32_products(precision):
        assert readings() == (("tf32" if is_tf32 else "ieee"), "ieee", ("high" if is_tf32 else "highest"), is_tf32)
        raise ZeroDivisionError
    assert readings() == before
    GPU.fp32_precision = CPU.fp32_precision = "ieee"
    assert torch.get_float32_matmul_precision() == older


@pytest.mark.skipif(
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
