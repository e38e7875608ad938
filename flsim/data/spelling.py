"""Made-up spellings for the words of a synthetic corpus, so that it can be read by characters.

Words are syllables of a consonant and a vowel, with letters as unequally frequent as in a language; one in ten is a
number.
"""

from dataclasses import dataclass
from functools import cached_property
from string import ascii_lowercase, digits

import numpy as np
from numpy.typing import NDArray

from flsim.base.rng import stream

VOWELS = "aeiou"
CONSONANTS = "".join(letter for letter in ascii_lowercase if letter not in VOWELS)
SYMBOLS = (" ", *ascii_lowercase, *digits)
LONGEST_WORD = 7  # characters
NUMBERS = 10  # one in so many words is a number


@dataclass(frozen=True)
class Spellings:
    """The spellings of words.

    Attributes:
        texts: each word's, all different.
    """

    texts: tuple[str, ...]

    @classmethod
    def draw(cls, words: int, seed: int) -> "Spellings":
        """Draw the spellings of so many words, of 2 to 7 letters, or 1 to 7 digits."""
        rng = stream(seed, "synthetic spellings")
        frequent = {letters: rng.permutation(list(letters)).tolist() for letters in (CONSONANTS, VOWELS)}

        def letter(letters: str) -> str:
            """Draw the k-th most frequent letter with probability about proportional to 1 / k."""
            return str(frequent[letters][int((len(letters) + 1) ** rng.random()) - 1])

        def text(word: int) -> str:
            if word % NUMBERS == NUMBERS - 1:
                return str(int(10 ** (rng.random() * LONGEST_WORD)))
            syllables = "".join(letter(CONSONANTS) + letter(VOWELS) for _ in range(rng.integers(1, 3, endpoint=True)))
            return syllables + (letter(CONSONANTS) if rng.random() < 1 / 2 else "")

        texts = dict[str, None]()
        while len(texts) < words:
            texts[text(len(texts))] = None
        return cls(tuple(texts))

    @cached_property
    def _flat(self) -> tuple[NDArray[np.int64], NDArray[np.uint16]]:
        """Return where each word begins, int64 [words + 1], in symbols of all words, each with a space after it."""
        flat = [SYMBOLS.index(symbol) for text in self.texts for symbol in f"{text} "]
        ends = np.cumsum([len(text) + 1 for text in self.texts])
        return np.concatenate([[0], ends]), np.array(flat, np.uint16)

    def spell(
        self, tokens: NDArray[np.unsignedinteger], record_words: NDArray[np.uint8]
    ) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
        """Spell records, with a space between words.

        Args:
            tokens: the words of all records, counted from 0, [words].
            record_words: number of words of each record, uint8 [records].

        Returns:
            The symbols of all records, as places in `SYMBOLS`, uint16 [symbols], and the number of symbols of each
            record, uint8 [records].
        """
        bounds, flat = self._flat
        first = bounds[tokens]
        lengths = bounds[tokens.astype(np.int64) + 1] - first
        ends = np.cumsum(lengths)
        within = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        symbols = flat[np.repeat(first, lengths) + within]
        record_ends = ends[np.cumsum(record_words, dtype=np.int64) - 1]  # each after a space that is no part of it
        counts = np.diff(record_ends, prepend=0) - 1
        return np.delete(symbols, record_ends - 1), counts.astype(np.uint8)
