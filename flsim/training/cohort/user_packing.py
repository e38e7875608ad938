"""The local training of a micro-cohort as one flat array, made from the users' records at once.

The array is that of `pack` over `steps_of`, which lay out one user after another and sort all positions. Here only
records are sorted. The rows of a step that reach a time are then its first ones, so that their number at each time
places every position.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from flsim.data.records import Records, Tokens
from flsim.data.vocabulary import Layout
from flsim.training.cohort.packing import EXACT, PackedGroup, Shape, allocate, shapes_of
from flsim.training.cohort.steps import Ints, Participant
from flsim.training.hparams import LocalHParams
from flsim.training.local import epoch_orders

AT_ONCE = 2**15  # positions, so that the intermediate arrays stay in a processor's cache


@dataclass(frozen=True)
class Segments:
    """The rows of all steps of a micro-cohort; a segment is a step of a user.

    Users are ordered by number of steps, most first, so that the users of any step are the first ones. Segments are
    ordered by step, then user.

    Attributes:
        step, user: int64 [segments].
        sizes: int64 [segments, times], number of rows at each time; the sum over times is the number of positions.
        length: int64 [rows], number of positions of each row; by segment, longest row first.
        start: int64 [rows], place of each row's first word in all words of the users.
        has_eos: bool [rows], whether the row's last target is EOS.
    """

    step: Ints
    user: Ints
    sizes: Ints
    length: Ints
    start: Ints
    has_eos: NDArray[np.bool_]

    def parts(self, positions: int) -> "Iterator[tuple[slice, Segments]]":
        """Yield the segments of whole steps, about this many positions at a time, and which segments these are."""
        filled = np.cumsum(np.bincount(self.step, self.sizes.sum(1))) // positions
        ends = np.searchsorted(self.step, np.flatnonzero(np.diff(filled, append=-1)), side="right").tolist()
        rows = np.append(0, np.cumsum(self.sizes[:, 0]))
        for first, last in pairwise([0, *ends]):
            own, of_rows = slice(first, last), slice(rows[first], rows[last])
            per_row = self.length[of_rows], self.start[of_rows], self.has_eos[of_rows]
            yield own, Segments(self.step[own], self.user[own], self.sizes[own], *per_row)


def pack_users(
    group: Sequence[Participant],
    layout: Layout,
    hparams: LocalHParams,
    rounding: Shape = EXACT,
    most: Shape | None = None,
    pin: bool = False,
) -> PackedGroup:
    """Return the local training of at least one user as one flat array.

    Args:
        group: the users.
        layout: the corpus' token layout.
        hparams: settings of local training.
        rounding, most, pin: as in `flsim.training.cohort.packing.pack`.
    """
    order = np.argsort([-hparams.examples(len(records)) // hparams.batch_size for records, _ in group], kind="stable")
    members = [group[place] for place in order]
    segments = _segments(members, layout, hparams)
    step, sizes = segments.step, segments.sizes
    count, rows, times = sizes.sum(1), sizes[:, 0], np.count_nonzero(sizes, axis=1)
    shapes = shapes_of(step, count, times - 1, rows - 1, int(step.max(initial=-1)) + 1, rounding, most)
    data, first, step_rows = allocate(shapes, step, segments.user, count, pin)
    # One token more at either end: the input of a first word and the target of a last one are replaced.
    unread = np.zeros(1, layout.token_type)
    words = np.concatenate([unread, *(records.tokens for records, _ in members), unread], dtype=layout.token_type)
    for own, part in segments.parts(AT_ONCE):
        _fill(data.numpy(), first[:, own], step_rows[own], part, words, layout)

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
    # Keys that hold the row itself are unique: they can be sorted, which is faster than an argsort.
    keys = by_length * len(row) + row
    keys.sort()
    order = keys % max(len(row), 1)
    of_step, of_user = np.repeat(np.arange(len(users)), users), np.arange(len(sizes)) - np.repeat(first_segment, users)
    return Segments(of_step, of_user, sizes, length[order], start[order], has_eos[order])


def _begins(users: Sequence[Records]) -> tuple[Ints, Ints]:
    """Return where the records of all users begin in all words, and the place of each user's first record in this.

    Each user's part has one value more than the user has records: where the last one ends.
    """
    parts = np.array([len(records.offsets) for records in users])
    words = np.array([records.words for records in users])
    begins = np.concatenate([records.offsets for records in users]) + np.repeat(np.cumsum(words) - words, parts)
    return begins, np.cumsum(parts) - parts


def _fill(flat: NDArray[np.int32], first: Ints, rows: Ints, segments: Segments, words: Tokens, layout: Layout) -> None:
    """Write the positions of some segments.

    Args:
        flat: int32, the flat array of all steps, where positions are 0.
        first: int64 [3, segments], where in it the tokens, places and targets of each segment begin.
        rows: int64 [segments], number of rows in the shape of the segment's step.
        segments: the segments to write.
        words: all words of the users, with one token before and one after.
        layout: the corpus' token layout.
    """
    count, times = segments.sizes.sum(1), segments.sizes.shape[1]
    block = segments.sizes.ravel()  # a block holds the positions of a segment at a time, by row
    begin = (np.cumsum(block) - block).reshape(-1, times)
    time = np.arange(times)
    in_segment = segments.sizes[:, 0]
    first_row = np.cumsum(in_segment) - in_segment
    position = np.arange(count.sum())

    row = np.repeat(first_row[:, None] - begin, block)
    row += position
    source = segments.start.take(row)
    source += np.repeat(np.tile(time, len(count)), block)
    # Values get the type of the array first: an assignment by index converts them more slowly.
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
