"""Triton's versions of `flsim.training.cohort.kernels`, for NVIDIA GPUs and master weights of float32.

Results do not depend on the order of programs: there are no atomics, so a GPU always gives the same result.
"""
# mypy: disable-error-code="no-untyped-def"

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from flsim.training import optimizers
from flsim.training.cohort.kernels import Kernels, UpdateRule
from flsim.training.cohort.packing import Parts
from flsim.training.optimizers import ALPHA, BETAS
from flsim.training.update import Precision

DOT = 16  # smallest size of a side of Triton's matrix products
WIDEST = {"bf16": 512, "tf32": 256, "float32": 256}  # the widest embeddings whose blocks fit an A100's shared memory
LOGITS, VALUES, USERS = 4096, 4096, 256  # per program: logits, values of a user, values summed over all users


def block(size: int, most: int = 2**20) -> int:
    """Return a power of two that covers the size, at least `DOT` and at most `most`."""
    return int(min(most, max(DOT, triton.next_power_of_2(size))))


@triton.jit
def _tanh(x):
    """Return tanh x, exact to float32's rounding; near 0, where 2 sigmoid(2x) - 1 cancels, by its series to x^9."""
    y = x * x
    series = x * (1 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, series, 2 * tl.sigmoid(2 * x) - 1)


@triton.jit
def _advanced(f, o, g, c):
    """Return f, o, g, the new c and o tanh c, from the gates' sums and the c of the previous time."""
    f = tl.sigmoid(f)
    o = tl.sigmoid(o)
    g = _tanh(g)
    c = f * c + (1 - f) * g
    return f, o, g, c, o * _tanh(c)


@triton.jit
def _differentiated(f, o, g, c, before, later, dm):
    """Return the gradients by the gates' sums and by the c of the previous time, which is `before`.

    `later` is the gradient by c from the next time, and `dm` that by o tanh c; others are values of this time.
    """
    bounded = _tanh(c)
    dc = later + dm * o * (1 - bounded * bounded)
    return dc * (before - g) * f * (1 - f), dm * bounded * o * (1 - o), dc * (1 - f) * (1 - g * g), dc * f


@triton.jit
def _cross_entropy(logits, bias, targets, counts, losses, rate, N, V, RATE: tl.constexpr, BLOCK: tl.constexpr):
    """Compute one position: the largest logit and the sum of exponentials in one pass, the gradient in a second."""
    user = tl.program_id(1).to(tl.int64)
    position = user * N + tl.program_id(0)
    count = tl.load(counts + user)
    logits += position * V
    bias += user * V
    columns = tl.arange(0, BLOCK)
    if tl.program_id(0) >= count:
        for first in range(0, V, BLOCK):
            v = first + columns
            tl.store(logits + v, tl.zeros((BLOCK,), logits.dtype.element_ty), v < V)
        tl.store(losses + position, 0.0)
    else:
        target = tl.load(targets + position)
        own = tl.load(logits + target).to(tl.float32) + tl.load(bias + target).to(tl.float32)
        largest = own
        total = 0.0
        for first in range(0, V, BLOCK):
            v = first + columns
            x = tl.load(logits + v, v < V, other=float("-inf")).to(tl.float32)
            x += tl.load(bias + v, v < V, other=0.0).to(tl.float32)
            above = tl.maximum(largest, tl.max(x, 0))
            total = total * tl.exp(largest - above) + tl.sum(tl.exp(x - above), 0)
            largest = above
        tl.store(losses + position, tl.log(total) + largest - own)
        for first in range(0, V, BLOCK):
            v = first + columns
            x = tl.load(logits + v, v < V, other=float("-inf")).to(tl.float32)
            x += tl.load(bias + v, v < V, other=0.0).to(tl.float32)
            gradient = (tl.exp(x - largest) / total - tl.where(v == target, 1.0, 0.0)) / count
            if RATE:
                gradient *= tl.load(rate).to(tl.float32)
            tl.store(logits + v, gradient.to(logits.dtype.element_ty), v < V)


@triton.jit
def _add_rows(
    table,
    low,
    rows,
    tokens,
    places,
    counts,
    scale,
    N,
    S,
    B,
    V,
    D: tl.constexpr,
    BI: tl.constexpr,
    BJ: tl.constexpr,
    BD: tl.constexpr,
    LOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the rows of some of a user's positions: the first position of each token adds all rows of that token.

    A matrix of 0 and 1 marks the positions with the token, and the sums are its product with the rows.
    """
    user = tl.program_id(1).to(tl.int64)
    count = tl.load(counts + user)
    i = tl.program_id(0) * BI + tl.arange(0, BI)
    d = tl.arange(0, BD)
    if tl.program_id(0) * BI < count:
        token = tl.load(tokens + user * S + tl.load(places + user * N + i, i < count, other=B) - B)
        earlier = tl.zeros((BI,), tl.int32)
        total = tl.zeros((BI, BD), tl.float32)
        for first in range(0, count, BJ):
            j = first + tl.arange(0, BJ)
            place = user * S + tl.load(places + user * N + j, j < count, other=B) - B
            same = (token[:, None] == tl.load(tokens + place)[None, :]) & (j < count)[None, :]
            earlier = tl.maximum(earlier, tl.max((same & (j[None, :] < i[:, None])).to(tl.int32), 1))
            row = tl.load(rows + place[:, None] * D + d[None, :], (j < count)[:, None] & (d < D)[None, :], other=0.0)
            total += tl.dot(same.to(row.dtype), row, input_precision=PRECISION)
        at = (user * V + token)[:, None] * D + d[None, :]
        first_one = ((i < count) & (earlier == 0))[:, None] & (d < D)[None, :]
        value = tl.load(table + at, first_one, other=0.0).to(tl.float32) + scale * total
        tl.store(table + at, value.to(table.dtype.element_ty), first_one)
        if LOW:
            tl.store(low + at, value.to(low.dtype.element_ty), first_one)


@triton.jit
def _former(weight, at, valid, GRADIENT: tl.constexpr):
    """Return the weights that `_settle` will change; loads that follow a store might have to wait for it."""
    former = 0.0
    if not GRADIENT:
        former = tl.load(weight + at, valid)
    return former


@triton.jit
def _settle(weight, low, at, valid, former, rate, gradient, LOW: tl.constexpr, GRADIENT: tl.constexpr):
    """Store a gradient, or the old weight minus rate times the gradient; `low` is a copy."""
    value = gradient
    if not GRADIENT:
        value = former - rate * gradient
    tl.store(weight + at, value.to(weight.dtype.element_ty), valid)
    if LOW:
        tl.store(low + at, value.to(low.dtype.element_ty), valid)


@triton.jit
def _optimize(
    weight,
    low,
    gradient,
    start,
    moment,
    second_moment,
    scale,
    counts,
    scalars,
    size,
    mu,
    decay,
    momentum,
    BETA: tl.constexpr,
    SECOND_BETA: tl.constexpr,
    ALPHA: tl.constexpr,
    EPS: tl.constexpr,
    OPTIMIZER: tl.constexpr,
    LOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    user = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = i < size
    at = user * size + i
    if tl.load(counts + user) > 0:
        w = tl.load(weight + at, valid, other=0.0)
        g = tl.load(gradient + at, valid, other=0.0).to(tl.float32)
        if mu != 0:
            g += mu * (w - tl.load(start + i, valid, other=0.0))
        g *= tl.load(scale + user).to(tl.float32)
        if decay != 0:
            g += decay * w
        if OPTIMIZER == "momentum":
            g += momentum * tl.load(moment + at, valid, other=0.0)
            tl.store(moment + at, g, valid)
        if OPTIMIZER == "adam":
            m = BETA * tl.load(moment + at, valid, other=0.0) + (1 - BETA) * g
            v = SECOND_BETA * tl.load(second_moment + at, valid, other=0.0) + (1 - SECOND_BETA) * g * g
            tl.store(moment + at, m, valid)
            tl.store(second_moment + at, v, valid)
            spread = tl.sqrt(v / tl.load(scalars + 2).to(tl.float32))
            g = m / tl.load(scalars + 1).to(tl.float32) / (spread + EPS)
        if OPTIMIZER == "rmsprop":
            v = ALPHA * tl.load(moment + at, valid, other=0.0) + (1 - ALPHA) * g * g
            tl.store(moment + at, v, valid)
            g /= tl.sqrt(v) + EPS
        w -= tl.load(scalars).to(tl.float32) * g
        tl.store(weight + at, w, valid)
        if LOW:
            tl.store(low + at, w.to(low.dtype.element_ty), valid)


@triton.jit
def _squares(weight, start, gradient, squares, size, mu, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    user = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = i < size
    x = mu * (tl.load(weight + user * size + i, valid, other=0.0) - tl.load(start + i, valid, other=0.0))
    if GRADIENT:
        x += tl.load(gradient + user * size + i, valid, other=0.0).to(tl.float32)
    y = x.to(tl.float64)
    tl.store(squares + user * tl.num_programs(0) + tl.program_id(0), tl.sum(y * y, 0))


@triton.jit
def _add_updates(weight, start, factors, into, users, size, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr):
    """Compute some values of the sum over all users, several of whom are read together."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = i < size
    origin = tl.load(start + i, valid, other=0.0)
    total = tl.load(into + i, valid, other=0.0)
    for first in range(0, users, AT_ONCE):
        user = first + tl.arange(0, AT_ONCE)
        factor = tl.load(factors + user, user < users, other=0.0)[:, None]
        read = (factor != 0) & valid[None, :]
        away = tl.load(weight + user.to(tl.int64)[:, None] * size + i[None, :], read, other=0.0) - origin[None, :]
        total += tl.sum(tl.where(read, factor * away.to(tl.float64), 0.0), 0)
    tl.store(into + i, total, valid)


class TritonKernels(Kernels):
    """The `Kernels` on an NVIDIA GPU, except for the recurrence; `precision` is that of float32 products."""

    multiple = 16  # rows of matrices then have the alignment of wide loads
    makes_graphs = True

    def __init__(self, precision: Precision) -> None:
        self._precision = "tf32" if precision == "tf32" else "ieee"

    def cross_entropy(
        self, logits: Tensor, bias: Tensor, targets: Tensor, counts: Tensor, losses: Tensor, rate: Tensor | None = None
    ) -> None:
        users, positions, vocabulary = logits.shape
        _cross_entropy[(positions, users)](
            logits, bias, targets, counts, losses, losses if rate is None else rate, positions, vocabulary,
            RATE=rate is not None, BLOCK=block(vocabulary, LOGITS), num_warps=8,
        )  # fmt: skip

    def add_rows(self, table: Tensor, low: Tensor | None, rows: Tensor, parts: Parts, scale: float) -> None:
        (users, times, batch), positions = parts.tokens.shape, parts.places.shape[1]
        _, vocabulary, width = table.shape
        grid = (triton.cdiv(positions, 32), users)
        _add_rows[grid](
            table, table if low is None else low, rows, parts.tokens, parts.places, parts.counts,
            scale, positions, times * batch, batch, vocabulary,
            D=width, BI=32, BJ=32, BD=block(width), LOW=low is not None, PRECISION=self._precision,
        )  # fmt: skip

    def optimize(
        self, weight: Tensor, low: Tensor | None, gradient: Tensor, start: Tensor, moments: list[Tensor],
        scale: Tensor, counts: Tensor, scalars: Tensor, rule: UpdateRule,
    ) -> None:  # fmt: skip
        if rule.optimizer.triton is None:
            super().optimize(weight, low, gradient, start, moments, scale, counts, scalars, rule)
            return
        first, second = (*moments, weight, weight)[:2]
        size = start.numel()
        _optimize[(triton.cdiv(size, VALUES), len(weight))](
            weight, weight if low is None else low, gradient, start, first, second, scale, counts, scalars,
            size, rule.proximal, rule.decay, rule.momentum,
            BETA=BETAS[0], SECOND_BETA=BETAS[1], ALPHA=ALPHA, EPS=optimizers.EPSILON, OPTIMIZER=rule.optimizer.triton,
            LOW=low is not None, BLOCK=VALUES, num_warps=8,
        )  # fmt: skip

    def squares(self, weight: Tensor, start: Tensor, mu: float, gradient: Tensor | None) -> Tensor:
        users, size = len(weight), start.numel()
        blocks = triton.cdiv(size, VALUES)
        squares = torch.empty(users, blocks, dtype=torch.float64, device=weight.device)
        terms = (weight, start, weight if gradient is None else gradient)
        _squares[(blocks, users)](*terms, squares, size, mu, GRADIENT=gradient is not None, BLOCK=VALUES, num_warps=8)
        return squares.sum(1)

    def add_updates(self, weight: Tensor, start: Tensor, factors: Tensor, into: Tensor) -> None:
        grid = (triton.cdiv(start.numel(), USERS),)
        _add_updates[grid](weight, start, factors, into, len(weight), start.numel(), BLOCK=USERS, AT_ONCE=8)
