"""The written-out gradient of stacked users' models, and plain SGD with it; every product covers all users.

Shapes: u users, T times, B rows, N positions, D embedding, H units, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from flsim.models.language_model import Params
from flsim.training.cohort.kernels import Kernels, PositionKernels, Prediction, Target, UpdateRule
from flsim.training.cohort.packing import Parts, Shape, units_of, widened
from flsim.training.update import Precision

# The memory of a stacked step without weights, which is reused in each step.


class Activations(NamedTuple):
    """The activations of a step of u users, T times, B rows and N positions; r and c have a block before time 0."""

    read: Tensor  # [u, T B, D], embeddings of the inputs; `d_read` is their gradient
    d_read: Tensor
    gates: Tensor  # [u, T, B, 3H], and then their gradient
    outputs: Tensor  # [u, T + 1, B, D], r; `d_outputs` their gradient
    d_outputs: Tensor
    cells: Tensor  # [u, T + 1, B, H], c, in the dtype of the master weights
    hidden: Tensor  # [u, T, B, H], o tanh c
    chosen: Tensor  # [u, N, D], r at real positions; `d_chosen` their gradient
    d_chosen: Tensor
    logits: Tensor  # [u, N, V], and then their gradient
    losses: Tensor  # [u, N], in the dtype of the master weights


class PositionActivations(NamedTuple):
    """The activations of a step of u users and N positions, each user's in the order of time, then row."""

    read: Tensor  # [u, N, D], embeddings of the inputs; `d_read` their gradient
    d_read: Tensor
    gates: Tensor  # [u, N, 3H], and then their gradient
    before: Tensor  # [u, N, D], r of the previous time
    outputs: Tensor  # [u, N, D], r; `d_outputs` its gradient
    d_outputs: Tensor
    cells: Tensor  # [u, N, H], c, in the dtype of the master weights
    hidden: Tensor  # [u, N, H], o tanh c
    losses: Tensor  # [u, N], in the dtype of the master weights
    log_sums: Tensor  # [u, N], log-sum-exp of the logits, in the dtype of the master weights


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
    """Flat memory that grows to the largest step."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self._sizes, self._device = sizes, device
        self._flat: dict[str, Tensor] = {}

    def reserve(self, steps: Sequence[Shape]) -> bool:
        """Grow the memory to hold any of these steps, and return whether it moved; OutOfMemoryError if impossible."""
        moved = False
        for step in steps:
            shapes = dict(zip(self._sizes.fields, self._sizes.shapes(step), strict=True))
            for name, shape in {**shapes, "data": (step.values,)}.items():
                values = torch.Size(shape).numel()
                if name not in self._flat or len(self._flat[name]) < values:
                    moved = True
                    self._flat.pop(name, None)  # free the old memory before allocating
                    dtype = torch.int32 if name == "data" else self._sizes.dtype(name)
                    self._flat[name] = torch.zeros(values, dtype=dtype, device=self._device)
        return moved

    def data(self, step: Shape) -> Tensor:
        return self._flat["data"][: step.values]

    def views(self, step: Shape) -> tuple[Tensor, ...]:
        """Return the memory of a step's activations, in the order of `Sizes.fields`."""
        named = zip(self._sizes.fields, self._sizes.shapes(step), strict=True)
        return tuple(self._flat[name][: torch.Size(shape).numel()].view(shape) for name, shape in named)


class Dropped(NamedTuple):
    """Dropout of a step, 1 for kept values and 0 for others."""

    read: Tensor  # uint8 [u, T B, D], for the inputs of cells
    predicted: Tensor  # uint8 [u, N, D], for the inputs of the output layer
    factor: float  # multiplier of kept values


class StackedWeights:
    """The weights of models of the same sizes, with memory for a step, which grows to the largest step so far.

    `wide` has the names, shapes, dtype and device of parameters as `widened_for` returns them. `weights`, [u, ...], are
    0 at first; `low` has them in the dtype of products, or is the same tensors; `gradients`, [u, ...], are in that
    dtype, and empty unless it `holds_gradients`, which `gradient` needs and `descend` does not. `buffers` are the
    memory of activations.
    """

    sizes: type[Sizes] = Sizes

    def __init__(self, wide: Params, users: int, precision: Precision, kernels: Kernels, holds_gradients: bool) -> None:
        sizes = self.sizes_of(wide, precision)
        self._kernels, self._device = kernels, wide["embedding"].device
        self._shapes = {name: (users, *value.shape) for name, value in wide.items()}
        self.weights = self.stack(sizes.master)
        self.low = self.stack(sizes.low) if precision == "bf16" else self.weights
        self.gradients = self.stack(sizes.low) if holds_gradients else {}
        self.buffers = Buffers(sizes, self._device)
        self._own = torch.arange(users, device=self._device)[:, None]

    @classmethod
    def sizes_of(cls, wide: Params, precision: Precision) -> Sizes:
        (vocabulary, width), master = wide["embedding"].shape, wide["embedding"].dtype
        return cls.sizes(width, units_of(wide), vocabulary, torch.bfloat16 if precision == "bf16" else master, master)

    def stack(self, dtype: torch.dtype) -> Params:
        """Return zeros in the shapes of the weights."""
        return {name: torch.zeros(shape, dtype=dtype, device=self._device) for name, shape in self._shapes.items()}

    def load(self, wide: Params) -> None:
        for name, value in wide.items():
            self.weights[name].copy_(value.expand_as(self.weights[name]))
            if self.low is not self.weights:
                self.low[name].copy_(value.expand_as(self.low[name]))

    def optimize(
        self,
        start: Params,
        moments: Sequence[Params],
        counts: Tensor,
        scalars: Tensor,
        rule: UpdateRule,
        clip: float | None,
    ) -> None:
        """Add FedProx's term to the gradients of the first u users, bound their norms, and take the rule's step.

        `clip` is the bound; None for no bound. See `Kernels.optimize` for other arguments.
        """
        users = len(counts)
        gradients = {name: value[:users] for name, value in self.gradients.items()}
        scale = torch.ones(users, dtype=torch.float64, device=self._device)
        if clip is not None:
            scale = (clip / self.squares(users, start, rule.proximal, gradients).sqrt()).clamp(max=1)
        for name, gradient in gradients.items():
            weight, low = self._targets(name, users, 1.0)
            of_weight = [moment[name][:users] for moment in moments]
            self._kernels.optimize(weight, low, gradient, start[name], of_weight, scale, counts, scalars, rule)

    def squares(self, users: int, start: Params, mu: float, gradients: Params) -> Tensor:
        """Return the squared norm of mu (weights - start) + gradients over all parameters, float64 [u]."""
        total = torch.zeros(users, dtype=torch.float64, device=self._device)
        for name, value in self.weights.items():
            total += self._kernels.squares(value[:users], start[name], mu, gradients.get(name))
        return total

    def _targets(self, name: str, users: int, rate: float | None) -> tuple[Tensor, Tensor | None]:
        """Return the first users' gradient, without a `rate`, or weight, with its copy in the dtype of products."""
        if rate is None:
            return self.gradients[name][:users], None
        return self.weights[name][:users], None if self.low is self.weights else self.low[name][:users]

    def _flat_places(self, index: Tensor, per_user: int) -> Tensor:
        """Return indices within each user [u, n] as flat indices among all users, with `per_user` indices each."""
        return (index + self._own[: len(index)] * per_user).flatten()


class StackedModel(StackedWeights):
    """The gradient of each model's mean cross-entropy by its weights; for arguments, see `StackedWeights`.

    If all steps are of a single user (`is_single`), products use plain matrices.
    """

    def __init__(
        self,
        wide: Params,
        users: int,
        precision: Precision,
        kernels: Kernels,
        holds_gradients: bool,
        is_single: bool = False,
    ) -> None:
        super().__init__(wide, users, precision, kernels, holds_gradients)
        self._is_single = is_single

    def descend(self, shape: Shape, parts: Parts, rate: float | Tensor, dropped: Dropped | None = None) -> Tensor:
        """Take a step of plain SGD of the first u users; return the cross-entropy before it, nats [u, N].

        It is 0 after a user's positions. No gradients are in memory. The learning rate can be a tensor, float64 [1],
        which can change under a CUDA graph, and is then a factor of the gradient by the logits.
        """
        factor, fixed = (rate, 1.0) if isinstance(rate, Tensor) else (None, rate)
        return self._step(shape, parts, factor, fixed, dropped)

    def gradient(self, shape: Shape, parts: Parts, dropped: Dropped | None = None) -> Tensor:
        """Compute the first u users' `gradients`; arguments and result are those of `descend`."""
        return self._step(shape, parts, None, None, dropped)

    def _step(
        self, shape: Shape, parts: Parts, factor: Tensor | None, rate: float | None, dropped: Dropped | None
    ) -> Tensor:
        """Compute gradients times the factor, and store them, or subtract rate times them from the weights."""
        kernels, a, times = self._kernels, Activations(*self.buffers.views(shape)), shape.times
        w = {name: value[: shape.users] for name, value in self.low.items()}
        embedding = w["embedding"]
        tokens = self._among_all(parts.tokens.flatten(1), embedding.shape[1])
        torch.index_select(embedding.flatten(0, 1), 0, tokens, out=a.read.flatten(0, 1))
        if dropped:
            a.read.mul_(dropped.read).mul_(dropped.factor)
        self._product(a.read, w["input_weight"], a.gates.flatten(1, 2))
        kernels.recur(a.gates, w["gate_bias"], w["recurrent_weight"], w["projection"], a.outputs, a.cells, a.hidden)

        index = self._among_all(parts.places, (times + 1) * shape.rows).long()
        torch.index_select(a.outputs.flatten(0, 2), 0, index, out=a.chosen.flatten(0, 1))
        if dropped:
            a.chosen.mul_(dropped.predicted).mul_(dropped.factor)
        self._product(a.chosen, embedding.mT, a.logits)
        kernels.cross_entropy(a.logits, w["output_bias"], parts.targets, parts.counts, a.losses, factor)

        self._product(a.logits, embedding, a.d_chosen)
        if dropped:
            a.d_chosen.mul_(dropped.predicted).mul_(dropped.factor)
        a.d_outputs.zero_().flatten(0, 2).index_copy_(0, index, a.d_chosen.flatten(0, 1))
        kernels.recur_back(a.gates, w["recurrent_weight"], w["projection"], a.d_outputs, a.cells)
        d_gates = a.gates.flatten(1, 2)
        self._product(d_gates, w["input_weight"].mT, a.d_read)
        if dropped:
            a.d_read.mul_(dropped.read).mul_(dropped.factor)

        self._settle("embedding", a.chosen, a.logits, rate, "output_bias", is_turned=True)
        self._settle("input_weight", a.read, d_gates, rate, "gate_bias")
        self._settle("recurrent_weight", a.outputs[:, :times].flatten(1, 2), d_gates, rate)
        self._settle("projection", a.hidden.flatten(1, 2), a.d_outputs[:, 1:].flatten(1, 2), rate)
        table, low = self._targets("embedding", shape.users, rate)
        kernels.add_rows(table, low, a.d_read, parts, 1.0 if rate is None else -rate)
        return a.losses

    def _settle(
        self, name: str, left: Tensor, right: Tensor, rate: float | None, bias: str | None = None,
        is_turned: bool = False,
    ) -> None:  # fmt: skip
        """Store left' right as the gradient of a weight (`is_turned`: of its transpose), right's sum as that of a bias.

        With a rate, subtract rate times them from the weight and the bias.
        """
        weight, low = self._targets(name, len(left), rate)
        if is_turned:
            weight, low = weight.mT, None if low is None else low.mT
        own_bias, low_bias = self._targets(bias, len(left), rate) if bias else (None, None)
        if rate is not None:
            self._kernels.descend(weight, low, left, right, rate, own_bias, low_bias)
            return
        self._product(left.mT, right, weight)
        if own_bias is not None:
            torch.sum(right, 1, out=own_bias)

    def _among_all(self, index: Tensor, per_user: int) -> Tensor:
        return index.flatten() if self._is_single else self._flat_places(index, per_user)

    def _product(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        if self._is_single:
            torch.mm(left[0], right[0], out=out[0])
        else:
            torch.bmm(left, right, out=out)


def widened_for(kernels: Kernels, like: Params) -> Params:
    """Return parameters with the number of units at which the kernels are fastest."""
    return widened(like, -(-units_of(like) // kernels.multiple) * kernels.multiple)


# A step of stacked users whose activations are by position, without padding between the records of a batch.
#  The results of the recurrence are directly the inputs of the output layer, which stores no logits.


class PositionModel(StackedWeights):
    """The gradient of each model's mean cross-entropy by its weights; `StackedModel` is its reference."""

    sizes = PositionSizes
    _kernels: PositionKernels

    def descend(self, shape: Shape, parts: Parts, rate: float | Tensor) -> Tensor:
        """Take a step of plain SGD as `StackedModel.descend`, with positions in the order of time, then row."""
        return self._step(shape, parts, *((rate, 1.0) if isinstance(rate, Tensor) else (None, rate)))

    def gradient(self, shape: Shape, parts: Parts) -> Tensor:
        """Compute the gradients of the first u users that have positions; for arguments and result, see `descend`."""
        return self._step(shape, parts, None, None)

    def _step(self, shape: Shape, parts: Parts, factor: Tensor | None, rate: float | None) -> Tensor:
        """Compute gradients times the factor, and store them, or subtract rate times them from the weights."""
        kernels, a = self._kernels, PositionActivations(*self.buffers.views(shape))
        w = {name: value[: shape.users] for name, value in self.low.items()}

        def target(name: str) -> Target:
            return Target(*self._targets(name, shape.users, rate))

        parts, starts = _by_position(shape, parts)
        tokens = self._flat_places(parts.tokens.flatten(1), w["embedding"].shape[1])
        torch.index_select(w["embedding"].flatten(0, 1), 0, tokens, out=a.read.flatten(0, 1))
        torch.bmm(a.read, w["input_weight"], out=a.gates)
        weights = w["recurrent_weight"], w["projection"]
        kernels.recur_positions(
            a.gates, w["gate_bias"], *weights, a.before, a.outputs, a.cells, a.hidden, starts, shape.rows
        )
        # If the low copy is the rounded weight, the second pass reads only the weight, which it needs anyway.
        prediction = Prediction(
            a.outputs, w["embedding"], w["output_bias"], parts.targets, parts.counts, a.log_sums, factor
        )
        kernels.predict(prediction, a.losses, a.d_outputs)
        table = target("embedding")
        own = prediction if rate is None else prediction._replace(embedding=table.value)
        kernels.descend_predictions(own, table, target("output_bias"), rate)
        kernels.recur_positions_back(a.gates, *weights, a.d_outputs, a.cells, starts, shape.rows)
        torch.bmm(a.gates, w["input_weight"].mT, out=a.d_read)

        def descend(names: list[str], lefts: list[Tensor], right: Tensor, bias: Target | None = None) -> None:
            kernels.descend_positions([target(name) for name in names], lefts, right, bias, parts.counts, rate)

        descend(["input_weight", "recurrent_weight"], [a.read, a.before], a.gates, target("gate_bias"))
        descend(["projection"], [a.hidden], a.d_outputs)
        kernels.add_rows(table.value, table.low, a.d_read, parts, 1.0 if rate is None else -rate)
        return a.losses


def _by_position(shape: Shape, parts: Parts) -> tuple[Parts, Tensor]:
    """Return the step as one time with a row for each position, and offsets of times and the end, int32 [u, T + 1]."""
    users, times, rows, positions = shape
    numbers: Any = {"device": parts.places.device, "dtype": torch.int32}
    position = torch.arange(positions, **numbers)
    tokens = parts.tokens.flatten(1).gather(1, (parts.places - rows).clamp(min=0).long())
    ends = torch.arange(rows, rows * (times + 1) + 1, rows, **numbers)
    earlier = (parts.places[:, None] < ends[:, None]) & (position < parts.counts[:, None])[:, None]
    places = (positions + position).expand(users, -1).contiguous()
    return parts._replace(tokens=tokens[:, None], places=places), earlier.sum(-1, dtype=torch.int32)
