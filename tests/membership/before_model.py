"""These functions make small models, records and candidates for tests of attacks."""

from dataclasses import replace

import numpy as np
from tiny_bases import GPT2

from flsim.attacks.membership.candidates import Candidates, Targets
from flsim.data.records import Layout, Records, Vocabulary
from flsim.models.architectures import build
from flsim.models.language_model import ModelSettings, TrainableModel

LAYOUT = Layout(40, 12)
VOCABULARY = Vocabulary(tuple(f"w{index}" for index in range(LAYOUT.words)), (1,) * LAYOUT.words)


def untrained(architecture: str = "cifg", seed: int = 0) -> TrainableModel:
    settings = ModelSettings(8, 12, architecture, heads=2 if architecture == "transformer" else 4)
    if architecture == "hf":
        settings = ModelSettings(architecture="hf", config=GPT2)
    return build(LAYOUT.vocabulary_size, settings).initialize(seed)


def drawn(count: int, seed: int = 0, longest: int = 12) -> Records:
    """Return records of 1 to `longest` words, drawn uniformly. Records of 12 or more words have no EOS."""
    rng = np.random.default_rng(seed)
    words = rng.integers(1, longest, count, endpoint=True)
    return Records.from_lists(
        [rng.integers(LAYOUT.first_word, LAYOUT.last_word, n, endpoint=True).tolist() for n in words]
    )


def before(model: TrainableModel, records: Records) -> Candidates:
    unigram = np.full(LAYOUT.vocabulary_size, -np.log(LAYOUT.vocabulary_size))
    keys = [f"train:{index}" for index in range(len(records))]
    return Candidates(model, records, keys, VOCABULARY, unigram, 0, LAYOUT)


def before_two(model: TrainableModel, records: Records) -> Candidates:
    """Return the candidates with another model as the reference, and with other records as the context."""
    return replace(before(model, records), reference=untrained(seed=9), context=drawn(2, seed=9))


def in_pairs(pairs: int, seed: int = 0, shortest: int = 1) -> tuple[Records, Targets]:
    """Return pairs of records of equal length and the same distribution of words; members come first."""
    rng = np.random.default_rng(seed)
    words = np.tile(rng.integers(shortest, 12, pairs, endpoint=True), 2)
    records = Records.from_lists(
        [rng.integers(LAYOUT.first_word, LAYOUT.last_word, n, endpoint=True).tolist() for n in words]
    )
    is_member, numbers = np.arange(2 * pairs) < pairs, np.tile(np.arange(pairs), 2)
    authors = [f"{'in' if member else 'out'}{number % 10}" for member, number in zip(is_member, numbers, strict=True)]
    return records, Targets(records, [f"{index}" for index in range(2 * pairs)], authors, is_member, numbers)
