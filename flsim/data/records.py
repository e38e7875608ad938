"""Records of users, and batches of them as a next-word model reads them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from flsim.data.extra import NOBODY, ExtraUsers
from flsim.data.vocabulary import Layout

Tokens = NDArray[np.unsignedinteger[Any]]  # of the layout's `token_type`


@dataclass(frozen=True)
class Records:
    """Consecutive records: record i is ``tokens[offsets[i]:offsets[i + 1]]``, word ids without BOS or EOS.

    Attributes:
        tokens: uint16 or uint32 [words], as `Layout.token_type` says.
        offsets: int64 [records + 1], from 0.
    """

    tokens: Tokens
    offsets: NDArray[np.int64]

    @classmethod
    def from_lists(cls, records: list[list[int]]) -> "Records":
        """Return records of lists of token ids."""
        lengths = [len(record) for record in records]
        flat = [token for record in records for token in record]
        token_type = np.uint16 if max(flat, default=0) < 2**16 else np.uint32
        return cls(np.array(flat, token_type), np.cumsum([0, *lengths], dtype=np.int64))

    @classmethod
    def joined(cls, parts: Sequence["Records"]) -> "Records":
        """Return the records of one or several parts, one part after another."""
        lengths: list[NDArray[np.int64]] = [np.diff(part.offsets) for part in parts]
        offsets = np.concatenate([np.zeros(1, np.int64), *lengths]).cumsum()
        return cls(np.concatenate([part.tokens for part in parts]), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Tokens:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[Tokens]:
        return (self[index] for index in range(len(self)))

    @property
    def words(self) -> int:
        """Return the number of words."""
        return len(self.tokens)


class Users(Protocol):
    """Interface of a population: a split of a corpus, the same with canaries planted in it, or its IID twin."""

    @property
    def layout(self) -> Layout: ...

    def __len__(self) -> int: ...

    def __getitem__(self, user: int) -> Records: ...


class RecordSource(Protocol):
    """Interface of all records of a population as one sequence, user after user.

    The position of a record is its index in that sequence.
    """

    @property
    def layout(self) -> Layout: ...

    @property
    def records(self) -> int:
        """Return the number of records."""
        ...

    def records_at(self, positions: NDArray[np.integer[Any]]) -> Records:
        """Return the records at integer [n] positions, in that order."""
        ...


class UsersByRound(Users, Protocol):
    """Interface of training users, whose records may depend on the round."""

    def at(self, round_: int) -> "UsersByRound":
        """Return the users of a round, counted from 0; the object itself if nothing depends on the round.

        The number of users is the same in every round, so that cohorts, shards and privacy do not depend on the round.
        A user who is not active in a round, or is held out, has no records.
        """
        ...

    @property
    def extra(self) -> ExtraUsers:
        """Return the users beside the population; most populations have none."""
        ...


class RecordsByRound(RecordSource, Protocol):
    """Interface of records for central training, which may depend on the step."""

    def at(self, round_: int) -> "RecordsByRound":
        """Return the records of a step, counted from 0; the object itself if nothing depends on the step.

        The number of records is the same in every step.
        """
        ...

    @property
    def extra(self) -> ExtraUsers:
        """Return the users beside the population, whose records extend batches; most populations have none."""
        ...


class Unchanging:
    """Base class of users and records that are the same in every round."""

    @property
    def extra(self) -> ExtraUsers:
        """Return that nobody takes part beside the population."""
        return NOBODY

    def at(self, round_: int) -> Self:  # noqa: ARG002 (others depend on it)
        """Return the object itself."""
        return self


@dataclass(frozen=True)
class Subset(Unchanging):
    """Some records of a source; the subset is a source itself and the same in every round.

    Attributes:
        source: the source of the records.
        chosen: integer [records], positions in the source.
    """

    source: RecordSource
    chosen: NDArray[np.integer[Any]]

    @property
    def layout(self) -> Layout:
        return self.source.layout

    @property
    def records(self) -> int:
        return len(self.chosen)

    def records_at(self, positions: NDArray[np.integer[Any]]) -> Records:
        return self.source.records_at(self.chosen[positions])


@dataclass(frozen=True)
class Batch:
    """Padded records, trimmed to the longest of them.

    Attributes:
        inputs: int64 [records, time], BOS first; PAD beyond the record's end.
        targets: int64 [records, time], the next word, with EOS last if the record is short enough; PAD elsewhere.
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]


def batch(records: Records, chosen: NDArray[np.int64], layout: Layout) -> Batch:
    """Return the chosen records of a user as one batch.

    A sequence is BOS, the words, and EOS if `layout.ends_with_eos`. Inputs are all tokens but the last, targets all but
    the first.

    Args:
        records: the user's records.
        chosen: int64 [n], indices into the records.
        layout: the corpus' token layout.
    """
    starts = records.offsets[chosen]
    lengths = records.offsets[chosen + 1] - starts
    ends_with_eos = layout.ends_with_eos(lengths)
    time = int((lengths + ends_with_eos).max(initial=1))
    position = np.arange(time)[None, :]
    is_word = position < lengths[:, None]
    flat = np.where(is_word, starts[:, None] + position, 0)
    words = np.where(is_word, records.tokens[flat] if records.words else 0, layout.pad).astype(np.int64)
    targets = words.copy()
    targets[ends_with_eos, lengths[ends_with_eos]] = layout.eos
    inputs = np.full_like(targets, layout.pad)
    inputs[:, 0] = layout.bos
    inputs[:, 1:] = words[:, :-1]
    return Batch(inputs, targets)


def batches_by_length(records: Records, layout: Layout, positions: int) -> Iterator[NDArray[np.int64]]:
    """Yield the indices of all records in batches of like length, longest first, so that little is padding.

    Args:
        records: the records.
        layout: the corpus' token layout.
        positions: largest number of positions of a batch, padding included; a longer record is a batch of its own.
    """
    words = np.diff(records.offsets)
    lengths = words + layout.ends_with_eos(words)
    order = np.argsort(-lengths, kind="stable")
    first = 0
    while first < len(order):
        last = first + max(1, positions // max(1, int(lengths[order[first]])))
        yield order[first:last]
        first = last
