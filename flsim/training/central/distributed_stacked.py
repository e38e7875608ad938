"""Data parallel training on GPUs by kernels: the processes of a group sum their gradients, and each takes the step."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from flsim.training.central.distributed import DistributedEngine, Group, refuse_what_trains_alone
from flsim.training.central.engines import has_kernels
from flsim.training.central.stacked import PackedChunk, StackedEngine
from flsim.training.central.task import CentralTask
from flsim.training.cohort.kernels import Kernels
from flsim.training.cohort.packing import Parts, Shape
from flsim.training.cohort.stacked_model import Dropped
from flsim.training.state import State


class DistributedStackedEngine(StackedEngine):
    """A `StackedEngine` in each process of the default group, over its share of each batch.

    Engines begin with the same state, and return the same losses, parameters and moments, bit for bit. CUDA graphs hold
    the gradient of a share; the sum over processes and the step are outside of them.

    Args:
        training: settings and records of training, in float32.
        state: the state to continue from; it is not changed.
        is_asked: as for `Group`.
        kernels, graphs: as for `StackedEngine`.

    Raises:
        torch.OutOfMemoryError: as for `StackedEngine`.
    """

    sums_gradients = True

    def __init__(
        self,
        training: CentralTask,
        state: State,
        is_asked: Callable[[], bool] = lambda: False,
        kernels: Kernels | None = None,
        graphs: bool | None = None,
    ) -> None:
        self._group = Group(is_asked)
        super().__init__(training, state, kernels, graphs, self._group.rank, self._group.workers)
        self._tokens = torch.ones(1, device=self._device)

    def train(self, packed: PackedChunk) -> tuple[Sequence[float], Sequence[int]]:
        self._tokens = torch.tensor([1, *packed.tokens], dtype=torch.float64).to(self._device)  # steps count from 1
        losses, tokens = super().train(packed)
        return self._group.summed(torch.tensor(losses, dtype=torch.float64, device=self._device)), tokens

    def ends(self) -> bool:
        """Return whether the first process was asked to end in the last chunk; the same in every process."""
        return self._group.ends

    def _run(self, shape: Shape, data: Tensor, kept: Tensor) -> None:
        gradients, parts = self._model.gradients, shape.parts(data)
        if shape.positions:
            super()._run(shape, data, kept)
        flat = torch.cat([gradient.flatten() for gradient in gradients.values()])
        if shape.positions:  # gradients are of the mean over this share
            flat.mul_((parts.counts / self._tokens[parts.number]).to(flat.dtype))
        else:
            flat.zero_()
        dist.all_reduce(flat)
        first = 0
        for gradient in gradients.values():
            gradient.copy_(flat[first : first + gradient.numel()].view_as(gradient))
            first += gradient.numel()
        self._optimize(parts._replace(counts=torch.ones_like(parts.counts)))  # a process without a share steps as well

    def _descend(self, shape: Shape, parts: Parts, dropped: Dropped | None) -> Tensor:
        return self._model.gradient(shape, parts, dropped)


def group_engine_of(
    training: CentralTask, state: State, is_asked: Callable[[], bool]
) -> DistributedEngine | DistributedStackedEngine:
    """Return the engine of a process of torch's default group: on GPUs the kernels', where there are kernels.

    Args:
        training, state, is_asked: as for the engines; the state is the same in all processes.

    Raises:
        InputError: see `flsim.training.central.distributed.refuse_what_trains_alone`.
    """
    refuse_what_trains_alone(training.privacy.mechanism, training.hparams.precision, training.architecture)
    if training.device != "cpu" and training.engine == "fused" and has_kernels(training):
        return DistributedStackedEngine(training, state, is_asked)
    return DistributedEngine(training, state, is_asked)
