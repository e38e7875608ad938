"""Deduplication of train records: the first record of each text in the order of the corpus remains.

Lee et al., "Deduplicating Training Data Makes Language Models Better" (2022): exact repetitions, and near repetitions
with MinHash (Broder, 1997). Records are sentences, so near repetitions are compared by n-grams of two words instead of
five.
"""

from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import numpy as np
from datasketch import MinHash, MinHashLSH
from numpy.typing import NDArray

from flsim.base.arrays import Flags
from flsim.base.progress import progress
from flsim.base.settings import Count, Probability, settings
from flsim.data.corpus import Corpus, Split
from flsim.data.records import Tokens
from flsim.data.rewriting import blocks
from flsim.defences.dropping import drop_records, train_records

# Near duplicates: records whose sets of word n-grams are similar.
#  MinHash with locality-sensitive hashing (datasketch) finds candidates among the kept records. Their Jaccard
# similarity is then computed exactly. Therefore no record is dropped wrongly, and one in `MISSES` near duplicates can
# be missed.

PERMUTATIONS = 64
MISSES = 1_000
_GRAM = np.uint64(0x9E3779B97F4A7C15)  # odd; mixes the words of an n-gram
Grams = frozenset[tuple[int, ...]]


def first_of_near(split: Split, chosen: Flags, near: float, ngram: int, by_user: bool) -> Flags:
    """Return whether a chosen record [records] is similar to no earlier kept record; others are dropped [records].

    `near` is the smallest Jaccard similarity of equal records. This is a Python loop over some thousands of records per
    second, and needs about 6 kB of memory for each kept record.
    """
    is_first = chosen.copy()
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
                of_others = (grams_of(_words(split, other), ngram) for other in candidates)
                if any(len(grams & other) / len(grams | other) >= near for other in of_others):
                    is_first[record] = False
                else:
                    index.insert(record, sketch, check_duplication=False)
                advance(record)
            advance(end)
    return is_first


def bands_for(near: float) -> tuple[int, int]:
    """Return bands b and rows r, with the most rows at which one in `MISSES` similar records shares no band.

    Two records of similarity s agree in a band with probability s^r, in none with (1 - s^r)^b.
    """
    rows = PERMUTATIONS // 2
    while rows > 1 and (1 - near**rows) ** (PERMUTATIONS // rows) > 1 / MISSES:
        rows -= 1
    return PERMUTATIONS // rows, rows


def grams_of(words: Tokens, ngram: int) -> Grams:
    """Return the n-grams of a record; all its words as one n-gram if it is shorter."""
    listed = words.tolist()
    return frozenset(tuple(listed[start : start + ngram]) for start in range(max(1, len(listed) - ngram + 1)))


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


Within = Literal["corpus", "user"]


@settings
class DeduplicationHParams:
    """Settings of what counts as a repeated record.

    Attributes:
        near: smallest Jaccard similarity of sets of word n-grams at which two records count as equal; None for exact
            equality only.
        within: "corpus" compares records of all users, and "user" records of one user.
        ngram: n; a record of fewer words is one n-gram.
    """

    near: Probability | None = None
    within: Within = "corpus"
    ngram: Count = 2

    @property
    def label(self) -> str:
        """Return the name of this defence in a table of runs."""
        return "deduplicated" if self.near is None else f"deduplicated at {self.near:g}"


def deduplicate(corpus: Corpus, out: Path, hparams: DeduplicationHParams) -> Corpus:
    """Write the corpus without repeated train records, of which there must be any; `out` must not exist."""
    train = train_records(corpus, out)
    remains = first_of_equal(train, hparams.within)
    dropped = {"records_duplicated": int(np.count_nonzero(~remains))}
    if hparams.near is not None:
        distinct = remains
        remains = first_of_near(train, distinct, hparams.near, hparams.ngram, hparams.within == "user")
        dropped["records_near_duplicated"] = int(np.count_nonzero(distinct & ~remains))
    return drop_records(
        corpus, out, remains, {"step": "deduplicate", "label": hparams.label, **asdict(hparams)}, dropped
    )


def first_of_equal(split: Split, within: Within = "corpus") -> Flags:
    """Return whether no earlier record has the same words, bool [records].

    Records are compared by hashes of 128 bits, so two different records among 10^9 are equal with a probability below
    10^-20. This is a Python loop over some 300,000 records per second, and needs about 60 bytes of memory per record.
    """
    hashes, user_offsets = bytearray(), np.asarray(split.user_offsets)
    with progress("comparing records", split.records, unit="records") as advance:
        for first, last in blocks(user_offsets, 1 if within == "user" else None):
            key = str(first).encode() if within == "user" else b""
            begin, end = user_offsets[first].item(), user_offsets[last].item()
            for record in split.records_at(np.arange(begin, end)):
                hashes += blake2b(record.tobytes(), digest_size=16, key=key).digest()
            advance(end)
    is_first = np.zeros(split.records, bool)
    is_first[np.unique(np.frombuffer(hashes, "S16"), return_index=True)[1]] = True
    return is_first
