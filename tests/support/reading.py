"""Helpers for tests of readers: they read a complete file as the import does, and damage files on purpose."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from flsim.data.formats import posts as parts
from flsim.data.formats.known import FORMATS
from flsim.data.formats.posts import Post

COLUMNS = ("user", "text")
Sentence = tuple[str, str | None, str]  # user, split, words


def read(
    path: Path, format: str, source: Path | None = None, columns: tuple[str, str] = COLUMNS
) -> tuple[list[Post], Counter[str]]:
    """Return the posts of a file, which is read part by part, and how much was dropped, by reason."""
    dropped: Counter[str] = Counter()
    parts = FORMATS[format].parts(path, source or path, columns)
    return [post for part in parts for post in FORMATS[format].read(part, dropped)], dropped


@contextmanager
def parts_of(size: int) -> Iterator[None]:
    """Set the largest size of a part, in bytes and in records."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "PART_BYTES", size)
        patch.setattr(parts, "PART_RECORDS", size)
        yield


def check_post(post: Post) -> None:
    """Check what holds for each post: a known split, encodable text, and sentences with single spaces."""
    assert post.split in ("train", "heldout", "test", None)
    assert post.user.encode("utf-8").decode("utf-8") == post.user
    for sentence in post.sentences:
        assert sentence
        assert sentence == " ".join(sentence.split())
        sentence.encode("utf-8")


def damaged(content: bytes, rng: np.random.Generator) -> bytes:
    """Return the content truncated, with a piece removed, repeated or overwritten, or with single bytes changed."""
    size = len(content)
    kind = rng.integers(6)
    first, last = sorted(int(offset) for offset in rng.integers(0, size + 1, 2))
    if kind == 0:
        return content[:last]
    if kind == 1:
        return content[:first] + content[last:]
    if kind == 2:
        return content[:last] + content[first:]
    changed = bytearray(content)
    if kind == 3:  # one piece overwrites another piece
        length = min(int(rng.integers(1, 64)), size - last)
        changed[last : last + length] = content[first : first + length]
    elif kind == 4:  # bytes of extreme numbers
        value = (b"\x00", b"\xff", b"\x7f", b"\x80")[rng.integers(4)]
        changed[first : first + int(rng.integers(1, 9))] = value * min(int(rng.integers(1, 9)), size - first)
    else:
        for offset in rng.integers(0, size, rng.integers(1, 9)):
            changed[offset] = rng.integers(256)
    return bytes(changed)
