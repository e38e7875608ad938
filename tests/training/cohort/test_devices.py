"""Tests that the precision of float32 products is set and restored without errors of torch, and of choosing kernels."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import product as pairs_of
from typing import get_args

import pytest
import torch

from flsim.training.cohort import engine
from flsim.training.cohort.engine import float32_products
from flsim.training.update import Precision

GPU, CPU = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
OLDER, NEWER = ("highest", "high", "medium"), ("none", "ieee", "tf32")


def readings() -> tuple[object, ...]:
    """Return the results of torch's functions that read the precision, or the type of their errors."""
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
def test_settings_are_consistent_in_the_block_and_restored_after_it(
    precision: Precision, older: str, gpu: str, cpu: str
) -> None:
    """All settings from before the block are restored, even contradictory ones, also after an error in the block."""
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


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux only")
def test_stacked_users_train_by_position_unless_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_has_triton", lambda *_: True)
    chosen = {precision: type(engine.kernels_for({}, precision)).__name__ for precision in get_args(Precision)}
    position = "TritonPositionKernels"
    assert chosen == {"float32": "TritonKernels", "tf32": position, "bf16": position}
    assert type(engine.kernels_for({}, "bf16", is_single=True)).__name__ == "SpreadKernels"
