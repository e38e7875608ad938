"""A synthetic corpus with Zipf words, topics and users.

Each topic has its own words, and each user a mix of topics. Records of a topic are a Markov chain: a word is followed
by one of its few successors in the topic, or by any word of the topic, so a next-word model can learn the order.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from string import ascii_lowercase, digits
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flsim.base.arrays import Floats, Ints
from flsim.base.errors import InputError
from flsim.base.files import new_folder
from flsim.base.machine import refuse_beyond_memory
from flsim.base.progress import tracked
from flsim.base.rng import stream
from flsim.base.settings import Count, Natural, Positive, bounds, settings
from flsim.data.corpus import Corpus, CorpusWriter
from flsim.data.records import SPECIAL_TOKENS, TOKENIZER, By, Layout, Tokens, Vocabulary, spans

# Spellings for the words of a synthetic corpus, so that corpora by characters are possible.
#  Words are syllables of a consonant and a vowel, with letter frequencies as in a language; one word in ten is a
# number.

VOWELS = "aeiou"
CONSONANTS = "".join(letter for letter in ascii_lowercase if letter not in VOWELS)
SYMBOLS = (" ", *ascii_lowercase, *digits)
LONGEST_WORD = 7  # characters
NUMBERS = 10  # one word in this many is a number


@dataclass(frozen=True)
class Spellings:
    texts: tuple[str, ...]

    @classmethod
    def draw(cls, words: int, seed: int) -> "Spellings":
        """Draw the spellings of `words` words, of 2 to 7 letters, or 1 to 7 digits."""
        rng = stream(seed, "synthetic spellings")
        frequent = {letters: rng.permutation(list(letters)).tolist() for letters in (CONSONANTS, VOWELS)}

        def letter(letters: str) -> str:
            """Draw letters; the probability of the k-th most frequent letter is about proportional to 1 / k."""
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
    def _flat(self) -> tuple[Ints, NDArray[np.uint16]]:
        """Return the begin of each word, int64 [words + 1], in symbols of all words, each with a space after it."""
        flat = [SYMBOLS.index(symbol) for text in self.texts for symbol in f"{text} "]
        ends = np.cumsum([len(text) + 1 for text in self.texts])
        return np.concatenate([[0], ends]), np.array(flat, np.uint16)

    def spell(
        self, tokens: NDArray[np.unsignedinteger], record_words: NDArray[np.uint8]
    ) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
        """Return records of words as places in `SYMBOLS`, with spaces between words, and their lengths, uint8."""
        bounds, flat = self._flat
        first = bounds[tokens]
        lengths = bounds[tokens.astype(np.int64) + 1] - first
        # each after a space that does not belong to the record
        record_ends = np.cumsum(lengths)[np.cumsum(record_words, dtype=np.int64) - 1]
        counts = np.diff(record_ends, prepend=0) - 1
        return np.delete(flat[spans(first, lengths)], record_ends - 1), counts.astype(np.uint8)


SUCCESSORS = 4  # successors of a word in a topic
SHORTEST, LONGEST = 5, 12  # words in a record
SPELLED = LONGEST * (LONGEST_WORD + 1)  # characters in a record, plus one, at which a record would count as cut
PART_WORDS = 2**19  # approximate number of words per part, in which users are drawn and written


@settings
class SyntheticHParams:
    """Settings of a synthetic corpus."""

    users: Count = 400  # number of training users
    test_users: Count = 40  # number of further users, on which utility is measured
    heldout_users: Natural = 40  # number of further users, the non-members of membership attacks
    words_per_user: Count = 250  # each user gets records until they have this many words
    # number of token ids, including the four special tokens; by characters, the number of words plus four
    vocabulary_size: int = 600
    record_words: int = 20  # longest record of the layout, in tokens; records here have 5 to 12 words
    topics: Count = 5  # number of topics
    # concentration of the symmetric Dirichlet distribution of users' topic mixtures. Near 0 a user has one topic, at 1
    # all mixtures are equally likely, and far above 1 all users are similar
    heterogeneity: Positive = 0.5
    zipf: Positive = 1.2  # exponent s of the word frequencies, which are proportional to 1 / rank^s
    order: Annotated[float, bounds(ge=0, le=1)] = 0.7  # probability that a word is followed by one of its successors
    layout: str = "tff"  # name of the layout of token ids
    by: By = "words"  # or "characters", which are the letters, digits and spaces of the spelled words

    @property
    def token_layout(self) -> Layout:
        words = len(SYMBOLS) if self.by == "characters" else self.vocabulary_size - SPECIAL_TOKENS
        return Layout(words + SPECIAL_TOKENS, self.record_words, self.layout)

    @property
    def most_records(self) -> int:
        """Return a number of training records that the corpus does not exceed: the number of shortest records."""
        return self.users * -(-self.words_per_user // SHORTEST)

    @property
    def symbols(self) -> tuple[str, ...]:
        """Return the texts of token ids, in the order of the word numbers of a language."""
        if self.by == "characters":
            return SYMBOLS
        words = self.vocabulary_size - SPECIAL_TOKENS
        digits = len(str(words - 1))
        return tuple(f"w{word:0{digits}d}" for word in range(words))

    def __post_init__(self) -> None:
        if self.by == "tokens" or self.layout == TOKENIZER:
            raise InputError('synthetic text needs no tokenizer: set by = "words" or "characters", and another layout')
        longest = LONGEST if self.by == "words" else SPELLED
        if self.record_words < longest:
            raise InputError(f"record_words must be at least {longest}, found {self.record_words}")


@dataclass(frozen=True)
class Language:
    """The words of topics: their frequencies and successors.

    `cumulative` [topics * words] has topic t's cumulative word frequencies plus t, so one search finds a word of any
    topic; `successors` [topics, words, SUCCESSORS] are words that follow a word, counted from 0.
    """

    cumulative: Floats
    successors: Tokens

    @classmethod
    def draw(cls, hparams: SyntheticHParams, seed: int) -> "Language":
        """Draw the words of all topics: half follow the common Zipf law, and half that of the topic's ranking."""
        layout = Layout(hparams.vocabulary_size, hparams.record_words)
        words = layout.words
        law = 1 / np.arange(1, words + 1) ** hparams.zipf
        rng = stream(seed, "synthetic language")
        frequencies = np.array([law + law[rng.permutation(words)] for _ in range(hparams.topics)])
        cumulative = np.cumsum(frequencies / frequencies.sum(1, keepdims=True), axis=1)
        cumulative[:, -1] = 1
        flat: Floats = (cumulative + np.arange(hparams.topics)[:, None]).ravel().astype(np.float64)
        topic = np.arange(hparams.topics)[:, None, None]
        successors = cls(flat, np.empty((0, 0, 0), np.uint16)).draw_words(
            np.broadcast_to(topic, (hparams.topics, words, SUCCESSORS)),
            rng.random((hparams.topics, words, SUCCESSORS)),
            words,
        )
        return cls(flat, successors.astype(layout.token_type))

    def draw_words(self, topic: Ints, uniform: Floats, words: int) -> Ints:
        """Return words of the given topics, counted from 0, by inversion of uniform numbers of the same shape."""
        word: Ints = np.searchsorted(self.cumulative, topic + uniform, side="right") - topic * words
        word[word == words] -= 1  # topic + uniform can round up to the next topic
        return word


class UserRange(NamedTuple):
    """Consecutive users.

    Tokens [words] count from 0 in the order of the common Zipf law; for spelled corpora, characters are positions in
    `SYMBOLS`. The others are words or characters of records, uint8, and records of users, int64.
    """

    tokens: Tokens
    record_words: NDArray[np.uint8]
    user_records: Ints


def draw_users(language: Language, hparams: SyntheticHParams, seed: int, names: Sequence[str]) -> UserRange:
    """Return the records of the named users; each user's records are a function of the seed and the name."""
    numbers = [_draw(hparams, seed, name) for name in names]
    lengths, topic = (np.concatenate([user[k] for user in numbers]) for k in (0, 1))
    uniform, successor, order = (np.concatenate([user[k] for user in numbers], axis=1) for k in (2, 3, 4))
    words = language.successors.shape[1]
    is_word = np.arange(LONGEST)[:, None] < lengths
    fresh = is_word & (order >= hparams.order)
    fresh[0] = True
    table = np.empty(is_word.shape, language.successors.dtype)
    table[fresh] = language.draw_words(np.broadcast_to(topic, is_word.shape)[fresh], uniform[fresh], words)
    following = language.successors.ravel()
    for position in range(1, LONGEST):
        follows = np.flatnonzero(is_word[position] & ~fresh[position])
        word = topic[follows] * words + table[position - 1, follows]
        table[position, follows] = following[word * SUCCESSORS + successor[position, follows]]
    return UserRange(table.T[is_word.T], lengths.astype(np.uint8), np.array([len(user[0]) for user in numbers]))


def _draw(hparams: SyntheticHParams, seed: int, name: str) -> tuple[Ints, Ints, Floats, Ints, Floats]:
    """Draw lengths and topics of a user's records, [records], and three arrays [LONGEST, records] for their words.

    These are the uniform number of a fresh word, the index of a successor, and the uniform number that chooses.
    """
    rng = stream(seed, "synthetic user", name)
    mixture = rng.dirichlet(np.full(hparams.topics, hparams.heterogeneity))
    lengths = rng.integers(SHORTEST, LONGEST, -(-hparams.words_per_user // SHORTEST), endpoint=True)
    lengths = lengths[: np.searchsorted(np.cumsum(lengths), hparams.words_per_user) + 1]
    topic = rng.choice(hparams.topics, len(lengths), p=mixture)
    fresh, order = np.empty((2, LONGEST, len(lengths)))
    successor = np.zeros((LONGEST, len(lengths)), np.int64)
    rng.random(out=fresh[0])
    for position in range(1, LONGEST):
        rng.random(out=fresh[position])
        successor[position] = rng.integers(SUCCESSORS, size=len(lengths))
        rng.random(out=order[position])
    return lengths, topic, fresh, successor, order


def make_synthetic(out: Path, hparams: SyntheticHParams, seed: int) -> Corpus:
    """Write a synthetic corpus, which is a function of the arguments only.

    Users are drawn into scratch files while words are counted, then written with ids in order of frequency, so memory
    does not grow with their number. InputError if `out` exists, or the disk or memory is too small.
    """
    layout = hparams.token_layout
    sizes = {"train": hparams.users, "heldout": hparams.heldout_users, "test": hparams.test_users}
    step = max(1, PART_WORDS // hparams.words_per_user)
    with new_folder(out) as folder:
        _refuse_too_large(hparams, folder)
        parts = [
            (split, [f"{split}{user}" for user in range(first, min(first + step, size))])
            for split, size in sizes.items()
            for first in range(0, size, step)
        ]
        scratch = folder / "scratch"
        scratch.mkdir()
        language = Language.draw(hparams, seed)
        spellings = Spellings.draw(language.successors.shape[1], seed) if hparams.by == "characters" else None
        counts = np.zeros(len(hparams.symbols), np.int64)
        for number, (split, users) in enumerate(tracked("synthetic corpus, drawing", parts)):
            part = draw_users(language, hparams, seed, users)
            if spellings:
                part = UserRange(*spellings.spell(part.tokens, part.record_words), part.user_records)
            if split == "train":
                counts += np.bincount(part.tokens, minlength=len(counts))
            np.savez(scratch / f"{number}.npz", **part._asdict())
        ranked = np.argsort(-counts, kind="stable")
        ids = np.empty(layout.words, layout.token_type)
        ids[ranked] = np.arange(layout.first_word, layout.last_word + 1)
        symbols = hparams.symbols
        names = tuple(symbols[word] for word in ranked)
        vocabulary = Vocabulary(names, tuple(counts[ranked].tolist()), layout.name, hparams.by)
        parameters = {name: value for name, value in vars(hparams).items() if name != "by"}
        by = {"by": hparams.by} if hparams.by == "characters" else {}
        with CorpusWriter(folder, vocabulary, layout) as writer:
            for number, (split, users) in enumerate(tracked("synthetic corpus, writing", parts)):
                file = scratch / f"{number}.npz"
                with np.load(file) as part_of_file:
                    part = UserRange(**part_of_file)
                writer.splits[split].extend(users, ids[part.tokens], part.record_words, part.user_records)
                file.unlink()
            scratch.rmdir()
            writer.finish(dropped={}, sources=[], parameters={"synthetic": {**parameters, "seed": seed}, **by})
    return Corpus.open(out)


def _refuse_too_large(hparams: SyntheticHParams, folder: Path) -> None:
    """Raise InputError if a user's random numbers exceed the memory, or all tokens exceed the disk."""
    random_numbers = 3 * 8 * hparams.words_per_user  # three values of 8 bytes for each word of a user
    what = f"a user of {hparams.words_per_user:,} words"
    refuse_beyond_memory(random_numbers, what, "set fewer words per user, and more users")
    users = hparams.users + hparams.test_users + hparams.heldout_users
    token = np.dtype(hparams.token_layout.token_type).itemsize
    needed = users * (hparams.words_per_user * token + np.dtype(np.int64).itemsize)  # plus the offset of each user
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InputError(
            f"{folder.parent}: no space for {users:,} users of {hparams.words_per_user:,} words, which need at "
            f"least {needed / 1e9:,.0f} GB; {free / 1e9:,.0f} GB are free. Set fewer users or words"
        )
