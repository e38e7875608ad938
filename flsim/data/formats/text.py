"""Reader of plain text in UTF-8, a record per line, such as the Penn Treebank for language models.

Words and characters are unchanged; runs of white space become one space. A block of consecutive lines counts as an
author, named by the file and the number of the first line.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path

from flsim.base.errors import InputError, at_least_one
from flsim.data.formats import posts
from flsim.data.formats.jsonl import BYTE_ORDER_MARK
from flsim.data.formats.posts import LONGEST_RECORD, Format, Part, Post

LINES_PER_AUTHOR = 200  # about 4,000 words of typical text
CHUNK = 2**16  # bytes


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
