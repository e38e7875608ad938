"""Populations in memory; this file needs torch and numpy only, as tests on a machine with a GPU do."""

from dataclasses import dataclass

from flsim.data.records import Records, Unchanging
from flsim.data.vocabulary import Layout


@dataclass(frozen=True)
class InMemory(Unchanging):
    """A population of given users, each a list of records, each a list of ids."""

    layout: Layout
    users: list[list[list[int]]]

    def __len__(self) -> int:
        return len(self.users)

    def __getitem__(self, user: int) -> Records:
        return Records.from_lists(self.users[user])
