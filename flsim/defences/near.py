"""Near duplicates: records whose sets of word n-grams are alike.

MinHash with locality-sensitive hashing (datasketch) names candidates among the records kept so far. Their Jaccard
similarity is then computed, not estimated. So no record is dropped wrongly, and one in `MISSES` near duplicates may be
missed.
"""

import numpy as np
from datasketch import MinHash, MinHashLSH
from numpy.typing import NDArray

from flsim.base.progress import progress
from flsim.data.corpus import Split
from flsim.data.records import Tokens
from flsim.data.rewriting import blocks

PERMUTATIONS = 64
MISSES = 1_000
_GRAM = np.uint64(0x9E3779B97F4A7C15)  # odd; mixes the words of an n-gram
Grams = frozenset[tuple[int, ...]]


def first_of_near(split: Split, chosen: NDArray[np.bool_], near: float, ngram: int, by_user: bool) -> NDArray[np.bool_]:
    """Return whether a chosen record is like no earlier kept one, bool [records].

    It is a Python loop over records: some thousands a second, and about 6 kB of memory for each kept record.

    Args:
        split: the users.
        chosen: bool [records], the records to compare; others are not kept.
        near: least Jaccard similarity at which two records count as equal.
        ngram: number of words in an n-gram; a record of fewer words is one n-gram.
        by_user: whether to compare only records of the same user.
    """
    kept = chosen.copy()
    empty, bands = MinHash(PERMUTATIONS, hashfunc=int), bands_for(near)
    index = MinHashLSH(num_perm=PERMUTATIONS, params=bands)
    user_offsets = np.asarray(split.user_offsets)
    with progress("comparing n-grams", split.records, unit="records") as advance:
        for first, last in blocks(user_offsets, 1 if by_user else None):
            if by_user:
                index = MinHashLSH(num_perm=PERMUTATIONS, params=bands)
            begin, end = user_offsets[first].item(), user_offsets[last].item()
            positions = begin + np.flatnonzero(chosen[begin:end])
            for record, words in zip(positions.tolist(), split.records_at(positions), strict=True):
                sketch = empty.copy()
                sketch.update_batch(_hashed(words, ngram).tolist())
                candidates = index.query(sketch)
                grams = grams_of(words, ngram) if candidates else frozenset()
                if any(jaccard(grams, grams_of(_words(split, other), ngram)) >= near for other in candidates):
                    kept[record] = False
                else:
                    index.insert(record, sketch, check_duplication=False)
                advance(record)
            advance(end)
    return kept


def bands_for(near: float) -> tuple[int, int]:
    """Return bands b and rows r: the most rows at which at most one in `MISSES` of similar records shares no band.

    Two records of similarity s agree in a band with probability s^r, in none with (1 - s^r)^b.
    """
    rows = PERMUTATIONS // 2
    while rows > 1 and (1 - near**rows) ** (PERMUTATIONS // rows) > 1 / MISSES:
        rows -= 1
    return PERMUTATIONS // rows, rows


def grams_of(words: Tokens, ngram: int) -> Grams:
    """Return the n-grams of a record; all its words as one n-gram where it is shorter."""
    listed = words.tolist()
    return frozenset(tuple(listed[start : start + ngram]) for start in range(max(1, len(listed) - ngram + 1)))


def jaccard(ours: Grams, theirs: Grams) -> float:
    return len(ours & theirs) / len(ours | theirs)


def _words(split: Split, record: int) -> Tokens:
    start, end = split.record_offsets[record : record + 2].tolist()
    return np.asarray(split.tokens[start:end])


def _hashed(words: Tokens, ngram: int) -> NDArray[np.uint64]:
    """Return a 32-bit hash of each n-gram."""
    size = min(ngram, len(words))
    hashes = np.zeros(len(words) - size + 1, np.uint64)
    for place in range(size):
        hashes = (hashes + words[place : place + len(hashes)] + np.uint64(1)) * _GRAM
        hashes ^= hashes >> np.uint64(29)
    return hashes >> np.uint64(32)
