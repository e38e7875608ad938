"""The local training of a micro-cohort as one flat array, made from the users' records at once.

The array is that of `pack` over `steps_of`, which lay out one user after another and sort all positions. Here only
records are sorted. The rows of a step that reach a time are then its first ones, so that their number at each time
places every position.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from flsim.data.records import Records, Tokens
from flsim.data.vocabulary import Layout
from flsim.training.batches import epoch_orders
from flsim.training.cohort.packing import EXACT, PackedGroup, Parts, Shape, shapes_of
from flsim.training.cohort.steps import Ints, Participant
from flsim.training.hparams import LocalHParams


@dataclass(frozen=True)
class Segments:
    """The rows of all steps of a micro-cohort, by step, then user, then length, longest first.

    A segment is a step of a user. Users are ordered by number of steps, most first, so that the users of any step are
    the first ones.

    Attributes:
        users: int64 [steps], number of users that take each step.
        sizes: int64 [segments, times], number of rows at each time; the sum over times is the number of positions.
        length: int64 [rows], number of positions of each row.
        start: int64 [rows], place of each row's first word in all words of the users.
        has_eos: bool [rows], whether the row's last target is EOS.
    """

    users: Ints
    sizes: Ints
    length: Ints
    start: Ints
    has_eos: NDArray[np.bool_]


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
    users, sizes = segments.users, segments.sizes
    steps, count, rows, times = len(users), sizes.sum(1), sizes[:, 0], np.count_nonzero(sizes, axis=1)
    shapes = shapes_of(np.repeat(np.arange(steps), users), count, times - 1, rows - 1, steps, rounding, most)

    # One token more at either end: the input of a first word and the target of a last one are replaced.
    unread = np.zeros(1, layout.token_type)
    words = np.concatenate([unread, *(records.tokens for records, _ in members), unread], dtype=layout.token_type)
    data = torch.empty(sum(shape.values for shape in shapes), dtype=torch.int32, pin_memory=pin)
    end, ends, row_ends = 0, np.append(0, np.cumsum(users)), np.append(0, np.cumsum(rows))
    for step, (shape, (first, last)) in enumerate(zip(shapes, pairwise(ends.tolist()), strict=True)):
        part, end = data[end : end + shape.values], end + shape.values
        part.numpy().fill(0)  # by NumPy, in this thread: threads of torch would wait for each other
        parts, own = shape.parts(part), slice(row_ends[first], row_ends[last])
        parts.number.fill_(step + 1)
        in_step = Segments(
            users[step : step + 1], sizes[first:last], segments.length[own], segments.start[own], segments.has_eos[own]
        )
        _fill(parts, in_step, words, layout)

    tokens = np.zeros(len(group), np.int64)
    np.add.at(tokens, order[np.arange(len(count)) - np.repeat(ends[:-1], users)], count)
    return PackedGroup(order, tokens.tolist(), shapes, data)


def _segments(members: Sequence[Participant], layout: Layout, hparams: LocalHParams) -> Segments:
    """Return the segments of users that are ordered by number of steps, most first."""
    epochs, batch = hparams.epochs, hparams.batch_size
    examples = np.array([hparams.examples(len(records)) for records, _ in members])
    steps_an_epoch = -(-examples // batch)
    users = np.searchsorted(-steps_an_epoch * epochs, -np.arange(steps_an_epoch[0] * epochs))

    # A pass is an epoch of a user: its records in the order of training.
    passes = [indices for records, rng in members for indices in epoch_orders(len(records), hparams, rng)]
    user, epoch = np.divmod(np.arange(len(passes)), epochs)
    in_pass = examples[user]
    ends = np.cumsum(in_pass)
    row = np.arange(ends[-1])
    step = (row - np.repeat(ends - in_pass, in_pass)) // batch + np.repeat(epoch * steps_an_epoch[user], in_pass)
    segment = (np.cumsum(users) - users)[step] + np.repeat(user, in_pass)
    begin, first = _begins([records for records, _ in members])
    record = np.concatenate(passes) + np.repeat(first[user], in_pass)
    start = begin[record]
    words = begin[record + 1] - start
    has_eos = layout.ends_with_eos(words)
    length = words + has_eos

    longest = int(length.max(initial=1))
    by_length = segment * longest + (longest - length)
    table = np.bincount(by_length, minlength=int(users.sum()) * longest).reshape(-1, longest)
    # Keys that hold the row itself are unique: they can be sorted, which is faster than an argsort.
    keys = by_length * len(row) + row
    keys.sort()
    order = keys % max(len(row), 1)
    return Segments(users, np.cumsum(table, axis=1)[:, ::-1], length[order], start[order], has_eos[order])


def _begins(users: Sequence[Records]) -> tuple[Ints, Ints]:
    """Return where the records of all users begin in all words, and the place of each user's first record in this.

    Each user's part has one value more than the user has records: where the last one ends.
    """
    parts = np.array([len(records.offsets) for records in users])
    words = np.array([records.words for records in users])
    begins = np.concatenate([records.offsets for records in users]) + np.repeat(np.cumsum(words) - words, parts)
    return begins, np.cumsum(parts) - parts


def _fill(parts: Parts, segments: Segments, words: Tokens, layout: Layout) -> None:
    """Write a step of the first u users into parts that are 0.

    Args:
        parts: the step.
        segments: the segments of this step.
        words: all words of the users, with one token before and one after.
        layout: the corpus' token layout.
    """
    sizes = segments.sizes
    users, times = sizes.shape
    user, count, in_user = np.arange(users), sizes.sum(1), sizes[:, 0]
    block = sizes.ravel()  # a block holds the positions of a user at a time, by row
    begin = np.cumsum(block) - block
    time, first_row = np.tile(np.arange(times), users), np.cumsum(in_user) - in_user
    position, row = np.arange(count.sum()), np.arange(len(segments.start))

    source = segments.start[position + np.repeat(np.repeat(first_row, times) - begin, block)]
    source += np.repeat(time, block)
    inputs, targets = words[source], words[1:][source]
    owner = np.repeat(user, in_user)
    last = begin[owner * times + segments.length - 1] + row - first_row[owner]
    targets[last[segments.has_eos]] = layout.eos

    _, all_times, rows = parts.tokens.shape
    place = position + np.repeat((time + 1) * rows - begin, block)
    listed = position + np.repeat(user * parts.places.shape[1] - begin[::times], count)
    parts.places.numpy().reshape(-1)[listed] = place
    parts.targets.numpy().reshape(-1)[listed] = targets
    place += np.repeat((user * all_times - 1) * rows, count)
    parts.tokens.numpy().reshape(-1)[place] = inputs
    parts.tokens.numpy()[:users, 0] = layout.bos * (np.arange(rows) < sizes[:, :1])
    parts.counts.numpy()[:users] = count
