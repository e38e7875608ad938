"""A micro-cohort's local training as one flat array: what stacked users read at each step, padded as little as can be."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flsim.train.cohort.steps import Ints, Steps

ALIGNED = 4  # int32 values: every part begins at a multiple of 16 bytes


class Parts(NamedTuple):
    """A step of u users, as views of the flat array.

    Attributes:
        tokens: int32 [u, T, B], inputs; 0 where there is none.
        index: int32 [u, N], the place (t + 1) B + b of each real position, as if a block came before the first time;
            padded with 0, which is in that block.
        targets: int32 [u, N].
        counts: int32 [u], number of real positions; 0 of a user that has no such step.
        number: int32 [1], of the step, from 1.
    """

    tokens: Tensor
    index: Tensor
    targets: Tensor
    counts: Tensor
    number: Tensor


class Shape(NamedTuple):
    """Of a step: u users, T times, B rows, N positions."""

    users: int
    times: int
    rows: int
    positions: int

    @property
    def sizes(self) -> tuple[int, ...]:
        users, times, rows, positions = self
        return users * times * rows, users * positions, users * positions, users, 1

    @property
    def values(self) -> int:
        """How many the flat array has for such a step."""
        return sum(_rounded(size, ALIGNED) for size in self.sizes)

    def parts(self, data: Tensor) -> Parts:
        """Views of a step's flat int32 [values]."""
        users, times, rows, positions = self
        shapes = ((users, times, rows), (users, positions), (users, positions), (users,), (1,))
        views, first = [], 0
        for size, shape in zip(self.sizes, shapes, strict=True):
            views.append(data[first : first + size].view(shape))
            first += _rounded(size, ALIGNED)
        return Parts(*views)


@dataclass(frozen=True)
class Rounding:
    """Shapes are rounded up to multiples of these, so that there are few different ones."""

    users: int = 1
    times: int = 1
    rows: int = 1
    positions: int = 1


@dataclass(frozen=True)
class PackedGroup:
    """Users, those of most steps first, so that at any step the ones that still train are the first ones.

    Attributes:
        order: int64 [users], which of the given users is at each place.
        tokens: positions of each user, all steps together, in the given order.
        shapes: of each step.
        data: int32, the steps one after another; in pinned memory where asked for.
    """

    order: Ints
    tokens: list[int]
    shapes: list[Shape]
    data: Tensor

    def __len__(self) -> int:
        return len(self.order)


def pack(group: Sequence[Steps], rounding: Rounding, pin: bool = False) -> PackedGroup:
    """All steps of a group of at least one user.

    Args:
        group: the users.
        rounding: of the shapes; users beyond the group's are padding.
        pin: whether the data go to pinned memory, from where a GPU copies them by itself.
    """
    users = len(group)
    order = np.argsort([-len(steps) for steps in group], kind="stable")
    members = [group[place] for place in order]
    lengths = np.array([len(steps.inputs) for steps in members])
    inputs, targets, step, time, row = (
        np.concatenate([getattr(steps, name) for steps in members])
        for name in ("inputs", "targets", "step", "time", "row")
    )
    user = np.repeat(np.arange(users), lengths)
    steps = max(map(len, members))

    counts = np.bincount(user * steps + step, minlength=users * steps)  # those of one user together
    rank = np.arange(len(user)) - (np.cumsum(counts) - counts)[user * steps + step]
    counts = counts.reshape(users, steps)
    shapes = _shapes(counts, _most(time, step, steps), _most(row, step, steps), rounding)

    begins = np.array([[0, *np.cumsum([_rounded(n, ALIGNED) for n in shape.sizes])] for shape in shapes])
    begins = begins.reshape(steps, -1)  # also of no steps
    ends = begins[:, -1].cumsum() if steps else np.zeros(0, np.int64)
    first = (begins + (ends - begins[:, -1])[:, None]).T
    times, rows, positions = (np.array([shape[of] for shape in shapes], np.int64) for of in (1, 2, 3))
    data = torch.zeros(int(ends[-1]) if steps else 0, dtype=torch.int32, pin_memory=pin)
    flat: NDArray[np.int32] = data.numpy()
    if steps:
        flat[first[0][step] + (user * times[step] + time) * rows[step] + row] = inputs
        listed = user * positions[step] + rank
        flat[first[1][step] + listed] = (time + 1) * rows[step] + row
        flat[first[2][step] + listed] = targets
        who, when = counts.nonzero()
        flat[first[3][when] + who] = counts[who, when]
        flat[first[4]] = np.arange(1, steps + 1)
    tokens = np.zeros(users, np.int64)
    tokens[order] = lengths
    return PackedGroup(order, tokens.tolist(), shapes, data)


def _shapes(counts: Ints, last_time: Ints, last_row: Ints, rounding: Rounding) -> list[Shape]:
    sizes = ((counts > 0).sum(0), last_time + 1, last_row + 1, counts.max(0))
    multiples = (rounding.users, rounding.times, rounding.rows, rounding.positions)
    columns = [_rounded(size, multiple).tolist() for size, multiple in zip(sizes, multiples, strict=True)]
    return [Shape(*row) for row in zip(*columns, strict=True)]


def _most(values: Ints, step: Ints, steps: int) -> Ints:
    """The largest of each step."""
    most = np.zeros(steps, np.int64)
    np.maximum.at(most, step, values)
    return most


def _rounded(number: Any, multiple: int) -> Any:
    return -(-number // multiple) * multiple
