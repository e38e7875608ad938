"""Reading arrays that are larger than memory should hold: piece by piece, without mapping them."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

WINDOW = 2**20  # values


def windows(values: NDArray[Any], size: int | None = None, overlap: int = 0) -> Iterator[tuple[int, NDArray[Any]]]:
    """Consecutive pieces of a whole array, each with where it starts.

    Of a memory-mapped file they are read, since pages of a mapping, once touched, count as this process's memory.

    Args:
        values: an array, or a mapped file as `flsim.data.corpus.memory_map` opened it, not a part of it.
        size: values that a piece is ahead of the one before; `WINDOW` where None.
        overlap: values that a piece has in common with the next.
    """
    size = size or WINDOW
    for start in range(0, len(values), size):
        yield start, piece(values, start, min(start + size + overlap, len(values)))


def piece(values: NDArray[Any], start: int, stop: int) -> NDArray[Any]:
    """``values[start:stop]`` of what `windows` takes, read where that is a file."""
    if isinstance(values, np.memmap):
        offset = start * values.itemsize
        return np.fromfile(values.filename, values.dtype, stop - start, offset=offset)  # type: ignore[arg-type]
    return values[start:stop]
