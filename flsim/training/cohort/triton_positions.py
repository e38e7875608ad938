"""Triton's versions of `flsim.training.cohort.position_kernels`, for NVIDIA GPUs and master weights of float32.

Nothing here depends on the order in which programs run: there are no atomics, so a GPU gives the same result each time.
"""
# mypy: disable-error-code="no-untyped-def"

from collections.abc import Sequence

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from flsim.training.cohort.position_kernels import Target
from flsim.training.cohort.triton_kernels import TritonKernels, _former, _settle
from flsim.training.cohort.triton_output import OutputLayer
from flsim.training.cohort.triton_recurrence import BLOCK, STAGES, _advanced, _differentiated, _gate, block, launch
from flsim.training.hparams import Precision

SUMS = 2**12  # values of a sum that a program of `_descend_positions` has in registers


@triton.jit
def _times(starts, T, BT: tl.constexpr):
    """Return how many times a user has."""
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
            begin = tl.cast(first, tl.int64)  # positions times columns may be beyond 32 bits
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


class TritonPositionKernels(OutputLayer, TritonKernels):
    """The `flsim.training.cohort.position_kernels.PositionKernels` on an NVIDIA GPU.

    Args:
        precision: precision of float32 products; products of bfloat16 do not depend on it.
    """

    def __init__(self, precision: Precision) -> None:
        TritonKernels.__init__(self, precision)

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

    def descend_positions(
        self, weights: Sequence[Target], lefts: Sequence[Tensor], right: Tensor, bias: Target | None, counts: Tensor,
        rate: float | None,
    ) -> None:  # fmt: skip
        (users, positions, m), n = lefts[0].shape, right.shape[2]
        # The narrower side is one block where possible, so that the wider factor is read once.
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
        """Return the grid and the sizes of a launch of the recurrence."""
        grid, sizes = launch(gates, projection, rows, BLOCK, STAGES)
        times = starts.shape[1] - 1
        sizes |= {"T": times, "N": gates.shape[1], "BT": block(times), "PRECISION": self._precision}
        return grid, sizes
