"""Regrouping by author what arrives in any order, on disk, with memory for one bucket at a time."""

import hashlib
import json
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

BUFFERED = 2**24  # characters kept in memory before they go to the buckets


class Spill:
    """Records of authors: added in any order, read back an author at a time.

    Authors come back in the order of the sha256 of their names, whatever the order they were added in and the number
    of buckets; an author's records come back in the order they were added in. A record is its words, joined by spaces.

    A bucket is a text file of a range of hashes. A line is one call of `add`: the author's name in JSON, then the
    records, separated by tabs, which neither JSON nor a word contains.
    """

    def __init__(self, folder: Path, buckets: int) -> None:
        folder.mkdir()
        self._folder = folder
        self._paths = [folder / f"bucket-{index:04d}" for index in range(buckets)]
        self._buffers: dict[int, list[str]] = defaultdict(list)
        self._buffered = 0

    def __len__(self) -> int:
        """Number of buckets."""
        return len(self._paths)

    def add(self, author: str, records: list[str]) -> None:
        line = "\t".join([json.dumps(author), *records]) + "\n"
        self._buffers[int.from_bytes(_order(author)[:8], "big") * len(self) >> 64].append(line)
        self._buffered += len(line)
        if self._buffered > BUFFERED:
            self.flush()

    def flush(self) -> None:
        """Append what is in memory to the buckets; to be called before reading."""
        for bucket, lines in self._buffers.items():
            with self._paths[bucket].open("a", encoding="ascii", newline="\n") as file:
                file.writelines(lines)
        self._buffers.clear()
        self._buffered = 0

    def remove(self) -> None:
        """Delete the buckets."""
        shutil.rmtree(self._folder)

    def read(self, bucket: int) -> Iterator[tuple[str, list[str]]]:
        """The authors of one bucket, with their records."""
        if not self._paths[bucket].exists():
            return
        grouped: dict[str, list[str]] = defaultdict(list)
        with self._paths[bucket].open(encoding="ascii", newline="\n") as file:
            for line in file:
                name, *records = line[:-1].split("\t")
                grouped[name] += records
        authors = {json.loads(name): records for name, records in grouped.items()}
        for author in sorted(authors, key=_order):
            yield author, authors[author]


def _order(author: str) -> bytes:
    return hashlib.sha256(author.encode()).digest()
