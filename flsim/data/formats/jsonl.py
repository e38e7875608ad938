"""Reader of JSON lines: one object ``{"user": ..., "text": ...}`` per line, in UTF-8, with plain text (not HTML)."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from flsim.base.errors import InputError
from flsim.data.formats import posts
from flsim.data.formats.posts import Format, Part, Post, post_of

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
    """Yield one post per line; blank lines are skipped, and other keys are ignored.

    A user is a whole number, or a string that is more than white space; 7 and "7" are one user. Lines of more than
    16 MB are dropped, as ``posts_too_long``.

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
                    yield _post(line.removesuffix(b"\n"), part)
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


def _post(line: bytes, part: Part) -> Post:
    columns = part.columns
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _LineError(f"not UTF-8 (byte {error.start + 1} of the line); convert the file to UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise _LineError(f"not JSON ({_reason(error)}); {_expected(columns)}") from error
    if not isinstance(value, dict):
        raise _LineError(f"not a JSON object; {_expected(columns)}")
    for key, option in zip(columns, ("--user-column", "--text-column"), strict=True):
        if key not in value:
            keys = ", ".join(map(_abbreviated, value)) or "none"
            raise _LineError(f"no {key!r}; its keys: {keys}; name the right one with {option}")
    user, text = columns
    return post_of(_user(value[user], user), _text(value[text], text), ascii=part.reading.ascii)


def _user(value: Any, key: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _LineError(f"{key!r} must be a string or a whole number, found {_abbreviated(value)}")
    name = str(value)
    if not name.strip():
        raise _LineError(f"{key!r} must name an author, found {_abbreviated(value)}; leave out posts without an author")
    if not name.isascii():
        try:
            name.encode("utf-8")
        except UnicodeEncodeError as error:
            raise _LineError(f"{key!r} holds half of a surrogate pair, which is no character") from error
    return name


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise _LineError(f"{key!r} must be a string, found {_abbreviated(value)}")
    return value


def _abbreviated(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else "a number of too many digits"


JSONL = Format("jsonl", jsonl_parts, read_jsonl)
