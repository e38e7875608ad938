"""Central training as a sequence of steps, each a function of (seed, step) and the state before it, and its engines."""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flsim.base.errors import Diverged, InputError, at_least_one
from flsim.base.extensions import configured, is_custom
from flsim.base.progress import progress, say
from flsim.data.records import Batch, Layout, Records, RecordsByRound, batch
from flsim.models import language_model
from flsim.models.architectures import CIFGLanguageModel, build, class_of, restore, with_low_precision
from flsim.privacy.ledger import Entry, PrivacyHParams
from flsim.training import update
from flsim.training.central.hparams import CentralHParams, Order, factors, poisson_lot, positions_at, private_step
from flsim.training.cohort.engine import Graphs, kernels_for, products
from flsim.training.cohort.gradient import PackedBatch, packed_batches, packed_model
from flsim.training.cohort.kernels import Kernels, UpdateRule, products_for
from flsim.training.cohort.packing import (
    EXACT,
    SCALARS,
    PackedGroup,
    Parts,
    Shape,
    Steps,
    lay_out,
    narrowed,
    pack,
    units_of,
    widened,
    width_of,
)
from flsim.training.cohort.stacked_model import Dropped, StackedModel, widened_for
from flsim.training.optimizers import BETAS, MOMENTUM, SGD, optimizer_named, refuse_low_precision, slots_of

# The settings, records and first state of central training, and the interface of its engines.


@dataclass(frozen=True)
class Log:
    loss: float = 0.0  # summed cross-entropy in nats, before each step
    tokens: int = 0  # number of positions in `loss`
    records: int = 0  # number of records

    def merge(self, other: "Log") -> "Log":
        return Log(self.loss + other.loss, self.tokens + other.tokens, self.records + other.records)


def init(vocabulary_size: int, hparams: language_model.ModelSettings, seed: int) -> update.State:
    model = build(vocabulary_size, hparams).initialize(seed)
    return update.State(0, {name: value.detach() for name, value in model.trainable.items()})


def load_moments(optimizer: torch.optim.Optimizer, parameters: language_model.Params, moments: update.Moments) -> None:
    """Set an optimizer's state to copies of the moments, on the device of each parameter."""
    for name, parameter in parameters.items():
        optimizer.state[parameter] = {
            # counts of steps, which Adam and RMSProp store, remain on the CPU
            slot: value.to(parameter.device, copy=True) if (value := values[name]).dim() else value.clone()
            for slot, values in moments.items()
        }


def moments_of(optimizer: torch.optim.Optimizer, parameters: language_model.Params) -> update.Moments:
    """Return a copy of an optimizer's state, on the CPU."""
    states = {name: optimizer.state[parameter] for name, parameter in parameters.items()}
    return update.transposed(
        {name: {slot: value.cpu().clone() for slot, value in of.items()} for name, of in states.items()}
    )


EngineName = Literal["fused", "autograd"]


@dataclass(frozen=True)
class Chunk:
    """The records that consecutive steps read."""

    first: int  # the first of the steps, from 0
    records: Records  # the records of all steps, one step after another
    counts: NDArray[np.int64]  # int64 [steps], number of records of each step; under DP-SGD it can be 0

    def __len__(self) -> int:
        return len(self.counts)

    def positions(self, layout: Layout) -> Steps:
        step = np.repeat(np.arange(len(self)), self.counts)
        return lay_out(self.records, layout, np.arange(len(self.records)), step, len(self))


class CentralEngine(Protocol):
    """An engine with parameters and an optimizer, which trains the parameters in place."""

    def pack(self, chunk: Chunk) -> Any:
        """Return the argument of `train`; can run in another thread while an earlier chunk trains."""

    def train(self, packed: Any) -> tuple[Sequence[float], Sequence[int]]:
        """Train; return each step's summed cross-entropy (nats) before the step, and its number of positions."""

    def params(self) -> language_model.Params:
        """Return a copy of the parameters, on the CPU."""

    def moments(self) -> update.Moments:
        """Return a copy of the optimizer's state, on the CPU; see `State.moments`."""


@dataclass(frozen=True)
class CentralTask:
    """The data and settings of central training, without the state; InputError if DP-SGD does not support them.

    Batches, lots, dropout and noise are functions of (`seed`, step). `order` "iid" permutes all records in each epoch;
    "sequence" uses the order of users. Mechanisms "clip" and "dp" of `privacy` are DP-SGD, with records instead of
    users, and the gradients of `physical_batch` records in memory at a time. A schedule ends at `steps`; None for the
    number that `hparams.steps_over` returns. `model` None is a CIFG with the sizes of the tensors in the state.
    """

    records: RecordsByRound
    hparams: CentralHParams
    seed: int
    order: Order = "iid"
    privacy: PrivacyHParams = field(default_factory=PrivacyHParams)
    steps: int | None = None
    device: str = "cpu"
    engine: EngineName = "fused"
    physical_batch: int = 8
    model: language_model.ModelSettings | None = None

    def __post_init__(self) -> None:
        at_least_one(physical_batch=self.physical_batch)
        if not self.records.records:
            raise InputError("there are no training records; import a corpus whose train split has users")
        slots_of(
            configured(self.hparams, "optimizer")
        )  # a custom optimizer is tried, because its state must fit in checkpoints
        if self.hparams.dropout and not issubclass(class_of(self.architecture), language_model.NextWordModel):
            raise InputError(
                f"training.dropout needs a NextWordModel, but {self.architecture} is not one; set dropout to 0"
            )
        if self.privacy.mechanism == "none":
            return
        if self.order == "sequence":
            raise InputError('order "sequence" has no privacy accounting; with clip or noise use order "iid"')
        if self.privacy.target_quantile is not None:
            raise InputError("target_quantile adapts the clip of users' updates; central training has a fixed clip")
        if self.privacy.noise != "independent":
            raise InputError("privacy.noise is for users' updates; remove it, or train federated")
        if self.model is not None and (is_custom(self.architecture) or self.model.lora):
            layout = self.records.layout
            if update.draws(build(layout.vocabulary_size, self.model), torch.tensor([[layout.bos, layout.first_word]])):
                raise InputError(
                    f"{self.architecture}: DP-SGD does not support random numbers in training, e.g. dropout; set "
                    "its probabilities to 0"
                )
        for name in ("gradient_clip", "dropout"):
            if getattr(self.hparams, name):
                raise InputError(f"{name} is not for DP-SGD, which clips each record's gradient; remove it")
        poisson_lot(0, self.records.records, self.hparams.batch_size, self.seed)

    @property
    def architecture(self) -> str:
        return "cifg" if self.model is None else self.model.architecture

    @property
    def capabilities(self) -> language_model.Capabilities:
        """Return the capabilities of the model; this executes the file of a custom model."""
        return class_of(self.architecture).capabilities

    def model_with(self, params: language_model.Params) -> language_model.TrainableModel:
        vocabulary_size = self.records.layout.vocabulary_size
        model = restore(params, self.model, vocabulary_size) if self.model else CIFGLanguageModel.from_params(params)
        return model.to(self.device)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return self.hparams.rate(step, self.steps or self.hparams.steps_over(self.records.records))

    def chunk(self, first: int, end: int) -> Chunk:
        """Return the records that the steps from `first` to `end` - 1 read; in a step, those of pseudo-users last."""
        size, records = self.hparams.batch_size, self.records.records
        if self.privacy.mechanism == "none":
            chosen = [positions_at(step, records, size, self.order, self.seed) for step in range(first, end)]
        else:
            chosen = [poisson_lot(step, records, size, self.seed) for step in range(first, end)]
        for index, step in enumerate(range(first, end)):
            if len(users := self.records.extra.users_in(step)):
                chosen[index] = np.concatenate([chosen[index], records + self.records.extra.records_of(users)])
        sources = [self.records.at(step) for step in range(first, end)]
        changes = [step for step, (old, new) in enumerate(pairwise(sources), start=1) if old is not new]
        parts = [
            sources[begin].records_at(np.concatenate(chosen[begin:until]))
            for begin, until in pairwise([0, *changes, len(chosen)])
        ]
        read = Records.joined(parts) if changes else parts[0]
        return Chunk(first, read, np.array([len(positions) for positions in chosen]))

    @property
    def largest_batch(self) -> int:
        return self.hparams.batch_size + self.records.extra.most_records

    def released_by(self, steps: int) -> Entry:
        """Return the ledger's entry for this many steps, also without noise: an empty ledger would mean no release."""
        records, size = self.records.records, self.hparams.batch_size
        if self.privacy.mechanism == "none":
            return Entry("fixed-size", records, min(size, records), noise_multiplier=0.0, rounds=steps)
        return Entry("poisson", records, size, self.privacy.noise_multiplier, rounds=steps)


def refuse_precision(training: CentralTask) -> None:
    """Raise InputError if model, engine or device support only float32, and the settings have another precision."""
    precision = training.hparams.precision
    if precision == "float32":
        return
    able = training.capabilities
    if not (able.low_precision and able.stacked and able.written_out):
        raise InputError(
            f'architecture "{training.architecture}" trains in float32; training.precision "{precision}" needs '
            f"{with_low_precision()}"
        )
    if training.engine == "autograd" or training.privacy.mechanism != "none":
        raise InputError(
            f'training.precision "{precision}" needs engine "fused" without clip or noise; set it to "float32"'
        )
    if training.records.layout.prompts:
        raise InputError(f'training.precision "{precision}": the corpus has prompts; set it to "float32"')
    refuse_low_precision(configured(training.hparams, "optimizer"), precision)
    if precision == "tf32" and training.device == "cpu":
        raise InputError('training.precision "tf32" needs an NVIDIA GPU; set system.device = "cuda", or "float32"')


# The engines of central training on a CPU, `autograd` and `fused`, and the choice of the engine of a task.

Batches = tuple[int, list[Batch]]


class AutogradEngine:
    """Plain PyTorch with torch's optimizers; a `flsim.training.central.training.CentralEngine`."""

    def __init__(self, training: CentralTask, state: update.State) -> None:
        self._training, self._layout = training, training.records.layout
        self._model = training.model_with(state.params)
        self._named = self._model.trainable
        self._optimizer = training.hparams.optimizer_over(self._named.values())
        load_moments(self._optimizer, self._params, state.moments)

    @property
    def _params(self) -> language_model.Params:
        return dict(self._named)

    def pack(self, chunk: Chunk) -> Batches:
        places = np.split(np.arange(len(chunk.records)), np.cumsum(chunk.counts)[:-1])
        return chunk.first, [batch(chunk.records, chosen, self._layout) for chosen in places]

    def train(self, packed: Batches) -> tuple[Sequence[float], Sequence[int]]:
        first, batches = packed
        done = []
        for step, step_batch in enumerate(batches, start=first):
            with update.training_mode(self._model, self._training.seed, step):
                done.append(self._step(step, step_batch))
        return [loss for loss, _ in done], [tokens for _, tokens in done]

    def params(self) -> language_model.Params:
        return {name: value.detach().cpu().clone() for name, value in self._named.items()}

    def moments(self) -> update.Moments:
        return moments_of(self._optimizer, self._params)

    def _step(self, step: int, read: Batch) -> tuple[float, int]:
        """Take one step in place; return the batch's summed cross-entropy (nats) before it and its positions."""
        training, hparams = self._training, self._training.hparams
        inputs, targets = (torch.from_numpy(part).to(training.device) for part in (read.inputs, read.targets))
        for group in self._optimizer.param_groups:
            group["lr"] = training.rate(step)
        if training.privacy.clip is not None:
            return private_step(
                self._model,
                self._optimizer,
                inputs,
                targets,
                clip=training.privacy.clip,
                noise_multiplier=training.privacy.noise_multiplier,
                expected=hparams.batch_size,
                seed=training.seed,
                step=step,
                physical_batch=training.physical_batch,
            )
        loss, tokens = language_model.loss_sum(
            self._model, inputs, targets, dropout_mask=self._dropout_mask(step, read)
        )
        gradients = torch.autograd.grad(loss / tokens, list(self._named.values()))
        update.take_step(self._optimizer, self._named.values(), gradients, hparams.gradient_clip)
        return loss.item(), tokens

    def _dropout_mask(self, step: int, read: Batch) -> Tensor | None:
        """Return dropout's factors of a batch, [2, B, T, D]; None without dropout."""
        training = self._training
        if not training.hparams.dropout:
            return None
        rows, times = read.inputs.shape
        width, like = self._model.hparams.embedding, language_model.representative(self._named)
        masks = factors(training.hparams.dropout, training.seed, step, rows, self._layout.record_words, width)
        longest_first = np.argsort(-(read.targets != self._layout.pad).sum(1), kind="stable")
        rank = np.empty(rows, np.int64)
        rank[longest_first] = np.arange(rows)
        return torch.from_numpy(masks[:, rank, :times]).to(like)


class PackedEngine:
    """The written-out gradient with torch's optimizers; a `flsim.training.central.training.CentralEngine`."""

    def __init__(self, training: CentralTask, state: update.State) -> None:
        self._training = training
        self._model = packed_model(state.params, products_for(training.hparams.precision, state.params))
        self._model.load(state.params)
        self._optimizer: torch.optim.Optimizer | None = None
        # an unused optimizer would load the compiler of torch, which takes two seconds
        if not training.hparams.is_plain:
            self._optimizer = training.hparams.optimizer_over(self._model.weights.values())
            load_moments(self._optimizer, self._model.weights, state.moments)

    def pack(self, chunk: Chunk) -> tuple[int, list[PackedBatch]]:
        steps = chunk.positions(self._training.records.layout)
        return chunk.first, self._with_dropout(chunk, steps, list(packed_batches(steps)))

    def train(self, packed: tuple[int, list[PackedBatch]]) -> tuple[Sequence[float], Sequence[int]]:
        first, batches = packed
        losses = [self._step(step, batch) for step, batch in enumerate(batches, start=first)]
        return losses, [len(batch.inputs) for batch in batches]

    def params(self) -> language_model.Params:
        return {name: value.clone() for name, value in self._model.weights.items()}

    def moments(self) -> update.Moments:
        return {} if self._optimizer is None else moments_of(self._optimizer, self._model.weights)

    def _step(self, step: int, batch: PackedBatch) -> float:
        training = self._training
        if self._optimizer is None:
            return self._model.descend(batch, training.rate(step))
        loss, gradient = self._model.gradient(batch)
        for group in self._optimizer.param_groups:
            group["lr"] = training.rate(step)
        gradients = list(gradient.values())
        update.take_step(self._optimizer, self._model.weights.values(), gradients, training.hparams.gradient_clip)
        return loss

    def _with_dropout(self, chunk: Chunk, steps: Steps, batches: list[PackedBatch]) -> list[PackedBatch]:
        training, dropout = self._training, self._training.hparams.dropout
        if not dropout:
            return batches
        times, width = training.records.layout.record_words, self._model.width
        like = language_model.representative(self._model.weights)
        with_factors, first = [], 0
        for index, (packed, end, rows) in enumerate(zip(batches, steps.ends, chunk.counts, strict=True)):
            masks = factors(dropout, training.seed, chunk.first + index, int(rows), times, width)
            mask = torch.from_numpy(masks[:, steps.row[first:end], steps.time[first:end]]).to(like)
            with_factors.append(replace(packed, dropout_mask=(mask[0], mask[1])))
            first = end
        return with_factors


def engine_of(training: CentralTask, state: update.State) -> CentralEngine:
    """Return the engine of the settings, with the state; InputError if it does not support device or precision.

    Engine "autograd" is plain PyTorch with torch's optimizers, the reference for the other engines. It also trains
    DP-SGD, which needs each record's gradient, and models that declare no written-out gradient. Engine "fused" is the
    written-out gradient: on a CPU without padding, and on other devices as one user of the cohort engine.
    """
    refuse_precision(training)
    able = training.capabilities
    needs_autograd = training.privacy.mechanism != "none" or training.records.layout.prompts or not able.written_out
    if training.engine == "autograd" or needs_autograd:
        return AutogradEngine(training, state)
    if training.device == "cpu":
        return PackedEngine(training, state)
    if not able.stacked:
        return AutogradEngine(training, state)
    if optimizer_named(configured(training.hparams, "optimizer")).direction is None:
        say(f'optimizer "{training.hparams.optimizer}" has no kernel; engine "autograd" is used instead')
        return AutogradEngine(training, state)

    return StackedEngine(training, state)


# The `fused` engine on a GPU, and for bfloat16: central training as one user of the cohort engine, whose weights stay.
#
# A chunk's steps, learning rates and Adam's corrections are one array, so one CUDA graph fits all steps of its shape.

POSITIONS = 2  # for each record of a batch; CUDA graphs are for multiples of this number of positions


class PackedChunk(NamedTuple):
    """Steps as those of one user, their numbers of positions, and dropout's uint8 values, one step after another."""

    group: PackedGroup
    tokens: list[int]
    dropout_mask: Tensor


class StackedEngine:
    """Training by stacked products of a single user; a `flsim.training.central.training.CentralEngine`.

    For `kernels`, `graphs` and errors, see `flsim.training.cohort.engine.StackedTrainer`.
    """

    def __init__(
        self, training: CentralTask, state: update.State, kernels: Kernels | None = None, graphs: bool | None = None
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

    def params(self) -> language_model.Params:
        return self._own(self._model.weights)

    def moments(self) -> update.Moments:
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

    def _stacked(self, values: language_model.Params | None, units: int) -> language_model.Params:
        """Return a moment in the shapes of the model's weights; 0 if it has no values yet."""
        stacked = self._model.stack(language_model.representative(self._like).dtype)
        for name, value in widened(values, units).items() if values else ():
            stacked[name].copy_(value)
        return stacked

    def _own(self, stacked: language_model.Params) -> language_model.Params:
        """Return a copy on the CPU, in the shapes of a state."""
        own = narrowed({name: value[0] for name, value in stacked.items()}, self._like)
        return {name: value.to("cpu", copy=True) for name, value in own.items()}


def _rule(hparams: CentralHParams) -> UpdateRule:
    optimizer = optimizer_named(configured(hparams, "optimizer"))
    if optimizer is MOMENTUM and not hparams.momentum:
        optimizer = SGD  # torch then has no buffer
    return UpdateRule(optimizer, hparams.momentum, decay=hparams.weight_decay)


def _by_token(steps: Steps) -> Steps:
    """Return the steps with positions of the same input next to each other, as `SpreadKernels` requires."""
    # Positions make the keys unique, so a stable sort, which is slower, is not needed.
    places = np.arange(len(steps.inputs))
    order = np.argsort((steps.step * (int(steps.inputs.max(initial=0)) + 1) + steps.inputs) * len(places) + places)
    sorted_ = {name: getattr(steps, name)[order] for name in ("inputs", "targets", "step", "time", "row")}
    return replace(steps, **sorted_)


# The loop of steps.

CHUNK = 2_048  # number of records to read together
NOT_FINITE = "{} not finite; most likely learning_rate is too high"


@dataclass(frozen=True)
class CentralTraining(CentralTask):
    """The settings of central training and the loop of steps; a `flsim.training.update.Training`."""

    def first_state(self) -> update.State:
        """Return the state before the first step; raise InputError if the settings name no model."""
        if self.model is None:
            raise InputError("the settings of central training have no model; pass `model`")
        return init(self.records.layout.vocabulary_size, self.model, self.seed)

    def states(
        self, state: update.State, until: int, is_wanted: Callable[[int], bool] = lambda _: True
    ) -> Iterator[update.State]:
        """Train to step `until`; yield the last state, and each state whose step satisfies `is_wanted`."""
        for _, _, reached in train_chunks(state, self, until, is_wanted):
            if reached is not None:
                yield reached


def train_central(
    state: update.State,
    training: CentralTraining,
    until_step: int,
    stop_at: Callable[[int], bool] = lambda _: False,
    title: str = "training",
    engine: CentralEngine | None = None,
) -> Iterator[tuple[update.State, Log]]:
    """Train, and yield states on the CPU, with the log since the previous one; leaving the loop ends training.

    The state after step `until_step` is always yielded, others if `stop_at` is true for their step. Raises Diverged.
    """
    log = Log()
    with (
        progress(title, until_step, state.round, unit="steps") as advance,
        closing(train_chunks(state, training, until_step, stop_at, engine)) as chunks,
    ):
        for step, new, reached in chunks:
            log = log.merge(new)
            advance(step, f"loss {new.loss / max(new.tokens, 1):.2f}")
            if reached is not None:
                yield reached, log
                log = Log()


def train_chunks(
    state: update.State,
    training: CentralTraining,
    until_step: int,
    stop_at: Callable[[int], bool] = lambda _: False,
    engine: CentralEngine | None = None,
    ends_early: Callable[[], bool] = lambda: False,
) -> Generator[tuple[int, Log, update.State | None]]:
    """Train like `train_central`, without display, and also yield between states: step, log, and None or the state.

    `stop_at` is a function of the number of steps only. `ends_early` is called once after each chunk of steps, while a
    thread packs the next records. Diverged, with the step, if values are not finite, or a loss is implausibly large.
    """
    if state.round >= until_step:
        return
    engine, ledger = engine or engine_of(training, state), state.ledger
    with closing(update.prefetched(_packed(engine, training, state.round, until_step, stop_at))) as chunks:
        for first, counts, packed in chunks:
            losses, tokens = engine.train(packed)
            _refuse_divergence(first, losses, tokens, training.records.layout.vocabulary_size)
            step, log = first + len(counts), Log(sum(losses), sum(tokens), int(counts.sum()))
            ledger = ledger.record(training.released_by(len(counts)))
            reached, is_end = None, ends_early() or step == until_step
            if is_end or stop_at(step):
                params = engine.params()
                if not all(bool(value.isfinite().all()) for value in params.values()):
                    raise Diverged(f"step {step}: {NOT_FINITE.format('values that are')}")
                reached = replace(state, round=step, params=params, moments=engine.moments(), ledger=ledger)
            yield step, log, reached
            if is_end:
                return


def _packed(
    engine: CentralEngine, training: CentralTask, first: int, until_step: int, stop_at: Callable[[int], bool]
) -> Iterator[tuple[int, Any, Any]]:
    """Yield chunks as (first step, records of each step, packed chunk); a chunk ends when a state is yielded."""
    at_once = max(1, CHUNK // training.hparams.batch_size)
    while first < until_step:
        end = first + 1
        while end < min(first + at_once, until_step) and not stop_at(end):
            end += 1
        chunk = training.chunk(first, end)
        yield first, chunk.counts, engine.pack(chunk)
        first = end


def _refuse_divergence(first: int, losses: Any, tokens: Any, vocabulary_size: int) -> None:
    for step, (loss, count) in enumerate(zip(losses, tokens, strict=True), start=first + 1):
        if not math.isfinite(loss):
            raise Diverged(f"step {step}: {NOT_FINITE.format('a loss that is')}")
        update.refuse_absurd_loss(f"step {step}", loss, count, vocabulary_size, "learning_rate")
