"""Which records a user trains on, in which order: the same for every engine."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from flsim.data.records import Batch, Records, batch
from flsim.data.vocabulary import Layout
from flsim.training.hparams import LocalHParams


def epoch_orders(records: int, hparams: LocalHParams, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """The records of each epoch in the order of training, int64 [examples] each: shuffled anew for every epoch.

    Args:
        records: how many the user has; of more than `hparams.max_records`, so many are drawn for all epochs.
        hparams: local training.
        rng: of the user and the round.
    """
    examples = hparams.examples(records)
    chosen = np.arange(records) if examples == records else rng.choice(records, examples, replace=False)
    return [chosen[rng.permutation(examples)] for _ in range(hparams.epochs)]


def local_batches(records: Records, layout: Layout, hparams: LocalHParams, rng: np.random.Generator) -> Iterator[Batch]:
    """The user's batches in the order of training."""
    for order in epoch_orders(len(records), hparams, rng):
        for first in range(0, len(order), hparams.batch_size):
            yield batch(records, order[first : first + hparams.batch_size], layout)
