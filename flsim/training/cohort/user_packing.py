"""The local training of a micro-cohort as one flat array, made from the users' records at once.

The array is that of `pack` over `steps_of`, which lay out one user after another and sort all positions. Here only
records are sorted. A mask of the real positions of a step, [user, time, row] with the longest record in row 0, lists
them in the order of `Steps` by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
class Rows:
    """The rows of all steps of u users; s segments, each of which is a step of a user.

    Users are ordered by number of steps, most first. Segments are ordered by step, then user; the rows of a segment by
    length, longest first.

    Attributes:
        order: int64 [u], the index of the user at each place.
        users: int64 [steps], number of users that take each step; they are the first ones.
        segment: int64 [rows], the segment of each row.
        length: int64 [rows], number of positions.
        start: int64 [rows], where the row's first input is in `sequences`.
        sequences: BOS, words and EOS of every record of every user.
    """

    order: Ints
    users: Ints
    segment: Ints
    length: Ints
    start: Ints
    sequences: Tokens


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
    rows = _rows(group, layout, hparams)
    in_segment = np.bincount(rows.segment, minlength=int(rows.users.sum()))
    first = np.cumsum(in_segment) - in_segment
    row = np.arange(len(rows.segment)) - np.repeat(first, in_segment)
    count = np.diff(np.cumsum(rows.length)[first + in_segment - 1], prepend=0)

    begins = np.cumsum(rows.users) - rows.users  # the first segment of each step
    steps, segment_step = len(begins), np.repeat(np.arange(len(begins)), rows.users)
    shapes = shapes_of(segment_step, count, rows.length[first] - 1, in_segment - 1, steps, rounding, most)
    lengths, starts = np.zeros((2, len(count), max((shape.rows for shape in shapes), default=0)), np.int64)
    lengths[rows.segment, row], starts[rows.segment, row] = rows.length, rows.start

    data = torch.empty(sum(shape.values for shape in shapes), dtype=torch.int32, pin_memory=pin)
    end = 0
    for step, shape in enumerate(shapes):
        part, end = data[end : end + shape.values], end + shape.values
        part.numpy().fill(0)  # by NumPy, in this thread: threads of torch would wait for each other
        parts, segments = shape.parts(part), slice(begins[step], begins[step] + rows.users[step])
        parts.number.fill_(step + 1)
        _fill(parts, lengths[segments, : shape.rows], starts[segments, : shape.rows], count[segments], rows.sequences)

    user = np.arange(len(count)) - np.repeat(begins, rows.users)
    tokens = np.zeros(len(group), np.int64)
    np.add.at(tokens, rows.order[user], count)
    return PackedGroup(rows.order, tokens.tolist(), shapes, data)


def _rows(group: Sequence[Participant], layout: Layout, hparams: LocalHParams) -> Rows:
    examples = np.array([hparams.examples(len(records)) for records, _ in group])
    steps_an_epoch = -(-examples // hparams.batch_size)
    order = np.argsort(-steps_an_epoch, kind="stable")
    examples, steps_an_epoch = examples[order], steps_an_epoch[order]
    members = [group[place] for place in order]

    # A pass is a user's epoch: its records in the order of training.
    passes = [epoch for records, rng in members for epoch in epoch_orders(len(records), hparams, rng)]
    pass_user = np.repeat(np.arange(len(members)), hparams.epochs)
    pass_step = np.tile(np.arange(hparams.epochs), len(members)) * steps_an_epoch[pass_user]
    pass_rows = examples[pass_user]
    in_pass = np.arange(pass_rows.sum()) - np.repeat(np.cumsum(pass_rows) - pass_rows, pass_rows)
    step = in_pass // hparams.batch_size + np.repeat(pass_step, pass_rows)

    sizes = np.array([len(records) for records, _ in members])
    record = np.concatenate(passes) + np.repeat((np.cumsum(sizes) - sizes)[pass_user], pass_rows)
    joined = Records.joined([records for records, _ in members])
    words = np.diff(joined.offsets)[record]
    length = words + layout.ends_with_eos(words)
    start = joined.offsets[record] + 2 * record + 1  # each boundary of records holds an EOS and a BOS

    steps = steps_an_epoch * hparams.epochs
    users = np.searchsorted(-steps, -np.arange(steps[0]))  # those with more steps than the step's index
    segment = (np.cumsum(users) - users)[step] + np.repeat(pass_user, pass_rows)
    # Keys hold their own index: so they are unique, and sorting them is faster than sorting indices.
    longest, rows = int(length.max(initial=0)), len(length)
    keys = (segment * (longest + 1) + longest - length) * rows + np.arange(rows)
    keys.sort()
    by_length = keys % max(rows, 1)
    return Rows(order, users, segment[by_length], length[by_length], start[by_length], _sequences(joined, layout))


def _sequences(records: Records, layout: Layout) -> Tokens:
    """Return EOS and BOS at every boundary of records, also before the first and after the last one."""
    boundaries = np.tile(np.array([layout.eos, layout.bos], layout.token_type), len(records.offsets))
    return np.insert(records.tokens.astype(layout.token_type), np.repeat(records.offsets, 2), boundaries)


def _fill(parts: Parts, length: Ints, start: Ints, count: Ints, sequences: Tokens) -> None:
    """Write a step of the first u users into parts that are 0.

    Args:
        parts: the step.
        length, start: int64 [u, rows], as in `Rows`; 0 where there is no row.
        count: int64 [u], number of positions.
        sequences: see `Rows`.
    """
    _, times, rows = parts.tokens.shape
    positions = parts.places.shape[1]
    time = np.arange(times)[:, None]
    place = np.flatnonzero(time < length[:, None])
    source = (start[:, None] + time).ravel()[place]
    listed = np.flatnonzero(np.arange(positions) < count[:, None])
    first = np.arange(len(count)) * times * rows - rows  # a block comes before the first time
    tokens, places, targets = (_flat(part) for part in (parts.tokens, parts.places, parts.targets))
    tokens[place] = sequences[source]
    targets[listed] = sequences[source + 1]
    places[listed] = place - np.repeat(first, count)
    _flat(parts.counts)[: len(count)] = count


def _flat(part: torch.Tensor) -> NDArray[np.int32]:
    values: NDArray[np.int32] = part.numpy().reshape(-1)
    return values
