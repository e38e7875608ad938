"""Steps of training as one flat array, with little padding."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from flsim.models.language_model import Params
from flsim.training.cohort.steps import Ints, Steps

ALIGNED = 4  # int32 values: every part begins at a multiple of 16 bytes
SCALARS = 3


class Parts(NamedTuple):
    """A step of u users, as views of the flat array.

    Attributes:
        tokens: int32 [u, T, B], inputs; 0 where a record has no token.
        places: int32 [u, N], the place (t + 1) B + b of each real position, as if a block came before the first time;
            padded with 0, which is in that block.
        targets: int32 [u, N].
        counts: int32 [u], number of real positions; 0 for a user that has no such step.
        number: int32 [1], the number of the step, from 1.
        scalars: float64 [3], the step's learning rate and Adam's 1 - beta^t; 0 where the caller of `pack` gave none.
    """

    tokens: Tensor
    places: Tensor
    targets: Tensor
    counts: Tensor
    number: Tensor
    scalars: Tensor


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


EXACT = Shape(1, 1, 1, 1)  # nothing is rounded up


@dataclass(frozen=True)
class PackedGroup:
    """Users, ordered by number of steps, so that the users that still train at any step are the first ones.

    Attributes:
        order: int64 [users], the index in the argument of `pack` or `pack_users` of the user at each place.
        tokens: number of positions of each user over all steps, in the order of the argument.
        shapes: the shape of each step.
        data: int32, the steps one after another; in pinned memory where `pin` was set.
    """

    order: Ints
    tokens: list[int]
    shapes: list[Shape]
    data: Tensor

    def __len__(self) -> int:
        return len(self.order)


def pack(
    group: Sequence[Steps],
    rounding: Shape = EXACT,
    most: Shape | None = None,
    pin: bool = False,
    scalars: NDArray[np.float64] | None = None,
) -> PackedGroup:
    """Return all steps of a group of at least one user as one flat array.

    Args:
        group: the users' steps.
        rounding: shapes are rounded up to multiples of these values, so that there are few different shapes.
        most: the largest values, which rounding does not exceed; None for no limit.
        pin: whether the data go to pinned memory, from where a GPU copies them by itself.
        scalars: float64 [steps, 3], see `Parts`; None for zeros.
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
    """Return the flat array of steps without their positions, and where these belong.

    Args:
        shapes: the shape of each step.
        step, user, count: int64 [segments], the step, user and number of positions of each segment, which is a step of
            a user.
        pin, scalars: as in `pack`.

    Returns:
        The data, int32, the steps one after another; where in it the tokens, places and targets of each segment begin,
        int64 [3, segments]; and the number of rows in the shape of each segment's step, int64 [segments].
    """
    parts = np.array([[_aligned(size) for size in shape.sizes] for shape in shapes], np.int64)
    parts = parts.reshape(-1, len(Parts._fields))
    first = (np.cumsum(parts) - parts.ravel()).reshape(parts.shape).T  # [part, step]
    data = torch.empty(int(parts.sum()), dtype=torch.int32, pin_memory=pin)
    flat: NDArray[np.int32] = data.numpy()
    flat.fill(0)  # by NumPy, in this thread: threads of torch would wait for each other
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
    """Return each step's shape.

    Args:
        step, count, time, row: int64 [segments], the step, number of positions, last time and last row of each segment,
            which is a step of a user.
        steps: number of steps.
        rounding, most: as in `pack`.
    """
    sizes = np.zeros((4, steps), np.int64)
    sizes[0] = np.bincount(step, minlength=steps)
    for size, values in zip(sizes[1:], (time + 1, row + 1, count), strict=True):
        np.maximum.at(size, step, values)
    sizes = -(-sizes.T // rounding) * rounding
    return [Shape(*shape) for shape in (sizes if most is None else np.minimum(sizes, most)).tolist()]


def _peaks(values: NDArray[np.int32], begin: Ints, count: Ints) -> Ints:
    """Return the largest value of each segment; 0 of an empty one."""
    peaks, has_positions = np.zeros(len(begin), np.int64), count > 0
    if has_positions.any():
        peaks[has_positions] = np.maximum.reduceat(values, begin[has_positions])
    return peaks


def _aligned(values: int) -> int:
    return -(-values // ALIGNED) * ALIGNED


# Parameters with more units than the model has; the added units are 0, get gradients of 0, and so stay 0.
#
# With a unit's weights 0 its c is 0, and so is o tanh c. With its row of the projection 0 its gates' gradients are 0.

GATES = ("input_weight", "recurrent_weight", "gate_bias")


def units_of(params: Params) -> int:
    return params["projection"].shape[-2]


def width_of(params: Params) -> int:
    return params["projection"].shape[-1]


def widened(params: Params, units: int) -> Params:
    """Return the same model with this many units, no fewer than it has."""
    own = units_of(params)

    def widen(name: str, value: Tensor) -> Tensor:
        if name in GATES:
            return pad(value.reshape(*value.shape[:-1], 3, own), (0, units - own)).flatten(-2)
        return pad(value, (0, 0, 0, units - own)) if name == "projection" else value

    return params if units == own else {name: widen(name, value) for name, value in params.items()}


def narrowed(params: Params, like: Params) -> Params:
    """Return the parameters in the shapes of `like`, without the units that `widened` added."""
    units, own = units_of(params), units_of(like)

    def narrow(name: str, value: Tensor) -> Tensor:
        if name in GATES:
            return value.reshape(*value.shape[:-1], 3, units)[..., :own].flatten(-2)
        return value[:own] if name == "projection" else value

    return {name: narrow(name, value) for name, value in params.items()}
