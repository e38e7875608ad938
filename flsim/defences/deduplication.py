"""Deduplication of train records: the first record of each text in the order of the corpus remains.

Lee et al., "Deduplicating Training Data Makes Language Models Better" (2022): exact repetitions, and near repetitions
with MinHash (Broder, 1997). Records are sentences, so near repetitions are compared by n-grams of two words instead of
five.
"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import numpy as np
from datasketch import MinHash, MinHashLSH
from numpy.typing import NDArray

from flsim.base.arrays import Flags, Ints
from flsim.base.progress import progress
from flsim.base.rng import stream
from flsim.base.settings import Count, Probability, settings
from flsim.data.corpus import Corpus, Split
from flsim.data.records import Tokens, piece, windows
from flsim.data.rewriting import BLOCK, blocks
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
PARTS = 16  # number of parts in which records are grouped by hash, which limits the memory for sorting


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


def first_of_equal(split: Split, within: Within = "corpus", hash_bits: int = 64) -> Flags:
    """Return whether no earlier record has the same words, bool [records].

    Records are grouped by a hash and then compared word by word, so collisions have no effect. This maps the corpus,
    and needs 9 bytes of memory per record plus a sixteenth of about 50 bytes.
    """
    hashes = np.empty(split.records, np.uint64)
    with progress("hashing records", split.records, unit="records") as advance:
        for first, values in _hashes(split, within == "user"):
            hashes[first : first + len(values)] = values >> np.uint64(64 - hash_bits)
            advance(first + len(values))
    is_first = np.ones(split.records, bool)
    with progress("comparing records", PARTS) as advance:
        for part in range(PARTS):
            _drop_repeated(split, np.flatnonzero(hashes % PARTS == part), hashes, is_first, within == "user")
            advance(part + 1)
    return is_first


def _hashes(split: Split, by_user: bool) -> Iterator[tuple[int, NDArray[np.uint64]]]:
    """Yield the start and hashes of consecutive records: the sum of T[w_k] P^k modulo 2^64, T random and P odd."""
    rng = stream(0, "record hash")
    table = rng.integers(0, 2**64, max(2**16, split.layout.vocabulary_size), np.uint64)
    base, salt = (2 * int(half) + 1 for half in rng.integers(0, 2**63, 2))
    powers = inverses = np.ones(1, np.uint64)
    user_offsets = np.asarray(split.user_offsets)
    for first, offsets in windows(split.record_offsets, BLOCK, overlap=1):
        begin, end = offsets[0].item(), offsets[-1].item()
        if end - begin >= len(powers):
            powers, inverses = _powers(base, 2 * (end - begin)), _powers(pow(base, -1, 2**64), 2 * (end - begin))
        sums = np.zeros(end - begin + 1, np.uint64)
        np.cumsum(table[piece(split.tokens, begin, end)] * powers[: end - begin], out=sums[1:])
        starts = offsets - begin
        values = (sums[starts[1:]] - sums[starts[:-1]]) * inverses[starts[:-1]]
        if by_user:
            values += _users(user_offsets, np.arange(first, first + len(values))).astype(np.uint64) * np.uint64(salt)
        yield first, values


def _powers(base: int, count: int) -> NDArray[np.uint64]:
    """Return 1, P, P^2, ..., P^count, modulo 2^64."""
    factors = np.full(count + 1, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


def _users(user_offsets: Ints, records: Ints) -> Ints:
    return np.searchsorted(user_offsets, records, side="right") - 1


def _drop_repeated(split: Split, pending: Ints, hashes: NDArray[np.uint64], kept: Flags, by_user: bool) -> None:
    """Clear `kept` of pending records, int64 [n] and ascending, that repeat an earlier pending record."""
    while len(pending):
        pending = pending[np.argsort(hashes[pending], kind="stable")]
        sorted_hashes = hashes[pending]
        opens = np.append(True, sorted_hashes[1:] != sorted_hashes[:-1])
        firsts = pending[opens].repeat(np.diff(np.append(np.flatnonzero(opens), len(pending))))
        later, firsts = pending[~opens], firsts[~opens]
        same = np.empty(len(later), bool)
        for start in range(0, len(later), BLOCK):
            part = slice(start, start + BLOCK)
            same[part] = _equal(split, later[part], firsts[part], by_user)
        kept[later[same]] = False
        pending = np.sort(later[~same])  # other texts of the same hash


def _equal(split: Split, left: Ints, right: Ints, by_user: bool) -> Flags:
    """Return whether pairs of records, int64 [n] each, have the same words, bool [n]."""
    one, other = split.records_at(left), split.records_at(right)
    lengths = np.diff(one.offsets)
    same: Flags = lengths == np.diff(other.offsets)
    if by_user:
        same &= _users(split.user_offsets, left) == _users(split.user_offsets, right)
    compared = lengths[same]
    differs = one.tokens[np.repeat(same, lengths)] != other.tokens[np.repeat(same, np.diff(other.offsets))]
    until = np.concatenate([[0], np.cumsum(differs)])[np.cumsum(np.append(0, compared))]
    same[same] = np.diff(until) == 0
    return same
