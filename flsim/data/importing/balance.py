"""From authors to balanced users: what a written word is, where an author is cut, which split an author belongs to.

Thakkar et al. (2020), "Dataset Construction": users of fewer than 2,000 words are discarded, the others are cut into
balanced users of about 2,000 words each, and remainders are discarded: 4,030 words are two users, and 30
words are lost. Words here are what an author wrote: before sentences are cut to the model's length, and without the
punctuation that the model reads as words of its own. Counting after the cut would call fewer authors long enough, for a
reason that is the model's. A user of 2,000 words holds about 110 sentences of real text.

A word is any token with a letter or a digit in it, a URL, or the mark of a word that a format of token ids has lost.
Sentences that a source publishes as tokens are taken as they are.
"""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from flsim.base.rng import stream


def written(tokens: Collection[str]) -> NDArray[np.bool_]:
    """Which tokens are words and not punctuation: those with a letter or a digit. Bool [tokens]."""
    return np.fromiter((any(map(str.isalnum, token)) for token in tokens), np.bool_, len(tokens))


def cut(written_words: NDArray[np.integer], words_per_user: int) -> NDArray[np.int64]:
    """Cut an author's records, in order, into users; each ends with the record that brings it to `words_per_user`.

    Args:
        written_words: integer [records], the written words of each record.
        words_per_user: at least 1.

    Returns:
        int64 [users], the index after each user's last record; records from the last of these on are the remainder,
        which has fewer than `words_per_user` words.
    """
    total = np.cumsum(written_words, dtype=np.int64)
    ends: list[int] = []
    before = 0
    while len(total) and total[-1] - before >= words_per_user:
        ends.append(int(np.searchsorted(total, before + words_per_user)) + 1)
        before = total[ends[-1] - 1]
    return np.array(ends, np.int64)


def split_of(author: str, heldout: float, test: float, seed: int) -> str:
    """The split of all of an author's users: a function of (seed, name) alone.

    Args:
        author: name.
        heldout: probability of heldout.
        test: probability of test.
        seed: of the import.
    """
    draw = stream(seed, "split", author).random()
    return "test" if draw < test else "heldout" if draw < test + heldout else "train"
