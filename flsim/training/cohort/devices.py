"""What stacked users need to know of the device that they are on."""

import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from flsim.models.language_model import Params, representative
from flsim.training.cohort.kernels import Kernels, TorchKernels
from flsim.training.cohort.padding import width_of
from flsim.training.hparams import Precision


def kernels_for(like: Params, precision: Precision, alone: bool = False) -> Kernels:
    """Triton's where they run: on NVIDIA GPUs, in float32, for embeddings that are not too wide.

    Args:
        like: parameters of the model.
        precision: of products.
        alone: whether for a single user, which is to fill the GPU; its positions of the same token are neighbors.
    """
    value = representative(like)
    nvidia = value.device.type == "cuda" and torch.version.cuda is not None
    if nvidia and value.dtype == torch.float32 and importlib.util.find_spec("triton") is not None:
        from flsim.training.cohort.triton_kernels import TritonKernels
        from flsim.training.cohort.triton_recurrence import WIDEST
        from flsim.training.cohort.triton_spread import SpreadKernels

        if width_of(like) <= WIDEST:
            return SpreadKernels(precision) if alone else TritonKernels(precision)
    return TorchKernels()


def current(device: torch.device) -> AbstractContextManager[object]:
    """Kernels go to the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def products(precision: Precision, device: torch.device) -> Iterator[None]:
    """Matrix products of that precision, summed in float32; on a GPU, and put back afterwards."""
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
