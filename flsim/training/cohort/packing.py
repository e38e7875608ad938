"""Training steps as flat arrays: every position of every batch, laid out before training, with little padding."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from flsim.base.arrays import Ints
from flsim.data.records import Layout, Records, Tokens
from flsim.models.language_model import Params
from flsim.training.update import LocalHParams, epoch_orders


class Participant(NamedTuple):
    """A user who trains in a round."""

    records: Records  # the user's records
    rng: np.random.Generator  # random stream of the user and the round, which orders the records


@dataclass(frozen=True)
class Steps:
    """The real positions of batches, in the order of training: by step, then time, then row.

    Rows are records, longest first, so a step is a sequence of ever shorter blocks without padding and masks.
    """

    inputs: Ints  # inputs, targets: int64 [positions], the token that is read and the token to predict
    targets: Ints
    step: Ints  # step, time, row: int64 [positions], the coordinates of each position
    time: Ints
    row: Ints
    ends: Ints  # int64 [steps], the position after each step's last

    def __len__(self) -> int:
        return len(self.ends)

    def sizes(self) -> list[list[int]]:
        """Return the number of rows at each time, for each step."""
        if not len(self):
            return []
        times = int(self.time.max()) + 1
        table = np.bincount(self.step * times + self.time, minlength=len(self) * times).reshape(len(self), times)
        return [row[row > 0].tolist() for row in table]


def steps_of(records: Records, layout: Layout, hparams: LocalHParams, rng: np.random.Generator) -> Steps:
    """Return a user's batches as positions; equal to `flsim.training.update.local_batches`."""
    orders = epoch_orders(len(records), hparams, rng)
    examples, batch = hparams.examples(len(records)), hparams.batch_size
    steps_an_epoch = -(-examples // batch)
    step = np.concatenate([epoch * steps_an_epoch + np.arange(examples) // batch for epoch in range(len(orders))])
    return lay_out(records, layout, np.concatenate(orders), step, steps_an_epoch * len(orders))


def lay_out(records: Records, layout: Layout, record: Ints, step: Ints, steps: int) -> Steps:
    """Return batches of records as positions: BOS and words are read, words and EOS (if the layout has it) predicted.

    `record` and `step`, int64 [n], are the chosen records and the step of each, ascending.
    """
    words = np.diff(records.offsets)[record]
    length = words + layout.ends_with_eos(words)
    row = _ranks(step, length)

    first = np.cumsum(length) - length
    time = np.arange(length.sum()) - np.repeat(first, length)
    flat = np.repeat(records.offsets[record], length) + time
    tokens = np.append(records.tokens.astype(np.int64), layout.eos)
    targets = np.where(time < np.repeat(words, length), tokens[np.minimum(flat, records.words)], layout.eos)
    inputs = np.where(time == 0, layout.bos, tokens[flat - 1])
    step, row = np.repeat(step, length), np.repeat(row, length)
    order = np.argsort((step * int(length.max(initial=1)) + time) * int(row.max(initial=0) + 1) + row)
    ends = np.cumsum(np.bincount(step, minlength=steps))
    return Steps(inputs[order], targets[order], step[order], time[order], row[order], ends)


def _ranks(step: Ints, length: Ints) -> Ints:
    """Return each record's row within its step, longest record first."""
    order = np.lexsort((-length, step))
    ranks = np.empty(len(step), np.int64)
    starts = np.searchsorted(step, step[order])
    ranks[order] = np.arange(len(step)) - starts
    return ranks


ALIGNED = 4  # int32 values, so that every part begins at a multiple of 16 bytes
SCALARS = 3


class Parts(NamedTuple):
    """A step of u users, as views of the flat array."""

    tokens: Tensor  # int32 [u, T, B], inputs; 0 if a record has no token
    # int32 [u, N], the place (t + 1) B + b of each real position, with an additional block before the first time;
    # padded with 0, which is in this block
    places: Tensor
    targets: Tensor  # int32 [u, N]
    counts: Tensor  # int32 [u], number of real positions; 0 for a user without this step
    number: Tensor  # int32 [1], the number of the step, from 1
    scalars: Tensor  # float64 [3], the step's learning rate and Adam's 1 - beta^t; 0 if the caller of `pack` gave none


class Shape(NamedTuple):
    """The shape of a step: u users, T times, B rows, N positions."""

    users: int
    times: int
    rows: int
    positions: int

    @property
    def sizes(self) -> tuple[int, ...]:
        users, times, rows, positions = self
        return users * times * rows, users * positions, users * positions, users, 1, 2 * SCALARS

    @property
    def values(self) -> int:
        """Return the length of the step's part of the flat array, in int32 values."""
        return sum(_aligned(size) for size in self.sizes)

    def parts(self, data: Tensor) -> Parts:
        """Return views of a step's flat data, int32 [values]."""
        users, times, rows, positions = self
        shapes = ((users, times, rows), (users, positions), (users, positions), (users,), (1,), (2 * SCALARS,))
        views, first = [], 0
        for size, shape in zip(self.sizes, shapes, strict=True):
            views.append(data[first : first + size].view(shape))
            first += _aligned(size)
        parts = Parts(*views)
        return parts._replace(scalars=parts.scalars.view(torch.float64))


EXACT = Shape(1, 1, 1, 1)  # shapes are not rounded up


@dataclass(frozen=True)
class PackedGroup:
    """Users, ordered by number of steps, so that the active users of any step are the first users."""

    order: Ints  # int64 [users], the index of each user in the argument of `pack` or `pack_users`
    tokens: list[int]  # number of positions of each user over all steps, in the order of the argument
    shapes: list[Shape]  # the shape of each step
    data: Tensor  # int32, the steps one after another; in pinned memory if `pin` was set

    def __len__(self) -> int:
        return len(self.order)


def pack(
    group: Sequence[Steps],
    rounding: Shape = EXACT,
    most: Shape | None = None,
    pin: bool = False,
    scalars: NDArray[np.float64] | None = None,
) -> PackedGroup:
    """Return all steps of a group of at least one user as one flat array, for an asynchronous GPU copy if `pin`.

    Shapes are multiples of `rounding`, up to `most`. `scalars`, float64 [steps, 3], see `Parts`, are zeros if None.
    """
    users, steps = len(group), max(map(len, group))
    order = np.argsort([-len(member) for member in group], kind="stable")
    members = [group[place] for place in order]
    inputs, targets, time, row = (
        np.concatenate([getattr(member, name) for member in members], dtype=np.int32)
        for name in ("inputs", "targets", "time", "row")
    )
    tokens = np.zeros(users, np.int64)
    tokens[order] = [len(member.inputs) for member in members]

    # A segment is a step of a user; its positions are consecutive.
    segment_user = np.repeat(np.arange(users), [len(member) for member in members])
    segment_step = np.concatenate([np.arange(len(member)) for member in members])
    count = np.concatenate([np.diff(member.ends, prepend=0) for member in members])
    begin = np.cumsum(count) - count
    shapes = shapes_of(
        segment_step, count, _peaks(time, begin, count), _peaks(row, begin, count), steps, rounding, most
    )
    data, first, rows = allocate(shapes, segment_step, segment_user, count, pin, scalars)

    def spread(values: Ints) -> NDArray[np.int32]:
        """Return each segment's value for all of its positions."""
        return np.repeat(values.astype(np.int32), count)

    flat: NDArray[np.int32] = data.numpy()
    wide = spread(rows)
    place = time * wide + row
    flat[place + spread(first[0])] = inputs
    listed = np.arange(len(inputs), dtype=np.int32) + spread(first[1] - begin)
    flat[listed] = place + wide
    flat[listed + spread(first[2] - first[1])] = targets
    return PackedGroup(order, tokens.tolist(), shapes, data)


def allocate(
    shapes: Sequence[Shape],
    step: Ints,
    user: Ints,
    count: Ints,
    pin: bool = False,
    scalars: NDArray[np.float64] | None = None,
) -> tuple[Tensor, Ints, Ints]:
    """Return the int32 data of steps without positions, the offsets of their segments, and the segments' rows.

    `step`, `user` and `count`, int64 [segments], are those of each segment, a step of a user; `pin` and `scalars` are
    as in `pack`. Offsets, int64 [3, segments], are of tokens, places and targets; rows, int64 [segments], are in the
    step's shape.
    """
    parts = np.array([[_aligned(size) for size in shape.sizes] for shape in shapes], np.int64)
    parts = parts.reshape(-1, len(Parts._fields))
    first = (np.cumsum(parts) - parts.ravel()).reshape(parts.shape).T  # [part, step]
    data = torch.empty(int(parts.sum()), dtype=torch.int32, pin_memory=pin)
    flat: NDArray[np.int32] = data.numpy()
    flat.fill(0)  # by NumPy, in this thread: because threads of torch would wait for each other
    flat[first[3][step] + user] = count
    flat[first[4]] = np.arange(1, len(shapes) + 1)
    if scalars is not None:
        flat[first[5][:, None] + np.arange(2 * SCALARS)] = scalars.view(np.int32)
    _, times, rows, positions = np.array(shapes, np.int64).reshape(-1, 4).T
    positions = user * positions[step]
    begins = np.array((user * (times * rows)[step], positions, positions)) + first[:3].take(step, axis=1)
    return data, begins, rows[step]


def shapes_of(
    step: Ints, count: Ints, time: Ints, row: Ints, steps: int, rounding: Shape, most: Shape | None
) -> list[Shape]:
    """Return each step's shape from its segments' step, count, last time and last row, int64 [segments]; as `pack`."""
    sizes = np.zeros((4, steps), np.int64)
    sizes[0] = np.bincount(step, minlength=steps)
    for size, values in zip(sizes[1:], (time + 1, row + 1, count), strict=True):
        np.maximum.at(size, step, values)
    sizes = -(-sizes.T // rounding) * rounding
    return [Shape(*shape) for shape in (sizes if most is None else np.minimum(sizes, most)).tolist()]


def _peaks(values: NDArray[np.int32], begin: Ints, count: Ints) -> Ints:
    """Return the largest value of each segment; 0 for an empty segment."""
    peaks, has_positions = np.zeros(len(begin), np.int64), count > 0
    if has_positions.any():
        peaks[has_positions] = np.maximum.reduceat(values, begin[has_positions])
    return peaks


def _aligned(values: int) -> int:
    return -(-values // ALIGNED) * ALIGNED


# Parameters with more units than the model has; the added units are 0, have gradients of 0, and therefore remain 0.
#  If the weights of a unit are 0, its c and o tanh c are 0. If its row of the projection is 0, the gradients of its
# gates are 0.

GATES = ("input_weight", "recurrent_weight", "gate_bias")


def units_of(params: Params) -> int:
    return params["projection"].shape[-2]


def width_of(params: Params) -> int:
    return params["projection"].shape[-1]


def widened(params: Params, units: int) -> Params:
    """Return the same model with this many units, at least its own number."""
    size = units_of(params)

    def widen(name: str, value: Tensor) -> Tensor:
        if name in GATES:
            return pad(value.reshape(*value.shape[:-1], 3, size), (0, units - size)).flatten(-2)
        return pad(value, (0, 0, 0, units - size)) if name == "projection" else value

    return params if units == size else {name: widen(name, value) for name, value in params.items()}


def narrowed(params: Params, like: Params) -> Params:
    """Return the parameters in the shapes of `like`, without the units that `widened` added."""
    units, own = units_of(params), units_of(like)

    def narrow(name: str, value: Tensor) -> Tensor:
        if name in GATES:
            return value.reshape(*value.shape[:-1], 3, units)[..., :own].flatten(-2)
        return value[:own] if name == "projection" else value

    return {name: narrow(name, value) for name, value in params.items()}


# The flat arrays of training steps, directly from the records of users: only records are sorted, and the rows of a step
# at a time are its first rows, so their numbers determine all positions.


@dataclass(frozen=True)
class Segments:
    """The rows of all steps of a micro-cohort; a segment is a step of a user, ordered by step, then user.

    Users are ordered by number of steps, most first, so that the users of any step are the first ones.
    """

    step: Ints  # step, user: int64 [segments]
    user: Ints
    sizes: Ints  # int64 [segments, times], number of rows at each time; the sum over times is the number of positions
    length: Ints  # int64 [rows], number of positions of each row; by segment, longest row first
    start: Ints  # int64 [rows], position of the first word of each row in all words of the users
    has_eos: NDArray[np.bool_]  # bool [rows], whether the row's last target is EOS


def pack_users(
    group: Sequence[Participant],
    layout: Layout,
    hparams: LocalHParams,
    rounding: Shape = EXACT,
    most: Shape | None = None,
    pin: bool = False,
) -> PackedGroup:
    """Return the local training of at least one user as one flat array; `rounding`, `most`, `pin` as in `pack`."""
    order = np.argsort([-hparams.examples(len(records)) // hparams.batch_size for records, _ in group], kind="stable")
    members = [group[place] for place in order]
    segments = _segments(members, layout, hparams)
    step, sizes = segments.step, segments.sizes
    count, rows, times = sizes.sum(1), sizes[:, 0], np.count_nonzero(sizes, axis=1)
    shapes = shapes_of(step, count, times - 1, rows - 1, int(step.max(initial=-1)) + 1, rounding, most)
    data, first, step_rows = allocate(shapes, step, segments.user, count, pin)
    # One additional token at both ends: the input of a first word and the target of a last one are replaced.
    unread = np.zeros(1, layout.token_type)
    words = np.concatenate([unread, *(records.tokens for records, _ in members), unread], dtype=layout.token_type)
    _fill(data.numpy(), first, step_rows, segments, words, layout)

    tokens = np.zeros(len(group), np.int64)
    np.add.at(tokens, order[segments.user], count)
    return PackedGroup(order, tokens.tolist(), shapes, data)


def _segments(members: Sequence[Participant], layout: Layout, hparams: LocalHParams) -> Segments:
    """Return the segments of users that are ordered by number of steps, most first."""
    epochs, batch = hparams.epochs, hparams.batch_size
    examples = np.array([hparams.examples(len(records)) for records, _ in members])
    steps_an_epoch = -(-examples // batch)
    users = np.searchsorted(-steps_an_epoch * epochs, -np.arange(steps_an_epoch[0] * epochs))  # of each step
    first_segment = np.cumsum(users) - users

    # A pass is an epoch of a user: its records in the order of training.
    passes = [indices for records, rng in members for indices in epoch_orders(len(records), hparams, rng)]
    user, epoch = np.divmod(np.arange(len(passes)), epochs)
    in_pass = examples[user]
    ends = np.cumsum(in_pass)
    row = np.arange(ends[-1])
    step = (row - np.repeat(ends - in_pass, in_pass)) // batch + np.repeat(epoch * steps_an_epoch[user], in_pass)
    segment = first_segment[step] + np.repeat(user, in_pass)
    begin, first = _begins([records for records, _ in members])
    record = np.concatenate(passes) + np.repeat(first[user], in_pass)
    start = begin[record]
    words = begin[record + 1] - start
    has_eos = layout.ends_with_eos(words)
    length = words + has_eos

    longest = int(length.max(initial=1))
    by_length = segment * longest + (longest - length)
    table = np.bincount(by_length, minlength=int(users.sum()) * longest).reshape(-1, longest)
    sizes = np.ascontiguousarray(np.cumsum(table, axis=1)[:, ::-1])
    # Keys that contain the row are unique: they can be sorted, which is faster than an argsort.
    keys = by_length * len(row) + row
    keys.sort()
    order = keys % max(len(row), 1)
    of_step, of_user = np.repeat(np.arange(len(users)), users), np.arange(len(sizes)) - np.repeat(first_segment, users)
    return Segments(of_step, of_user, sizes, length[order], start[order], has_eos[order])


def _begins(users: Sequence[Records]) -> tuple[Ints, Ints]:
    """Return the offsets of all records in all words, one more than records for each user, and each user's first."""
    parts = np.array([len(records.offsets) for records in users])
    words = np.array([records.words for records in users])
    begins = np.concatenate([records.offsets for records in users]) + np.repeat(np.cumsum(words) - words, parts)
    return begins, np.cumsum(parts) - parts


def _fill(flat: NDArray[np.int32], first: Ints, rows: Ints, segments: Segments, words: Tokens, layout: Layout) -> None:
    """Write the positions of all segments into the int32 array of all steps, which has 0 there.

    `first` [3, segments] has offsets of tokens, places and targets, `rows` [segments] rows in a step's shape. `words`
    has one token before and one after.
    """
    count, times = segments.sizes.sum(1), segments.sizes.shape[1]
    block = segments.sizes.ravel()  # a block has the positions of a segment at a time, by row
    begin = (np.cumsum(block) - block).reshape(-1, times)
    time = np.arange(times)
    in_segment = segments.sizes[:, 0]
    first_row = np.cumsum(in_segment) - in_segment
    position = np.arange(count.sum())

    row = np.repeat(first_row[:, None] - begin, block)
    row += position
    source = segments.start.take(row)
    source += np.repeat(np.tile(time, len(count)), block)
    # Values are converted to the type of the array first, because indexed assignments convert more slowly.
    inputs, targets = (part.take(source).astype(np.int32) for part in (words, words[1:]))
    owner = np.repeat(np.arange(len(count)), in_segment)
    in_step = np.arange(len(owner)) - first_row[owner]
    inputs[begin[owner, 0] + in_step] = layout.bos
    last = begin[owner, segments.length - 1] + in_step
    targets[last[segments.has_eos]] = layout.eos

    place = np.repeat((time + 1) * rows[:, None] - begin, block)
    place += position
    listed = np.repeat(first[1] - begin[:, 0], count)
    listed += position
    flat[listed] = place.astype(np.int32)
    listed += np.repeat(first[2] - first[1], count)
    flat[listed] = targets
    place += np.repeat(first[0] - rows, count)
    flat[place] = inputs
