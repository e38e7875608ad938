"""The `fused` engine on a GPU, and for bfloat16: central training as one user of the cohort engine, whose weights stay.

A chunk's steps, learning rates and Adam's corrections are one array, so one CUDA graph fits all steps of its shape.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flsim.base.extensions import configured
from flsim.models.language_model import Params, representative
from flsim.training.central.hparams import CentralHParams
from flsim.training.central.records import factors
from flsim.training.central.task import CentralTask, Chunk
from flsim.training.cohort.devices import Graphs, kernels_for, products
from flsim.training.cohort.kernels import Kernels, Rule
from flsim.training.cohort.packing import (
    EXACT,
    SCALARS,
    PackedGroup,
    Parts,
    Shape,
    narrowed,
    pack,
    units_of,
    widened,
    width_of,
)
from flsim.training.cohort.stacked_model import Dropped, StackedModel, widened_for
from flsim.training.cohort.steps import Steps
from flsim.training.optimizers import BETAS, MOMENTUM, SGD, optimizer_named
from flsim.training.state import Moments, State

POSITIONS = 2  # for each record of a batch; CUDA graphs are for multiples of this number of positions


class PackedChunk(NamedTuple):
    """Steps as those of one user, their numbers of positions, and dropout's uint8 values, one step after another."""

    group: PackedGroup
    tokens: list[int]
    dropout_mask: Tensor


class StackedEngine:
    """Training by stacked products of a single user; a `flsim.training.central.task.Engine`.

    For `kernels`, `graphs` and errors, see `flsim.training.cohort.stacked_trainer.StackedTrainer`.
    """

    def __init__(
        self, training: CentralTask, state: State, kernels: Kernels | None = None, graphs: bool | None = None
    ) -> None:
        self._training, self._hparams, self._device = training, training.hparams, torch.device(training.device)
        self._like = {name: value.detach().to(self._device) for name, value in state.params.items()}
        self._kernels = kernels or kernels_for(self._like, self._hparams.precision, is_single=True)
        self._graphs = Graphs(self._device, self._kernels, graphs)
        rows, times = training.largest_batch, training.records.layout.record_words
        self._largest = Shape(1, times, rows, times * rows)
        self._rounding = Shape(1, 4, rows, POSITIONS * rows) if self._graphs.is_on else EXACT

        wide = widened_for(self._kernels, self._like)
        holds_gradients = not self._hparams.is_plain
        self._model = StackedModel(wide, 1, self._hparams.precision, self._kernels, holds_gradients, is_single=True)
        self._model.load(wide)
        self._rule = _rule(self._hparams)
        slots = self._rule.optimizer.slots
        self._moments = [self._stacked(state.moments.get(slot), units_of(wide)) for slot in slots]
        self._done = max(map(int, state.moments.get("step", {}).values()), default=0)  # steps of the optimizer
        self._began = state.round - self._done
        self._losses = torch.zeros(0, dtype=torch.float64, device=self._device)
        self._width = width_of(wide) if self._hparams.dropout else 0
        self._mask = torch.zeros(self._mask_values(self._largest), dtype=torch.uint8, device=self._device)

    def pack(self, chunk: Chunk) -> PackedChunk:
        steps = _by_token(chunk.positions(self._training.records.layout))
        scalars = np.array([self._scalars(number) for number in range(chunk.first, chunk.first + len(chunk))])
        group = pack([steps], self._rounding, self._largest, self._device.type == "cuda", scalars.reshape(-1, SCALARS))
        return PackedChunk(group, np.diff(steps.ends, prepend=0).tolist(), self._drop(chunk, steps, group.shapes))

    @torch.no_grad()
    def train(self, packed: PackedChunk) -> tuple[Sequence[float], Sequence[int]]:
        shapes, buffers = packed.group.shapes, self._model.buffers
        with products(self._hparams.precision, self._device):
            moved = buffers.reserve(shapes)
            if len(self._losses) <= len(shapes):
                self._losses, moved = self._losses.new_zeros(len(shapes) + 1), True
            if moved:
                self._graphs.forget()
            self._losses.zero_()
            data, mask = (
                array.to(self._device, non_blocking=True) for array in (packed.group.data, packed.dropout_mask)
            )
            first = first_mask = 0
            for shape in shapes:
                end, end_mask = first + shape.values, first_mask + self._mask_values(shape)
                reads = buffers.data(shape), self._mask[: end_mask - first_mask]
                self._graphs.run(self._step, shape, reads, (data[first:end], mask[first_mask:end_mask]))
                first, first_mask = end, end_mask
        self._done += len(shapes)
        losses: list[float] = self._losses[1 : len(shapes) + 1].tolist()
        return losses, packed.tokens

    def params(self) -> Params:
        return self._own(self._model.weights)

    def moments(self) -> Moments:
        slots = self._rule.optimizer.slots
        moments = {slot: self._own(moment) for slot, moment in zip(slots, self._moments, strict=True)}
        if self._rule.optimizer.counts_steps:
            moments["step"] = {name: torch.tensor(float(self._done)) for name in self._like}
        return moments

    def _step(self, shape: Shape, data: Tensor, mask: Tensor) -> None:
        parts, dropped = shape.parts(data), None
        if self._hparams.dropout:
            stays, places = mask.view(1, -1, self._width), shape.times * shape.rows
            factor = float(np.float32(1) / np.float32(1 - self._hparams.dropout))  # rounded as in `factors`
            dropped = Dropped(stays[:, :places], stays[:, places:], factor)
        losses = self._descend(shape, parts, dropped)
        self._losses.index_add_(0, parts.number, losses.sum(1, dtype=torch.float64))

    def _descend(self, shape: Shape, parts: Parts, dropped: Dropped | None) -> Tensor:
        """Take a step; return the loss of each position, nats [1, N]."""
        if self._hparams.is_plain:
            return self._model.descend(shape, parts, parts.scalars[:1], dropped)
        losses = self._model.gradient(shape, parts, dropped)
        # Without FedProx's term, the start has no effect.
        start, clip = {name: value[0] for name, value in self._model.weights.items()}, self._hparams.gradient_clip
        self._model.optimize(start, self._moments, parts.counts, parts.scalars, self._rule, clip)
        return losses

    def _scalars(self, step: int) -> tuple[float, ...]:
        """Return a step's learning rate and Adam's 1 - beta^t, see `Parts.scalars`."""
        return self._training.rate(step), *(1 - beta ** (step + 1 - self._began) for beta in BETAS)

    def _drop(self, chunk: Chunk, steps: Steps, shapes: Sequence[Shape]) -> Tensor:
        """Return dropout of all steps, flat uint8, 1 for kept values: [T B + N, D], first inputs of cells."""
        size = sum(map(self._mask_values, shapes))
        mask = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        if not size:
            return mask
        training, flat, first, begin = self._training, mask.numpy(), 0, 0
        flat.fill(0)
        for index, (shape, end) in enumerate(zip(shapes, steps.ends, strict=True)):
            draw = self._hparams.dropout, training.seed, chunk.first + index, int(chunk.counts[index])
            row, time = steps.row[begin:end], steps.time[begin:end]
            stays = factors(*draw, self._largest.times, self._width)[:, row, time] != 0
            values = self._mask_values(shape)
            part, places = flat[first : first + values].reshape(-1, self._width), shape.times * shape.rows
            part[time * shape.rows + row], part[places : places + len(row)] = stays
            first, begin = first + values, end
        return mask

    def _mask_values(self, shape: Shape) -> int:
        return (shape.times * shape.rows + shape.positions) * self._width

    def _stacked(self, values: Params | None, units: int) -> Params:
        """Return a moment in the shapes of the model's weights; 0 if it has no values yet."""
        stacked = self._model.stack(representative(self._like).dtype)
        for name, value in widened(values, units).items() if values else ():
            stacked[name].copy_(value)
        return stacked

    def _own(self, stacked: Params) -> Params:
        """Return a copy on the CPU, in the shapes of a state."""
        own = narrowed({name: value[0] for name, value in stacked.items()}, self._like)
        return {name: value.to("cpu", copy=True) for name, value in own.items()}


def _rule(hparams: CentralHParams) -> Rule:
    optimizer = optimizer_named(configured(hparams, "optimizer"))
    if optimizer is MOMENTUM and not hparams.momentum:
        optimizer = SGD  # torch then has no buffer
    return Rule(optimizer, hparams.momentum, decay=hparams.weight_decay)


def _by_token(steps: Steps) -> Steps:
    """Return the steps with positions of the same input next to each other, as `SpreadKernels` requires."""
    # Positions make the keys unique, so a stable sort, which is slower, is not needed.
    places = np.arange(len(steps.inputs))
    order = np.argsort((steps.step * (int(steps.inputs.max(initial=0)) + 1) + steps.inputs) * len(places) + places)
    sorted_ = {name: getattr(steps, name)[order] for name in ("inputs", "targets", "step", "time", "row")}
    return replace(steps, **sorted_)
