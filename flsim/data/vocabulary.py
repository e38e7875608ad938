"""Words and the token ids that stand for them.

The layout is that of TensorFlow Federated, google-research/federated and pfl-research (one of three published ones):
PAD 0, words from 1 in order of frequency, then OOV, BOS, EOS. Sizes count the four special tokens.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from flsim.errors import InputError, at_least_one

SPECIAL_TOKENS = 4


@dataclass(frozen=True)
class Layout:
    """Where the special tokens are, and how long a record can be.

    Attributes:
        vocabulary_size: number of token ids, the four special ones included.
        record_words: a record holds at most this many words; EOS is appended only to shorter ones.
    """

    vocabulary_size: int
    record_words: int = 20

    name = "tff"
    pad = 0

    def __post_init__(self) -> None:
        if not SPECIAL_TOKENS < self.vocabulary_size <= 2**16:
            raise InputError(f"vocabulary size must be between 5 and 65,536, found {self.vocabulary_size:,}")
        at_least_one(record_words=self.record_words)

    @property
    def words(self) -> int:
        """Number of words; their ids are 1 to `words`."""
        return self.vocabulary_size - SPECIAL_TOKENS

    @property
    def oov(self) -> int:
        return self.words + 1

    @property
    def bos(self) -> int:
        return self.words + 2

    @property
    def eos(self) -> int:
        return self.words + 3


@dataclass(frozen=True)
class Vocabulary:
    """The most frequent words of a corpus, with their counts, most frequent first."""

    words: tuple[str, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, counts: Mapping[str, int], size: int) -> "Vocabulary":
        """The `size` - 4 most frequent words; ties in alphabetical order.

        Raises:
            InputError: the corpus has fewer different words than that.
        """
        wanted = Layout(size).words
        if wanted > len(counts):
            raise InputError(
                f"vocabulary of {size:,} asked for, but the corpus has only {len(counts):,} different words; "
                f"use a vocabulary of at most {len(counts) + SPECIAL_TOKENS:,}"
            )
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:wanted]
        return cls(tuple(word for word, _ in ranked), tuple(count for _, count in ranked))

    @classmethod
    def read(cls, path: Path) -> "Vocabulary":
        rows = [line.rsplit("\t", 1) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
        return cls(tuple(word for word, _ in rows), tuple(int(count) for _, count in rows))

    def write(self, path: Path) -> None:
        """One line a word, ``word<TAB>count``, most frequent first."""
        lines = (f"{word}\t{count}\n" for word, count in zip(self.words, self.counts, strict=True))
        path.write_text("".join(lines), encoding="utf-8")

    @cached_property
    def ids(self) -> dict[str, int]:
        return {word: 1 + rank for rank, word in enumerate(self.words)}

    def encode(self, words: Iterable[str]) -> list[int]:
        """Token ids of words; OOV for those that are not in the vocabulary."""
        oov = len(self.words) + 1
        return [self.ids.get(word, oov) for word in words]

    def decode(self, tokens: Iterable[int]) -> list[str]:
        names = ("<pad>", *self.words, "<oov>", "<bos>", "<eos>")
        return [names[token] for token in tokens]
