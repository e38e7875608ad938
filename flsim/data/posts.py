"""What every reader takes and gives: a source that is read once, and posts of users.

A reader is a generator function `read(source, dropped)`. It yields posts in the source's order, holds little of the
source in memory, and adds what it leaves out to `dropped` under a reason that names the unit (``posts_without_owner``).
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from flsim.errors import InputError

CHUNK = 2**16  # bytes


@dataclass(frozen=True, slots=True)
class Post:
    """Something that a user wrote, as plain text.

    Attributes:
        user: the author's name, unique within the corpus.
        text: plain text; line feeds end sentences.
    """

    user: str
    text: str


class Source:
    """A file, opened to be read once, front to back, and hashed on the way; a pipe will do.

    Attributes:
        size: bytes that are there to be read, as far as is known; 0 for a pipe.
        bytes: bytes read so far.
        head: the file's first bytes, to tell its format from.

    Raises:
        InputError: there is no such file, or it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = 0
        self._sha256 = hashlib.sha256()
        if path.is_dir():
            raise InputError(f"{path}: a folder; name the files in it")
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from error
        self.size = os.fstat(self._file.fileno()).st_size
        self.head = self._file.read(CHUNK)

    def __enter__(self) -> "Source":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def chunks(self) -> Iterator[bytes]:
        """The file's bytes, in pieces of at most `CHUNK`; to be called once."""
        chunk = self.head
        while chunk:
            self.bytes += len(chunk)
            self._sha256.update(chunk)
            yield chunk
            chunk = self._file.read(CHUNK)

    def described(self) -> dict[str, Any]:
        """Name, bytes and sha256 of what was read, for the manifest; the folder is nobody's business."""
        return {"name": self.path.name, "bytes": self.bytes, "sha256": self._sha256.hexdigest()}


Reader = Callable[[Source, Counter[str]], Iterator[Post]]
