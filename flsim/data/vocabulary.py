"""Words and the token ids that stand for them.

Three layouts of token ids are in use for next-word prediction on Stack Overflow; a corpus says which one is its own:

    tff      PAD, words, OOV, BOS, EOS    TensorFlow Federated, google-research/federated, pfl-research
    fedjax   PAD, BOS, EOS, words, OOV    FedJAX
    fedml    PAD, words, BOS, EOS, OOV    FedML

Words are in order of frequency. Sizes count the four special tokens.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from flsim.base.errors import InputError, at_least_one

SPECIAL_TOKENS = 4
MOST_TOKENS = 2**24  # far beyond any vocabulary in use, so that a damaged size is refused before memory is asked for
LAYOUTS = {  # what follows PAD
    "tff": ("words", "oov", "bos", "eos"),
    "fedjax": ("bos", "eos", "words", "oov"),
    "fedml": ("words", "bos", "eos", "oov"),
}


def token_type_of(vocabulary_size: int) -> str:
    """Return the NumPy type of so many token ids: uint16 where it holds them all, else uint32."""
    return "uint16" if vocabulary_size <= 2**16 else "uint32"


@dataclass(frozen=True)
class Layout:
    """Which ids are words and which the special tokens, and how long a record can be.

    Attributes:
        vocabulary_size: number of token ids, the four special ones included.
        record_words: a record holds at most this many words; see `ends_with_eos`.
        name: a key of `LAYOUTS`.
    """

    vocabulary_size: int
    record_words: int = 20
    name: str = "tff"

    pad = 0

    def __post_init__(self) -> None:
        if self.name not in LAYOUTS:
            raise InputError(f"layout must be one of {', '.join(LAYOUTS)}, found {self.name!r}")
        if not SPECIAL_TOKENS < self.vocabulary_size <= MOST_TOKENS:
            raise InputError(f"vocabulary size must be between 5 and {MOST_TOKENS:,}, found {self.vocabulary_size:,}")
        at_least_one(record_words=self.record_words)

    @property
    def token_type(self) -> str:
        """The NumPy type of token ids, in files and in memory."""
        return token_type_of(self.vocabulary_size)

    @property
    def words(self) -> int:
        """Number of words; their ids are `first_word` to `last_word`, most frequent first."""
        return self.vocabulary_size - SPECIAL_TOKENS

    @property
    def first_word(self) -> int:
        return self._first("words")

    @property
    def last_word(self) -> int:
        return self.first_word + self.words - 1

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
    def ends_with_eos(self, words: NDArray[np.int64]) -> NDArray[np.bool_]: ...
    def ends_with_eos(self, words: int | NDArray[np.int64]) -> bool | NDArray[np.bool_]:
        """Return whether EOS follows the words of a record, or of each of several (int64 [records], bool [records]).

        A record of as many words as there is room for may have been cut, so that nobody knows where it ended.
        """
        return words < self.record_words

    def _first(self, what: str) -> int:
        before = LAYOUTS[self.name][: LAYOUTS[self.name].index(what)]
        return 1 + sum(self.words if part == "words" else 1 for part in before)


@dataclass(frozen=True)
class Vocabulary:
    """The most frequent words of a corpus, with their counts, most frequent first.

    Attributes:
        words: the words.
        counts: how often each occurs.
        layout: name of the layout of token ids.
    """

    words: tuple[str, ...]
    counts: tuple[int, ...]
    layout: str = "tff"

    @classmethod
    def of(cls, counts: Mapping[str, int], size: int, layout: str = "tff") -> "Vocabulary":
        """The `size` - 4 most frequent words; ties in alphabetical order.

        Raises:
            InputError: the corpus has fewer different words than that.
        """
        wanted = Layout(size, name=layout).words
        if wanted > len(counts):
            raise InputError(
                f"vocabulary of {size:,} asked for, but the corpus has only {len(counts):,} different words; "
                f"give --vocabulary {len(counts) + SPECIAL_TOKENS} or less"
            )
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:wanted]
        return cls(tuple(word for word, _ in ranked), tuple(count for _, count in ranked), layout)

    @classmethod
    def read(cls, path: Path, layout: str = "tff") -> "Vocabulary":
        """Inverse of `write`. Raises InputError where the file is not that."""
        try:
            rows = [line.rsplit("\t", 1) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
            return cls(tuple(word for word, _ in rows), tuple(int(count) for _, count in rows), layout)
        except (OSError, ValueError) as error:
            raise InputError(
                f"{path}: not a vocabulary of words and counts ({error}); import the corpus again"
            ) from error

    def write(self, path: Path) -> None:
        """One line a word, ``word<TAB>count``, most frequent first."""
        lines = (f"{word}\t{count}\n" for word, count in zip(self.words, self.counts, strict=True))
        path.write_text("".join(lines), encoding="utf-8")

    @cached_property
    def ids(self) -> dict[str, int]:
        return {word: id for id, word in enumerate(self.words, self._layout.first_word)}

    def encode(self, words: Iterable[str]) -> list[int]:
        """Token ids of words; OOV for those that are not in the vocabulary."""
        ids, oov = self.ids, self._layout.oov
        return [ids.get(word, oov) for word in words]

    def decode(self, tokens: Iterable[int]) -> list[str]:
        """Words of token ids; ``<pad>``, ``<oov>``, ``<bos>``, ``<eos>`` for the special ones."""
        return [self._names[token] for token in tokens]

    @cached_property
    def _layout(self) -> Layout:
        return Layout(len(self.words) + SPECIAL_TOKENS, name=self.layout)

    @cached_property
    def _names(self) -> tuple[str, ...]:
        parts = {"words": self.words, "oov": ("<oov>",), "bos": ("<bos>",), "eos": ("<eos>",)}
        return ("<pad>", *(name for part in LAYOUTS[self.layout] for name in parts[part]))
