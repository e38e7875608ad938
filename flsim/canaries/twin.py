"""The IID twin of users: users of the same sizes, who hold the same records in random order."""

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

ORDER_FILES = {"<u4": "twin.u32", "<i8": "twin.i64"}  # by the type of their values


@dataclass(frozen=True)
class Twin:
    """An IID twin: all records in random order, dealt to as many synthetic users as there are real ones.

    Attributes:
        order: uint32 [records], a permutation; int64 where there are more than 2^32.
        user_offsets: int64 [users + 1], where each synthetic user starts in `order`.
    """

    order: NDArray[np.integer[Any]]
    user_offsets: NDArray[np.int64]


def make_twin(split: Split, planting: Planting, seed: int) -> tuple[Twin, Overlay]:
    """Shuffle all planted records and deal them in sequence to synthetic users as large as the real ones, in words.

    Thakkar et al. (2020), section 4.1: shuffled after planting, users filled in sequence. Each synthetic user gets as
    many words as the real user of its number has, canaries in place, up to a record. So both partitions have the same
    users in a round and as much of each. No record is left over: the twin is a permutation. It needs 5 bytes of memory
    a record, or 6 where records hold over 255 words.

    Returns:
        The twin, and the overlay, counted in the twin's order.
    """
    # The paper fills users of about 2,000 words, its real users' size. A fixed size would give another number of users
    # once canaries shorten records, and a remainder to drop. Runs with twins of older versions, dealt in equal shares,
    # continue with the twin in their folder.
    longest = max([split.layout.record_words, *(len(canary.tokens) for canary in planting.canaries)])
    lengths = np.empty(split.records, np.min_scalar_type(longest))
    for start, words in record_words(split):
        lengths[start : start + len(words)] = words
    overlay = planting.overlay
    phrase_lengths = np.array([len(canary.tokens) for canary in planting.canaries])
    lengths[overlay.records] = phrase_lengths[overlay.canaries]

    real = np.asarray(split.user_offsets[1:-1])
    until = np.zeros(len(real), np.int64)  # words of each real user and of all users before
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
    """Yield, for each piece of records' lengths, its start and the words before each record and up to its end."""
    start = words = 0
    for piece in pieces:
        so_far = np.full(len(piece) + 1, words, np.int64)
        so_far[1:] += np.cumsum(piece, dtype=np.int64)
        yield start, so_far
        start, words = start + len(piece), int(so_far[-1])


def order_dtype(records: int) -> str:
    """Return the smallest type, as named in files, that counts this many records."""
    return "<u4" if records <= 2**32 else "<i8"


def _reordered(overlay: Overlay, order: NDArray[np.integer[Any]]) -> Overlay:
    """Return an overlay of records as an overlay of their places in `order`."""
    replaced = np.zeros(len(order), bool)
    replaced[overlay.records] = True
    places = [start + np.flatnonzero(replaced[piece]) for start, piece in windows(order)]
    at = np.concatenate([np.empty(0, np.int64), *places])
    return Overlay(at, overlay.canaries[np.searchsorted(overlay.records, order[at])])
