"""Extra users, who are no part of the population: each takes part in one round, whatever the sampler draws."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class ExtraUsers:
    """Users with numbers from the size of the population on, whose records follow those of the population.

    Attributes:
        rounds: int64 [users], the round in which each takes part, from 0; -1 for none.
        offsets: int64 [users + 1], where each user's records start among those of extra users.
    """

    rounds: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    offsets: Ints = field(default_factory=lambda: np.zeros(1, np.int64))

    def __len__(self) -> int:
        return len(self.rounds)

    def users_in(self, round_: int) -> Ints:
        """Return the extra users of a round (from 0), counted from 0: int64 [n], ascending."""
        return np.flatnonzero(self.rounds == round_)

    def records_of(self, users: Ints) -> Ints:
        """Return the records of extra users, counted from 0 among those of all of them: int64 [n]."""
        ranges = [np.arange(self.offsets[user], self.offsets[user + 1]) for user in users]
        return np.concatenate([*ranges, np.empty(0, np.int64)])

    @property
    def most_records(self) -> int:
        """Return the number of records of the extra users of a round, of the round with the most of them."""
        taking_part = self.rounds >= 0
        sizes = np.diff(self.offsets)[taking_part]
        return int(np.bincount(self.rounds[taking_part], sizes).max(initial=0))


NOBODY = ExtraUsers()
