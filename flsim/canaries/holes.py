"""Templates of secrets as text: fixed text with holes.

{d9}     9 digits
{l4}     4 lower-case letters
{w2}     2 words of the vocabulary
{card}   a payment card number: 15 digits and the check digit of ISO/IEC 7812-1, annex B (Luhn)
{ssn}    a US social security number: area 001 to 899 without 666, group 01 to 99, serial 0001 to 9999
{k5}     a key, which attackers know and no two secrets share: 5 letters, or 5 words in a corpus of words (section
6.5, and <s> and <e> of Table 3)
"""

import re
from dataclasses import dataclass
from math import prod
from string import ascii_lowercase, digits

import numpy as np

from flsim.base.errors import InputError
from flsim.data.vocabulary import Vocabulary

BETWEEN = re.compile(r"\{([^{}]*)\}")
COUNTED = re.compile(r"([dlwk])([1-9][0-9]?)", re.ASCII)
SYMBOLS = {"card": 16, "ssn": 9}
FILLINGS = {"card": 10**15, "ssn": 898 * 99 * 9_999}


@dataclass(frozen=True)
class Hole:
    """A hole of a template.

    Attributes:
        kind: "d" for digits, "l" for letters, "w" for words, "card", "ssn", or "k" for a key.
        symbols: number of digits, letters or words.
    """

    kind: str
    symbols: int

    @property
    def is_key(self) -> bool:
        """Return whether attackers know what fills it."""
        return self.kind == "k"

    def __str__(self) -> str:
        return f"{{{self.kind}}}" if self.kind in SYMBOLS else f"{{{self.kind}{self.symbols}}}"

    def fillings(self, words: int) -> int:
        """Return the number of fillings, with a vocabulary of so many words."""
        if self.kind in FILLINGS:
            return FILLINGS[self.kind]
        if self.is_key:
            return 1
        alphabet = {"d": len(digits), "l": len(ascii_lowercase), "w": words}[self.kind]
        return int(alphabet**self.symbols)


def parse(template: str) -> tuple[str | Hole, ...]:
    """Return the fixed texts and the holes of a template, in their order; joined they are the template again.

    Raises:
        InputError: a hole is unknown, or there is none.
    """
    parts: list[str | Hole] = []
    for index, text in enumerate(BETWEEN.split(template)):
        counted = COUNTED.fullmatch(text)
        if index % 2 and text in SYMBOLS:
            parts.append(Hole(text, SYMBOLS[text]))
        elif index % 2 and counted:
            parts.append(Hole(counted[1], int(counted[2])))
        elif index % 2 or "{" in text or "}" in text:
            hole = f"{{{text}}}" if index % 2 else text.strip()
            raise InputError(
                f'template "{template}" has the unknown hole {hole}; known are {{dN}} for N digits, {{lN}} for '
                f"letters, {{wN}} for words and {{kN}} for a key, N from 1 to 99, {{card}} and {{ssn}}"
            )
        elif text:
            parts.append(text)
    if all(isinstance(part, str) or part.is_key for part in parts):
        raise InputError(f'template "{template}" has no hole for a secret; add one, such as {{d9}} for 9 digits')
    return tuple(parts)


def fillings(template: str, words: int) -> int:
    """Return |R|, the number of fillings of a template with a vocabulary of so many words."""
    return prod(part.fillings(words) for part in parse(template) if isinstance(part, Hole))


def unknown_symbols(template: str) -> int:
    """Return the number of words, digits and letters from the first hole for a secret to the end of a template."""
    return sum(part.symbols if isinstance(part, Hole) else len(part.split()) for part in hidden(template))


def hidden(template: str) -> tuple[str | Hole, ...]:
    """Return the parts of a template from its first hole for a secret."""
    parts = parse(template)
    return parts[next(index for index, part in enumerate(parts) if isinstance(part, Hole) and not part.is_key) :]


def with_keys(template: str, vocabulary: Vocabulary, rng: np.random.Generator) -> str:
    """Return a template with random letters, or random words of the vocabulary, in place of its keys."""
    by_words = vocabulary.by == "words"
    symbols = [word for word in vocabulary.words if not set("{}") & set(word)] if by_words else list(ascii_lowercase)

    def text(part: str | Hole) -> str:
        if isinstance(part, str) or not part.is_key:
            return str(part)
        drawn = [symbols[index] for index in rng.integers(len(symbols), size=part.symbols)]
        return f" {' '.join(drawn)} " if by_words else "".join(drawn)

    return "".join(map(text, parse(template)))
