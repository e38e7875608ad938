"""Reading of arrays that are larger than memory, piece by piece, without mapping them."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

WINDOW = 2**20  # values


def windows(values: NDArray[Any], size: int | None = None, overlap: int = 0) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield consecutive pieces of a whole array, each with the index where it starts.

    Pieces of a memory-mapped file are read, because pages of a mapping, once touched, count as this process's memory.

    Args:
        values: an array, or a whole mapped file as `flsim.data.corpus.memory_map` opened it, not a part of one.
        size: values from the start of one piece to the start of the next; `WINDOW` by default.
        overlap: values that a piece has in common with the next.
    """
    size = size or WINDOW
    for start in range(0, len(values), size):
        yield start, piece(values, start, min(start + size + overlap, len(values)))


def piece(values: NDArray[Any], start: int, stop: int) -> NDArray[Any]:
    """Return ``values[start:stop]`` of an array or a mapped file as `windows` takes it; parts of a file are read."""
    if isinstance(values, np.memmap):
        offset = start * values.itemsize
        return np.fromfile(values.filename, values.dtype, stop - start, offset=offset)  # type: ignore[arg-type]
    return values[start:stop]
