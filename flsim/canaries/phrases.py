"""Phrases of canaries: random words, the first words of records of held-out users, or fillings of a template."""

from collections.abc import Callable, Sequence

import numpy as np

from flsim.base.errors import InputError
from flsim.base.rng import stream
from flsim.canaries.secrets import Secrets
from flsim.canaries.spec import draw_phrase
from flsim.data.corpus import Corpus
from flsim.data.vocabulary import Layout

HELDOUT = "heldout"  # split, and the source of canaries that are its text
TRIED = 100  # records in which words of the vocabulary alone are looked for
Draw = Callable[[int, int], tuple[int, ...]]  # a phrase by the canary's index and the attempt


def random_phrases(length: int, seed: int, layout: Layout) -> Draw:
    """Return a drawer of phrases of random words."""
    return lambda index, attempt: draw_phrase(seed, index, attempt, length, layout)


def natural_phrases(corpus: Corpus, length: int, seed: int) -> Draw:
    """Return a drawer of the first words of a held-out user's record, all of the vocabulary.

    Raises:
        InputError: held-out users have no such record, or hardly any.
    """
    heldout, layout = corpus.split(HELDOUT), corpus.layout
    offsets = np.asarray(heldout.record_offsets)
    starts = offsets[:-1][np.diff(offsets) >= length]
    none = InputError(
        f"{corpus.path}: held-out users have too few records that begin with {length} words of the vocabulary; set a "
        f'smaller canaries.length, or canaries.source = "words"'
    )
    if not len(starts):
        raise none

    def draw(index: int, attempt: int) -> tuple[int, ...]:
        for chosen in stream(seed, "natural canary", index, attempt).integers(len(starts), size=TRIED).tolist():
            phrase = tuple(heldout.tokens[starts[chosen] : starts[chosen] + length].tolist())
            if layout.first_word <= min(phrase) and max(phrase) <= layout.last_word:
                return phrase
        raise none

    return draw


def secret_phrases(templates: Sequence[Secrets], seed: int) -> Draw:
    """Return a drawer of fillings of the canaries' templates."""
    return lambda index, attempt: tuple(templates[index].draw(stream(seed, "secret", index, attempt), 1)[0].tolist())
