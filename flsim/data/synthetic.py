"""A synthetic corpus: Zipf words, topics with their own words and word order, users with their own mix of topics.

Records of a topic are a Markov chain: a word is followed by one of its few successors in that topic, or by any word of
the topic. So a next-word model has something to learn, and users of different topics really differ.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flsim.data.corpus import Corpus, CorpusWriter
from flsim.data.records import Records
from flsim.data.vocabulary import Layout, Vocabulary
from flsim.errors import InputError, at_least_one
from flsim.files import new_folder
from flsim.progress import progress
from flsim.rng import stream

SUCCESSORS = 4  # of a word in a topic
SHORTEST, LONGEST = 5, 12  # words in a record


@dataclass(frozen=True)
class SyntheticHParams:
    """A synthetic corpus.

    Attributes:
        users: training users.
        test_users: further users to measure utility on.
        heldout_users: further users, the safe non-members of membership attacks.
        words_per_user: each user holds records until they have this many words.
        vocabulary_size: number of token ids, the four special ones included.
        record_words: longest record of the layout; records here have 5 to 12 words.
        topics: number of topics.
        heterogeneity: concentration of the symmetric Dirichlet distribution that users' topic mixtures come from:
            near 0 a user has one topic, at 1 all mixtures are as likely, far above all users are alike.
        zipf: exponent s of the word frequencies, proportional to 1 / rank^s.
        order: probability that a word is followed by one of its successors.
    """

    users: int = 400
    test_users: int = 40
    heldout_users: int = 40
    words_per_user: int = 250
    vocabulary_size: int = 600
    record_words: int = 20
    topics: int = 5
    heterogeneity: float = 0.5
    zipf: float = 1.2
    order: float = 0.7

    def __post_init__(self) -> None:
        at_least_one(
            users=self.users, test_users=self.test_users, words_per_user=self.words_per_user, topics=self.topics
        )
        if self.heldout_users < 0:
            raise InputError(f"heldout_users must be at least 0, found {self.heldout_users}")
        for name in ("heterogeneity", "zipf"):
            value = getattr(self, name)
            if not 0 < value < np.inf:
                raise InputError(f"{name} must be above 0 and finite, found {value}")
        if not 0 <= self.order <= 1:
            raise InputError(f"order must be a probability, found {self.order}")
        if self.record_words < LONGEST:
            raise InputError(f"record_words must be at least {LONGEST}, found {self.record_words}")


@dataclass(frozen=True)
class Language:
    """How topics use words.

    Attributes:
        cumulative: float64 [topics * words]: topic t's cumulative word frequencies, plus t, so that one search in the
            whole finds a word of any topic.
        successors: int64 [topics, words, SUCCESSORS], words that follow a word, from 0.
    """

    cumulative: NDArray[np.float64]
    successors: NDArray[np.int64]

    @classmethod
    def draw(cls, hparams: SyntheticHParams, seed: int) -> "Language":
        """Half of a topic's words follow the common Zipf law, half one over the topic's own ranking."""
        words = Layout(hparams.vocabulary_size, hparams.record_words).words
        law = 1 / np.arange(1, words + 1) ** hparams.zipf
        rng = stream(seed, "synthetic language")
        frequencies = np.array([law + law[rng.permutation(words)] for _ in range(hparams.topics)])
        cumulative = np.cumsum(frequencies / frequencies.sum(1, keepdims=True), axis=1)
        cumulative[:, -1] = 1
        flat: NDArray[np.float64] = (cumulative + np.arange(hparams.topics)[:, None]).ravel().astype(np.float64)
        topic = np.arange(hparams.topics)[:, None, None]
        successors = cls(flat, np.empty((0, 0, 0), np.int64)).draw_words(
            np.broadcast_to(topic, (hparams.topics, words, SUCCESSORS)),
            rng.random((hparams.topics, words, SUCCESSORS)),
            words,
        )
        return cls(flat, successors)

    def draw_words(self, topic: NDArray[np.int64], uniform: NDArray[np.float64], words: int) -> NDArray[np.int64]:
        """Words from 0, of the given topics, by inversion of uniform numbers of the same shape."""
        found: NDArray[np.int64] = np.searchsorted(self.cumulative, topic + uniform, side="right") - topic * words
        found[found == words] -= 1  # topic + uniform can round up to the next topic
        return found


def draw_user(language: Language, hparams: SyntheticHParams, seed: int, name: str) -> Records:
    """A user's records, token ids from 1 in the order of the common Zipf law."""
    rng = stream(seed, "synthetic user", name)
    words = language.successors.shape[1]
    mixture = rng.dirichlet(np.full(hparams.topics, hparams.heterogeneity))
    lengths = rng.integers(SHORTEST, LONGEST, -(-hparams.words_per_user // SHORTEST), endpoint=True)
    lengths = lengths[: np.searchsorted(np.cumsum(lengths), hparams.words_per_user) + 1]
    topic = rng.choice(hparams.topics, len(lengths), p=mixture)
    table = np.empty((len(lengths), LONGEST), np.int64)
    table[:, 0] = language.draw_words(topic, rng.random(len(lengths)), words)
    for position in range(1, LONGEST):
        fresh = language.draw_words(topic, rng.random(len(lengths)), words)
        following = language.successors[topic, table[:, position - 1], rng.integers(SUCCESSORS, size=len(lengths))]
        table[:, position] = np.where(rng.random(len(lengths)) < hparams.order, following, fresh)
    kept = np.arange(LONGEST) < lengths[:, None]
    return Records((table[kept] + 1).astype(np.uint16), np.concatenate([[0], np.cumsum(lengths)]))


def make_synthetic(out: Path, hparams: SyntheticHParams, seed: int) -> Corpus:
    """Write a synthetic corpus, as a function of the arguments alone.

    Every user is drawn twice, once to count words and once to write them with ids in order of frequency; so memory does
    not grow with the number of users.

    Raises:
        InputError: `out` exists.
    """
    layout = Layout(hparams.vocabulary_size, hparams.record_words)
    language = Language.draw(hparams, seed)
    sizes = {"train": hparams.users, "heldout": hparams.heldout_users, "test": hparams.test_users}
    total = 2 * hparams.users + hparams.heldout_users + hparams.test_users
    with new_folder(out) as folder, progress("synthetic corpus", total) as advance:

        def users(split: str, done: int) -> Iterator[tuple[str, Records]]:
            for index in range(sizes[split]):
                name = f"{split}{index}"
                yield name, draw_user(language, hparams, seed, name)
                advance(done + index + 1)

        counts = np.zeros(layout.words + 1, np.int64)
        for _, records in users("train", 0):
            counts += np.bincount(records.tokens, minlength=len(counts))
        ranked = np.argsort(-counts[1:], kind="stable")
        digits = len(str(layout.words - 1))
        vocabulary = Vocabulary(tuple(f"w{word:0{digits}d}" for word in ranked), tuple(counts[1:][ranked].tolist()))
        ids = np.zeros(layout.words + 1, np.uint16)
        ids[1 + ranked] = np.arange(1, layout.words + 1)
        with CorpusWriter(folder, vocabulary, layout) as writer:
            done = sizes["train"]
            for split, size in sizes.items():
                for name, records in users(split, done):
                    writer.splits[split].add(name, Records(ids[records.tokens], records.offsets))
                done += size
            writer.finish(dropped={}, sources=[], parameters={"synthetic": {**vars(hparams), "seed": seed}})
    return Corpus.open(out)
