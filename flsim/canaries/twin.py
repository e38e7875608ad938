"""The IID partition (twin): synthetic users of the same sizes with the same records in random order."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flsim.base.rng import stream
from flsim.canaries.planting import Overlay, Planting
from flsim.data.corpus import Split
from flsim.data.records import windows
from flsim.data.withheld import record_words

ORDER_FILES = {"<u4": "twin.u32", "<i8": "twin.i64"}  # suffixes of files by the type of values


@dataclass(frozen=True)
class Twin:
    """An IID partition: a permutation of all records, dealt to synthetic users with these offsets [users + 1]."""

    order: NDArray[np.integer[Any]]
    user_offsets: NDArray[np.int64]


def make_twin(split: Split, planting: Planting, seed: int) -> tuple[Twin, Overlay]:
    """Shuffle all planted records and deal them in sequence to synthetic users with as many words as the real users.

    Thakkar et al. (2020), section 4.1: shuffled after planting, users filled in sequence. Each synthetic user gets as
    many words as the real user with the same number, with planted canaries, up to one record. Therefore both partitions
    have the same numbers of users in a round, with the same amounts of text. Every record is used: the twin is a
    permutation. It needs 5 bytes of memory per record, or 6 if records have more than 255 words. The overlay is
    returned in the order of the twin.
    """
    # The paper fills users of about 2,000 words, the size of its real users. With a fixed size, the number of users
    # would change when canaries shorten records, and a remainder would be dropped. Runs with older twins, with equal
    # shares, continue with the twin in their folder.
    longest = max([split.layout.record_words, *(len(canary.tokens) for canary in planting.canaries)])
    lengths = np.empty(split.records, np.min_scalar_type(longest))
    for start, words in record_words(split):
        lengths[start : start + len(words)] = words
    overlay = planting.overlay
    phrase_lengths = np.array([len(canary.tokens) for canary in planting.canaries])
    lengths[overlay.records] = phrase_lengths[overlay.canaries]

    real = np.asarray(split.user_offsets[1:-1])
    until = np.zeros(len(real), np.int64)  # words of each real user and all previous users
    for start, words in _words_so_far(piece for _, piece in windows(lengths)):
        ended = np.flatnonzero((start <= real) & (real < start + len(words)))
        until[ended] = words[real[ended] - start]

    order = np.arange(split.records, dtype=order_dtype(split.records))
    stream(seed, "iid-twin").shuffle(order)
    synthetic = np.zeros(len(real), np.int64)
    for start, words in _words_so_far(lengths[piece] for _, piece in windows(order)):
        ended = np.flatnonzero((words[0] < until) & (until <= words[-1]))
        synthetic[ended] = start + words.searchsorted(until[ended])
    return Twin(order, np.concatenate([[0], synthetic, [split.records]])), _reordered(overlay, order)


def _words_so_far(pieces: Iterable[NDArray[Any]]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield the start of each piece of record lengths, with the numbers of words before and after each record."""
    start = words = 0
    for piece in pieces:
        so_far = np.full(len(piece) + 1, words, np.int64)
        so_far[1:] += np.cumsum(piece, dtype=np.int64)
        yield start, so_far
        start, words = start + len(piece), int(so_far[-1])


def order_dtype(records: int) -> str:
    """Return the smallest type, by its name in files, for this number of records."""
    return "<u4" if records <= 2**32 else "<i8"


def _reordered(overlay: Overlay, order: NDArray[np.integer[Any]]) -> Overlay:
    """Return an overlay with records replaced by their positions in `order`."""
    replaced = np.zeros(len(order), bool)
    replaced[overlay.records] = True
    places = [start + np.flatnonzero(replaced[piece]) for start, piece in windows(order)]
    at = np.concatenate([np.empty(0, np.int64), *places])
    return Overlay(at, overlay.canaries[np.searchsorted(overlay.records, order[at])])
