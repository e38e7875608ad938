"""CUDA graphs: what a step launches is recorded once for each shape, and then launched as one."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flsim.training.cohort.packing import Shape

Step = Callable[..., None]


class Graphs:
    """Of one step, on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.forget()

    def forget(self) -> None:
        """They hold addresses of buffers. Their common pool of memory ends with the last of them."""
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, step: Step, shape: Shape, reads: Sequence[Tensor], data: Sequence[Tensor]) -> None:
        """Do the step.

        Args:
            step: called with the shape and `reads`; where those are zeros, it must change nothing.
            shape: what a graph is for.
            reads: tensors whose place in memory stays the same until `forget`.
            data: what is copied to them before.
        """
        graph = self._graphs.get(shape)
        if graph is None:
            graph = self._graphs[shape] = self._capture(step, shape, reads)
        for read, given in zip(reads, data, strict=True):
            read.copy_(given)
        graph.replay()

    def _capture(self, step: Step, shape: Shape, reads: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
        """A graph of the step; the run before it, which compiles kernels, is one without positions: it changes nothing.

        Other threads read and pack meanwhile, and may allocate pinned memory.
        """
        for read in reads:
            read.zero_()
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            step(shape, *reads)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"):
            step(shape, *reads)
        return graph
