"""JSON lines files that one process appends to while others read them."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from flsim.base.files import from_json

TAIL = 4096  # bytes that are first read of a file's end, which holds most last lines


def read_lines(path: Path) -> Iterator[Any]:
    """Yield the value of each line of a file.

    A line that is cut short or damaged is left out. A missing file has no lines.
    """
    if path.exists():
        yield from _values(path.read_bytes())


def last_line(path: Path) -> Any:
    """Return the value of a file's last line without reading the lines before it.

    None means that the line is damaged or the file has none.
    """
    try:
        with path.open("rb") as file:
            line = _end(file)
        return from_json(line) if line else None
    except (OSError, ValueError):
        return None


def _end(file: IO[bytes]) -> bytes:
    """Return the last line of a file, without its newline, however long it is."""
    size, tail = os.fstat(file.fileno()).st_size, TAIL
    while True:
        file.seek(max(0, size - tail))
        _, newline, line = file.read(min(tail, size)).removesuffix(b"\n").rpartition(b"\n")
        if newline or tail >= size:
            return line
        tail *= 2


class NewLines:
    """A reader that returns the lines appended to a file since its last call, or all lines if the file was replaced."""

    def __init__(self, path: Path) -> None:
        self._path, self._file, self._offset = path, 0, 0

    def take(self) -> list[Any]:
        """Return the values of the new lines, without damaged ones."""
        try:
            with self._path.open("rb") as file:
                about = os.fstat(file.fileno())
                if about.st_ino != self._file or about.st_size < self._offset:
                    self._file, self._offset = about.st_ino, 0
                file.seek(self._offset)
                whole = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return []
        self._offset += len(whole) + 1 if whole else 0
        return list(_values(whole))


def _values(text: bytes) -> Iterator[Any]:
    for line in text.split(b"\n"):
        with suppress(ValueError):
            yield from_json(line)
