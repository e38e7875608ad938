"""Triton's `flsim.training.cohort.kernels.PositionKernels`, for NVIDIA GPUs and master weights of float32.

Results do not depend on the order of programs: there are no atomics, so a GPU always gives the same result.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Sequence
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from flsim.training.cohort.kernels import PositionKernels, Prediction, Target
from flsim.training.cohort.triton_kernels import DOT, TritonKernels, _advanced, _differentiated, _former, _settle, block

# The output layer of stacked users in Triton: two passes over the vocabulary, neither of which stores logits.
#  The first pass has some positions of a user and streams the embedding, as attention streams its keys: it keeps the
# largest logit so far, the sum of exponentials and the sum of rows that they weight (Dao et al., 2022, Algorithm 1,
# with the embedding as both keys and values). The second pass has some rows of the embedding and streams the positions.
# Each gradient is therefore a sum in the registers of one program, in a fixed order.

# Positions and words of a tile of logits in the first pass, and in the second.
TILES = {"bf16": ((64, 64), (32, 64)), "tf32": ((32, 32), (32, 32))}
REGISTERS = 168  # registers of a thread in the first pass, so that three programs of bfloat16 fit on a multiprocessor
VALUES = 2**13  # columns of a sum of rows in registers
LOG2E = tl.constexpr(1.4426950408889634)  # GPUs compute powers of 2: e^x = 2^(x log2 e)


@triton.jit
def _rows(matrix, row, valid, D: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """Return columns of some rows of a matrix of D columns, 0 if a row is not valid."""
    d = FIRST + tl.arange(0, BLOCK)
    at = matrix + row[:, None] * D + d[None, :]
    if FIRST + BLOCK <= D:
        return tl.load(at, valid[:, None], other=0.0)
    return tl.load(at, valid[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _store_gradient(
    d_chosen, place, stored, real, mean, rows, total, scale, D: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr
):
    """Store columns of the gradient by r: the mean row of the embedding minus the target's row, scaled."""
    d = FIRST + tl.arange(0, BLOCK)
    gradient = tl.where(real[:, None], (mean / total[:, None] - rows) * scale, 0.0).to(d_chosen.dtype.element_ty)
    tl.store(d_chosen + place[:, None] * D + d[None, :], gradient, stored[:, None] & (d < D)[None, :])


@triton.jit
def _predict(
    chosen,
    embedding,
    bias,
    targets,
    counts,
    log_sums,
    factor,
    losses,
    d_chosen,
    N,
    V,
    D: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    FACTOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the loss of some positions of a user, and its gradient by r."""
    user = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    count = tl.load(counts + user)
    place = user * N + n
    real = n < count
    low = d_chosen.dtype.element_ty
    embedding += user * V * D
    bias += user * V
    output = _rows(chosen, place, real, D, 0, BD)
    mean = tl.zeros((BN, BD), tl.float32)
    if BE:
        second_output = _rows(chosen, place, real, D, BD, BE)
        second_mean = tl.zeros((BN, BE), tl.float32)
    largest = tl.full((BN,), float("-inf"), tl.float32)
    total = tl.zeros((BN,), tl.float32)
    columns = tl.arange(0, BV)
    next_shift = tl.load(bias + columns, columns < V, other=float("-inf"))
    words = tl.where(tl.program_id(0) * BN < count, V, 0)
    for first in range(0, words, BV):
        v = first + columns
        shift = next_shift.to(tl.float32) * LOG2E
        # The biases of the next tile, which are loaded during the current tile.
        next_shift = tl.load(bias + v + BV, v + BV < V, other=float("-inf"))
        rows = _rows(embedding, v, v < V, D, 0, BD).to(low)
        scores = tl.dot(output, tl.trans(rows), input_precision=PRECISION)
        if BE:
            second_rows = _rows(embedding, v, v < V, D, BD, BE).to(low)
            scores = tl.dot(second_output, tl.trans(second_rows), scores, input_precision=PRECISION)
        scores = scores * LOG2E + shift[None, :]
        above = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - above[:, None])
        shrink = tl.exp2(largest - above)
        total = total * shrink + tl.sum(weights, 1)
        mean = tl.dot(weights.to(low), rows, mean * shrink[:, None], input_precision=PRECISION)
        if BE:
            second_mean *= shrink[:, None]
            second_mean = tl.dot(weights.to(low), second_rows, second_mean, input_precision=PRECISION)
        largest = above
    total = tl.where(real, total, 1.0)
    scale = 1.0 / tl.maximum(count, 1)
    if FACTOR:
        scale *= tl.load(factor).to(tl.float32)
    target = tl.load(targets + place, real, other=0)
    # The gradient before the loss: both need many registers.
    rows = _rows(embedding, target, real, D, 0, BD).to(low).to(tl.float32)
    _store_gradient(d_chosen, place, n < N, real, mean, rows, total, scale, D, 0, BD)
    own = tl.load(bias + target).to(tl.float32) + tl.sum(output.to(tl.float32) * rows, 1)
    if BE:
        second_rows = _rows(embedding, target, real, D, BD, BE).to(low).to(tl.float32)
        _store_gradient(d_chosen, place, n < N, real, second_mean, second_rows, total, scale, D, BD, BE)
        own += tl.sum(second_output.to(tl.float32) * second_rows, 1)
    log_sum = (tl.log2(total) + largest) / LOG2E
    tl.store(log_sums + place, tl.where(real, log_sum, float("inf")), n < N)
    tl.store(losses + place, tl.where(real, log_sum - own, 0.0), n < N)


@triton.jit
def _descend_predictions(
    chosen,
    embedding,
    bias,
    targets,
    counts,
    log_sums,
    factor,
    weight,
    low,
    own_bias,
    low_bias,
    rate,
    N,
    V,
    D: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    EVEN: tl.constexpr,
    FACTOR: tl.constexpr,
    LOW: tl.constexpr,
    GRADIENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the gradient by some rows of the embedding and by their biases, over all positions of a user."""
    user = tl.program_id(1).to(tl.int64)
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    place = user * V + v
    count = tl.load(counts + user)
    if count > 0:
        rows = _rows(embedding, place, v < V, D, 0, BD).to(chosen.dtype.element_ty)
        total = tl.zeros((BV, BD), tl.float32)
        if BE:
            second_rows = _rows(embedding, place, v < V, D, BD, BE).to(chosen.dtype.element_ty)
            second_total = tl.zeros((BV, BE), tl.float32)
        shift = tl.load(bias + place, v < V, other=float("-inf")).to(tl.float32) * LOG2E
        sums = tl.zeros((BV,), tl.float32)
        word = tl.where(v > 0, v, -1)  # as 0, which is not a word, is the target beyond a user's positions
        for first in range(0, count, BN):
            n = first + tl.arange(0, BN)
            at = user * N + n
            output = _rows(chosen, at, n < count, D, 0, BD)
            scores = tl.dot(rows, tl.trans(output), input_precision=PRECISION)
            if BE:
                second_output = _rows(chosen, at, n < count, D, BD, BE)
                scores = tl.dot(second_rows, tl.trans(second_output), scores, input_precision=PRECISION)
            log_sum = tl.load(log_sums + at) if EVEN else tl.load(log_sums + at, n < N, other=float("inf"))
            error = tl.exp2(scores * LOG2E + shift[:, None] - (log_sum * LOG2E)[None, :])
            target = tl.load(targets + at) if EVEN else tl.load(targets + at, n < N, other=0)
            error -= tl.where(word[:, None] == target[None, :], 1.0, 0.0)
            total = tl.dot(error.to(output.dtype), output, total, input_precision=PRECISION)
            if BE:
                second_total = tl.dot(error.to(output.dtype), second_output, second_total, input_precision=PRECISION)
            sums += tl.sum(error, 1)
        scale = 1.0 / count
        if FACTOR:
            scale *= tl.load(factor).to(tl.float32)
        d = tl.arange(0, BD)
        at = place[:, None] * D + d[None, :]
        valid = (v < V)[:, None] & (d < D)[None, :]
        former = _former(weight, at, valid, GRADIENT)
        former_bias = _former(own_bias, place, v < V, GRADIENT)
        if BE:
            e = BD + tl.arange(0, BE)
            second_at = place[:, None] * D + e[None, :]
            second_valid = (v < V)[:, None] & (e < D)[None, :]
            second_former = _former(weight, second_at, second_valid, GRADIENT)
            second_total *= scale
            _settle(weight, low, second_at, second_valid, second_former, rate, second_total, LOW, GRADIENT)
        _settle(weight, low, at, valid, former, rate, total * scale, LOW, GRADIENT)
        _settle(own_bias, low_bias, place, v < V, former_bias, rate, sums * scale, LOW, GRADIENT)


def columns(width: int) -> tuple[int, int, int]:
    """Return a width, and its columns as blocks of two powers of two; the second is 0 if it would save nothing.

    Examples:
        >>> columns(96), columns(100), columns(18)
        ((96, 64, 32), (100, 128, 0), (18, 32, 0))
    """
    whole = block(width)
    second = block(width - whole // 2)
    return (width, whole // 2, second) if DOT < whole != whole // 2 + second else (width, whole, 0)


# The recurrence: one program has some rows of a user, at all times. It streams the recurrent weights of the user at
# every time, in blocks of units. The weights are equal each time, so they come from the cache if those of the active
# users fit in it. r of the last time remains in registers. A barrier ends each time, because values that one thread
# writes can be read by another thread at the next time.

ROWS = 64  # largest number of rows of a program
STATE = 2**13  # values of r from which on a program has twice as many warps; rows of wide embeddings stay below
BLOCK = 2**14  # bytes of a block of weights, if there are few rows
STAGES = 2  # blocks of weights that are loaded at once
SUMS = 2**12  # values of a sum that a program of `_descend_positions` has in registers


@triton.jit
def _gate(output, column, weights, gate, valid, own, inside, PRECISION: tl.constexpr):
    """Return the sum of a gate for a block of units: recurrent product, contribution of the inputs, and bias.

    A plain sum would make `gate` the accumulator of the product, and Triton does not prefetch loads of an accumulator,
    so every block of units would wait.
    """
    product = tl.dot(output, tl.load(column, weights, other=0.0), input_precision=PRECISION)
    total = tl.fma(product, 1.0, tl.load(gate, valid, other=0.0).to(tl.float32))
    return total + tl.load(own, inside, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _times(starts, T, BT: tl.constexpr):
    t = tl.arange(0, BT)
    return tl.sum((tl.load(starts + t, t < T, other=0) < tl.load(starts + T)).to(tl.int32) * (t < T), 0)


@triton.jit
def _recur_positions(
    gates,
    bias,
    recurrent,
    projection,
    before,
    outputs,
    cells,
    hidden,
    starts,
    T,
    N,
    D: tl.constexpr,
    H: tl.constexpr,
    BB: tl.constexpr,
    BD: tl.constexpr,
    BH: tl.constexpr,
    BT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Run the cells of some rows of a user over all times."""
    user = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BB + tl.arange(0, BB)
    d = tl.arange(0, BD)
    bias += user * 3 * H
    recurrent += user * D * 3 * H
    projection += user * H * D
    starts += user * (T + 1)
    low = gates.dtype.element_ty
    output = tl.zeros((BB, BD), low)
    for time in range(_times(starts, T, BT)):
        begin = tl.load(starts + time)
        live = row < tl.load(starts + time + 1) - begin
        now = (user * N + begin + row)[:, None]
        last = (user * N + tl.load(starts + tl.maximum(time - 1, 0)) + row)[:, None]
        real = live[:, None] & (d < D)[None, :]
        tl.store(before + now * D + d[None, :], output, real)
        following = tl.zeros((BB, BD), tl.float32)
        for first in range(0, H, BH):
            h = first + tl.arange(0, BH)
            valid = live[:, None] & (h < H)[None, :]
            weights = (d < D)[:, None] & (h < H)[None, :]
            gate = gates + now * (3 * H) + h[None, :]
            own = bias + h
            column = recurrent + d[:, None] * (3 * H) + h[None, :]
            c = tl.load(cells + last * H + h[None, :], valid & (time > 0), other=0.0)
            f = _gate(output, column, weights, gate, valid, own, h < H, PRECISION)
            o = _gate(output, column + H, weights, gate + H, valid, own + H, h < H, PRECISION)
            g = _gate(output, column + 2 * H, weights, gate + 2 * H, valid, own + 2 * H, h < H, PRECISION)
            f, o, g, c, m = _advanced(f, o, g, c)
            m = tl.where(valid, m, 0.0).to(low)
            tl.store(gate, f.to(low), valid)
            tl.store(gate + H, o.to(low), valid)
            tl.store(gate + 2 * H, g.to(low), valid)
            tl.store(cells + now * H + h[None, :], c, valid)
            tl.store(hidden + now * H + h[None, :], m, valid)
            rows = tl.load(projection + h[:, None] * D + d[None, :], (h < H)[:, None] & (d < D)[None, :], other=0.0)
            following += tl.dot(m, rows, input_precision=PRECISION)
        output = following.to(low)
        tl.store(outputs + now * D + d[None, :], output, real)
        tl.debug_barrier()


@triton.jit
def _recur_positions_back(
    gates,
    recurrent,
    projection,
    d_outputs,
    cells,
    starts,
    T,
    N,
    D: tl.constexpr,
    H: tl.constexpr,
    BB: tl.constexpr,
    BD: tl.constexpr,
    BH: tl.constexpr,
    BT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Run the cells backwards; the gradient by c of the time before overwrites the c that is no longer needed."""
    user = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BB + tl.arange(0, BB)
    d = tl.arange(0, BD)
    recurrent += user * D * 3 * H
    projection += user * H * D
    starts += user * (T + 1)
    low = gates.dtype.element_ty
    times = _times(starts, T, BT)
    later = tl.zeros((BB, BD), tl.float32)
    for back in range(times):
        time = times - 1 - back
        begin = tl.load(starts + time)
        end = tl.load(starts + time + 1)
        live = row < end - begin
        continued = row < tl.load(starts + tl.minimum(time + 2, T)) - end
        last = (user * N + tl.load(starts + tl.maximum(time - 1, 0)) + row)[:, None]
        now = (user * N + begin + row)[:, None]
        after = (user * N + end + row)[:, None]
        place = d_outputs + now * D + d[None, :]
        real = live[:, None] & (d < D)[None, :]
        d_output = (later + tl.load(place, real, other=0.0).to(tl.float32)).to(low)
        tl.store(place, d_output, real)
        later = tl.zeros((BB, BD), tl.float32)
        for first in range(0, H, BH):
            h = first + tl.arange(0, BH)
            valid = live[:, None] & (h < H)[None, :]
            gate = gates + now * (3 * H) + h[None, :]
            f = tl.load(gate, valid, other=0.0).to(tl.float32)
            o = tl.load(gate + H, valid, other=0.0).to(tl.float32)
            g = tl.load(gate + 2 * H, valid, other=0.0).to(tl.float32)
            cell = cells + now * H + h[None, :]
            c = tl.load(cell, valid, other=0.0)
            earlier = tl.load(cells + last * H + h[None, :], valid & (time > 0), other=0.0)
            carried = tl.load(cells + after * H + h[None, :], valid & continued[:, None], other=0.0)
            rows = tl.load(projection + h[None, :] * D + d[:, None], (d < D)[:, None] & (h < H)[None, :], other=0.0)
            dm = tl.dot(d_output, rows, input_precision=PRECISION)
            df, do, dg, dc = _differentiated(f, o, g, c, earlier, carried, dm)
            df = tl.where(valid, df, 0.0).to(low)
            do = tl.where(valid, do, 0.0).to(low)
            dg = tl.where(valid, dg, 0.0).to(low)
            tl.store(cell, dc, valid)
            tl.store(gate, df, valid)
            tl.store(gate + H, do, valid)
            tl.store(gate + 2 * H, dg, valid)
            column = recurrent + h[:, None] + d[None, :] * (3 * H)
            weights = (h < H)[:, None] & (d < D)[None, :]
            later += tl.dot(df, tl.load(column, weights, other=0.0), input_precision=PRECISION)
            later += tl.dot(do, tl.load(column + H, weights, other=0.0), input_precision=PRECISION)
            later += tl.dot(dg, tl.load(column + 2 * H, weights, other=0.0), input_precision=PRECISION)
        tl.debug_barrier()


@triton.jit
def _descend_positions(
    weight,
    low,
    left,
    second_weight,
    second_low,
    second_left,
    right,
    bias,
    low_bias,
    counts,
    rate,
    N,
    M,
    C,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    PAIR: tl.constexpr,
    BIAS: tl.constexpr,
    LOW: tl.constexpr,
    GRADIENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute a block of left' right for one or two lefts, over a user's positions, and store or apply it."""
    user = tl.program_id(2).to(tl.int64)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BC + tl.arange(0, BC)
    count = tl.load(counts + user)
    if count > 0:
        left += user * N * M
        second_left += user * N * M
        right += user * N * C
        total = tl.zeros((BM, BC), tl.float32)
        second_total = tl.zeros((BM, BC), tl.float32)
        sums = tl.zeros((BC,), tl.float32)
        for first in range(0, count, BK):
            k = first + tl.arange(0, BK)
            begin = tl.cast(first, tl.int64)  # positions times columns can exceed 32 bits
            at_left = begin * M + tl.arange(0, BK)[None, :] * M + m[:, None]
            real = (m < M)[:, None] & (k < count)[None, :]
            at_right = begin * C + tl.arange(0, BK)[:, None] * C + n[None, :]
            b = tl.load(right + at_right, (k < count)[:, None] & (n < C)[None, :], other=0.0)
            total = tl.dot(tl.load(left + at_left, real, other=0.0), b, total, input_precision=PRECISION)
            if PAIR:
                a = tl.load(second_left + at_left, real, other=0.0)
                second_total = tl.dot(a, b, second_total, input_precision=PRECISION)
            if BIAS:
                sums += tl.sum(b.to(tl.float32), 0)
        at = user * M * C + m[:, None] * C + n[None, :]
        inside = (m < M)[:, None] & (n < C)[None, :]
        former = _former(weight, at, inside, GRADIENT)
        _settle(weight, low, at, inside, former, rate, total, LOW, GRADIENT)
        if PAIR:
            second_former = _former(second_weight, at, inside, GRADIENT)
            _settle(second_weight, second_low, at, inside, second_former, rate, second_total, LOW, GRADIENT)
        if BIAS and tl.program_id(1) == 0:
            former_bias = _former(bias, user * C + n, n < C, GRADIENT)
            _settle(bias, low_bias, user * C + n, n < C, former_bias, rate, sums, LOW, GRADIENT)


class TritonPositionKernels(TritonKernels, PositionKernels):
    """The `PositionKernels` on an NVIDIA GPU; `precision` as in `TritonKernels`."""

    def recur_positions(
        self, gates: Tensor, bias: Tensor, recurrent: Tensor, projection: Tensor, before: Tensor, outputs: Tensor,
        cells: Tensor, hidden: Tensor, starts: Tensor, rows: int,
    ) -> None:  # fmt: skip
        grid, sizes = self._launch_positions(gates, projection, starts, rows)
        _recur_positions[grid](gates, bias, recurrent, projection, before, outputs, cells, hidden, starts, **sizes)

    def recur_positions_back(
        self, gates: Tensor, recurrent: Tensor, projection: Tensor, d_outputs: Tensor, cells: Tensor, starts: Tensor,
        rows: int,
    ) -> None:  # fmt: skip
        grid, sizes = self._launch_positions(gates, projection, starts, rows)
        _recur_positions_back[grid](gates, recurrent, projection, d_outputs, cells, starts, **sizes)

    def predict(self, prediction: Prediction, losses: Tensor, d_chosen: Tensor) -> None:
        users, positions, _ = prediction.chosen.shape
        operands, sizes = self._operands(prediction), self._tile(prediction, 0)
        if d_chosen.dtype == torch.bfloat16:
            sizes["maxnreg"] = REGISTERS
        _predict[(triton.cdiv(positions, sizes["BN"]), users)](
            *operands, losses, d_chosen, positions, prediction.bias.shape[1], **sizes
        )

    def descend_predictions(self, prediction: Prediction, weight: Target, bias: Target, rate: float | None) -> None:
        (users, positions, _), vocabulary = prediction.chosen.shape, prediction.bias.shape[1]
        operands, sizes = self._operands(prediction), self._tile(prediction, 1)
        low, low_bias = (target.value if target.low is None else target.low for target in (weight, bias))
        _descend_predictions[(triton.cdiv(vocabulary, sizes["BV"]), users)](
            *operands, weight.value, low, bias.value, low_bias, 0.0 if rate is None else rate,
            positions, vocabulary, EVEN=positions % sizes["BN"] == 0, LOW=weight.low is not None, GRADIENT=rate is None,
            **sizes,
        )  # fmt: skip

    def descend_positions(
        self, weights: Sequence[Target], lefts: Sequence[Tensor], right: Tensor, bias: Target | None, counts: Tensor,
        rate: float | None,
    ) -> None:  # fmt: skip
        (users, positions, m), n = lefts[0].shape, right.shape[2]
        # The narrower side is one block if possible, so the wider factor is read once.
        narrow = block(min(m, n), 128)
        wide = block(max(m, n), SUMS // narrow)
        block_m, block_n = (narrow, wide) if m <= n else (wide, narrow)
        targets = [*weights, *weights][:2], [*lefts, *lefts][:2]
        first, second = (
            (target.value, target.value if target.low is None else target.low, left)
            for target, left in zip(*targets, strict=True)
        )
        own = bias or weights[0]
        _descend_positions[(triton.cdiv(n, block_n), triton.cdiv(m, block_m), users)](
            *first, *second, right, own.value, own.value if own.low is None else own.low,
            counts, 0.0 if rate is None else rate, positions, m, n,
            BM=block_m, BC=block_n, BK=128 // right.element_size(), PAIR=len(weights) == 2, BIAS=bias is not None,
            LOW=weights[0].low is not None, GRADIENT=rate is None, PRECISION=self._precision,
            num_warps=2 * right.element_size(), num_stages=3,
        )  # fmt: skip

    def _launch_positions(
        self, gates: Tensor, projection: Tensor, starts: Tensor, rows: int
    ) -> tuple[tuple[int, int], dict[str, int | str]]:
        (users, positions, _), (_, units, width), times = gates.shape, projection.shape, starts.shape[1] - 1
        width_block = block(width)
        row_block = block(rows, max(DOT, min(ROWS, STATE // width_block)))
        bytes_a_unit = width_block * gates.element_size() * (1 if row_block == DOT else 2)
        sizes: dict[str, int | str] = {"T": times, "N": positions, "D": width, "H": units, "PRECISION": self._precision}
        sizes |= {"BB": row_block, "BD": width_block, "BH": block(units, max(DOT, BLOCK // bytes_a_unit))}
        sizes |= {"BT": block(times), "num_stages": STAGES, "num_warps": 4 if row_block * width_block < STATE else 8}
        return (triton.cdiv(rows, row_block), users), sizes

    def _operands(self, prediction: Prediction) -> tuple[Tensor, ...]:
        *operands, factor = prediction
        return *operands, prediction.log_sums if factor is None else factor

    def _tile(self, prediction: Prediction, number: int) -> dict[str, Any]:
        """Return the sizes of a tile of logits in the first pass, 0, or the second; small for wide embeddings."""
        (_, positions, width), vocabulary = prediction.chosen.shape, prediction.bias.shape[1]
        most = max(DOT, VALUES // block(width))
        few, words = TILES["bf16" if prediction.chosen.dtype == torch.bfloat16 else self._precision][number]
        sizes = {"BN": block(positions, min(few, most)), "BV": block(vocabulary, min(words, most))}
        sizes |= {"num_warps": 4, "num_stages": 3}
        sizes |= {"FACTOR": prediction.factor is not None} | dict(zip(("D", "BD", "BE"), columns(width), strict=True))
        return {**sizes, "PRECISION": self._precision}
