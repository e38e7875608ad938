"""Words and their token ids.

Three layouts of token ids are in use for next-word prediction on Stack Overflow. A corpus names its layout:

    tff      PAD, words, OOV, BOS, EOS    TensorFlow Federated, google-research/federated, pfl-research
    fedjax   PAD, BOS, EOS, words, OOV    FedJAX
    fedml    PAD, words, BOS, EOS, OOV    FedML

Words are in order of frequency. Sizes include the four special tokens. The words of a corpus by characters are single
characters, including spaces.

A corpus whose text is divided by a Hugging Face tokenizer has the layout

    tokenizer    PAD, words, pieces, OOV, BOS, EOS

in which words are tokens that are a complete word, and pieces are all others; see `flsim.data.tokenizer`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, overload

from flsim.base.arrays import Flags, Ints
from flsim.base.errors import InputError, at_least_one

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
