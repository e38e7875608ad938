"""Balanced users: which tokens are words, where an author is cut into users, and which split an author belongs to.

Thakkar et al. (2020), "Dataset Construction": users of fewer than 2,000 words are discarded, the others are cut into
balanced users of about 2,000 words each, and remainders are discarded. For example, 4,030 words give two users, and 30
words are lost.

Words here are the words that an author wrote: before sentences are cut to the model's length, and without punctuation,
which the model reads as words of its own. Counting after the cut would find fewer authors long enough, for a reason
that lies in the model. A user of 2,000 words holds about 110 sentences of real text.

A word is any token with a letter or a digit, a URL, or the mark of a word that a format of token ids has lost. Of a
corpus by characters, each character counts.
Sentences that a source publishes as tokens are taken as they are.
"""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from flsim.base.rng import stream


def written(tokens: Collection[str]) -> NDArray[np.bool_]:
    """Return which tokens are words and not punctuation, bool [tokens]: those with a letter or a digit."""
    return np.fromiter((any(map(str.isalnum, token)) for token in tokens), np.bool_, len(tokens))


def cut(written_words: NDArray[np.integer], words_per_user: int) -> NDArray[np.int64]:
    """Cut an author's records, in order, into users; each user ends with the record that reaches `words_per_user`.

    Args:
        written_words: integer [records], the written words of each record.
        words_per_user: at least 1.

    Returns:
        int64 [users], the index after each user's last record. The records after the last user are the remainder, which
        has fewer than `words_per_user` words.
    """
    total = np.cumsum(written_words, dtype=np.int64)
    ends: list[int] = []
    before = 0
    while len(total) and total[-1] - before >= words_per_user:
        ends.append(int(np.searchsorted(total, before + words_per_user)) + 1)
        before = total[ends[-1] - 1]
    return np.array(ends, np.int64)


def split_of(author: str, heldout: float, test: float, seed: int) -> str:
    """Return the split of all of an author's users: a function of (seed, name) alone.

    Args:
        author: the author's name.
        heldout: probability of heldout.
        test: probability of test.
        seed: seed of the import.
    """
    draw = stream(seed, "split", author).random()
    return "test" if draw < test else "heldout" if draw < test + heldout else "train"
