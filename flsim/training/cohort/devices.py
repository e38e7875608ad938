"""The choices of stacked training that depend on the device: kernels and the precision of products."""

import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from flsim.models.language_model import Params, representative
from flsim.training.cohort.kernels import Kernels, TorchKernels
from flsim.training.cohort.padding import width_of
from flsim.training.cohort.position_kernels import PositionKernels, TorchPositionKernels
from flsim.training.hparams import Precision


def kernels_for(like: Params, precision: Precision, is_single: bool = False) -> Kernels:
    """Return Triton's kernels on NVIDIA GPUs, in float32 and for embeddings that are not too wide, else PyTorch's.

    Args:
        like: parameters of the model.
        precision: precision of matrix products.
        is_single: whether a single user is to fill the GPU; its positions of the same token are neighbors.
    """
    if not _has_triton(like):
        return TorchKernels()
    from flsim.training.cohort.triton_kernels import TritonKernels
    from flsim.training.cohort.triton_spread import SpreadKernels

    return SpreadKernels(precision) if is_single else TritonKernels(precision)


def position_kernels_for(like: Params, precision: Precision) -> PositionKernels:
    """Return the kernels of a step by position, chosen as in `kernels_for`."""
    if not _has_triton(like):
        return TorchPositionKernels()
    from flsim.training.cohort.triton_positions import TritonPositionKernels

    return TritonPositionKernels(precision)


def _has_triton(like: Params) -> bool:
    """Return whether Triton's kernels run where these parameters are."""
    value = representative(like)
    nvidia = value.device.type == "cuda" and torch.version.cuda is not None
    if not nvidia or value.dtype != torch.float32 or importlib.util.find_spec("triton") is None:
        return False
    from flsim.training.cohort.triton_recurrence import WIDEST

    return width_of(like) <= WIDEST


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make the device the current one within the block, as kernels are launched on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def products(precision: Precision, device: torch.device) -> Iterator[None]:
    """Set the precision of matrix products on a GPU, summed in float32, and restore the former one afterwards."""
    if device.type != "cuda":
        yield
        return
    settings = torch.backends.cuda.matmul
    names = ("fp32_precision", "allow_bf16_reduced_precision_reduction")
    before = [getattr(settings, name) for name in names]
    try:
        for name, value in zip(names, ("tf32" if precision == "tf32" else "ieee", False), strict=True):
            setattr(settings, name, value)
        with current(device):
            yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(settings, name, value)
