"""The operations of a stacked step besides products, in PyTorch, which are the reference for other kernels.

Shapes: u users, T times, B rows, N positions, D embedding, H units, V vocabulary. Activations have the dtype of the
weights in the products; sums over time or steps have that of the master weights.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from flsim.base.progress import say
from flsim.models.language_model import Params
from flsim.training.cohort.packing import Parts
from flsim.training.optimizers import Optimizer
from flsim.training.update import Precision

# The large matrix products of a step on a CPU: in the dtype of the weights, or with operands rounded to bfloat16.
#
# Products and their sums stay in float32 inside the processor. Some processors multiply bfloat16 several times as fast:
#
#     AMX           170 GFLOP/s in float32, 680 to 870 in bfloat16. The library (oneDNN) rounds operands as it loads
#                   them and returns float32, so nothing else changes.
#     avx512_bf16   the library needs operands, and returns products, that are bfloat16 in memory. One core of a Zen 5:
#                   240 GFLOP/s in float32, 370 to 430 in bfloat16.
#
# Products with at most 16 rows, those of the recurrence, take twice as long with AMX. In float32, the default library,
# MKL, uses AVX-512 only on Intel processors: 105 GFLOP/s on a Zen 5, and 240 with oneDNN (docs/benchmarks.md).

TILE = 16  # rows
LARGE = 2**18  # entries of the largest weight
LINE = 64  # bytes of a cache line


def padded(columns: int, dtype: torch.dtype) -> int:
    """Return a number of columns, at least `columns`, that fills cache lines."""
    values = LINE // dtype.itemsize
    return -(-columns // values) * values


def aligned(dtype: torch.dtype, *shape: int) -> Tensor:
    """Return an uninitialised tensor, in which rows of a matrix begin at cache lines, which makes products faster."""
    *rows, columns = shape
    return torch.empty(*rows, padded(columns, dtype), dtype=dtype)[..., :columns]


class Scratch:
    """Uninitialised memory by name, which grows to the largest requested size, and is reused."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._flat: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        size = torch.Size(shape).numel()
        flat = self._flat.get(name)
        if flat is None or len(flat) < size:
            flat = self._flat[name] = torch.empty(size, dtype=self._dtype)
        return flat[:size].view(shape)

    def aligned(self, name: str, rows: int, columns: int) -> Tensor:
        """Return a matrix as `aligned` does."""
        return self(name, rows, padded(columns, self._dtype))[:, :columns]


class Products:
    """Products in the dtype of their operands."""

    def rows(self, count: int) -> int:
        """Return the number of rows of a matrix of `count` positions, at least `count`; further rows are zero."""
        return count

    def operand(self, name: str, value: Tensor) -> Tensor:  # noqa: ARG002 (a name of memory, where that is needed)
        """Return a matrix as an operand of any number of products; the next operand with this name overwrites it."""
        return value

    def multiply(self, left: Tensor, right: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
        """Write left right, plus the bias in each row, to `out`, and return it."""
        torch.mm(left, right, out=out)
        return out if bias is None else out.add_(bias)  # addmm copies the bias to `out` first, and takes longer

    def add(self, left: Tensor, right: Tensor, factor: float, into: Tensor) -> None:
        """Add factor times left right to `into`."""
        into.addmm_(left, right, alpha=factor)


class OneDNNProducts(Products):
    """Products of float32 operands by oneDNN, which rounds them to bfloat16 only on a processor with AMX.

    It compiles a kernel for each new shape, in up to 3 ms; multiples of 16 rows, an AMX tile, make shapes repeat.
    """

    def rows(self, count: int) -> int:
        return -(-count // TILE) * TILE

    def multiply(self, left: Tensor, right: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
        with by_onednn():
            return super().multiply(left, right, out, bias)

    def add(self, left: Tensor, right: Tensor, factor: float, into: Tensor) -> None:
        with by_onednn():
            super().add(left, right, factor, into)


class RoundedProducts(OneDNNProducts):
    """Products of operands that are bfloat16 in memory; each product is rounded to bfloat16 before it is added."""

    def __init__(self) -> None:
        self._low = Scratch(torch.bfloat16)

    def operand(self, name: str, value: Tensor) -> Tensor:
        return self._low(name, *value.shape).copy_(value)

    def multiply(self, left: Tensor, right: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
        product = torch.mm(left, right, out=self._low("product", *out.shape))
        return out.copy_(product) if bias is None else torch.add(product, bias, out=out)

    def add(self, left: Tensor, right: Tensor, factor: float, into: Tensor) -> None:
        into.add_(torch.mm(left, right, out=self._low("product", *into.shape)), alpha=factor)


def products_for(precision: Precision, like: Params) -> Products:
    """Return the fastest products of this processor: MKL's for small models, because oneDNN takes longer to call."""
    if precision_here(precision) == "bf16":
        return OneDNNProducts() if torch.cpu.get_capabilities().get("amx_bf16") else RoundedProducts()
    return OneDNNProducts() if max(map(torch.numel, like.values())) >= LARGE and onednn_is_faster() else Products()


def precision_here(precision: Precision) -> Precision:
    """Return "float32", with a message, for bfloat16 on a processor without its instructions, which would be slower."""
    able = torch.cpu.get_capabilities()
    if precision != "bf16" or able.get("amx_bf16") or able.get("avx512_bf16"):
        return precision
    _say_that_float32_is_used()
    return "float32"


def onednn_is_faster() -> bool:
    """Return whether oneDNN multiplies float32 faster than MKL and equally exactly: on AMD's processors with AVX-512.

    MKL uses AVX-512 on Intel processors only. With oneDNN, the model of the paper trains about 1.1 times as fast on a
    Zen 4. A Zen 5, which computes all 512 bits at once, gains more.
    """
    able = torch.cpu.get_capabilities()
    is_amd = "AMD" in able.get("cpu_name", "") and able.get("avx512_f")
    return bool(is_amd and not able.get("amx_bf16") and _torch_takes_onednn())


def _torch_takes_onednn() -> bool:
    """Return whether `by_onednn` has an effect: not if ONEDNN_MAX_CPU_ISA restricts it to older instructions."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def _say_that_float32_is_used() -> None:
    say('this processor has no instructions for bfloat16 (avx512_bf16, AMX); "bf16" computes in float32')


@contextmanager
def by_onednn() -> Iterator[None]:
    """Let oneDNN multiply float32 matrices in the block: torch uses it if operands may be rounded, as only AMX does."""
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


# The other operations of a stacked step, and the optimizer of a step.


sigmoid_backward, tanh_backward = torch.ops.aten.sigmoid_backward, torch.ops.aten.tanh_backward


class UpdateRule(NamedTuple):
    """An optimizer with its settings, for gradients that are already clipped."""

    optimizer: Optimizer  # an optimizer that has a `direction`
    momentum: float  # factor of the previous direction, for optimizer "momentum"
    proximal: float = 0.0  # FedProx's mu
    decay: float = 0.0  # lambda of torch's weight decay


class Kernels:
    """The operations of a stacked step, which write to their arguments; gradients are of each user's mean loss.

    Here in plain PyTorch, for any device; subclasses have kernels of Triton.
    """

    multiple: ClassVar[int] = 1  # the operations are fastest if the number of units is a multiple of it
    makes_graphs: ClassVar[bool] = False  # whether a step on a GPU becomes a CUDA graph

    def recur(
        self, gates: Tensor, bias: Tensor, recurrent: Tensor, projection: Tensor, outputs: Tensor, cells: Tensor,
        hidden: Tensor,
    ) -> None:  # fmt: skip
        """Run the cells over time, as in `flsim.models.architectures`.

        `gates` [u, T, B, 3H] have the contribution of inputs to the sums of gates, and become f, o, g; `bias` [u, 3H],
        `recurrent` [u, D, 3H], `projection` [u, H, D]. `outputs` [u, T + 1, B, D] and `cells` [u, T + 1, B, H] become r
        and c after each time, with a block of zeros before the first time, and `hidden` [u, T, B, H] becomes o tanh c.
        """
        outputs[:, 0], cells[:, 0] = 0, 0
        gates += bias[:, None, None]
        units = cells.shape[-1]
        for time in range(gates.shape[1]):
            sums = torch.baddbmm(gates[:, time], outputs[:, time], recurrent).to(cells.dtype)
            sums[..., : 2 * units].sigmoid_()
            sums[..., 2 * units :].tanh_()
            f, o, g = sums.chunk(3, dim=-1)
            cells[:, time + 1] = torch.lerp(g, cells[:, time], f)  # f c + (1 - f) g
            hidden[:, time] = o * cells[:, time + 1].tanh()
            gates[:, time] = sums
            outputs[:, time + 1] = torch.bmm(hidden[:, time], projection)

    def recur_back(
        self, gates: Tensor, recurrent: Tensor, projection: Tensor, d_outputs: Tensor, cells: Tensor
    ) -> None:
        """Run the cells backwards over time; see `recur`. The values of `cells` are lost.

        `gates`, f, o, g, become the gradient by the gates' sums; `d_outputs` [u, T + 1, B, D] the complete gradient by
        r.
        """
        times = gates.shape[1]
        carried = torch.zeros_like(cells[:, 0])
        for time in reversed(range(times)):
            if time + 1 < times:
                d_outputs[:, time + 1] += torch.bmm(gates[:, time + 1], recurrent.mT)
            d_hidden = torch.bmm(d_outputs[:, time + 1], projection.mT).to(cells.dtype)
            f, o, g = gates[:, time].to(cells.dtype).chunk(3, dim=-1)
            bounded = cells[:, time + 1].tanh()
            d_cell = carried + tanh_backward(d_hidden * o, bounded)
            d_forget = sigmoid_backward(d_cell * (cells[:, time] - g), f)
            d_output = sigmoid_backward(d_hidden * bounded, o)
            carried = d_cell * f
            gates[:, time] = torch.cat((d_forget, d_output, tanh_backward(d_cell - carried, g)), dim=-1)

    def cross_entropy(
        self, logits: Tensor, bias: Tensor, targets: Tensor, counts: Tensor, losses: Tensor, rate: Tensor | None = None
    ) -> None:
        """Compute softmax, cross-entropy and its gradient.

        `logits` [u, N, V], without the `bias` [u, V], become the gradient by the logits times the `rate`, float64 [1]
        (None: 1); `losses` [u, N] become the cross-entropy in nats. Both are 0 after the positions of a user, which are
        the first ones: `counts`, int32 [u]. `targets` are int32 [u, N].
        """
        real = torch.arange(losses.shape[1], device=losses.device) < counts[:, None]
        chosen = targets.long()[..., None]
        scores = log_softmax(logits.to(losses.dtype) + bias.to(losses.dtype)[:, None], -1)
        losses.copy_(-scores.gather(-1, chosen)[..., 0]).masked_fill_(~real, 0)
        errors = scores.exp_().scatter_add_(-1, chosen, torch.full_like(chosen, -1, dtype=scores.dtype))
        factor = real.to(scores.dtype) / counts[:, None].clamp(min=1)
        if rate is not None:
            factor.mul_(rate)
        logits.copy_(errors.mul_(factor[..., None]))

    def add_rows(self, table: Tensor, low: Tensor | None, rows: Tensor, parts: Parts, scale: float) -> None:
        """Add scale times the row of each real position to its token's row of the table [u, V, D].

        `rows` are [u, T B, D]; `low` is the table in the dtype of products, see `descend`.
        """
        users, positions = parts.places.shape
        places = (parts.places.long() - parts.tokens.shape[2]).clamp(min=0)  # padding adds 0 to the first row
        real = torch.arange(positions, device=rows.device) < parts.counts[:, None]
        tokens = torch.where(real, parts.tokens.flatten(1).gather(1, places), 0)
        own = torch.arange(users, device=rows.device)[:, None]
        added = rows[own, places].masked_fill(~real[..., None], 0).to(table.dtype)
        flat = (tokens + own * table.shape[1]).flatten()
        if table.is_cuda:  # on GPUs, index_add_ adds in no fixed order, and index_put_ sorts first
            table.flatten(0, 1).index_put_((flat,), scale * added.flatten(0, 1), accumulate=True)
        else:
            table.flatten(0, 1).index_add_(0, flat, added.flatten(0, 1), alpha=scale)
        if low is not None:
            low.copy_(table)

    def descend(
        self, weight: Tensor, low: Tensor | None, left: Tensor, right: Tensor, rate: float,
        bias: Tensor | None = None, low_bias: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Subtract rate times left' right from the weight, and rate times right's sum over rows from the bias.

        `weight` [u, m, n] has any strides; `left` and `right` are [u, k, m] and [u, k, n]; `bias` is [u, n] or None.
        `low` and `low_bias` become copies in the dtype of products; None if the weight has that dtype.
        """
        if low is None:
            weight.baddbmm_(left.mT, right, alpha=-rate)
        else:  # products of bfloat16 values are exact in float32
            for user in range(len(weight)):
                weight[user].addmm_(left[user].T.to(weight.dtype), right[user].to(weight.dtype), alpha=-rate)
            low.copy_(weight)
        if bias is not None:
            bias.sub_(right.sum(1, dtype=bias.dtype), alpha=rate)
            if low_bias is not None:
                low_bias.copy_(bias)

    def optimize(
        self, weight: Tensor, low: Tensor | None, gradient: Tensor, start: Tensor, moments: list[Tensor],
        scale: Tensor, counts: Tensor, scalars: Tensor, rule: UpdateRule,
    ) -> None:  # fmt: skip
        """Take a step of the optimizer of the rule, for users that have positions.

        `weight`, `gradient` and, for each slot of the optimizer, `moments` are [u, ...], `start`, the global weights,
        [...]; for `low`, see `descend`. `scale`, float64 [u], is a factor of the gradient after FedProx's term was
        added; `counts`, int32 [u], are numbers of positions; `scalars`, float64 [3], the learning rate and Adam's 1 -
        beta^t.
        """
        per_user = (-1, *[1] * start.ndim)
        active = (counts > 0).view(per_user)
        g = gradient.to(weight.dtype)
        if rule.proximal:
            g = g + rule.proximal * (weight - start)
        g = g * scale.to(weight.dtype).view(per_user)
        if rule.decay:
            g = g + rule.decay * weight
        rate, first, second = scalars.to(weight.dtype)
        if rule.optimizer.direction is None:
            raise ValueError(f"{rule.optimizer.label}: has no direction for stacked users")
        direction, after = rule.optimizer.direction(g, moments, (first, second), rule.momentum)
        for moment, value in zip(moments, after, strict=True):
            moment.copy_(torch.where(active, value, moment))
        weight.addcmul_(torch.where(active, direction, 0), rate, value=-1)
        if low is not None:
            low.copy_(weight)

    def squares(self, weight: Tensor, start: Tensor, mu: float, gradient: Tensor | None) -> Tensor:
        """Return the squared norm of mu (weight - start) + gradient, float64 [u]; a gradient of None counts as 0."""
        squares = []
        for user, value in enumerate(weight):
            term = mu * (value - start)
            if gradient is not None:
                term += gradient[user]
            squares.append(torch.linalg.vector_norm(term, dtype=torch.float64) ** 2)
        return torch.stack(squares)

    def add_updates(self, weight: Tensor, start: Tensor, factors: Tensor, into: Tensor) -> None:
        """Add the sum over users of factor [u] times (weight [u, ...] - start [...]); factor 0 omits a user."""
        for value, factor in zip(weight, factors.tolist(), strict=True):
            if factor:
                into.add_(value - start, alpha=factor)


# The operations of a step whose activations are by position, in the order of time, then row.
#  Logits are not stored: the first pass stores the log-sum-exp of each position, and the second recomputes the logits
# while it updates the weights.


class Target(NamedTuple):
    """A weight that takes a step, or the memory of its gradient."""

    value: Tensor  # the weight in its own dtype, or the gradient
    # copy of the weight in the dtype of products; None if the weight has that dtype, and for gradients
    low: Tensor | None = None


class Prediction(NamedTuple):
    """The operands of the output layer."""

    chosen: Tensor  # [u, N, D], r at each position
    embedding: Tensor  # [u, V, D]; rounded to the dtype of `chosen` before it is multiplied
    bias: Tensor  # [u, V]
    targets: Tensor  # int32 [u, N]; 0, which is padding and not a word, after the positions of a user
    counts: Tensor  # int32 [u], number of positions of each user, which are the first ones
    # [u, N], log-sum-exp of the logits (nats), infinite after the positions of a user; written by `predict`
    log_sums: Tensor
    factor: Tensor | None = None  # float64 [1], factor of all gradients; 1 if None


class PositionKernels(Kernels, ABC):
    """The operations of a step by position; methods write to their arguments, but only within the positions of a user.

    Gradients are of each user's mean loss. If `rate` is None, a method writes gradients to its targets; otherwise it
    subtracts rate times the gradient from them. Targets of users without positions do not change.
    """

    @abstractmethod
    def recur_positions(
        self, gates: Tensor, bias: Tensor, recurrent: Tensor, projection: Tensor, before: Tensor, outputs: Tensor,
        cells: Tensor, hidden: Tensor, starts: Tensor, rows: int,
    ) -> None:  # fmt: skip
        """Run the cells over time, as in `flsim.models.architectures`.

        `gates` [u, N, 3H] have the contribution of inputs to the sums of gates, and become f, o, g; `bias` [u, 3H],
        `recurrent` [u, D, 3H], `projection` [u, H, D]. `before` [u, N, D] becomes r of the previous time of each
        position, 0 at the first time; `outputs` [u, N, D], `cells` [u, N, H] and `hidden` [u, N, H] become r, c and o
        tanh c. `starts`, int32 [u, T + 1], has the first position of each time, then the number of positions; `rows` is
        the largest number of rows at a time.
        """

    @abstractmethod
    def recur_positions_back(
        self, gates: Tensor, recurrent: Tensor, projection: Tensor, d_outputs: Tensor, cells: Tensor, starts: Tensor,
        rows: int,
    ) -> None:  # fmt: skip
        """Run the cells backwards over time; see `recur_positions`. The values of `cells` are lost.

        `gates`, f, o, g, become the gradient by the gates' sums; `d_outputs` [u, N, D] the complete gradient by r.
        """

    @abstractmethod
    def predict(self, prediction: Prediction, losses: Tensor, d_chosen: Tensor) -> None:
        """Compute the cross-entropy, and its gradient by `chosen`; log-sum-exps of the prediction are written.

        `losses` [u, N], nats, and `d_chosen` [u, N, D] become 0 after a user's positions.
        """

    @abstractmethod
    def descend_predictions(self, prediction: Prediction, weight: Target, bias: Target, rate: float | None) -> None:
        """Compute the gradients by the embedding [u, V, D] and by the bias [u, V], and store or apply them."""

    @abstractmethod
    def descend_positions(
        self, weights: Sequence[Target], lefts: Sequence[Tensor], right: Tensor, bias: Target | None, counts: Tensor,
        rate: float | None,
    ) -> None:  # fmt: skip
        """Compute the gradients left' right of one or two weights, and right's sum for a bias; store or apply them.

        `weights` are targets [u, m, n], each with a left [u, N, m]; `right` is [u, N, n], `bias` a target [u, n] or
        None, and `counts`, int32 [u], the number of positions of each user.
        """
