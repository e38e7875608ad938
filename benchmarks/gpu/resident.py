"""A candidate for the recurrence by position: several programs share a user, and their weights stay on the chip.

`flsim.training.cohort.triton_positions` streams all recurrent weights of a user at every time. Here, a group of P
programs has one block of rows of one user. Each program has some units, and loads their weights once, into shared
memory. At every time, each program writes the part of r that its units contribute, and waits until all programs of its
group have written theirs. Then it sums the parts in the order of the units. The results therefore have the same bits
for every order of programs.

A program that waits needs the other programs of its group to run. Each program therefore takes the next number when it
starts, and the numbers from P i to P i + P - 1 are group i. All programs of a group have then started before any
program of the next group, and no group needs a later group. The GPU must run at least P programs at once; otherwise the
kernel never ends.

The width of the embedding, D, is two blocks of columns, because blocks have powers of two as sizes: 96 is 64 + 32,
which saves a quarter of the shared memory.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from flsim.training.cohort.triton_kernels import DOT, _advanced, _differentiated, block
from flsim.training.cohort.triton_positions import TritonPositionKernels, _times

UNITS = 128  # units of a program: 98 KB of weights in bfloat16 if D is 96; two programs fit on a multiprocessor
WARPS = 4  # with at most 255 registers of a thread, two programs fit, too


@triton.jit
def _group(counters, P: tl.constexpr):
    """Return the group of this program, its part, and a pointer to the group's number of arrivals."""
    number = tl.atomic_add(counters, 1, sem="relaxed")
    group = number // P
    return group, number % P, counters + 1 + group


@triton.jit
def _share(group, part, BLOCKS, BB: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BH: tl.constexpr):
    """Return the user, the rows in the block and of the user, both blocks of columns, and the units of this program."""
    rows = tl.arange(0, BB)
    user = (group // BLOCKS).to(tl.int64)
    return user, rows, group % BLOCKS * BB + rows, tl.arange(0, BD), BD + tl.arange(0, BE), part * BH + tl.arange(0, BH)


@triton.jit
def _arrive(arrivals):
    """Make what all threads of this program wrote visible to its group."""
    tl.debug_barrier()
    tl.atomic_add(arrivals, 1, sem="release")


@triton.jit
def _wait(arrivals, expected):
    """Wait until as many programs of the group as expected arrived, and see what they wrote."""
    while tl.atomic_add(arrivals, 0, sem="acquire") < expected:
        pass
    tl.debug_barrier()


@triton.jit
def _at(starts, time, row, first, T):
    """Return which rows have a position at a time, and their positions; no row has one before or after all times."""
    exists = (time >= 0) & (time < T)
    time = tl.where(exists, time, 0)
    begin = tl.load(starts + time)
    return exists & (row < tl.load(starts + time + 1) - begin), (first + begin + row)[:, None]


@triton.jit
def _sum(parts, row, d, valid, P: tl.constexpr, BB: tl.constexpr, D: tl.constexpr):
    """Return the sum of some columns of all parts of a group, from the cache that all multiprocessors share."""
    total = tl.zeros(valid.shape, tl.float32)
    for part in tl.static_range(P):
        at = parts + (part * BB + row)[:, None] * D + d[None, :]
        total += tl.load(at, valid, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _three(matrix, at, H: tl.constexpr, valid):
    """Return the values of the three gates at some places."""
    f = tl.load(matrix + at, valid, other=0.0)
    o = tl.load(matrix + at + H, valid, other=0.0)
    return f, o, tl.load(matrix + at + 2 * H, valid, other=0.0)


@triton.jit
def _both(first, second, weights, second_weights, PRECISION: tl.constexpr):
    """Return the product of both blocks of columns with their weights."""
    product = tl.dot(first, weights, input_precision=PRECISION)
    return tl.dot(second, second_weights, product, input_precision=PRECISION)


@triton.jit
def _recur_resident(
    gates,
    bias,
    recurrent,
    projection,
    before,
    outputs,
    cells,
    hidden,
    starts,
    parts,
    counters,
    T,
    N,
    BLOCKS,
    GROUPS,
    D: tl.constexpr,
    H: tl.constexpr,
    P: tl.constexpr,
    BB: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    BH: tl.constexpr,
    BT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Run some units of some rows of a user over all times; c and the weights stay on the chip."""
    group, part, arrivals = _group(counters, P)
    user, rows, row, d, e, h = _share(group, part, BLOCKS, BB, BD, BE, BH)
    inside = h < H
    recurrent += user * D * 3 * H
    projection += user * H * D
    bias += user * 3 * H
    starts += user * (T + 1)
    low = gates.dtype.element_ty
    wide = (d < D)[:, None] & inside[None, :]
    second_wide = (e < D)[:, None] & inside[None, :]
    f_weight, o_weight, g_weight = _three(recurrent, d[:, None] * (3 * H) + h[None, :], H, wide)
    f_second, o_second, g_second = _three(recurrent, e[:, None] * (3 * H) + h[None, :], H, second_wide)
    down = tl.load(projection + h[:, None] * D + d[None, :], inside[:, None] & (d < D)[None, :], other=0.0)
    second_down = tl.load(projection + h[:, None] * D + e[None, :], inside[:, None] & (e < D)[None, :], other=0.0)
    f_bias, o_bias, g_bias = _three(bias, h, H, inside)
    output = tl.zeros((BB, BD), low)
    second = tl.zeros((BB, BE), low)
    c = tl.zeros((BB, BH), tl.float32)
    live, now = _at(starts, 0, row, user * N, T)
    f_next, o_next, g_next = _three(gates, now * (3 * H) + h[None, :], H, live[:, None] & inside[None, :])
    for time in range(_times(starts, T, BT)):
        live, now = _at(starts, time, row, user * N, T)
        valid = live[:, None] & inside[None, :]
        real = live[:, None] & (d < D)[None, :]
        second_real = live[:, None] & (e < D)[None, :]
        f = _both(output, second, f_weight, f_second, PRECISION) + (f_next + f_bias.to(tl.float32)[None, :])
        o = _both(output, second, o_weight, o_second, PRECISION) + (o_next + o_bias.to(tl.float32)[None, :])
        g = _both(output, second, g_weight, g_second, PRECISION) + (g_next + g_bias.to(tl.float32)[None, :])
        f, o, g, c, m = _advanced(f, o, g, c)
        m = tl.where(valid, m, 0.0).to(low)
        # Even and odd times have separate memory: a program that is ahead must not overwrite what another one sums.
        sums = parts + (time % 2 * GROUPS + group).to(tl.int64) * P * BB * D
        mine = sums + (part * BB + rows)[:, None] * D
        tl.store(mine + d[None, :], tl.dot(m, down, input_precision=PRECISION), real)
        tl.store(mine + e[None, :], tl.dot(m, second_down, input_precision=PRECISION), second_real)
        _arrive(arrivals)
        # Loads and stores that no other program needs, while the other programs arrive.
        following, after = _at(starts, time + 1, row, user * N, T)
        f_next, o_next, g_next = _three(gates, after * (3 * H) + h[None, :], H, following[:, None] & inside[None, :])
        place = now * (3 * H) + h[None, :]
        tl.store(gates + place, f.to(low), valid)
        tl.store(gates + place + H, o.to(low), valid)
        tl.store(gates + place + 2 * H, g.to(low), valid)
        tl.store(cells + now * H + h[None, :], c, valid)
        tl.store(hidden + now * H + h[None, :], m, valid)
        if part == 0:
            tl.store(before + now * D + d[None, :], output, real)
            tl.store(before + now * D + e[None, :], second, second_real)
        _wait(arrivals, P * (time + 1))
        output = _sum(sums, rows, d, real, P, BB, D).to(low)
        second = _sum(sums, rows, e, second_real, P, BB, D).to(low)
        if part == 0:
            tl.store(outputs + now * D + d[None, :], output, real)
            tl.store(outputs + now * D + e[None, :], second, second_real)


@triton.jit
def _recur_resident_back(
    gates,
    recurrent,
    projection,
    d_outputs,
    cells,
    starts,
    parts,
    counters,
    T,
    N,
    BLOCKS,
    GROUPS,
    D: tl.constexpr,
    H: tl.constexpr,
    P: tl.constexpr,
    BB: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    BH: tl.constexpr,
    BT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Run some units of some rows of a user backwards; the gradient by c and the weights stay on the chip."""
    group, part, arrivals = _group(counters, P)
    user, rows, row, d, e, h = _share(group, part, BLOCKS, BB, BD, BE, BH)
    inside = h < H
    recurrent += user * D * 3 * H
    projection += user * H * D
    starts += user * (T + 1)
    low = gates.dtype.element_ty
    tall = inside[:, None] & (d < D)[None, :]
    second_tall = inside[:, None] & (e < D)[None, :]
    f_weight, o_weight, g_weight = _three(recurrent, h[:, None] + d[None, :] * (3 * H), H, tall)
    f_second, o_second, g_second = _three(recurrent, h[:, None] + e[None, :] * (3 * H), H, second_tall)
    up = tl.load(projection + h[None, :] * D + d[:, None], (d < D)[:, None] & inside[None, :], other=0.0)
    second_up = tl.load(projection + h[None, :] * D + e[:, None], (e < D)[:, None] & inside[None, :], other=0.0)
    carried = tl.zeros((BB, BH), tl.float32)
    later = tl.zeros((BB, BD), tl.float32)
    second_later = tl.zeros((BB, BE), tl.float32)
    times = _times(starts, T, BT)
    live, now = _at(starts, times - 1, row, user * N, T)
    valid = live[:, None] & inside[None, :]
    f, o, g = _three(gates, now * (3 * H) + h[None, :], H, valid)
    c = tl.load(cells + now * H + h[None, :], valid, other=0.0)
    live, now = _at(starts, times - 2, row, user * N, T)
    earlier = tl.load(cells + now * H + h[None, :], live[:, None] & inside[None, :], other=0.0)
    for back in range(times):
        time = times - 1 - back
        live, now = _at(starts, time, row, user * N, T)
        valid = live[:, None] & inside[None, :]
        real = live[:, None] & (d < D)[None, :]
        second_real = live[:, None] & (e < D)[None, :]
        output = (later + tl.load(d_outputs + now * D + d[None, :], real, other=0.0)).to(low)
        second = (second_later + tl.load(d_outputs + now * D + e[None, :], second_real, other=0.0)).to(low)
        dm = _both(output, second, up, second_up, PRECISION)
        df, do, dg, carried = _differentiated(
            f.to(tl.float32), o.to(tl.float32), g.to(tl.float32), c, earlier, carried, dm
        )
        df = tl.where(valid, df, 0.0).to(low)
        do = tl.where(valid, do, 0.0).to(low)
        dg = tl.where(valid, dg, 0.0).to(low)
        carried = tl.where(valid, carried, 0.0)
        sums = parts + (time % 2 * GROUPS + group).to(tl.int64) * P * BB * D
        mine = sums + (part * BB + rows)[:, None] * D
        more = tl.dot(df, f_weight, input_precision=PRECISION)
        more = tl.dot(do, o_weight, more, input_precision=PRECISION)
        tl.store(mine + d[None, :], tl.dot(dg, g_weight, more, input_precision=PRECISION), real)
        more = tl.dot(df, f_second, input_precision=PRECISION)
        more = tl.dot(do, o_second, more, input_precision=PRECISION)
        tl.store(mine + e[None, :], tl.dot(dg, g_second, more, input_precision=PRECISION), second_real)
        _arrive(arrivals)
        place = now * (3 * H) + h[None, :]
        tl.store(gates + place, df, valid)
        tl.store(gates + place + H, do, valid)
        tl.store(gates + place + 2 * H, dg, valid)
        live, last = _at(starts, time - 1, row, user * N, T)
        f, o, g = _three(gates, last * (3 * H) + h[None, :], H, live[:, None] & inside[None, :])
        c = earlier
        live, last = _at(starts, time - 2, row, user * N, T)
        earlier = tl.load(cells + last * H + h[None, :], live[:, None] & inside[None, :], other=0.0)
        _wait(arrivals, P * (back + 1))
        later = _sum(sums, rows, d, real, P, BB, D)
        second_later = _sum(sums, rows, e, second_real, P, BB, D)
        # Only now, because other programs may read what this overwrites until they arrive.
        if part == 0:
            tl.store(d_outputs + now * D + d[None, :], output, real)
            tl.store(d_outputs + now * D + e[None, :], second, second_real)


class ResidentPositionKernels(TritonPositionKernels):
    """`TritonPositionKernels` with this recurrence; for widths whose weights fit into shared memory."""

    def recur_positions(
        self, gates: Tensor, bias: Tensor, recurrent: Tensor, projection: Tensor, before: Tensor, outputs: Tensor,
        cells: Tensor, hidden: Tensor, starts: Tensor, rows: int,
    ) -> None:  # fmt: skip
        grid, shared, sizes = self._launch_groups(gates, projection, starts, rows)
        _recur_resident[grid](
            gates, bias, recurrent, projection, before, outputs, cells, hidden, starts, *shared, **sizes
        )

    def recur_positions_back(
        self, gates: Tensor, recurrent: Tensor, projection: Tensor, d_outputs: Tensor, cells: Tensor, starts: Tensor,
        rows: int,
    ) -> None:  # fmt: skip
        grid, shared, sizes = self._launch_groups(gates, projection, starts, rows)
        _recur_resident_back[grid](gates, recurrent, projection, d_outputs, cells, starts, *shared, **sizes)

    def _launch_groups(
        self, gates: Tensor, projection: Tensor, starts: Tensor, rows: int
    ) -> tuple[tuple[int], tuple[Tensor, Tensor], dict[str, int | str]]:
        """Return the grid, the memory that groups share, and the sizes of a launch.

        The memory is the parts of r, float32 [2, groups, P, BB, D], and counters, int32 [1 + groups]: of programs that
        started, and of arrivals in each group. Counters must be 0 at the launch.
        """
        (blocks, users), sizes = self._launch_positions(gates, projection, starts, rows)
        (_, units, width), groups, unit_block = projection.shape, users * blocks, block(projection.shape[1], UNITS)
        first, programs = max(DOT, block(width) // 2), triton.cdiv(units, unit_block)
        sizes |= {"BD": first, "BE": block(width - first), "BH": unit_block, "P": programs, "BLOCKS": blocks}
        sizes |= {"GROUPS": groups, "num_warps": WARPS, "num_stages": 1}
        parts = gates.new_empty(2, groups, programs, int(sizes["BB"]), width, dtype=torch.float32)
        counters = torch.zeros(1 + groups, dtype=torch.int32, device=gates.device)
        return (groups * programs,), (parts, counters), sizes
