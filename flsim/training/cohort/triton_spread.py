"""Triton's kernels for a single user on a GPU: its units are spread over programs, one launch for each time.

A single program for a user would stream all recurrent weights (a megabyte for the paper's model in float32) through one
multiprocessor at each time, while the other multiprocessors are idle. Here, a program has a block of units and some
rows. It writes the contribution of its units to r [B, D] to memory. At the next time, every program sums the
contributions of all programs, in a fixed order. Contributions of even and odd times have separate memory, because
programs of one launch both read and write.
"""
# mypy: disable-error-code="no-untyped-def"

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from flsim.training.cohort import triton_kernels
from flsim.training.cohort.packing import Parts

BLOCK = 2**13  # bytes of a block of weights
AT_ONCE = 8  # programs whose parts of r are loaded at once
MANY = 128  # rows; with more rows, a program has as many as fit in registers
STATE = 2**13  # values of r that fit in registers
SAME = 32  # positions of a token that are read together


@triton.jit
def _summed(left, row, B, K, D: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr, AT_ONCE: tl.constexpr):
    """Return the sum of all blocks' parts of r for some rows [BB, BD], with a few loads in flight at a time."""
    d = tl.arange(0, BD)
    at = row[:, None] * D + d[None, :]
    real = (row < B)[:, None] & (d < D)[None, :]
    total = tl.zeros((BB, BD), tl.float32)
    for first in range(0, K, AT_ONCE):
        for k in tl.static_range(AT_ONCE):
            total += tl.load(left + (first + k) * B * D + at, real & (first + k < K), other=0.0)
    return total


@triton.jit(do_not_specialize=["time"])
def _cell(
    gates,
    bias,
    recurrent,
    projection,
    outputs,
    cells,
    hidden,
    left,
    time,
    T,
    B,
    D: tl.constexpr,
    H: tl.constexpr,
    BB: tl.constexpr,
    BD: tl.constexpr,
    BH: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Run one time forwards; sum r of the previous time, which the programs of the first block of units store."""
    user, users, K = tl.program_id(2).to(tl.int64), tl.num_programs(2), tl.num_programs(0)
    row = tl.program_id(1) * BB + tl.arange(0, BB)
    d = tl.arange(0, BD)
    h = tl.program_id(0) * BH + tl.arange(0, BH)
    valid = (row < B)[:, None] & (h < H)[None, :]
    real = (row < B)[:, None] & (d < D)[None, :]
    weights = (d < D)[:, None] & (h < H)[None, :]
    now = ((user * T + time) * B + row)[:, None]
    before = ((user * (T + 1) + time) * B + row)[:, None]
    low = gates.dtype.element_ty
    output = tl.zeros((BB, BD), low)
    if time > 0:
        output = _summed(left + ((time - 1) % 2 * users + user) * K * B * D, row, B, K, D, BB, BD, AT_ONCE).to(low)
        if tl.program_id(0) == 0:
            tl.store(outputs + before * D + d[None, :], output, real)
    gate = gates + now * (3 * H) + h[None, :]
    own = bias + user * 3 * H + h
    column = recurrent + user * D * 3 * H + d[:, None] * (3 * H) + h[None, :]
    f = tl.dot(output, tl.load(column, weights, other=0.0), input_precision=PRECISION)
    o = tl.dot(output, tl.load(column + H, weights, other=0.0), input_precision=PRECISION)
    g = tl.dot(output, tl.load(column + 2 * H, weights, other=0.0), input_precision=PRECISION)
    f += tl.load(gate, valid, other=0.0).to(tl.float32)
    o += tl.load(gate + H, valid, other=0.0).to(tl.float32)
    g += tl.load(gate + 2 * H, valid, other=0.0).to(tl.float32)
    f += tl.load(own, h < H, other=0.0).to(tl.float32)[None, :]
    o += tl.load(own + H, h < H, other=0.0).to(tl.float32)[None, :]
    g += tl.load(own + 2 * H, h < H, other=0.0).to(tl.float32)[None, :]
    f, o, g, c, m = triton_kernels._advanced(f, o, g, tl.load(cells + before * H + h[None, :], valid, other=0.0))
    m = tl.where(valid, m, 0.0).to(low)
    tl.store(gate, f.to(low), valid)
    tl.store(gate + H, o.to(low), valid)
    tl.store(gate + 2 * H, g.to(low), valid)
    tl.store(cells + (before + B) * H + h[None, :], c, valid)
    tl.store(hidden + now * H + h[None, :], m, valid)
    rows = projection + user * H * D + h[:, None] * D + d[None, :]
    added = tl.dot(m, tl.load(rows, (h < H)[:, None] & (d < D)[None, :], other=0.0), input_precision=PRECISION)
    mine = left + ((time % 2 * users + user) * K + tl.program_id(0)) * B * D
    tl.store(mine + row[:, None] * D + d[None, :], added, real)


@triton.jit(do_not_specialize=["time"])
def _cell_back(
    gates,
    recurrent,
    projection,
    d_outputs,
    later,
    cells,
    left,
    time,
    T,
    B,
    D: tl.constexpr,
    H: tl.constexpr,
    BB: tl.constexpr,
    BD: tl.constexpr,
    BH: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Run one time backwards; sum the next time's part of the gradient by r, which is stored in `later`.

    As in `_recur_positions_back`, the gradient by c takes the memory of the c that is no longer needed.
    """
    user, users, K = tl.program_id(2).to(tl.int64), tl.num_programs(2), tl.num_programs(0)
    row = tl.program_id(1) * BB + tl.arange(0, BB)
    d = tl.arange(0, BD)
    h = tl.program_id(0) * BH + tl.arange(0, BH)
    valid = (row < B)[:, None] & (h < H)[None, :]
    real = (row < B)[:, None] & (d < D)[None, :]
    now = ((user * T + time) * B + row)[:, None]
    before = ((user * (T + 1) + time) * B + row)[:, None]
    low = gates.dtype.element_ty
    d_output = tl.load(d_outputs + (before + B) * D + d[None, :], real, other=0.0).to(tl.float32)
    if time + 1 < T:
        added = _summed(left + ((time + 1) % 2 * users + user) * K * B * D, row, B, K, D, BB, BD, AT_ONCE)
        d_output += added
        if tl.program_id(0) == 0:
            tl.store(later + now * D + d[None, :], added, real)
    rows = projection + user * H * D + h[None, :] * D + d[:, None]
    weights = tl.load(rows, (d < D)[:, None] & (h < H)[None, :], other=0.0)
    dm = tl.dot(d_output.to(low), weights, input_precision=PRECISION)
    gate = gates + now * (3 * H) + h[None, :]
    f = tl.load(gate, valid, other=0.0).to(tl.float32)
    o = tl.load(gate + H, valid, other=0.0).to(tl.float32)
    g = tl.load(gate + 2 * H, valid, other=0.0).to(tl.float32)
    cell = cells + before * H + h[None, :]
    c = tl.load(cell + B * H, valid, other=0.0)
    carried = tl.load(cell + 2 * B * H, valid & (time + 1 < T), other=0.0)
    df, do, dg, dc = triton_kernels._differentiated(f, o, g, c, tl.load(cell, valid, other=0.0), carried, dm)
    df = tl.where(valid, df, 0.0).to(low)
    do = tl.where(valid, do, 0.0).to(low)
    dg = tl.where(valid, dg, 0.0).to(low)
    tl.store(cell + B * H, dc, valid)
    tl.store(gate, df, valid)
    tl.store(gate + H, do, valid)
    tl.store(gate + 2 * H, dg, valid)
    column = recurrent + user * D * 3 * H + h[:, None] + d[None, :] * (3 * H)
    inside = (h < H)[:, None] & (d < D)[None, :]
    more = tl.dot(df, tl.load(column, inside, other=0.0), input_precision=PRECISION)
    more += tl.dot(do, tl.load(column + H, inside, other=0.0), input_precision=PRECISION)
    more += tl.dot(dg, tl.load(column + 2 * H, inside, other=0.0), input_precision=PRECISION)
    mine = left + ((time % 2 * users + user) * K + tl.program_id(0)) * B * D
    tl.store(mine + row[:, None] * D + d[None, :], more, real)


@triton.jit
def _add_neighbors(
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
    BJ: tl.constexpr,
    BD: tl.constexpr,
    LOW: tl.constexpr,
):
    """Process one position: if it is the first of its token, add the rows of all positions of this token."""
    user = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0)
    count = tl.load(counts + user)
    places += user * N
    tokens += user * S
    if i < count:
        token = tl.load(tokens + tl.load(places + i) - B)
        is_first = i == 0
        if i > 0:
            is_first = tl.load(tokens + tl.load(places + i - 1) - B) != token
        if is_first:
            d = tl.arange(0, BD)
            total = tl.zeros((BD,), tl.float32)
            first = i
            same_count = BJ
            while same_count == BJ:
                j = first + tl.arange(0, BJ)
                place = tl.load(places + j, j < count, other=B) - B
                same = (tl.load(tokens + place) == token) & (j < count)
                row = rows + (user * S + place[:, None]) * D + d[None, :]
                total += tl.sum(tl.load(row, same[:, None] & (d < D)[None, :], other=0.0).to(tl.float32), 0)
                same_count = tl.sum(same.to(tl.int32), 0)
                first += BJ
            at = (user * V + token) * D + d
            value = tl.load(table + at, d < D, other=0.0).to(tl.float32) + scale * total
            tl.store(table + at, value.to(table.dtype.element_ty), d < D)
            if LOW:
                tl.store(low + at, value.to(low.dtype.element_ty), d < D)


@triton.jit
def _descend(
    weight,
    low,
    left,
    right,
    bias,
    low_bias,
    rate,
    K,
    M,
    N,
    left_user,
    right_user,
    STRIDE_M: tl.constexpr,
    STRIDE_N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Subtract a block of left' right from the weights as soon as it is computed."""
    user = tl.program_id(2).to(tl.int64)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    left += user * left_user
    right += user * right_user
    total = tl.zeros((BM, BN), tl.float32)
    sums = tl.zeros((BN,), tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        begin = tl.cast(first, tl.int64)  # positions times vocabulary can exceed 32 bits
        at_left = begin * M + tl.arange(0, BK)[None, :] * M + m[:, None]
        at_right = begin * N + tl.arange(0, BK)[:, None] * N + n[None, :]
        a = tl.load(left + at_left, (m < M)[:, None] & (k < K)[None, :], other=0.0)
        b = tl.load(right + at_right, (k < K)[:, None] & (n < N)[None, :], other=0.0)
        total += tl.dot(a, b)
        if BIAS:
            sums += tl.sum(b.to(tl.float32), 0)
    at = user * M * N + m[:, None] * STRIDE_M + n[None, :] * STRIDE_N
    valid = (m < M)[:, None] & (n < N)[None, :]
    former = triton_kernels._former(weight, at, valid, False)
    triton_kernels._settle(weight, low, at, valid, former, rate, total, True, False)
    if BIAS and tl.program_id(1) == 0:
        former_bias = triton_kernels._former(bias, user * N + n, n < N, False)
        triton_kernels._settle(bias, low_bias, user * N + n, n < N, former_bias, rate, sums, True, False)


class SpreadKernels(triton_kernels.TritonKernels):
    """The `Kernels` for few users on an NVIDIA GPU, whose positions of the same token must be adjacent."""

    def recur(
        self, gates: Tensor, bias: Tensor, recurrent: Tensor, projection: Tensor, outputs: Tensor, cells: Tensor,
        hidden: Tensor,
    ) -> None:  # fmt: skip
        outputs[:, 0].zero_()
        cells[:, 0].zero_()
        grid, sizes, left = self._spread(gates, projection)
        for time in range(gates.shape[1]):
            _cell[grid](gates, bias, recurrent, projection, outputs, cells, hidden, left, time, **sizes)
        outputs[:, -1].copy_(left[(gates.shape[1] - 1) % 2].sum(1))

    def recur_back(
        self, gates: Tensor, recurrent: Tensor, projection: Tensor, d_outputs: Tensor, cells: Tensor
    ) -> None:
        grid, sizes, left = self._spread(gates, projection)
        later = torch.empty_like(d_outputs[:, 1:], dtype=torch.float32, memory_format=torch.contiguous_format)
        for time in reversed(range(gates.shape[1])):
            _cell_back[grid](gates, recurrent, projection, d_outputs, later, cells, left, time, **sizes)
        d_outputs[:, 1:-1] += later[:, :-1]

    def add_rows(self, table: Tensor, low: Tensor | None, rows: Tensor, parts: Parts, scale: float) -> None:
        (users, times, batch), positions = parts.tokens.shape, parts.places.shape[1]
        _, vocabulary, width = table.shape
        _add_neighbors[(positions, users)](
            table, table if low is None else low, rows, parts.tokens, parts.places, parts.counts,
            scale, positions, times * batch, batch, vocabulary,
            D=width, BJ=SAME, BD=triton_kernels.block(width), LOW=low is not None,
        )  # fmt: skip

    def descend(
        self, weight: Tensor, low: Tensor | None, left: Tensor, right: Tensor, rate: float,
        bias: Tensor | None = None, low_bias: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Descend as in `Kernels`; in float32 with products of plain matrices of the library."""
        if low is None:
            for user, value in enumerate(weight):
                value.addmm_(left[user].T, right[user], alpha=-rate)
            if bias is not None:
                bias.sub_(right.sum(1), alpha=rate)
            return
        users, m, n = weight.shape
        block_m, block_n = triton_kernels.block(m, 128), triton_kernels.block(n, 64)
        _descend[(triton.cdiv(n, block_n), triton.cdiv(m, block_m), users)](
            weight, low, left, right, weight if bias is None else bias, low if low_bias is None else low_bias, rate,
            left.shape[1], m, n, left.stride(0), right.stride(0),
            STRIDE_M=weight.stride(1), STRIDE_N=weight.stride(2), BM=block_m, BN=block_n, BK=32,
            BIAS=bias is not None, num_warps=8, num_stages=3,
        )  # fmt: skip

    def _spread(self, gates: Tensor, projection: Tensor) -> tuple[tuple[int, int, int], dict[str, int | str], Tensor]:
        """Return grid, sizes, and memory for the programs' parts of r: float32 [2, u, blocks of units, B, D]."""
        (users, times, rows, _), (_, units, width) = gates.shape, projection.shape
        width_block = triton_kernels.block(width)
        row_block = (
            triton_kernels.DOT
            if rows <= MANY
            else triton_kernels.block(rows, max(triton_kernels.DOT, STATE // width_block))
        )
        unit_block = triton_kernels.block(units, max(triton_kernels.DOT, BLOCK // (width_block * gates.element_size())))
        blocks = triton.cdiv(units, unit_block)
        sizes: dict[str, int | str] = {"T": times, "B": rows, "D": width, "H": units, "PRECISION": self._precision}
        sizes |= {"BB": row_block, "BD": width_block, "BH": unit_block, "AT_ONCE": AT_ONCE, "num_warps": 8}
        left = torch.empty(2, users, blocks, rows, width, dtype=torch.float32, device=gates.device)
        return (blocks, triton.cdiv(rows, row_block), users), sizes, left
