"""The memory of a stacked step beside weights, which is used again from step to step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from flsim.training.cohort.packing import Shape


class Activations(NamedTuple):
    """The activations of a step of u users, T times, B rows and N positions; r and c have a block before time 0.

    Attributes:
        read: [u, T B, D], embeddings of the inputs; `d_read` their gradient.
        gates: [u, T, B, 3H], and then their gradient.
        outputs: [u, T + 1, B, D], r; `d_outputs` their gradient.
        cells: [u, T + 1, B, H], c, in the dtype of the master weights.
        hidden: [u, T, B, H], o tanh c.
        chosen: [u, N, D], r at real positions; `d_chosen` their gradient.
        logits: [u, N, V], and then their gradient.
        losses: [u, N], in the dtype of the master weights.
    """

    read: Tensor
    d_read: Tensor
    gates: Tensor
    outputs: Tensor
    d_outputs: Tensor
    cells: Tensor
    hidden: Tensor
    chosen: Tensor
    d_chosen: Tensor
    logits: Tensor
    losses: Tensor


class PositionActivations(NamedTuple):
    """The activations of a step of u users and N positions, each user's in the order of time, then row.

    Attributes:
        read: [u, N, D], embeddings of the inputs; `d_read` their gradient.
        gates: [u, N, 3H], and then their gradient.
        before: [u, N, D], r of the time before.
        outputs: [u, N, D], r; `d_outputs` its gradient.
        cells: [u, N, H], c, in the dtype of the master weights.
        hidden: [u, N, H], o tanh c.
        losses: [u, N], in the dtype of the master weights.
        log_sums: [u, N], log-sum-exp of the logits, in the dtype of the master weights.
    """

    read: Tensor
    d_read: Tensor
    gates: Tensor
    before: Tensor
    outputs: Tensor
    d_outputs: Tensor
    cells: Tensor
    hidden: Tensor
    losses: Tensor
    log_sums: Tensor


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model: width D, units H, vocabulary V, and the dtypes of its products and its master weights."""

    width: int
    units: int
    vocabulary: int
    low: torch.dtype
    master: torch.dtype

    fields: ClassVar[tuple[str, ...]] = Activations._fields

    def shapes(self, step: Shape) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of a step's activations, in the order of `fields`."""
        users, times, rows, positions = step
        read, outputs = (users, times * rows, self.width), (users, times + 1, rows, self.width)
        gates, hidden = (users, times, rows, 3 * self.units), (users, times, rows, self.units)
        cells, chosen = (users, times + 1, rows, self.units), (users, positions, self.width)
        logits, losses = (users, positions, self.vocabulary), (users, positions)
        return read, read, gates, outputs, outputs, cells, hidden, chosen, chosen, logits, losses

    def dtype(self, name: str) -> torch.dtype:
        return self.master if name in ("cells", "losses", "log_sums") else self.low

    def bytes(self, step: Shape) -> int:
        named = zip(self.fields, self.shapes(step), strict=True)
        return sum(torch.Size(shape).numel() * self.dtype(name).itemsize for name, shape in named) + 4 * step.values


class PositionSizes(Sizes):
    """The sizes of a model whose activations are `PositionActivations`."""

    fields: ClassVar[tuple[str, ...]] = PositionActivations._fields

    def shapes(self, step: Shape) -> tuple[tuple[int, ...], ...]:
        wide, gates, hidden = (
            (step.users, step.positions, width) for width in (self.width, 3 * self.units, self.units)
        )
        losses = (step.users, step.positions)
        return wide, wide, gates, wide, wide, wide, hidden, hidden, losses, losses


class Buffers:
    """Flat memory that grows to the largest step so far."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self._sizes, self._device = sizes, device
        self._flat: dict[str, Tensor] = {}

    def reserve(self, steps: Sequence[Shape]) -> bool:
        """Grow the memory to hold any of these steps, and return whether memory moved.

        Raises:
            torch.OutOfMemoryError: the device's memory does not suffice (RuntimeError on a CPU).
        """
        moved = False
        for step in steps:
            shapes = dict(zip(self._sizes.fields, self._sizes.shapes(step), strict=True))
            for name, shape in {**shapes, "data": (step.values,)}.items():
                values = torch.Size(shape).numel()
                if name not in self._flat or len(self._flat[name]) < values:
                    moved = True
                    self._flat.pop(name, None)  # before the new one is there
                    dtype = torch.int32 if name == "data" else self._sizes.dtype(name)
                    self._flat[name] = torch.zeros(values, dtype=dtype, device=self._device)
        return moved

    def data(self, step: Shape) -> Tensor:
        """Return memory for the flat data of a step, int32 [values]."""
        return self._flat["data"][: step.values]

    def views(self, step: Shape) -> tuple[Tensor, ...]:
        """Return the memory of a step's activations, in the order of `Sizes.fields`."""
        named = zip(self._sizes.fields, self._sizes.shapes(step), strict=True)
        return tuple(self._flat[name][: torch.Size(shape).numel()].view(shape) for name, shape in named)
