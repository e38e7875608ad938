"""Training steps as flat arrays: every position of every batch, laid out before training."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flsim.data.records import Records
from flsim.data.vocabulary import Layout
from flsim.training.hparams import LocalHParams
from flsim.training.local import epoch_orders

Ints = NDArray[np.int64]


class Participant(NamedTuple):
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
    """Return a user's batches as positions; equal to `flsim.training.local.local_batches`."""
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
