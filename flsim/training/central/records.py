"""The records that a step of central training reads, and its dropout, as functions of the step."""

from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from flsim.base.errors import InputError
from flsim.base.rng import stream

Order = Literal["iid", "sequence"]


def steps_per_epoch(records: int, batch_size: int) -> int:
    return -(-records // batch_size)


def positions_at(step: int, records: int, batch_size: int, order: Order, seed: int) -> NDArray[np.int64]:
    """Return the positions of the records that a step, from 0, reads, int64 [n]; the last of an epoch can be smaller.

    Order "iid" permutes all records in each epoch; "sequence" uses the order of users: Thakkar et al. (2020), section
    4.2, "sequentially through the user-grouped variant of the dataset in each epoch".
    """
    epoch, index = divmod(step, steps_per_epoch(records, batch_size))
    first, last = index * batch_size, min((index + 1) * batch_size, records)
    if order == "sequence":
        return np.arange(first, last)
    return _permutation(seed, epoch, records)[first:last].astype(np.int64)


@lru_cache(maxsize=1)
def _permutation(seed: int, epoch: int, records: int) -> NDArray[np.integer[Any]]:
    """Return the permutation of an epoch, with 4 bytes per record if that is enough."""
    order: NDArray[np.integer[Any]] = np.arange(records, dtype=np.uint32 if records <= 2**32 else np.int64)
    stream(seed, "record order", epoch).shuffle(order)
    order.flags.writeable = False
    return order


def poisson_lot(step: int, records: int, expected: int, seed: int) -> NDArray[np.int64]:
    """Draw the positions of a lot, int64 [n], ascending: each record independently with probability expected / records.

    The lot may be empty (Abadi et al., 2016, section 3.1). InputError if `expected` exceeds `records`.
    """
    if not 1 <= expected <= records:
        raise InputError(f"batch_size must be between 1 and the {records:,} training records, found {expected:,}")
    rng = stream(seed, "lot", step)
    return np.sort(rng.choice(records, rng.binomial(records, expected / records), replace=False, shuffle=False))


def factors(probability: float, seed: int, step: int, rows: int, times: int, width: int) -> NDArray[np.float32]:
    """Return dropout factors, float32 [2, rows, times, width]: 0 for dropped values, otherwise 1 / (1 - probability).

    Index 0 is for the inputs of cells, 1 for those of the output layer. Row 0 belongs to the longest record; records of
    equal length keep the order of the batch. Srivastava et al. (2014), section 10, the "inverted" form.
    """
    uniform = stream(seed, "dropout", step).random((2, rows, times, width), np.float32)
    return (uniform >= probability).astype(np.float32) / np.float32(1 - probability)
