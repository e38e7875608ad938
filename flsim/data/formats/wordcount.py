"""Reader of the word counts of TensorFlow Federated, ``stackoverflow.word_count.tar.bz2``: the standard vocabulary.

Lines are ``word<TAB>count``, most frequent first. The count is the number of train users who have the word.
"""

import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import IO

from flsim.base.errors import InputError
from flsim.data.formats.posts import reading
from flsim.data.vocabulary import Layout, Vocabulary

LONGEST_LINE = 2**16  # bytes


LARGEST = 2**29  # bytes of a file; that of TensorFlow Federated has about 90 MB


def read_word_count(path: Path, vocabulary_size: int, fit: bool = False) -> tuple[Vocabulary, str]:
    """Return the most frequent words of the text file, or of its archive, and the sha256 of the file.

    With `fit`, there may be fewer words than the vocabulary needs.
    """
    needed = Layout(vocabulary_size).words
    counts: dict[str, int] = {}
    lines, last = 0, None
    content = _content(path)
    with _opened(path, content) as file:
        for lines, line in enumerate(iter(partial(file.readline, LONGEST_LINE), b""), start=1):
            word, count = _word_and_count(line, f"{path}: line {lines}")
            if last is not None and count > last:
                raise InputError(
                    f"{path}: line {lines}: a count of {count:,} after {last:,}; sort by count, largest first"
                )
            last = count
            if len(counts) < needed:
                if word in counts:
                    raise InputError(f"{path}: line {lines}: {word!r:.40} occurs twice; remove one line")
                counts[word] = count
    if len(counts) < needed and not (fit and counts):
        raise InputError(
            f"{path}: line {lines}: ends after {len(counts):,} words, but a vocabulary of {vocabulary_size:,} has "
            f"{needed:,}; give --vocabulary {len(counts) + vocabulary_size - needed} or less"
        )
    return Vocabulary(tuple(counts), tuple(counts.values())), sha256(content).hexdigest()


def _content(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        content = path.read_bytes() if size <= LARGEST else b""
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    if size > LARGEST:
        raise InputError(f"{path}: {size:,} bytes are too many for a file of word counts; name the right file")
    return content


@contextmanager
def _opened(path: Path, content: bytes) -> Iterator[IO[bytes]]:
    """Open the text, which is the content of the file or the first file in the archive."""
    if not content.startswith(b"BZh"):
        yield BytesIO(content)
        return
    with (
        reading(path, "cannot be read as word counts", (tarfile.TarError, EOFError, OSError, ValueError)),
        tarfile.open(fileobj=BytesIO(content), mode="r|bz2") as archive,
    ):
        for member in archive:
            if member.isfile() and (text := archive.extractfile(member)) is not None:
                yield text
                return
        raise InputError(f"{path}: the archive has no file")


def _word_and_count(line: bytes, where: str) -> tuple[str, int]:
    try:
        word, count = line.decode("utf-8").split()
        number = int(count)
    except ValueError as error:
        raise InputError(f"{where}: expected a word and a count, found {line[:40]!r}") from error
    if number < 0 or not count.isdecimal():
        raise InputError(f"{where}: expected a count, found {count!r:.40}")
    return word, number
