"""Records of all users as one sequence, and which of them a step of central training reads: a function of the step."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flsim.data.records import Batch, Records, Users, batch
from flsim.errors import InputError
from flsim.rng import stream

Order = Literal["iid", "sequence"]


@dataclass(frozen=True)
class RecordSequence:
    """All records, user after user; a record's position is its place in this sequence.

    Attributes:
        users: the population.
        offsets: int64 [users + 1], the position of each user's first record, and the number of records.

    Raises:
        InputError: there is no record at all.
    """

    users: Users
    offsets: NDArray[np.int64]

    def __post_init__(self) -> None:
        if not len(self):
            raise InputError("there are no training records; import a corpus whose train split has users")

    @classmethod
    def of(cls, users: Users) -> "RecordSequence":
        """Of any population, each user of which is read once to count its records."""
        return cls(users, np.cumsum([0, *(len(users[user]) for user in range(len(users)))], dtype=np.int64))

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def batch(self, positions: NDArray[np.int64]) -> Batch:
        """The records at int64 [n] positions, in that order; only their users are read."""
        owners = np.searchsorted(self.offsets, positions, side="right") - 1
        places = positions - self.offsets[owners]
        read = {user: self.users[user] for user in np.unique(owners).tolist()}
        records = [read[user][place] for user, place in zip(owners.tolist(), places.tolist(), strict=True)]
        ends = np.cumsum([0, *map(len, records)], dtype=np.int64)
        chosen = Records(np.concatenate([np.empty(0, np.uint16), *records]), ends)
        return batch(chosen, np.arange(len(records)), self.users.layout)


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
    return np.arange(first, last) if order == "sequence" else _permutation(seed, epoch, records)[first:last]


@lru_cache(maxsize=1)
def _permutation(seed: int, epoch: int, records: int) -> NDArray[np.int64]:
    order = stream(seed, "record order", epoch).permutation(records)
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
