"""Secrets: a template, fixed text with holes, and the space R of its fillings as tokens of a corpus.

Carlini et al. (2018), "The Secret Sharer", sections 3.2 and 4.1: a format s, such as "the random number is ...", whose
holes are filled with r, which is drawn uniformly from a randomness space R. See `flsim.canaries.spec`.

{d9}     9 digits
{l4}     4 lower-case letters
{w2}     2 words of the vocabulary
{card}   a payment card number: 15 digits and the check digit of ISO/IEC 7812-1, annex B (Luhn)
{ssn}    a US social security number: area 001 to 899 without 666, group 01 to 99, serial 0001 to 9999
{k5}     a key, which attackers know and no two secrets share: 5 letters, or 5 words in a corpus of words or tokens
(section 6.5, and <s> and <e> of Table 3)
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import prod
from string import ascii_lowercase, digits

import numpy as np

from flsim.base.arrays import Flags, Ints
from flsim.base.errors import InputError
from flsim.base.rng import stream
from flsim.data.records import Vocabulary
from flsim.data.tokenizer import TokenVocabulary

BETWEEN = re.compile(r"\{([^{}]*)\}")
COUNTED = re.compile(r"([dlwk])([1-9][0-9]?)", re.ASCII)
SYMBOLS = {"card": 16, "ssn": 9}
FILLINGS = {"card": 10**15, "ssn": 898 * 99 * 9_999}


@dataclass(frozen=True)
class Hole:
    """A hole of a template: its kind and its number of digits, letters or words."""

    kind: str
    symbols: int

    @property
    def is_key(self) -> bool:
        """Return whether attackers know the content of the hole."""
        return self.kind == "k"

    def __str__(self) -> str:
        return f"{{{self.kind}}}" if self.kind in SYMBOLS else f"{{{self.kind}{self.symbols}}}"

    def fillings(self, words: int) -> int:
        if self.kind in FILLINGS:
            return FILLINGS[self.kind]
        if self.is_key:
            return 1
        alphabet = {"d": len(digits), "l": len(ascii_lowercase), "w": words}[self.kind]
        return int(alphabet**self.symbols)


def parse(template: str) -> tuple[str | Hole, ...]:
    """Return the fixed texts and the holes of a template, in order, or raise InputError for an unknown or no hole."""
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
    return prod(part.fillings(words) for part in parse(template) if isinstance(part, Hole))


def unknown_symbols(template: str) -> int:
    """Return the number of words, digits and letters from the first hole for a secret to the end of a template."""
    return sum(part.symbols if isinstance(part, Hole) else len(part.split()) for part in hidden(template))


def hidden(template: str) -> tuple[str | Hole, ...]:
    """Return the parts of a template from its first hole for a secret."""
    parts = parse(template)
    return parts[next(index for index, part in enumerate(parts) if isinstance(part, Hole) and not part.is_key) :]


def with_keys(template: str, vocabulary: Vocabulary, rng: np.random.Generator) -> str:
    """Return a template with random letters, or random words of the vocabulary, in place of keys."""
    by_words = vocabulary.by == "words"
    if isinstance(vocabulary, TokenVocabulary):
        symbols = [vocabulary.text([id_]).strip() for id_ in vocabulary.word_ids]
    else:
        symbols = [word for word in vocabulary.words if not set("{}") & set(word)] if by_words else [*ascii_lowercase]

    def text(part: str | Hole) -> str:
        if isinstance(part, str) or not part.is_key:
            return str(part)
        symbols_drawn = [symbols[index] for index in rng.integers(len(symbols), size=part.symbols)]
        if isinstance(vocabulary, TokenVocabulary):
            return " ".join(symbols_drawn)
        return f" {' '.join(symbols_drawn)} " if by_words else "".join(symbols_drawn)

    return "".join(map(text, parse(template)))


Spell = Callable[[Ints], Ints]  # from numbers of fillings [N] to symbols [N, k]

AREAS = np.setdiff1d(np.arange(1, 900), [666])
GROUPS, SERIALS = 99, 9_999
MOST_DRAWS = 100  # attempts to draw a key that no other canary has


def check_digits(numbers: Ints) -> Ints:
    """Return the check digits, int64 [N], of the digits before them, int64 [N, n]: ISO/IEC 7812-1, annex B."""
    doubled = numbers.copy()
    doubled[:, ::-1][:, ::2] *= 2  # every second digit, from the one before the check digit
    sums: Ints = (doubled - 9 * (doubled > 9)).sum(1)  # for 10 to 18, the sum of the two digits is the number minus 9
    return -sums % 10


def are_cards(symbols: Ints) -> Flags:
    """Return whether digits, int64 [N, n], end with their check digit, bool [N]."""
    return np.asarray(check_digits(symbols[:, :-1]) == symbols[:, -1])


def are_social_security_numbers(symbols: Ints) -> Flags:
    """Return whether digits, int64 [N, 9], are in the ranges of a social security number, bool [N].

    No number has an area 000, 666 or 900 to 999, a group 00 or a serial 0000: Social Security Administration, "Social
    Security Number Randomization" (2011).
    """
    area, group, serial = (_number(part) for part in np.split(symbols, [3, 5], axis=1))
    return np.isin(area, AREAS) & (group > 0) & (serial > 0)


IS_VALID = {"card": are_cards, "ssn": are_social_security_numbers}


def _number(symbols: Ints) -> Ints:
    return np.asarray(symbols @ 10 ** np.arange(symbols.shape[1])[::-1])


def _digits(numbers: Ints, count: int) -> Ints:
    return np.asarray(numbers[:, None] // 10 ** np.arange(count)[::-1] % 10)


def _card(numbers: Ints) -> Ints:
    payload = _digits(numbers, 15)
    return np.column_stack([payload, check_digits(payload)])


def _ssn(numbers: Ints) -> Ints:
    area, group = AREAS[numbers // (GROUPS * SERIALS)], numbers // SERIALS % GROUPS + 1
    return np.hstack([_digits(area, 3), _digits(group, 2), _digits(numbers % SERIALS + 1, 4)])


SPELL: dict[str, Spell] = {"card": _card, "ssn": _ssn}


@dataclass(frozen=True)
class SecretPart:
    """Adjacent tokens of a secret that are filled together: a "card" or "ssn", or a token with its allowed ids."""

    kind: str
    ids: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return SYMBOLS.get(self.kind, 1)

    @property
    def fillings(self) -> int:
        return FILLINGS.get(self.kind, len(self.ids))

    def fill(self, numbers: Ints) -> Ints:
        """Return the tokens, int64 [N, tokens], of the fillings with these numbers from 0, int64 [N]."""
        return np.array(self.ids)[SPELL[self.kind](numbers) if self.kind in SPELL else numbers[:, None]]

    def is_filling(self, tokens: Sequence[int]) -> bool:
        """Return whether tokens, of the length of this part, are one of its fillings."""
        if not set(tokens) <= set(self.ids):
            return False
        symbols = np.array([[self.ids.index(token) for token in tokens]])
        return self.kind not in IS_VALID or bool(IS_VALID[self.kind](symbols)[0])


@dataclass(frozen=True)
class Secrets:
    """The space R of a template: all its fillings, as token ids of a corpus."""

    template: str
    parts: tuple[SecretPart, ...] = field(repr=False)  # for a hole of words, this is the vocabulary

    @classmethod
    def from_template(cls, template: str, vocabulary: Vocabulary) -> "Secrets":
        """Return the fillings of a template in a corpus; raise InputError if the template does not fit it."""
        parts: list[SecretPart] = []
        parsed = parse(template.strip())
        for part, following in zip(parsed, (*parsed[1:], ""), strict=True):
            if isinstance(part, str):
                has_space = isinstance(following, Hole) and following.kind == "w"  # a tokenizer's words begin with it
                text = part.rstrip() if has_space else part
                parts += (SecretPart("", (id_,)) for id_ in token_ids(text, vocabulary))
            elif part.kind in SYMBOLS:
                parts.append(SecretPart(part.kind, _alphabet(digits, vocabulary)))
            elif part.kind == "w":
                if vocabulary.by == "characters":
                    raise InputError(
                        f"canaries.template: {part} is a hole for words, but the corpus is by {vocabulary.by}; "
                        f"use {{lN}} for N letters"
                    )
                ids = vocabulary.word_ids if isinstance(vocabulary, TokenVocabulary) else vocabulary.ids.values()
                parts += [SecretPart("", tuple(sorted(ids)))] * part.symbols
            else:
                parts += [
                    SecretPart("", _alphabet(digits if part.kind == "d" else ascii_lowercase, vocabulary))
                ] * part.symbols
        return cls(template, tuple(parts))

    def __str__(self) -> str:
        return self.template

    @cached_property
    def space(self) -> int:
        return prod(part.fillings for part in self.parts)

    @property
    def holes(self) -> tuple[int, ...]:
        is_secret = [part.fillings > 1 for part in self.parts for _ in range(part.tokens)]
        return tuple(np.flatnonzero(is_secret).tolist())

    @property
    def known(self) -> int:
        """Return the number of tokens before the first hole."""
        return self.holes[0]

    @cached_property
    def hidden(self) -> "Secrets":
        """Return the parts after the text before the first hole; secrets with equal parts share references."""
        return Secrets("".join(map(str, hidden(self.template.strip()))), self.parts[self.known :])

    @property
    def length(self) -> int:
        return sum(part.tokens for part in self.parts)

    @property
    def allowed(self) -> tuple[tuple[int, ...], ...]:
        """Return the token ids that are allowed at each position; for a card or social security number, all digits."""
        return tuple(part.ids for part in self.parts for _ in range(part.tokens))

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        """Draw `count` fillings uniformly, with repetition, as int64 [count, length]."""
        return np.hstack([part.fill(rng.integers(part.fillings, size=count)) for part in self.parts])

    def all(self) -> Ints:
        """Return every filling once, as int64 [|R|, length]; only for a space that fits in memory."""
        numbers, filled = np.arange(self.space), []
        for part in reversed(self.parts):
            numbers, places = np.divmod(numbers, part.fillings)
            filled.append(part.fill(places))
        return np.hstack(filled[::-1])

    def is_filling(self, tokens: Sequence[int]) -> bool:
        ends = list(accumulate(part.tokens for part in self.parts))
        starts = [0, *ends[:-1]]
        fits = (part.is_filling(tokens[start:end]) for part, start, end in zip(self.parts, starts, ends, strict=True))
        return len(tokens) == self.length and all(fits)

    def references(self, seed: int, count: int, secrets: Ints) -> Ints:
        """Return fillings to rank secrets [m, length] among, none of which is a secret, in lexicographic order.

        They are `count` uniform draws from R without the secrets, or all of these fillings if there are at most
        `count`, so ranks are exact. For a secret that was drawn but not planted, all ranks are equally likely.
        """
        if self.space - len(secrets) <= count:
            rows = self.all()
            rows = rows[~_are_among(rows, secrets)]
        else:
            rng = stream(seed, "references of a template")
            rows = self.draw(rng, count)
            while (again := _are_among(rows, secrets)).any():
                rows[again] = self.draw(rng, int(again.sum()))
        return rows[np.lexsort(rows.T[::-1])]

    def count_references(self, count: int, secrets: int) -> int:
        """Return the number of references if `count` are requested and some fillings are secrets."""
        return min(count, self.space - secrets)


def templates(template: str, vocabulary: Vocabulary, seed: int, count: int) -> list[Secrets]:
    """Return the template of each of `count` canaries; if it has keys, each canary has a different key."""
    if not any(isinstance(part, Hole) and part.is_key for part in parse(template)):
        return [Secrets.from_template(template, vocabulary)] * count
    texts = dict[str, None]()
    for index in range(count):
        draws = (with_keys(template, vocabulary, stream(seed, "key", index, draw)) for draw in range(MOST_DRAWS))
        text = next((text for text in draws if text not in texts), None)
        if text is None:
            raise InputError(f'canaries.template "{template}": not enough keys for {count} canaries; set longer keys')
        texts[text] = None
    made = [Secrets.from_template(text, vocabulary) for text in texts]
    if len({secrets.length for secrets in made}) > 1:  # a tokenizer cuts keys without a space in front differently
        raise InputError(f'canaries.template "{template}": keys are words; write a space before and none after each')
    return made


def token_ids(text: str, vocabulary: Vocabulary) -> list[int]:
    """Return the token ids of a part of a text: words, characters with spaces at both ends, or a tokenizer's tokens."""
    if isinstance(vocabulary, TokenVocabulary):
        return vocabulary.encode_text(text)
    # `Vocabulary.split` would drop the space between fixed text and a hole.
    tokens = text.split() if vocabulary.by == "words" else list(re.sub(r"\s+", " ", text))
    for token in tokens:
        if token not in vocabulary.ids:
            instead = ", or with {wN} in place of digits and letters" if vocabulary.by == "words" else ""
            raise InputError(
                f'canaries.template needs the token "{token}", which is not in the vocabulary; write it with other '
                f"{vocabulary.by}{instead}, or import a corpus whose vocabulary has it"
            )
    return vocabulary.encode(tokens)


def _alphabet(symbols: str, vocabulary: Vocabulary) -> tuple[int, ...]:
    """Return a token id for each symbol; with a tokenizer a separate token, even if text has several in one token."""
    if isinstance(vocabulary, TokenVocabulary):
        ids = {symbol: vocabulary.symbol(symbol) for symbol in symbols}
        for symbol, id_ in ids.items():
            if id_ is None:
                raise InputError(
                    f'canaries.template needs a token "{symbol}" that the tokenizer of the corpus lacks; use {{wN}} '
                    "for N words"
                )
        return tuple(id_ for id_ in ids.values() if id_ is not None)
    return tuple(id_ for symbol in symbols for id_ in token_ids(symbol, vocabulary))


def _are_among(rows: Ints, secrets: Ints) -> Flags:
    """Return whether each of the rows [N, n] is one of the secrets [m, n], bool [N]."""
    is_secret = np.zeros(len(rows), bool)
    for secret in secrets:
        candidates = np.arange(len(rows))
        for place in reversed(range(len(secret))):  # templates begin with fixed text, which is useless for sorting
            candidates = candidates[rows[candidates, place] == secret[place]]
        is_secret[candidates] = True
    return is_secret
