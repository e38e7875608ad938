"""The recurrence of stacked users in Triton, forwards and backwards.

One program has some rows of a user, at all times. It streams the recurrent weights of the user at every time step, in
blocks of units. The weights are equal at each step, so they come from the cache if the active users fit in it. r of the
last time step remains in registers. A barrier ends each time step, because values that one thread writes can be read by
another thread in the next step.
"""
# mypy: disable-error-code="no-untyped-def"

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

DOT = 16  # smallest size of a side of Triton's matrix products
ROWS = 64  # largest number of rows of a program
WIDEST = {"bf16": 512, "tf32": 256, "float32": 256}  # the widest embeddings whose blocks fit an A100's shared memory
STATE = 2**13  # values of r from which on a program has twice as many warps; rows of wide embeddings stay below
BLOCK = 2**14  # bytes of a block of weights, if there are few rows
STAGES = 2  # blocks of weights that are loaded at once


def block(size: int, most: int = 2**20) -> int:
    """Return a power of two that covers the size, at least `DOT` and at most `most`."""
    return int(min(most, max(DOT, triton.next_power_of_2(size))))


def launch(
    gates: Tensor, projection: Tensor, rows: int, most: int, stages: int
) -> tuple[tuple[int, int], dict[str, int | str]]:
    """Return the grid of a recurrence, and those of its sizes that do not depend on the layout of activations.

    Gates are [users, ...], the projection [users, H, D]. At most `rows` are at a time; a block of weights has at most
    `most` bytes, if there are few rows, and `stages` are loaded at once.
    """
    _, units, width = projection.shape
    width_block = block(width)
    row_block = block(rows, max(DOT, min(ROWS, STATE // width_block)))
    bytes_a_unit = width_block * gates.element_size() * (1 if row_block == DOT else 2)
    sizes: dict[str, int | str] = {"D": width, "H": units, "BB": row_block, "BD": width_block}
    sizes |= {"BH": block(units, max(DOT, most // bytes_a_unit)), "num_stages": stages}
    sizes |= {"num_warps": 4 if row_block * width_block < STATE else 8}
    return (triton.cdiv(rows, row_block), len(gates)), sizes


@triton.jit
def _tanh(x):
    """Return tanh x, exact to float32's rounding; near 0, where 2 sigmoid(2x) - 1 cancels, by its series to x^9."""
    y = x * x
    series = x * (1 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, series, 2 * tl.sigmoid(2 * x) - 1)


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
            f = _gate(output, column, weights, gate, valid, own, h < H, PRECISION)
            o = _gate(output, column + H, weights, gate + H, valid, own + H, h < H, PRECISION)
            g = _gate(output, column + 2 * H, weights, gate + 2 * H, valid, own + 2 * H, h < H, PRECISION)
            f, o, g, c, m = _advanced(f, o, g, tl.load(cells + before * H + h[None, :], valid, other=0.0))
            m = tl.where(valid, m, 0.0).to(low)
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
    """Run the cells backwards; the gradient by c of the previous time overwrites the c that is no longer needed."""
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
            c = tl.load(cell + B * H, valid, other=0.0)
            carried = tl.load(cell + 2 * B * H, valid & (back > 0), other=0.0)
            df, do, dg, dc = _differentiated(f, o, g, c, tl.load(cell, valid, other=0.0), carried, dm)
            df = tl.where(valid, df, 0.0).to(low)
            do = tl.where(valid, do, 0.0).to(low)
            dg = tl.where(valid, dg, 0.0).to(low)
            tl.store(cell + B * H, dc, valid)
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
        times, rows = gates.shape[1:3]
        grid, sizes = launch(gates, projection, rows, BLOCK, STAGES)
        return grid, sizes | {"T": times, "B": rows, "PRECISION": self._precision}
