"""Regrouping on disk, in bounded memory: files of lines in the order of a hash, read one range of hashes at a time.

The writer of a file decides nothing about how the file is read: the ranges are chosen when all files exist and their
sizes are known. All lines of one hash are in one range. They come in the order of the files, and within a file in the
order of its lines.

A file is its lines, then uint64 [lines] hashes, int64 [lines] ends of lines in bytes, and int64 the number of lines.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flsim.base.files import new_file

Range = tuple[str, int, int]  # a file, and the bytes of it from the one to before the other


def hash_of(text: str) -> int:
    """Return the first 64 bits of a text's sha256, which order texts as the whole sha256 does, except for ties."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def write_lines(path: Path, hashes: Sequence[int], lines: Iterable[bytes]) -> None:
    """Write a file, whole or not at all.

    Args:
        path: the file.
        hashes: the lines' hashes, from 0 to 2**64 - 1, in ascending order.
        lines: lines that end with their only line feed.
    """
    ends = []
    size = 0
    with new_file(path) as partial, partial.open("wb") as file:
        for line in lines:
            file.write(line)
            size += len(line)
            ends.append(size)
        file.write(np.array(hashes, "<u8").tobytes())
        file.write(np.array([*ends, len(ends)], "<i8").tobytes())


def cuts(paths: Sequence[Path], ranges: int) -> NDArray[np.int64]:
    """Return where each of `ranges` equal ranges of hashes begins in each file: int64 [files, ranges + 1], bytes."""
    bounds = np.array([(index << 64) // ranges for index in range(ranges)], np.uint64)
    starts_in_files = np.zeros((len(paths), ranges + 1), np.int64)
    for row, path in enumerate(paths):
        with path.open("rb") as file:
            file.seek(-8, 2)
            (lines,) = np.frombuffer(file.read(), "<i8")
            file.seek(-8 - 16 * int(lines), 2)
            hashes = np.frombuffer(file.read(8 * int(lines)), "<u8")
            ends = np.frombuffer(file.read(8 * int(lines)), "<i8")
        starts = np.concatenate([np.zeros(1, np.int64), ends])
        starts_in_files[row] = starts[np.append(np.searchsorted(hashes, bounds), lines)]
    return starts_in_files


def ranges_of(paths: Sequence[Path], cuts: NDArray[np.int64], index: int) -> list[Range]:
    """Return the lines of one range of hashes, in those files that have lines in it."""
    bounds = zip(paths, cuts[:, index].tolist(), cuts[:, index + 1].tolist(), strict=True)
    return [(str(path), first, last) for path, first, last in bounds if first < last]


def read_lines(ranges: Iterable[Range]) -> Iterator[bytes]:
    """Yield the lines without their line feeds."""
    for path, first, last in ranges:
        with Path(path).open("rb") as file:
            file.seek(first)
            yield from file.read(last - first)[:-1].split(b"\n")
