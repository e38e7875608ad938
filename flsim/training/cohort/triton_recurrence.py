"""The recurrence of stacked users in Triton, forwards and backwards.

One program has some rows of a user, at all times. It streams its user's recurrent weights at every time step, in blocks
of units. The weights are the same at each step, so that they come from the cache as long as the users in flight fit it.
r, as the next time step needs it, stays in registers. A barrier ends each time step, since what one thread writes to
memory another may read at the next.
"""
# mypy: disable-error-code="no-untyped-def"

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

DOT = 16  # least size of a side of Triton's matrix products
ROWS = 64  # most rows of a program
WIDEST = 512  # the widest embedding for which registers suffice
STATE = 2**13  # values of r from which on a program has twice as many warps
BLOCK = 2**14  # bytes of a block of weights, where rows are few


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
def _forwards(
    gates,
    bias,
    recurrent,
    projection,
    outputs,
    cells,
    hidden,
    T,
    B,
    D: tl.constexpr,
    H: tl.constexpr,
    BB: tl.constexpr,
    BD: tl.constexpr,
    BH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    user = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BB + tl.arange(0, BB)
    d = tl.arange(0, BD)
    bias += user * 3 * H
    recurrent += user * D * 3 * H
    projection += user * H * D
    low = gates.dtype.element_ty
    output = tl.zeros((BB, BD), low)
    for time in range(T):
        now = ((user * T + time) * B + row)[:, None]
        before = ((user * (T + 1) + time) * B + row)[:, None]
        following = tl.zeros((BB, BD), tl.float32)
        for first in range(0, H, BH):
            h = first + tl.arange(0, BH)
            valid = (row < B)[:, None] & (h < H)[None, :]
            weights = (d < D)[:, None] & (h < H)[None, :]
            gate = gates + now * (3 * H) + h[None, :]
            own = bias + h
            column = recurrent + d[:, None] * (3 * H) + h[None, :]
            f = tl.dot(output, tl.load(column, weights, other=0.0), input_precision=PRECISION)
            o = tl.dot(output, tl.load(column + H, weights, other=0.0), input_precision=PRECISION)
            g = tl.dot(output, tl.load(column + 2 * H, weights, other=0.0), input_precision=PRECISION)
            f += tl.load(gate, valid, other=0.0).to(tl.float32)
            o += tl.load(gate + H, valid, other=0.0).to(tl.float32)
            g += tl.load(gate + 2 * H, valid, other=0.0).to(tl.float32)
            f = tl.sigmoid(f + tl.load(own, h < H, other=0.0).to(tl.float32)[None, :])
            o = tl.sigmoid(o + tl.load(own + H, h < H, other=0.0).to(tl.float32)[None, :])
            g = _tanh(g + tl.load(own + 2 * H, h < H, other=0.0).to(tl.float32)[None, :])
            c = f * tl.load(cells + before * H + h[None, :], valid, other=0.0) + (1 - f) * g
            m = tl.where(valid, o * _tanh(c), 0.0).to(low)
            tl.store(gate, f.to(low), valid)
            tl.store(gate + H, o.to(low), valid)
            tl.store(gate + 2 * H, g.to(low), valid)
            tl.store(cells + (before + B) * H + h[None, :], c, valid)
            tl.store(hidden + now * H + h[None, :], m, valid)
            rows = tl.load(projection + h[:, None] * D + d[None, :], (h < H)[:, None] & (d < D)[None, :], other=0.0)
            following += tl.dot(m, rows, input_precision=PRECISION)
        output = following.to(low)
        tl.store(outputs + (before + B) * D + d[None, :], output, (row < B)[:, None] & (d < D)[None, :])
        tl.debug_barrier()


@triton.jit
def _backwards(
    gates,
    recurrent,
    projection,
    d_outputs,
    cells,
    T,
    B,
    D: tl.constexpr,
    H: tl.constexpr,
    BB: tl.constexpr,
    BD: tl.constexpr,
    BH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Run the cells backwards; the gradient by c of the time before overwrites the c that is no longer needed."""
    user = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BB + tl.arange(0, BB)
    d = tl.arange(0, BD)
    recurrent += user * D * 3 * H
    projection += user * H * D
    low = gates.dtype.element_ty
    real = (row < B)[:, None] & (d < D)[None, :]
    later = tl.zeros((BB, BD), tl.float32)
    for back in range(T):
        time = T - 1 - back
        now = ((user * T + time) * B + row)[:, None]
        before = ((user * (T + 1) + time) * B + row)[:, None]
        place = d_outputs + (before + B) * D + d[None, :]
        d_output = (later + tl.load(place, real, other=0.0).to(tl.float32)).to(low)
        tl.store(place, d_output, real)
        later = tl.zeros((BB, BD), tl.float32)
        for first in range(0, H, BH):
            h = first + tl.arange(0, BH)
            valid = (row < B)[:, None] & (h < H)[None, :]
            rows = tl.load(projection + h[None, :] * D + d[:, None], (d < D)[:, None] & (h < H)[None, :], other=0.0)
            dm = tl.dot(d_output, rows, input_precision=PRECISION)
            gate = gates + now * (3 * H) + h[None, :]
            f = tl.load(gate, valid, other=0.0).to(tl.float32)
            o = tl.load(gate + H, valid, other=0.0).to(tl.float32)
            g = tl.load(gate + 2 * H, valid, other=0.0).to(tl.float32)
            cell = cells + before * H + h[None, :]
            bounded = _tanh(tl.load(cell + B * H, valid, other=0.0))
            dc = tl.load(cell + 2 * B * H, valid & (back > 0), other=0.0) + dm * o * (1 - bounded * bounded)
            df = tl.where(valid, dc * (tl.load(cell, valid, other=0.0) - g) * f * (1 - f), 0.0).to(low)
            do = tl.where(valid, dm * bounded * o * (1 - o), 0.0).to(low)
            dg = tl.where(valid, dc * (1 - f) * (1 - g * g), 0.0).to(low)
            tl.store(cell + B * H, dc * f, valid)
            tl.store(gate, df, valid)
            tl.store(gate + H, do, valid)
            tl.store(gate + 2 * H, dg, valid)
            column = recurrent + h[:, None] + d[None, :] * (3 * H)
            weights = (h < H)[:, None] & (d < D)[None, :]
            later += tl.dot(df, tl.load(column, weights, other=0.0), input_precision=PRECISION)
            later += tl.dot(do, tl.load(column + H, weights, other=0.0), input_precision=PRECISION)
            later += tl.dot(dg, tl.load(column + 2 * H, weights, other=0.0), input_precision=PRECISION)
        tl.debug_barrier()


class Recurrence:
    """The launcher of both kernels, with the precision of `tl.dot` for products of float32."""

    def __init__(self, precision: str) -> None:
        self._precision = precision

    def recur(
        self,
        gates: Tensor,
        bias: Tensor,
        recurrent: Tensor,
        projection: Tensor,
        outputs: Tensor,
        cells: Tensor,
        hidden: Tensor,
    ) -> None:
        outputs[:, 0].zero_()
        cells[:, 0].zero_()
        grid, sizes = self._launch(gates, projection)
        _forwards[grid](gates, bias, recurrent, projection, outputs, cells, hidden, **sizes)

    def recur_back(
        self, gates: Tensor, recurrent: Tensor, projection: Tensor, d_outputs: Tensor, cells: Tensor
    ) -> None:
        grid, sizes = self._launch(gates, projection)
        _backwards[grid](gates, recurrent, projection, d_outputs, cells, **sizes)

    def _launch(self, gates: Tensor, projection: Tensor) -> tuple[tuple[int, int], dict[str, int | str]]:
        """Return the grid and the sizes of a launch."""
        (users, times, rows, _), (_, units, width) = gates.shape, projection.shape
        row_block, width_block = block(rows, ROWS), block(width)
        bytes_a_unit = width_block * gates.element_size() * (1 if row_block == DOT else 2)
        sizes: dict[str, int | str] = {"T": times, "B": rows, "D": width, "H": units, "PRECISION": self._precision}
        sizes |= {"BB": row_block, "BD": width_block, "BH": block(units, max(DOT, BLOCK // bytes_a_unit))}
        sizes |= {"num_warps": 4 if row_block * width_block < STATE else 8, "num_stages": 2}
        return (triton.cdiv(rows, row_block), users), sizes
