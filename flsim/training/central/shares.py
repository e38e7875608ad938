"""The shares of a batch that the processes of a group read."""

import numpy as np

from flsim.data.vocabulary import Layout
from flsim.training.central.task import Chunk
from flsim.training.cohort.steps import Ints


def tokens_of(chunk: Chunk, layout: Layout) -> Ints:
    """Return the number of positions of each step's whole batch, int64 [steps]."""
    return np.bincount(_step(chunk), _lengths(chunk, layout), len(chunk)).astype(np.int64)


def dealt(chunk: Chunk, layout: Layout, rank: int, workers: int) -> tuple[Ints, Ints]:
    """Return which records one of several processes reads, and the step of each, int64 [n] both.

    A step's records are sorted by length, longest first, and dealt out in turn, so that all processes have about equal
    work; a process may get none.
    """
    step = _step(chunk)
    longest_first = np.lexsort((-_lengths(chunk, layout), step))
    place = np.arange(len(step)) - np.repeat(np.cumsum(chunk.counts) - chunk.counts, chunk.counts)
    mine = place % workers == rank
    return longest_first[mine], step[mine]


def _step(chunk: Chunk) -> Ints:
    """Return the step of each record, ascending."""
    return np.repeat(np.arange(len(chunk)), chunk.counts)


def _lengths(chunk: Chunk, layout: Layout) -> Ints:
    """Return the number of positions of each record."""
    words = np.diff(chunk.records.offsets)
    lengths: Ints = words + layout.ends_with_eos(words)
    return lengths
