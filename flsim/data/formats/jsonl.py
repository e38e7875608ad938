"""Reader of JSON lines: one object ``{"user": ..., "text": ...}`` per line, in UTF-8, with plain text (not HTML)."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from flsim.base.errors import InputError
from flsim.data.formats import posts
from flsim.data.formats.fields import TEXT, USER, WrongFieldError, posts_of
from flsim.data.formats.posts import Format, Part, Post

LONGEST_LINE = 2**24  # bytes
CHUNK = 2**16  # bytes
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def jsonl_parts(data: Path, source: Path, columns: tuple[str, str]) -> list[Part]:
    """Return the parts of a file: byte ranges that end after a line feed, or at the end of the file."""
    size = data.stat().st_size
    bounds = [0]
    with data.open("rb") as file:
        while (target := bounds[-1] + posts.PART_BYTES) < size:
            bounds.append(_after_line_feed(file, target))
    bounds += [size] if bounds[-1] < size else []
    return posts.parts_between(bounds, data, source, columns)


def _after_line_feed(file: IO[bytes], offset: int) -> int:
    """Return where the first line at or after an offset begins; the end of the file if there is none."""
    file.seek(offset - 1)
    while line := file.readline(CHUNK):
        if line.endswith(b"\n"):
            break
    return file.tell()


def read_jsonl(part: Part, dropped: Counter[str]) -> Iterator[Post]:
    """Yield one post per text; blank lines are skipped, and other keys are ignored.

    `flsim.data.formats.fields.posts_of` states what an author and a text are, and which posts are dropped. Lines of
    more than 16 MB are dropped too, as ``posts_too_long``.

    Raises:
        InputError: a line is not UTF-8, not JSON, or not such an object.
    """
    with part.path.open("rb") as file:
        offset = part.first
        file.seek(offset)
        while offset < part.last:
            line = file.readline(LONGEST_LINE + 1)
            if not line:
                raise InputError(f"{part.source}: became shorter while it was read")
            start, offset = offset, offset + len(line)
            try:
                if len(line) > LONGEST_LINE and not line.endswith(b"\n"):
                    offset = _skip(line, file, part)
                    dropped["posts_too_long"] += 1
                    continue
                if start == 0:
                    line = line.removeprefix(BYTE_ORDER_MARK)
                if line.strip():
                    yield from _posts(line.removesuffix(b"\n"), part, dropped)
            except _LineError as error:
                raise InputError(f"{part.source}: line {line_number(part.path, start)}: {error}") from error


class _LineError(Exception):
    """The fault of a line."""


def _skip(begun: bytes, file: IO[bytes], part: Part) -> int:
    """Skip the rest of a line, and return where it ends."""
    if not begun.removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"{"):
        raise _LineError(
            f"a line of more than {LONGEST_LINE:,} bytes that is no JSON object; {_expected(part.columns)}"
        )
    return _after_line_feed(file, file.tell() + 1)


def line_number(path: Path, offset: int) -> int:
    """Return the number, from 1, of the line that begins at an offset."""
    lines = 1
    with path.open("rb") as file:
        while offset > 0 and (chunk := file.read(min(2**20, offset))):
            lines += chunk.count(b"\n")
            offset -= len(chunk)
    return lines


def _expected(columns: tuple[str, str]) -> str:
    return f"expected {{{json.dumps(columns[0])}: ..., {json.dumps(columns[1])}: ...}}"


def _posts(line: bytes, part: Part, dropped: Counter[str]) -> Iterator[Post]:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _LineError(f"not UTF-8 (byte {error.start + 1} of the line); convert the file to UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise _LineError(f"not JSON ({reason_of(error)}); {_expected(part.columns)}") from error
    try:
        yield from posts_of_object(value, part, dropped)
    except WrongFieldError as error:
        raise _LineError(error.why) from error


def posts_of_object(value: Any, part: Part, dropped: Counter[str]) -> Iterator[Post]:
    """Yield the posts of a JSON object; see `flsim.data.formats.fields.posts_of`.

    Raises:
        WrongFieldError: the value is no object, lacks the author or the text, or has one of another type.
    """
    if not isinstance(value, dict):
        raise WrongFieldError(USER, f"not a JSON object; {_expected(part.columns)}")
    user, text = (_field(value, place, part.columns[place]) for place in (USER, TEXT))
    try:
        yield from posts_of(user, text, dropped, part.reading)
    except WrongFieldError as error:
        value = (user, text)[error.place]
        why = f"{part.columns[error.place]!r} {error.why}, found {_abbreviated(value)}"
        raise WrongFieldError(error.place, why) from error


def _field(value: dict[str, Any], place: int, key: str) -> Any:
    """Return the value of a key, or of ``author.id``: the key ``id`` of the object ``author``."""
    inner: Any = value
    for step in [key] if key in value else key.split("."):
        if inner is None:
            return None
        if not isinstance(inner, dict) or step not in inner:
            option = ("--user-column", "--text-column")[place]
            keys = ", ".join(map(_abbreviated, value)) or "none"
            raise WrongFieldError(place, f"no {key!r}; its keys: {keys}; name the right one with {option}")
        inner = inner[step]
    return inner


def _abbreviated(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def reason_of(error: Exception) -> str:
    """Return why Python cannot decode a JSON text."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else "a number of too many digits"


JSONL = Format("jsonl", jsonl_parts, read_jsonl)
