"""The `cohort` engine: users of similar size form micro-cohorts, which train together and sum their updates.

It equals `flsim.algorithms.fedavg.train_users` up to rounding. On a CPU, users train one after another, because the
matrices of one fill the caches, unless a step is too little work (`users_on_cpu`). On other devices, users are stacked.
"""

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from flsim.base.errors import InputError, RunFailed, at_least_one, first_line, is_out_of_memory
from flsim.base.extensions import configured
from flsim.base.progress import say
from flsim.base.rng import stream
from flsim.data.records import Batch, Layout, Records, Users
from flsim.models.hf import HuggingFaceModel
from flsim.models.language_model import Params, representative
from flsim.training.cohort import packing
from flsim.training.cohort.gradient import packed_batches, packed_model
from flsim.training.cohort.kernels import Kernels, PositionKernels, UpdateRule, products_for
from flsim.training.cohort.stacked_model import PositionModel, StackedModel, widened_for
from flsim.training.optimizers import BETAS, optimizer_named
from flsim.training.update import (
    Counts,
    LocalHParams,
    Precision,
    UpdateSum,
    global_norm,
    local_batches,
    prefetched,
    take_step,
)

# The parts of stacked training that depend on the device: kernels, the precision of products, and CUDA graphs.


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

    return packing.width_of(like) <= WIDEST[precision]


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
        self._graphs: dict[packing.Shape, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.is_on else None

    def run(self, step: Step, shape: packing.Shape, reads: Sequence[Tensor], data: Sequence[Tensor]) -> None:
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

    def _capture(self, step: Step, shape: packing.Shape, reads: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
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


# Local training of many users at once: their weights are stacked, and every product covers all users.
#
# On an NVIDIA GPU with Triton each shape of step is one CUDA graph; otherwise it is plain PyTorch (`kernels`).

GRAPHS = packing.Shape(users=16, times=4, rows=16, positions=32)  # coarse, for few different shapes
WAVES = 2  # users for each multiprocessor of a GPU
CPU_USERS = 8
SLACK = 0.9  # share of this process' memory; the rest is for libraries


class StackedTrainer:
    """A trainer of stacked users from the global parameters; a `flsim.training.cohort.engine.Trainer`.

    `like` has the names, shapes, dtype (float64: not with Triton) and device of parameters; at most `users` train
    together. Defaults: `kernels` of Triton on an NVIDIA GPU if available, otherwise of PyTorch; `graphs`, CUDA's, with
    Triton's. torch.OutOfMemoryError (RuntimeError on a CPU) if memory is too small, also in `train`.
    """

    def __init__(
        self,
        like: Params,
        hparams: LocalHParams,
        layout: Layout,
        users: int,
        kernels: Kernels | None = None,
        graphs: bool | None = None,
    ) -> None:
        self._hparams, self._like, self._layout = hparams, like, layout
        self._device, self._dtype = representative(like).device, representative(like).dtype
        self._kernels = kernels or kernels_for(like, hparams.precision)
        self._graphs = Graphs(self._device, self._kernels, graphs)
        self._rounding = GRAPHS if self._graphs.is_on else packing.EXACT
        rows = hparams.batch_size
        self._largest = packing.Shape(users, layout.record_words, rows, layout.record_words * rows)

        wide, self._rule = widened_for(self._kernels, like), _rule(hparams)
        self._start = {name: value.detach().clone() for name, value in wide.items()}
        model = _model_of(self._kernels)
        self._model = model(wide, users, hparams.precision, self._kernels, holds_gradients=not hparams.is_plain)
        self._moments = [self._model.stack(self._dtype) for _ in self._rule.optimizer.slots]
        self._losses = torch.zeros(users, dtype=torch.float64, device=self._device)
        self._given_rate = hparams.learning_rate
        self._rate = torch.tensor([hparams.learning_rate], dtype=torch.float64, device=self._device)
        self._betas = torch.tensor(BETAS, dtype=torch.float64, device=self._device)
        self._order = torch.arange(0)

    @staticmethod
    def users_that_fit(like: Params, hparams: LocalHParams, layout: Layout, memory_share: float = 1.0) -> int:
        """Return the number of users that fill the device and fit in the share of its memory, at least 1.

        It is independent of other programs, because a restart must not change the groups, and with them the last bits.
        """
        device = representative(like).device
        if device.type != "cuda":
            return CPU_USERS
        fixed, per_user = StackedTrainer.memory(like, hparams, layout)
        properties = torch.cuda.get_device_properties(device)
        fitting = int((properties.total_memory * memory_share * SLACK - fixed) // per_user)
        return max(1, min(fitting, WAVES * properties.multi_processor_count))

    @staticmethod
    def memory(like: Params, hparams: LocalHParams, layout: Layout, kernels: Kernels | None = None) -> tuple[int, int]:
        """Return bytes of the device's memory: the fixed part, and that of a user whose records are longest.

        Caller and trainer each hold first parameters of a round, and a sum of updates in float64, in addition to
        `like`.
        """
        kernels = kernels or kernels_for(like, hparams.precision)
        wide, rows = widened_for(kernels, like), hparams.examples(hparams.batch_size)
        sizes = _model_of(kernels).sizes_of(wide, hparams.precision)
        copies = [sizes.master] * (1 + len(_rule(hparams).optimizer.slots))
        copies += [sizes.low] * ((sizes.low != sizes.master) + (not hparams.is_plain))
        values = sum(value.numel() for value in wide.values())
        longest = packing.Shape(1, layout.record_words, rows, layout.record_words * rows)
        per_user = values * sum(dtype.itemsize for dtype in copies) + sizes.bytes(longest)
        return values * (3 * sizes.master.itemsize + 2 * torch.float64.itemsize), per_user

    def pack(self, group: Sequence[packing.Participant]) -> packing.PackedGroup:
        on_gpu = self._device.type == "cuda"
        return packing.pack_users(group, self._layout, self._hparams, self._rounding, self._largest, pin=on_gpu)

    @torch.no_grad()
    def train(
        self, start: Params, group: packing.PackedGroup, rate: float | None = None
    ) -> tuple[list[float], list[int]]:
        self._order = torch.from_numpy(group.order)
        for name, value in packing.widened(start, packing.units_of(self._start)).items():
            self._start[name].copy_(value)
        self._model.load(self._start)
        self._given_rate = self._hparams.learning_rate if rate is None else rate
        self._rate.fill_(self._given_rate)
        for values in (self._losses, *(value for moments in self._moments for value in moments.values())):
            values.zero_()
        buffers = self._model.buffers
        with products(self._hparams.precision, self._device):
            if buffers.reserve(group.shapes):
                self._graphs.forget()
            data = group.data.to(self._device, non_blocking=True)
            first = 0
            for shape in group.shapes:
                part = data[first : first + shape.values]
                self._graphs.run(self._step, shape, (buffers.data(shape),), (part,))
                first += shape.values
        return self._as_given(self._losses[: len(group)].cpu()).tolist(), group.tokens

    @torch.no_grad()
    def norms(self) -> list[float]:
        with current(self._device):
            squares = self._model.squares(len(self._order), self._start, 1.0, {})
        return self._as_given(squares.sqrt().cpu()).tolist()

    @torch.no_grad()
    def add_updates(self, factors: Sequence[float], into: Params) -> None:
        own = torch.tensor(factors, dtype=torch.float64)[self._order].to(self._device)
        sums = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in self._start.items()}
        with current(self._device):
            for name, value in self._model.weights.items():
                self._kernels.add_updates(value[: len(own)], self._start[name], own, sums[name])
        for name, value in packing.narrowed(sums, self._like).items():
            into[name].add_(value)

    def _as_given(self, values: Tensor) -> Tensor:
        restored = torch.empty_like(values)
        restored[self._order] = values
        return restored

    def _step(self, shape: packing.Shape, data: Tensor) -> None:
        parts = shape.parts(data)
        if self._hparams.is_plain:
            # A CUDA graph stores numbers at capture, and reads tensors at each replay.
            is_tensor = self._graphs.is_on and self._hparams.schedule != "constant"
            losses = self._model.descend(shape, parts, self._rate if is_tensor else self._given_rate)
        else:
            losses = self._model.gradient(shape, parts)
            scalars = torch.cat((self._rate, 1 - self._betas**parts.number))
            clip = self._hparams.gradient_clip
            self._model.optimize(self._start, self._moments, parts.counts, scalars, self._rule, clip)
        self._losses[: shape.users] += losses.sum(1, dtype=torch.float64)


def _model_of(kernels: Kernels) -> Any:
    return PositionModel if isinstance(kernels, PositionKernels) else StackedModel


def _rule(hparams: LocalHParams) -> UpdateRule:
    return UpdateRule(optimizer_named(configured(hparams, "optimizer")), hparams.momentum, hparams.proximal)


# LoRA adapters of many users at once on one frozen base: users are blocks of the batch.
#
# A layer computes base(x) + s B_k A_k x for the rows of user k (`flsim.models.language_model.LoraBlocks`). The loss is
# the sum of the users' losses, so plain autograd gives each user's gradient. Its oracle is
# `flsim.algorithms.fedavg.train_users`.


@dataclass(frozen=True)
class Block:
    """A step of the first users of a group, who are those that have the step."""

    inputs: Tensor  # int64 [users * rows, T]; PAD fills up users and rows
    places: Tensor  # int64 [n], the positions of `inputs`, flat, that have targets
    targets: Tensor  # int64 [n]
    counts: Tensor  # int64 [users], number of targets of each user


@dataclass(frozen=True)
class UserSteps:
    """The steps of users, who are in the order of their numbers of steps, most first."""

    blocks: list[Block]
    order: Tensor  # int64 [users], the place of each user in the argument of `BlockTrainer.pack`


class BlockTrainer:
    """A trainer of the adapters of several users at once; a `flsim.training.cohort.engine.Trainer`.

    The layers of `model`, which has adapters and no dropout, are replaced, so other code must not use it. `like` has
    its trained parameters, for names, shapes, dtype and device; at most `users` train at once, in float32.
    """

    def __init__(
        self, model: HuggingFaceModel, like: Params, hparams: LocalHParams, layout: Layout, users: int
    ) -> None:
        self._hparams, self._layout, self._model = hparams, layout, model
        self._optimizer = optimizer_named(configured(hparams, "optimizer"))
        self._layers = model.with_blocks()
        self._start: Params = {}
        self._weights = {name: value.new_zeros(users, *value.shape) for name, value in like.items()}
        self._order = torch.arange(0)

    def pack(self, group: Sequence[packing.Participant]) -> UserSteps:
        steps = [list(local_batches(records, self._layout, self._hparams, rng)) for records, rng in group]
        order = sorted(range(len(steps)), key=lambda user: -len(steps[user]))
        most = max(map(len, steps), default=0)
        batches = [[steps[user][at] for user in order if at < len(steps[user])] for at in range(most)]
        return UserSteps([_block(step, self._device) for step in batches], torch.tensor(order, dtype=torch.int64))

    def train(self, start: Params, packed: UserSteps, rate: float | None = None) -> tuple[list[float], list[int]]:
        rate = self._hparams.learning_rate if rate is None else rate
        self._start, self._order = start, packed.order
        for name, value in self._weights.items():
            value[: len(packed.order)] = start[name]
        weights = self._weights.items()
        moments = [{name: torch.zeros_like(value) for name, value in weights} for _ in self._optimizer.slots]
        losses = torch.zeros(len(packed.order), dtype=torch.float64, device=self._device)
        tokens = torch.zeros(len(packed.order), dtype=torch.int64, device=self._device)
        for number, block in enumerate(packed.blocks, start=1):
            users = len(block.counts)
            losses[:users] += self._step(block, rate, number, moments)
            tokens[:users] += block.counts
        return self._as_given(losses).tolist(), self._as_given(tokens).tolist()

    @torch.no_grad()
    def norms(self) -> list[float]:
        squares = sum(update.square().flatten(1).sum(1) for update in self._updates().values())
        return self._as_given(torch.as_tensor(squares).sqrt()).tolist()

    @torch.no_grad()
    def add_updates(self, factors: Sequence[float], into: Params) -> None:
        by_user = torch.tensor(factors, dtype=torch.float64)[self._order].to(self._device)
        users = by_user.nonzero().flatten()  # an update of factor 0 may not be finite
        for name, update in self._updates().items():
            into[name].add_(torch.tensordot(by_user[users], update[users], 1))

    @property
    def _device(self) -> torch.device:
        return representative(self._weights).device

    def _updates(self) -> Params:
        """Return the users' updates, float64 [users, ...], in the group's order."""
        users = len(self._order)
        return {name: value[:users].double() - self._start[name] for name, value in self._weights.items()}

    def _step(self, block: Block, rate: float, number: int, moments: list[Params]) -> Tensor:
        """Take a step of the block's users in place; return their summed losses before it, in nats, float64 [users]."""
        users = len(block.counts)
        weights = {name: value[:users].detach().requires_grad_() for name, value in self._weights.items()}
        for layer in self._layers:
            layer.A, layer.B = weights.get(layer.name_of_a, layer.frozen_a), weights[layer.name_of_b]
        hidden, _ = self._model.hidden(block.inputs)
        logits = self._model.logits(hidden.flatten(0, 1)[block.places])
        nats = cross_entropy(logits, block.targets, reduction="none")
        share = (1 / block.counts.to(nats.dtype)).repeat_interleave(block.counts, output_size=len(nats))
        gradients = torch.autograd.grad((nats * share).sum(), list(weights.values()))
        with torch.no_grad():
            self._descend(weights, dict(zip(weights, gradients, strict=True)), rate, number, moments)
            by_position = nats.new_zeros(block.inputs.numel(), dtype=torch.float64)
            by_position[block.places] = nats.double()
            return by_position.view(users, -1).sum(1)

    def _descend(self, weights: Params, gradients: Params, rate: float, number: int, moments: list[Params]) -> None:
        """Add FedProx's term, bound each user's norm, and step as the optimizer does, in place of the weights."""
        hparams, users = self._hparams, len(next(iter(weights.values())))
        if hparams.proximal:
            gradients = {
                name: gradient + hparams.proximal * (weights[name] - self._start[name])
                for name, gradient in gradients.items()
            }
        if hparams.gradient_clip is not None:
            squares = torch.stack([value.flatten(1).square().sum(1) for value in gradients.values()]).sum(0)
            scale = (hparams.gradient_clip / squares.sqrt()).clamp(max=1)
            gradients = {name: value * scale[:, None, None] for name, value in gradients.items()}
        corrections = [torch.tensor(1 - beta**number, dtype=torch.float64, device=self._device) for beta in BETAS]
        direction = self._optimizer.direction
        if direction is None:
            raise ValueError(f"optimizer {hparams.optimizer!r} has no direction, which blocks need")
        for name, gradient in gradients.items():
            slots = [moment[name][:users] for moment in moments]
            step, new = direction(gradient, slots, corrections, hparams.momentum)
            for old, value in zip(slots, new, strict=True):
                old.copy_(value)
            self._weights[name][:users].sub_(step, alpha=rate)

    def _as_given(self, values: Tensor) -> Tensor:
        """Return values [users] in the order of the argument of `pack`, on the CPU."""
        restored = torch.empty_like(values, device="cpu")
        restored[self._order] = values.cpu()
        return restored


def _block(batches: Sequence[Batch], device: torch.device) -> Block:
    rows, times = (max(batch.inputs.shape[axis] for batch in batches) for axis in (0, 1))
    inputs, targets = (np.zeros((len(batches), rows, times), np.int64) for _ in range(2))
    for user, batch in enumerate(batches):
        place = (user, slice(len(batch.inputs)), slice(batch.inputs.shape[1]))
        inputs[place], targets[place] = batch.inputs, batch.targets
    places = np.flatnonzero(targets)
    arrays = (
        inputs.reshape(-1, times), places, targets.reshape(-1)[places], np.count_nonzero(targets, axis=(1, 2))
    )  # fmt: skip
    return Block(*(torch.from_numpy(array).to(device) for array in arrays))


# Local training on a CPU, one user at a time, with the written-out gradient of `gradient`.


class PackedTrainer:
    """A `Trainer` of one user after another on a CPU, in float32, float64 or "bf16", for parameters like `like`."""

    def __init__(self, like: Params, hparams: LocalHParams, layout: Layout) -> None:
        self._hparams, self._layout = hparams, layout
        self._model = packed_model(like, products_for(hparams.precision, like))
        self._start: Params = {}

    def pack(self, group: Sequence[packing.Participant]) -> list[packing.Steps]:
        return [packing.steps_of(records, self._layout, self._hparams, rng) for records, rng in group]

    @torch.no_grad()
    def train(
        self, start: Params, group: Sequence[packing.Steps], rate: float | None = None
    ) -> tuple[list[float], list[int]]:
        (steps,) = group
        self._start, hparams, loss = start, self._hparams, 0.0
        rate = hparams.learning_rate if rate is None else rate
        self._model.load(start)
        if hparams.is_plain:
            for batch in packed_batches(steps):
                loss += self._model.descend(batch, rate)
            return [loss], [len(steps.inputs)]
        weights = list(self._model.weights.values())
        optimizer = hparams.optimizer_over(weights, rate)
        for batch in packed_batches(steps):
            summed, gradient = self._model.gradient(batch)
            if hparams.proximal:
                for name, weight in self._model.weights.items():
                    gradient[name].add_(weight - start[name], alpha=hparams.proximal)
            take_step(optimizer, weights, list(gradient.values()), hparams.gradient_clip)
            loss += summed
        return [loss], [len(steps.inputs)]

    @torch.no_grad()
    def norms(self) -> list[float]:
        for name, value in self._model.weights.items():
            value.sub_(self._start[name])
        return [global_norm(self._model.weights)]

    @torch.no_grad()
    def add_updates(self, factors: Sequence[float], into: Params) -> None:
        (factor,) = factors
        if factor:
            for name, update in self._model.weights.items():
                into[name].add_(update, alpha=factor)


# The engine: micro-cohorts, and the choice of a trainer.

Member = tuple[int, Records]

# Measured: docs/benchmarks.md, "Small models".
SMALL_STEP = 600_000  # parameters times records of a step, up to which stacked users are faster
STACKED_ON_CPU = 16


class Trainer(Protocol):
    """A trainer of a micro-cohort; if memory runs out, the tensors that updates are added to do not change."""

    def pack(self, group: Sequence[packing.Participant]) -> Any:
        """Return the argument of `train`; can run in another thread while another group trains."""

    def train(self, start: Params, packed: Any, rate: float | None = None) -> tuple[Sequence[float], Sequence[int]]:
        """Train, by default at the settings' rate; return summed losses (nats) before steps, and positions, by user."""

    def norms(self) -> Sequence[float]:
        """Return the L2 norm of the complete update of each user, summed in float64."""

    def add_updates(self, factors: Sequence[float], into: Params) -> None:
        """Add every user's update times its factor to float64 tensors; users with factor 0 are omitted."""


class CohortEngine:
    """An engine that trains cohorts in micro-cohorts, and reuses its buffers for the next cohort.

    `like` has the names, shapes, dtype and device of parameters. `micro_cohort` users train at once; None chooses by
    the device's memory, of which this process can use `memory_share`. If memory runs out, the number is halved, and all
    users train again. A schedule of the learning rate needs the `rounds` of the run. `trainer` makes the trainer of at
    most a number of users, and needs `micro_cohort`. InputError if the device does not support the settings.
    """

    def __init__(
        self,
        like: Params,
        layout: Layout,
        hparams: LocalHParams,
        micro_cohort: int | None = None,
        memory_share: float = 1.0,
        rounds: int | None = None,
        trainer: Callable[[int], Trainer] | None = None,
    ) -> None:
        if micro_cohort is not None:
            at_least_one(micro_cohort=micro_cohort)
        self._make = trainer
        self._like, self._layout, self._hparams, self._rounds = like, layout, hparams, rounds
        self._device = representative(like).device
        if hparams.precision == "tf32" and self._device.type != "cuda":
            raise InputError('precision "tf32" needs an NVIDIA GPU, but this process has none; set "float32"')
        self.is_stacked = trainer is not None or is_stacked(like, micro_cohort)
        if self._device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(memory_share, self._device)
        self._at_once = micro_cohort or 1
        if self.is_stacked and micro_cohort is None:
            self._at_once = StackedTrainer.users_that_fit(like, hparams, layout, memory_share)
        self._trainer: Trainer | None = None

    @property
    def device_name(self) -> str:
        on_gpu = self._device.type == "cuda"
        return torch.cuda.get_device_name(self._device) if on_gpu else str(self._device)

    @property
    def micro_cohort(self) -> int:
        """Return the largest number of users that train together, which decreases when memory runs out."""
        return self._at_once

    @micro_cohort.setter
    def micro_cohort(self, users: int) -> None:
        if users != self._at_once:
            self._at_once, self._trainer = users, None  # buffers of the trainer have the old size

    def train(
        self, start: Params, users: Users, cohort: Iterable[int], seed: int, round_: int, clip: float | None = None
    ) -> UpdateSum:
        """Train users and return the sum of their updates, as `train_users`; RunFailed if one exceeds the memory."""
        try:
            start = {name: value.to(self._device) for name, value in start.items()}
            delta = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in start.items()}
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise self._too_little(error) from error
        # Largest first: users that train together have similar sizes, and memory runs out early or never.
        members = sorted(((user, users[user]) for user in cohort), key=lambda member: -len(member[1]))
        while True:
            try:
                counts = self._train_all(start, members, seed, round_, clip, delta)
                return UpdateSum({name: value.cpu() for name, value in delta.items()}, counts)
            except (MemoryError, RuntimeError) as error:  # Python's error, or torch's
                if not is_out_of_memory(error):
                    raise
                self._trainer = None
                if self._at_once == 1:
                    raise self._too_little(error) from error
                self._at_once //= 2
                say(f"{self._device}: out of memory; from now on, {self._at_once} users train together")
            # All users train again, so the sum equals that of an engine with the smaller size from the beginning.
            for value in delta.values():
                value.zero_()

    def _train_all(
        self, start: Params, members: Sequence[Member], seed: int, round_: int, clip: float | None, delta: Params
    ) -> Counts:
        # A separate function, so that no reference keeps the memory of a trainer that did not fit.
        trainer, rate = self._trainer or self._build(), self._hparams.rate(round_, self._rounds)
        groups = self._packed(trainer, members, seed, round_)
        counts = Counts()
        for group, packed in prefetched(groups) if self._device.type == "cuda" else groups:
            losses, tokens = trainer.train(start, packed, rate)
            factors = []
            for (_, records), loss, count, norm in zip(group, losses, tokens, trainer.norms(), strict=True):
                examples = self._hparams.examples(len(records))
                left_out = len(records) - examples
                user, factor = Counts.of_user(norm, examples, loss, count, clip=clip, left_out=left_out)
                counts += user
                factors.append(factor)
            trainer.add_updates(factors, delta)
        return counts

    def _packed(
        self, trainer: Trainer, members: Sequence[Member], seed: int, round_: int
    ) -> Iterator[tuple[Sequence[Member], Any]]:
        for first, end in pairwise(bounds(len(members), self._at_once)):
            group = members[first:end]
            participants = [
                packing.Participant(records, stream(seed, "local", round_, user)) for user, records in group
            ]
            yield group, trainer.pack(participants)

    def _build(self) -> Trainer:
        settings = self._like, self._hparams, self._layout
        if self._make is not None:
            self._trainer = self._make(self._at_once)
        elif self.is_stacked:
            self._trainer = StackedTrainer(*settings, self._at_once)
        else:
            self._trainer = PackedTrainer(*settings)
        return self._trainer

    def _too_little(self, error: Exception) -> RunFailed:
        return RunFailed(f"{self._device}: not enough memory to train one user ({first_line(error)})")


def is_stacked(like: Params, micro_cohort: int | None) -> bool:
    """Return whether users train stacked; otherwise they train one after another, as on a CPU."""
    return representative(like).device.type != "cpu" or (micro_cohort or 1) > 1


def users_on_cpu(like: Params, hparams: LocalHParams) -> int | None:
    """Return the fastest number of users to train together on a CPU, if more than one; otherwise, or on a GPU, None.

    It depends only on the model and the settings, so all processes and resumed runs have the same groups.
    """
    values = sum(value.numel() for value in like.values())
    is_small = values * hparams.batch_size <= SMALL_STEP and hparams.precision == "float32"
    return STACKED_ON_CPU if is_small and representative(like).device.type == "cpu" else None


def bounds(users: int, at_once: int) -> list[int]:
    """Return the bounds of the fewest groups of at most `at_once` users, whose sizes differ by at most 1.

    A small last group would leave most of a GPU idle: 625 users train as 208, 208 and 209, not as 264, 264 and 97.
    """
    groups = -(-users // at_once)
    return [users * group // groups for group in range(groups + 1)] if groups else []
