"""Reader of plain text in UTF-8, a record per line, such as the Penn Treebank for language models.

Words and characters are unchanged; runs of white space become one space. A block of consecutive lines counts as an
author, named by the file and the number of the first line.
"""

import tarfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import IO

from flsim.base.errors import InputError, at_least_one
from flsim.base.files import file_digest
from flsim.data.formats import posts
from flsim.data.formats.jsonl import BYTE_ORDER_MARK, CHUNK
from flsim.data.formats.posts import LONGEST_RECORD, Format, Part, Post, reading
from flsim.data.vocabulary import Layout, Vocabulary

LINES_PER_AUTHOR = 200  # about 4,000 words of typical text


def text_format(lines_per_author: int = LINES_PER_AUTHOR) -> Format:
    """Return the format of plain text in which `lines_per_author` consecutive lines, at least 1, count as an author."""
    at_least_one(lines_per_author=lines_per_author)
    settings = {} if lines_per_author == LINES_PER_AUTHOR else {"lines_per_author": lines_per_author}
    return Format("text", partial(_parts, lines_per_author), partial(_read, lines_per_author), about=settings)


def _parts(lines_per_author: int, data: Path, source: Path, columns: tuple[str, str]) -> list[Part]:
    bounds, begun = [0], [1]  # begun: number of each part's first line
    lines = offset = 0
    with data.open("rb") as file:
        while chunk := file.readline(CHUNK):
            offset += len(chunk)
            lines += chunk.endswith(b"\n")
            is_between = chunk.endswith(b"\n") and lines % lines_per_author == 0
            if is_between and offset - bounds[-1] >= posts.PART_BYTES:
                bounds.append(offset)
                begun.append(lines + 1)
    bounds += [offset] if bounds[-1] < offset else []
    parts = posts.parts_between(bounds, data, source, columns)
    return [replace(part, line=line) for part, line in zip(parts, begun, strict=False)]  # no part begins at the end


def _read(lines_per_author: int, part: Part, dropped: Counter[str]) -> Iterator[Post]:
    """Yield the lines of one author after another; `published` documents which lines are dropped."""
    split, name = posts.split_of_name(part.source), posts.user_name(posts.unpacked_name(part.source)) or "text"
    for author, lines in groupby(enumerate(_lines(part)), key=lambda line: line[0] // lines_per_author):
        user = f"{name}:{part.line + author * lines_per_author}"
        yield from posts.published(user, split, (line for _, line in lines), dropped)


def _lines(part: Part) -> Iterator[bytes]:
    """Yield the lines of a part; a line that is too long is cut, but remains too long."""
    with part.path.open("rb") as file:
        file.seek(part.first)
        while (start := file.tell()) < part.last:
            line = rest = file.readline(LONGEST_RECORD + 1)
            if not line:
                raise InputError(f"{part.source}: the file became shorter while flsim read it; import it again")
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(CHUNK)
            yield line if start else line.removeprefix(BYTE_ORDER_MARK)


TEXT = text_format()

# Reader of the word counts of TensorFlow Federated, ``stackoverflow.word_count.tar.bz2``: the standard vocabulary.
#
# Lines are ``word<TAB>count``, most frequent first. The count is the number of train users who have the word.


def read_word_count(path: Path, vocabulary_size: int, fit: bool = False) -> tuple[Vocabulary, str]:
    """Return the most frequent words of the text file, or of its archive, and the sha256 of the file.

    With `fit`, there may be fewer words than the vocabulary needs.
    """
    needed = Layout(vocabulary_size).words
    kinds = (tarfile.TarError, EOFError, OSError, ValueError)
    with reading(path, "cannot be read as lines of a word and its count", kinds), _opened(path) as file:
        lines = islice(iter(partial(file.readline, CHUNK), b""), needed)
        rows = [line.decode("utf-8").split() for line in lines]
        words, counts = tuple(word for word, _ in rows), tuple(int(count) for _, count in rows)
        sha256 = file_digest(path)
    if list(counts) != sorted(map(abs, counts), reverse=True):
        raise InputError(f"{path}: counts must be 0 or more, the largest first; sort the lines by count")
    if len(set(words)) < len(words):
        raise InputError(f"{path}: {Counter(words).most_common(1)[0][0]!r:.40} occurs twice; remove one line")
    if len(words) < needed and not (fit and words):
        raise InputError(
            f"{path}: ends after {len(words):,} words, but a vocabulary of {vocabulary_size:,} has {needed:,}; give "
            f"--vocabulary {len(words) + vocabulary_size - needed} or less"
        )
    return Vocabulary(words, counts), sha256


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open the text, which is the file or the first file in the archive."""
    with path.open("rb") as file:
        is_archive = file.read(3) == b"BZh"
        file.seek(0)
        if not is_archive:
            yield file
            return
        with tarfile.open(fileobj=file, mode="r|bz2") as archive:
            for member in archive:
                if member.isfile() and (text := archive.extractfile(member)) is not None:
                    yield text
                    return
    raise InputError(f"{path}: the archive has no file")
