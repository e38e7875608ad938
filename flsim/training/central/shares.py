"""The shares of a batch that the processes of a group read."""

import numpy as np
from numpy.typing import NDArray

from flsim.data.vocabulary import Layout
from flsim.training.central.task import Chunk
from flsim.training.cohort.steps import Ints


def tokens_of(chunk: Chunk, layout: Layout) -> Ints:
    """Return the number of positions of each step's whole batch, int64 [steps]."""
    return np.add.reduceat(np.append(_lengths(chunk, layout), 0), _firsts(chunk)) * (chunk.counts > 0)


def dealt(chunk: Chunk, layout: Layout, rank: int, workers: int) -> tuple[Ints, NDArray[np.int64]]:
    """Return which records one of several processes reads, and the step of each, int64 [n] both.

    A step's records are sorted by length, longest first, and dealt out in turn, so that all processes have about equal
    work; a process may get none.
    """
    step = np.repeat(np.arange(len(chunk)), chunk.counts)
    longest_first = np.lexsort((-_lengths(chunk, layout), step))
    place = np.arange(len(step)) - np.repeat(_firsts(chunk), chunk.counts)
    mine = place % workers == rank
    return longest_first[mine], step[mine]


def _firsts(chunk: Chunk) -> Ints:
    """Return the first record of each step."""
    firsts: Ints = np.cumsum(chunk.counts) - chunk.counts
    return firsts


def _lengths(chunk: Chunk, layout: Layout) -> Ints:
    """Return the number of positions of each record."""
    words = np.diff(chunk.records.offsets)
    lengths: Ints = words + layout.ends_with_eos(words)
    return lengths
