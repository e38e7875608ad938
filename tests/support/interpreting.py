"""Helpers for tests of kernels in Triton's interpreter, which must be selected before Triton is imported."""

import math
import multiprocessing
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import torch
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor
from triton.runtime import interpreter  # type: ignore[import-untyped]

from flsim.base.rng import stream
from flsim.training.cohort.kernels import Kernels
from flsim.training.cohort.packing import Parts
from flsim.training.cohort.triton_kernels import TritonKernels
from flsim.training.update import Precision

U, T, B, N, D, H, V = 3, 4, 5, 13, 18, 37, 75
COUNTS = torch.tensor([13, 0, 9], dtype=torch.int32)

_patch_tensor = interpreter._patch_lang_tensor


def _patch(tensor: Any, scope: Any) -> None:
    """Replace `__index__`: Triton 3.6 calls int() on an array of one number, which NumPy 2.4 refuses."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch

_cast, _dot = interpreter.InterpreterBuilder.cast_impl, interpreter.InterpreterBuilder.create_dot


def _rounding_cast(self: Any, source: Any, target: Any) -> Any:
    """Round to the nearest bfloat16, ties to even, as a GPU does; the interpreter truncates, or keeps integer bits."""
    if target.scalar != tl.bfloat16 or source.dtype.scalar == tl.bfloat16:
        return _cast(self, source, target)
    bits = source.data.astype(np.float32).view(np.uint32)
    return interpreter.TensorHandle(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16), tl.bfloat16)


def _dot_of_bfloat16(self: Any, left: Any, right: Any, *others: Any) -> Any:
    """Multiply the values of bfloat16 operands; the interpreter multiplies their bits as integers."""
    factors = (self.cast_impl(one, tl.float32) if one.dtype.scalar == tl.bfloat16 else one for one in (left, right))
    return _dot(self, *factors, *others)


interpreter.InterpreterBuilder.cast_impl = _rounding_cast
interpreter.InterpreterBuilder.create_dot = _dot_of_bfloat16


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(stream(seed, "test", *shape).normal(size=shape)).float()


def parts() -> Parts:
    """Return positions in random order, with repeated tokens; user 1 has no positions."""
    rng = stream(0, "test", "parts")
    tokens = torch.from_numpy(rng.integers(0, 7, (U, T, B))).int()
    places = torch.zeros(U, N, dtype=torch.int32)
    for user, count in enumerate(COUNTS.tolist()):
        places[user, :count] = torch.from_numpy(B + rng.permutation(T * B)[:count]).int()
    targets = torch.from_numpy(rng.integers(0, V, (U, N))).int()
    return Parts(tokens, places, targets, COUNTS, torch.tensor([3], dtype=torch.int32), torch.zeros(3).double())


def check(
    method: str,
    *arguments: Any,
    writes: Sequence[int],
    tolerance: float = 1e-5,
    kernels: Callable[[Precision], Any] = TritonKernels,
    oracle: Callable[[], Any] = Kernels,
) -> None:
    """Check that both kernels write and return the same for the same arguments; PyTorch's compute in float64.

    The tolerance is relative to the largest value of a tensor, or to 1 if that is larger; the default is about 80
    roundings of float32. NaN marks values that neither may write. The interpreter multiplies TF32 in float32.
    """

    def run(tested: Any, dtype: torch.dtype) -> list[Tensor]:
        own = [_copied(value, dtype) for value in arguments]
        returned = getattr(tested, method)(*own)
        return [tensor for place in writes for tensor in _tensors_in(own[place])] + _tensors_in(returned)

    written, expected = run(kernels("tf32"), torch.float32), run(oracle(), torch.float64)
    assert written
    for one, other in zip(written, expected, strict=True):
        atol = tolerance * max(1.0, float(other.nan_to_num().abs().max()))
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=atol, equal_nan=True)


class AtOnce:
    """A kernel whose programs wait for each other: each program is a process, and all share the memory of tensors.

    Programs must not ask for their place in the grid, because each process launches a grid of one.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, math.prod(grid))

    def _launch(self, programs: int, *arguments: Any, **named: Any) -> None:
        for tensor in _tensors_in(arguments):
            tensor.share_memory_()  # type: ignore[no-untyped-call]
        fork = multiprocessing.get_context("fork")
        processes = [fork.Process(target=self._kernel[(1,)], args=arguments, kwargs=named) for _ in range(programs)]
        for process in processes:
            process.start()
        # The running ones are listed once for both uses: `wait` for an empty list would never return.
        while not any(process.exitcode for process in processes) and (
            running := [process.sentinel for process in processes if process.is_alive()]
        ):
            wait(running)
        for process in processes:  # a program that fails lets those of its group wait forever
            process.kill()
            process.join()
        assert {process.exitcode for process in processes} == {0}


# The interpreter copies tensors back after a launch, and would overwrite what other processes have written since.
interpreter.GridExecutor._restore_args_dev = lambda self, devices, hosts, named, named_hosts: None


def _copied(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        copies = [_copied(one, dtype) for one in value]
        return copies if isinstance(value, list) else type(value)(*copies)
    if isinstance(value, Tensor) and value.dtype == torch.float32:
        return torch.empty_like(value, dtype=dtype).copy_(value)
    return value.clone() if isinstance(value, Tensor) else value


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, (list, tuple)):
        return [tensor for one in value for tensor in _tensors_in(one)]
    return [value] if isinstance(value, Tensor) else []
