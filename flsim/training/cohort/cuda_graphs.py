"""CUDA graphs: the launches of a step are recorded once for each shape, and then replayed as one launch."""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from flsim.training.cohort.packing import Shape

Step = Callable[..., None]


class Graphs:
    """The CUDA graphs of one step on a GPU, by shape."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.forget()

    def forget(self) -> None:
        """Drop all graphs, which hold addresses of buffers; their memory pool ends with the last of them."""
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, step: Step, shape: Shape, reads: Sequence[Tensor], data: Sequence[Tensor]) -> None:
        """Do the step.

        Args:
            step: function of the shape and `reads`; where `reads` are zeros, it must change nothing.
            shape: the shape of the step, which tells which graph to replay.
            reads: tensors whose memory stays the same until `forget`.
            data: values to copy to `reads` before the step.
        """
        graph = self._graphs.get(shape)
        if graph is None:
            graph = self._graphs[shape] = self._capture(step, shape, reads)
        for read, values in zip(reads, data, strict=True):
            read.copy_(values)
        graph.replay()

    def _capture(self, step: Step, shape: Shape, reads: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
        """Return a graph of the step, after one run that compiles its kernels and, over zeros, changes nothing.

        Other threads read and pack meanwhile, and may allocate pinned memory.
        """
        for read in reads:
            read.zero_()
        stream = capture_stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            step(shape, *reads)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local")
        with torch.cuda.stream(stream), capture:  # where a capture cannot be ended, it leaves its stream current
            step(shape, *reads)
        return graph


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which all graphs of a device are captured; replays run on the caller's own stream.

    Libraries keep memory for each stream that they ever ran on: cuBLAS 32 MiB on an H200. So one stream is for all.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
