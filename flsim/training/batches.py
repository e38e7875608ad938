"""The choice and order of the records that a user trains on, which is the same for every engine."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from flsim.data.records import Batch, Records, batch
from flsim.data.vocabulary import Layout
from flsim.training.hparams import LocalHParams


def epoch_orders(records: int, hparams: LocalHParams, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """Return the records of each epoch in the order of training, int64 [examples] each, shuffled anew for every epoch.

    Args:
        records: number of records that the user has. If it exceeds `hparams.max_records`, that many are drawn once and
            used in all epochs.
        hparams: settings of local training.
        rng: random stream of the user and the round.
    """
    examples = hparams.examples(records)
    chosen = np.arange(records) if examples == records else rng.choice(records, examples, replace=False)
    return [chosen[rng.permutation(examples)] for _ in range(hparams.epochs)]


def local_batches(records: Records, layout: Layout, hparams: LocalHParams, rng: np.random.Generator) -> Iterator[Batch]:
    """Yield the user's batches in the order of training."""
    for order in epoch_orders(len(records), hparams, rng):
        for first in range(0, len(order), hparams.batch_size):
            yield batch(records, order[first : first + hparams.batch_size], layout)
