"""Which records a step of central training reads: a function of the step."""

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
    """The positions that a step reads, int64 [n]; the last batch of an epoch may be smaller.

    Thakkar et al. (2020), section 4.2: plain SGD takes records in random order; its non-IID twin runs "sequentially
    through the user-grouped variant of the dataset in each epoch".

    Args:
        step: from 0; epochs follow one another, and a step in mid-epoch needs nothing of those before.
        records: number of records, at least 1.
        batch_size: records in a step.
        order: "iid" permutes all records anew each epoch, as a function of (seed, epoch); "sequence" goes user by user,
            each epoch the same way.
        seed: the experiment's.
    """
    epoch, index = divmod(step, steps_per_epoch(records, batch_size))
    first, last = index * batch_size, min((index + 1) * batch_size, records)
    if order == "sequence":
        return np.arange(first, last)
    return _permutation(seed, epoch, records)[first:last].astype(np.int64)


@lru_cache(maxsize=1)
def _permutation(seed: int, epoch: int, records: int) -> NDArray[np.integer[Any]]:
    """Of 4 bytes a record, where that counts them."""
    order: NDArray[np.integer[Any]] = np.arange(records, dtype=np.uint32 if records <= 2**32 else np.int64)
    stream(seed, "record order", epoch).shuffle(order)
    order.flags.writeable = False
    return order


def poisson_lot(step: int, records: int, expected: int, seed: int) -> NDArray[np.int64]:
    """Positions of a lot: each with probability expected / records, independently; int64 [n], ascending, possibly none.

    Abadi et al. (2016), section 3.1. Drawn as Binomial many, then which of them, uniformly: the same distribution, and
    a lot of 256 among 10^8 does not take 10^8 draws.

    Raises:
        InputError: more records are expected than there are.
    """
    if not 1 <= expected <= records:
        raise InputError(f"batch_size must be between 1 and the {records:,} training records, found {expected:,}")
    rng = stream(seed, "lot", step)
    return np.sort(rng.choice(records, rng.binomial(records, expected / records), replace=False, shuffle=False))
