"""The parts of stacked training that depend on the device: kernels, the precision of products, and CUDA graphs."""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch
from torch import Tensor

from flsim.models.language_model import Params, representative
from flsim.training.cohort.kernels import Kernels
from flsim.training.cohort.packing import Shape, width_of
from flsim.training.hparams import Precision


def kernels_for(like: Params, precision: Precision, is_single: bool = False) -> Kernels:
    """Return Triton's kernels on NVIDIA GPUs, for float32 and embeddings of limited width; otherwise PyTorch's.

    A single user uses the complete GPU, with adjacent positions for equal tokens. Stacked users train by position,
    except in float32: without tensor cores, Triton's products are slower than those of cuBLAS.
    """
    if not _has_triton(like, precision):
        return Kernels()
    from flsim.training.cohort.triton_kernels import TritonKernels
    from flsim.training.cohort.triton_positions import TritonPositionKernels
    from flsim.training.cohort.triton_spread import SpreadKernels

    stacked = TritonKernels if precision == "float32" else TritonPositionKernels
    return SpreadKernels(precision) if is_single else stacked(precision)


def _has_triton(like: Params, precision: Precision) -> bool:
    """Return whether Triton's kernels support the device of these parameters and this precision."""
    value = representative(like)
    nvidia = value.device.type == "cuda" and torch.version.cuda is not None
    if not nvidia or value.dtype != torch.float32 or importlib.util.find_spec("triton") is None:
        return False
    from flsim.training.cohort.triton_kernels import WIDEST

    return width_of(like) <= WIDEST[precision]


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make the device the current one within the block, because kernels are launched on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def products(precision: Precision, device: torch.device) -> Iterator[None]:
    """Set the precision of matrix products on a GPU, summed in float32, and restore it afterwards."""
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
    """Set whether products of float32 matrices on GPUs use TF32, and restore all previous settings afterwards.

    torch's functions that read its older setting raise RuntimeError if a newer one (`fp32_precision`) contradicts it.
    """
    gpu, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    newer = gpu.fp32_precision, cpu.fp32_precision
    gpu.fp32_precision = cpu.fp32_precision = "ieee"  # value with which the older setting can always be read
    older = torch.get_float32_matmul_precision()
    try:
        gpu.allow_tf32 = precision == "tf32"  # sets the older setting, and the newer one for GPUs
        yield
    finally:
        torch.set_float32_matmul_precision(older)  # sets the newer ones too
        gpu.fp32_precision, cpu.fp32_precision = newer


# CUDA graphs: the launches of a step are recorded once for each shape, and then replayed as one launch.


Step = Callable[..., None]


class Graphs:
    """The CUDA graphs of one step, by shape, if `is_on`: by default on a GPU if the kernels make graphs."""

    def __init__(self, device: torch.device, kernels: Kernels, is_on: bool | None = None) -> None:
        self._device = device
        self.is_on = device.type == "cuda" and kernels.makes_graphs if is_on is None else is_on
        self.forget()

    def forget(self) -> None:
        """Drop all graphs, which hold addresses of buffers; their memory pool ends with the last of them."""
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.is_on else None

    def run(self, step: Step, shape: Shape, reads: Sequence[Tensor], data: Sequence[Tensor]) -> None:
        """Replay or capture a step for its shape, after copying `data` to `reads`, whose memory stays until `forget`.

        The step is a function of the shape and `reads`; if they are zeros, it must change nothing. Without graphs,
        it is called on the data.
        """
        if not self.is_on:
            step(shape, *data)
            return
        graph = self._graphs.get(shape)
        if graph is None:
            graph = self._graphs[shape] = self._capture(step, shape, reads)
        for read, values in zip(reads, data, strict=True):
            read.copy_(values)
        graph.replay()

    def _capture(self, step: Step, shape: Shape, reads: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
        """Return a graph of the step, after one run over zeros that compiles it; other threads can pack meanwhile."""
        for read in reads:
            read.zero_()
        stream = capture_stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            step(shape, *reads)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local")
        with torch.cuda.stream(stream), capture:  # a capture that cannot be ended leaves its stream current
            step(shape, *reads)
        return graph


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which a device's graphs are captured: libraries keep memory for each (cuBLAS: 32 MiB)."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
