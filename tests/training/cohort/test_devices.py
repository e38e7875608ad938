"""The precision of products on GPUs is set and put back, so that torch's functions that read it never raise."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import product as pairs_of

import pytest
import torch

from flsim.training.cohort.devices import float32_products
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
