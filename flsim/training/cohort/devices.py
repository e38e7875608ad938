"""The choices of stacked training that depend on the device: kernels and the precision of products."""

import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from flsim.models.language_model import Params, representative
from flsim.training.cohort.kernels import Kernels, TorchKernels
from flsim.training.cohort.packing import width_of
from flsim.training.cohort.position_kernels import PositionKernels, TorchPositionKernels
from flsim.training.hparams import Precision


def kernels_for(like: Params, precision: Precision, is_single: bool = False) -> Kernels:
    """Return Triton's kernels on NVIDIA GPUs, in float32 and for embeddings that are not too wide, else PyTorch's.

    Args:
        like: parameters of the model.
        precision: precision of matrix products.
        is_single: whether a single user is to fill the GPU; its positions of the same token are neighbors.
    """
    if not _has_triton(like, precision):
        return TorchKernels()
    from flsim.training.cohort.triton_kernels import TritonKernels
    from flsim.training.cohort.triton_spread import SpreadKernels

    return SpreadKernels(precision) if is_single else TritonKernels(precision)


def position_kernels_for(like: Params, precision: Precision) -> PositionKernels:
    """Return the kernels of a step by position, chosen as in `kernels_for`."""
    if not _has_triton(like, precision):
        return TorchPositionKernels()
    from flsim.training.cohort.triton_positions import TritonPositionKernels

    return TritonPositionKernels(precision)


def by_position_is_faster(like: Params, precision: Precision) -> bool:
    """Return whether stacked users train faster by position, which depends on the products of the output layer.

    Those of bfloat16 are fused with the softmax by position. For float32 and TF32 Triton's are slower than cuBLAS's
    (docs/benchmarks.md, "On a GPU").
    """
    return precision == "bf16" and _has_triton(like, precision)


def _has_triton(like: Params, precision: Precision) -> bool:
    """Return whether Triton's kernels run where these parameters are, in this precision."""
    value = representative(like)
    nvidia = value.device.type == "cuda" and torch.version.cuda is not None
    if not nvidia or value.dtype != torch.float32 or importlib.util.find_spec("triton") is None:
        return False
    from flsim.training.cohort.triton_recurrence import WIDEST

    return width_of(like) <= WIDEST[precision]


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
    before = settings.allow_bf16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = False
    try:
        with float32_products(precision), current(device):
            yield
    finally:
        settings.allow_bf16_reduced_precision_reduction = before


@contextmanager
def float32_products(precision: Precision) -> Iterator[None]:
    """Set whether products of float32 matrices on GPUs use TF32, and restore all former settings afterwards.

    torch has an older setting (`allow_tf32`, `set_float32_matmul_precision`) and newer ones (`fp32_precision`, for GPUs
    and for CPUs). Its functions that read the older setting raise RuntimeError where a newer one contradicts it. In the
    block they agree.
    """
    gpu, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    newer = gpu.fp32_precision, cpu.fp32_precision
    gpu.fp32_precision = cpu.fp32_precision = "ieee"  # with which the older setting can be read, whatever it is
    older = torch.get_float32_matmul_precision()
    try:
        gpu.allow_tf32 = precision == "tf32"  # sets the older setting, and the newer one for GPUs
        yield
    finally:
        torch.set_float32_matmul_precision(older)  # sets the newer ones too
        gpu.fp32_precision, cpu.fp32_precision = newer
