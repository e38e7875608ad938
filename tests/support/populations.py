"""Populations in memory. This file needs only torch and NumPy, as do the tests on a machine with a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flsim.data.corpus import Split
from flsim.data.records import Layout, Records, Unchanging


@dataclass(frozen=True)
class InMemory(Unchanging):
    """A population of given users; a user is a list of records, and a record is a list of token ids."""

    layout: Layout
    users: list[list[list[int]]]

    def __len__(self) -> int:
        return len(self.users)

    def __getitem__(self, user: int) -> Records:
        return Records.from_lists(self.users[user])


def split_of(users: Sequence[Sequence[list[int]]], vocabulary_size: int = 100) -> Split:
    """Return a split of a corpus in memory, with these users; their records are lists of token ids."""
    flat = Records.from_lists([record for user in users for record in user])
    offsets = np.cumsum([0, *map(len, users)], dtype=np.int64)
    return Split(Layout(vocabulary_size), flat.tokens, flat.offsets, offsets, Path("nowhere"))
