"""Users' records: words, their token ids, and the records of each user."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, Self, overload

import numpy as np
from numpy.typing import NDArray

from flsim.base.arrays import Flags, Ints
from flsim.base.errors import InputError, at_least_one

# Words and their token ids.
#
# Three layouts of token ids are in use for next-word prediction on Stack Overflow. A corpus names its layout:
#
#     tff      PAD, words, OOV, BOS, EOS    TensorFlow Federated, google-research/federated, pfl-research
#     fedjax   PAD, BOS, EOS, words, OOV    FedJAX
#     fedml    PAD, words, BOS, EOS, OOV    FedML
#
# Words are in order of frequency. Sizes include the four special tokens. The words of a corpus by characters are single
# characters, including spaces.
#
# A corpus whose text is divided by a Hugging Face tokenizer has the layout
#
#     tokenizer    PAD, words, pieces, OOV, BOS, EOS
#
# in which words are tokens that are a complete word, and pieces are all others; see `flsim.data.tokenizer`.

By = Literal["words", "characters", "tokens"]  # the units of text that have token ids

SPECIAL_TOKENS = 4
MOST_TOKENS = 2**24  # far above any real vocabulary; a damaged size is refused before memory is allocated
LAYOUTS = {  # order of the ids after PAD
    "tff": ("words", "oov", "bos", "eos"),
    "fedjax": ("bos", "eos", "words", "oov"),
    "fedml": ("words", "bos", "eos", "oov"),
}
TOKENIZER = "tokenizer"  # the layout of corpora that a tokenizer has cut
_ORDERS = {**LAYOUTS, TOKENIZER: ("words", "pieces", "oov", "bos", "eos")}


def token_type_of(vocabulary_size: int) -> str:
    """Return the NumPy type for this many token ids: uint16 if they fit, otherwise uint32."""
    return "uint16" if vocabulary_size <= 2**16 else "uint32"


@dataclass(frozen=True)
class Layout:
    """The assignment of token ids to words and special tokens, and the maximal length of a record."""

    vocabulary_size: int  # number of token ids, including the four special tokens
    record_words: int = 20  # a record has at most this many words; see `ends_with_eos`
    name: str = "tff"  # a key of `LAYOUTS`, or `TOKENIZER`
    pieces: int = 0  # number of token ids of layout `TOKENIZER` that are neither words nor special
    prompts: bool = False  # whether records can begin with a prompt, which models read and are not trained to write

    pad = 0

    def __post_init__(self) -> None:
        if self.name not in _ORDERS:
            raise InputError(f"layout must be one of {', '.join(LAYOUTS)}, found {self.name!r}")
        if not SPECIAL_TOKENS < self.vocabulary_size <= MOST_TOKENS:
            raise InputError(f"vocabulary size must be between 5 and {MOST_TOKENS:,}, found {self.vocabulary_size:,}")
        at_least_one(record_words=self.record_words)
        if self.pieces and not (self.name == TOKENIZER and 0 < self.pieces < self.vocabulary_size - SPECIAL_TOKENS):
            raise InputError(f"layout {self.name} of {self.vocabulary_size:,} ids cannot have {self.pieces:,} pieces")

    @property
    def token_type(self) -> str:
        """Return the NumPy type of token ids, in files and in memory."""
        return token_type_of(self.vocabulary_size)

    @property
    def words(self) -> int:
        """Number of words; their ids are `first_word` to `last_word`, most frequent first."""
        return self.vocabulary_size - SPECIAL_TOKENS - self.pieces

    @property
    def first_word(self) -> int:
        return self._first("words")

    @property
    def last_word(self) -> int:
        return self.first_word + self.words - 1

    @property
    def text_ids(self) -> range:
        """Return the ids of all text: of words, and of pieces if there are any."""
        return range(self.first_word, self.last_word + self.pieces + 1)

    @property
    def oov(self) -> int:
        return self._first("oov")

    @property
    def bos(self) -> int:
        return self._first("bos")

    @property
    def eos(self) -> int:
        return self._first("eos")

    @overload
    def ends_with_eos(self, words: int) -> bool: ...
    @overload
    def ends_with_eos(self, words: Ints) -> Flags: ...
    def ends_with_eos(self, words: int | Ints) -> bool | Flags:
        """Return whether EOS follows the words of a record.

        A record with `record_words` words can have been cut, so its end is unknown.
        """
        return words < self.record_words

    def _first(self, what: str) -> int:
        before = _ORDERS[self.name][: _ORDERS[self.name].index(what)]
        return 1 + sum({"words": self.words, "pieces": self.pieces}.get(part, 1) for part in before)


@dataclass(frozen=True)
class Vocabulary:
    """The most frequent words (single characters, tokens) of a corpus with their counts, most frequent first."""

    words: tuple[str, ...]
    counts: tuple[int, ...]
    layout: str = "tff"
    by: By = "words"

    @classmethod
    def most_frequent(cls, counts: Mapping[str, int], size: int, layout: str = "tff", by: By = "words") -> "Vocabulary":
        """Return the vocabulary of the `size` - 4 most frequent words; ties are in alphabetical order."""
        most = Layout(size, name=layout).words
        if most > len(counts):
            raise InputError(
                f"a vocabulary of {size:,} was requested, but the corpus has only {len(counts):,} different "
                f"{by}; give --vocabulary {len(counts) + SPECIAL_TOKENS} or less"
            )
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:most]
        return cls(tuple(word for word, _ in ranked), tuple(count for _, count in ranked), layout, by)

    @classmethod
    def read(cls, path: Path, layout: str = "tff", by: By = "words") -> "Vocabulary":
        """Read a vocabulary that `write` wrote."""
        try:
            rows = [line.rsplit("\t", 1) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
            return cls(tuple(word for word, _ in rows), tuple(int(count) for _, count in rows), layout, by)
        except (OSError, ValueError) as error:
            raise InputError(
                f"{path}: not a vocabulary of words and counts ({error}); import the corpus again"
            ) from error

    def write(self, path: Path) -> None:
        """Write one line ``word<TAB>count`` per word, most frequent first."""
        lines = (f"{word}\t{count}\n" for word, count in zip(self.words, self.counts, strict=True))
        path.write_text("".join(lines), encoding="utf-8")

    @cached_property
    def ids(self) -> dict[str, int]:
        return {word: id for id, word in enumerate(self.words, self._layout.first_word)}

    def encode(self, words: Iterable[str]) -> list[int]:
        """Return the token ids of words; words outside the vocabulary become OOV."""
        ids, oov = self.ids, self._layout.oov
        return [ids.get(word, oov) for word in words]

    def decode(self, tokens: Iterable[int]) -> list[str]:
        """Return the words of token ids; special ids become ``<pad>``, ``<oov>``, ``<bos>`` and ``<eos>``."""
        return [self._names[token] for token in tokens]

    def text(self, tokens: Iterable[int]) -> str:
        """Return the text of token ids: words with spaces between them, or characters."""
        return ("" if self.by == "characters" else " ").join(self.decode(tokens))

    def split(self, text: str) -> list[str]:
        """Return the words or the characters of a text, in which runs of white space count as one space."""
        words = text.split()
        return list(" ".join(words)) if self.by == "characters" else words

    @cached_property
    def _layout(self) -> Layout:
        return Layout(len(self.words) + SPECIAL_TOKENS, name=self.layout)

    @cached_property
    def _names(self) -> tuple[str, ...]:
        parts = {"words": self.words, "pieces": (), "oov": ("<oov>",), "bos": ("<bos>",), "eos": ("<eos>",)}
        return ("<pad>", *(name for part in _ORDERS[self.layout] for name in parts[part]))


# Reading of arrays that are larger than memory, piece by piece, without mapping them.

WINDOW = 2**20  # values


def windows(values: NDArray[Any], size: int | None = None, overlap: int = 0) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield consecutive pieces of an array, each with the index of its start, by default of `WINDOW` values.

    A piece shares `overlap` values with the next. A mapped file is read, because its touched pages count as memory.
    """
    size = size or WINDOW
    for start in range(0, len(values), size):
        yield start, piece(values, start, min(start + size + overlap, len(values)))


def piece(values: NDArray[Any], start: int, stop: int) -> NDArray[Any]:
    """Return ``values[start:stop]`` of an array or a mapped file, see `windows`; parts of a file are read."""
    if isinstance(values, np.memmap):
        offset = start * values.itemsize
        return np.fromfile(values.filename, values.dtype, stop - start, offset=offset)  # type: ignore[arg-type]
    return values[start:stop]


def spans(starts: Ints, lengths: Ints) -> Ints:
    """Return the positions of the elements of pieces of an array, one piece after another: int64 [sum of lengths]."""
    positions = np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
    positions += np.arange(len(positions))
    return positions


# Extra users, who do not belong to the population: each takes part in one round, independent of the sampler.


@dataclass(frozen=True)
class ExtraUsers:
    """Users whose numbers and records follow those of the population.

    `rounds` [users] are those in which each takes part, from 0, or -1; `offsets` [users + 1] of their records.
    """

    rounds: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    offsets: Ints = field(default_factory=lambda: np.zeros(1, np.int64))

    def __len__(self) -> int:
        return len(self.rounds)

    def users_in(self, round_: int) -> Ints:
        """Return the extra users of a round (from 0), counted from 0: int64 [n], ascending."""
        return np.flatnonzero(self.rounds == round_)

    def records_of(self, users: Ints) -> Ints:
        """Return the records of extra users, counted from 0 among the records of all extra users: int64 [n]."""
        ranges = [np.arange(self.offsets[user], self.offsets[user + 1]) for user in users]
        return np.concatenate([*ranges, np.empty(0, np.int64)])

    @property
    def most_records(self) -> int:
        """Return the largest number of records of extra users in a round."""
        taking_part = self.rounds >= 0
        sizes = np.diff(self.offsets)[taking_part]
        return int(np.bincount(self.rounds[taking_part], sizes).max(initial=0))


NOBODY = ExtraUsers()


# Records of users, and their batches for next-word models.

Tokens = NDArray[np.unsignedinteger[Any]]  # dtype: `token_type` of the layout


@dataclass(frozen=True)
class Records:
    """Consecutive records: record i is ``tokens[offsets[i]:offsets[i + 1]]``, word ids without BOS or EOS."""

    tokens: Tokens  # uint16 or uint32 [words], see `Layout.token_type`
    offsets: Ints  # int64 [records + 1], from 0
    # integer [records], number of first tokens of each record in its prompt: a model reads them and is not
    # trained to write them. None if no record has a prompt
    prompts: NDArray[np.integer[Any]] | None = None

    @classmethod
    def from_lists(cls, records: list[list[int]]) -> "Records":
        lengths = [len(record) for record in records]
        flat = [token for record in records for token in record]
        token_type = np.uint16 if max(flat, default=0) < 2**16 else np.uint32
        return cls(np.array(flat, token_type), np.cumsum([0, *lengths], dtype=np.int64))

    @classmethod
    def joined(cls, parts: Sequence["Records"]) -> "Records":
        """Return the records of one or several parts, one part after another."""
        lengths: list[Ints] = [np.diff(part.offsets) for part in parts]
        offsets = np.concatenate([np.zeros(1, np.int64), *lengths]).cumsum()
        prompts = None
        if any(part.prompts is not None for part in parts):
            none = [np.zeros(len(part), np.int64) if part.prompts is None else part.prompts for part in parts]
            prompts = np.concatenate(none)
        return cls(np.concatenate([part.tokens for part in parts]), offsets, prompts)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Tokens:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[Tokens]:
        return (self[index] for index in range(len(self)))

    @property
    def words(self) -> int:
        return len(self.tokens)


class Users(Protocol):
    """Interface of a population: a split of a corpus, a split with planted canaries, or an IID partition."""

    @property
    def layout(self) -> Layout: ...

    def __len__(self) -> int: ...

    def __getitem__(self, user: int) -> Records: ...


class RecordSource(Protocol):
    """Interface of all records of a population as one sequence, in the order of users, with positions as indices."""

    @property
    def layout(self) -> Layout: ...

    @property
    def records(self) -> int: ...

    def records_at(self, positions: NDArray[np.integer[Any]]) -> Records:
        """Return the records at integer [n] positions, in that order."""
        ...


class UsersByRound(Users, Protocol):
    """Interface of training users, whose records can depend on the round."""

    def at(self, round_: int) -> "UsersByRound":
        """Return the users of a round, counted from 0; or this object if records do not depend on the round.

        The number of users is the same in every round. A user who is not active in a round has no records.
        """
        ...

    @property
    def extra(self) -> ExtraUsers:
        """Return the extra users, which most populations do not have."""
        ...


class RecordsByRound(RecordSource, Protocol):
    """Interface of records for central training, which can depend on the step."""

    def at(self, round_: int) -> "RecordsByRound":
        """Return the records of a step, counted from 0; or this object if records do not depend on the step.

        The number of records is the same in every step.
        """
        ...

    @property
    def extra(self) -> ExtraUsers:
        """Return the extra users, whose records extend batches; most populations have no extra users."""
        ...


class Unchanging:
    """Base class of users and records that are the same in every round."""

    @property
    def extra(self) -> ExtraUsers:
        """Return that there are no extra users."""
        return NOBODY

    def at(self, round_: int) -> Self:  # noqa: ARG002 (others depend on it)
        """Return this object."""
        return self


@dataclass(frozen=True)
class Subset(Unchanging):
    """The records of a source at chosen positions, as a source that is the same in every round."""

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
    """Padded records, trimmed to the longest record."""

    inputs: Ints  # int64 [records, time], BOS first; PAD beyond the record's end
    # int64 [records, time], the next word, with EOS last if the record is short enough; PAD elsewhere, and for
    # words of a prompt
    targets: Ints


def batch(records: Records, chosen: Ints, layout: Layout) -> Batch:
    """Return the chosen records [n] of a user as one batch.

    A sequence is BOS, the words, and EOS if `layout.ends_with_eos`. Inputs are all tokens except the last, and targets
    all tokens except the first.
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
    if records.prompts is not None:
        targets[position < records.prompts[chosen, None]] = layout.pad
    return Batch(inputs, targets)


def batches_by_length(records: Records, layout: Layout, positions: int) -> Iterator[Ints]:
    """Yield the indices of records in batches of at most so many positions, or one record, the longest first."""
    words = np.diff(records.offsets)
    lengths = words + layout.ends_with_eos(words)
    order = np.argsort(-lengths, kind="stable")
    first = 0
    while first < len(order):
        last = first + max(1, positions // max(1, int(lengths[order[first]])))
        yield order[first:last]
        first = last


# The largest authors of a corpus, and names that are placeholders for many people, such as ``[deleted]``.

LARGEST = 5  # authors that a summary names
UNUSUAL_SHARE = 0.05  # an author with a larger share of all words is unusual,
UNUSUAL_MULTIPLE = 2  # if the share is also above this multiple of an equal share
STAND_INS = {
    *("[deleted]", "[removed]", "deleted", "removed", "nan", "none", "null", "n/a", "na", "undefined"),
    *("unknown", "anonymous", "anon", "guest", "automoderator", "bot"),
}


def author_of(user: str) -> str:
    """Return the author of a user's text: an import cuts authors into users ``author#0``, ``author#1``."""
    return re.sub(r"#[0-9]+\Z", "", user)


def largest_authors(users: Iterable[tuple[str, str, int]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the `LARGEST` authors of (split, user, words) and those of `STAND_INS`, and warnings about them."""
    words: Counter[tuple[str, str]] = Counter()
    pieces: Counter[tuple[str, str]] = Counter()
    for split, user, count in users:
        key = (author_of(user), split)
        words[key] += count
        pieces[key] += 1
    total = max(words.total(), 1)
    ranked = sorted(words, key=lambda key: (-words[key], key))
    chosen = [*ranked[:LARGEST], *(key for key in ranked[LARGEST:] if key[0].strip().lower() in STAND_INS)]
    authors: list[dict[str, Any]] = [
        {"author": key[0], "split": key[1], "users": pieces[key], "words": words[key], "share": words[key] / total}
        for key in chosen
    ]
    warnings = []
    for author in authors:
        name, share = author["author"], author["share"]
        if name.strip().lower() in STAND_INS:
            why = "and is a placeholder for many people or for nobody"
        elif share > UNUSUAL_SHARE and share > UNUSUAL_MULTIPLE / len(words):
            why = "which is unusual for one person"
        else:
            continue
        advice = "to leave this author out, import again with --drop-authors"
        warnings.append(f"author {name!r} has {share:.1%} of all words, {why}; {advice} {name!r}")
    return authors, warnings
