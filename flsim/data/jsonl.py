"""JSON lines: one object ``{"user": ..., "text": ...}`` a line, in UTF-8, the text plain (not HTML)."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from flsim.data.posts import Post, Source
from flsim.errors import InputError

LONGEST_LINE = 2**26  # bytes
EXPECTED = 'expected {"user": ..., "text": ...}'


def read_jsonl(source: Source, _dropped: Counter[str]) -> Iterator[Post]:
    """A post a line; blank lines are skipped, other keys ignored. Nothing is dropped.

    A user is a string or a whole number; 7 and "7" are one user.

    Raises:
        InputError: a line is not UTF-8, not JSON, or not such an object.
    """
    for number, line in enumerate(_lines(source), start=1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        try:
            if line.strip():
                yield _post(line)
        except _LineError as error:
            raise InputError(f"{source.path}: line {number}: {error}") from error


class _LineError(Exception):
    """What is wrong with a line."""


def _post(line: bytes) -> Post:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _LineError(f"not UTF-8 (byte {error.start + 1} of the line); convert the file to UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise _LineError(f"not JSON ({_reason(error)}); {EXPECTED}") from error
    if not isinstance(value, dict):
        raise _LineError(f"not a JSON object; {EXPECTED}")
    for key in ("user", "text"):
        if key not in value:
            raise _LineError(f"no {key!r}; {EXPECTED}")
    return Post(_user(value["user"]), _text(value["text"]))


def _user(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _LineError(f"'user' must be a string or a whole number, found {_shown(value)}")
    name = str(value)
    if not name.isascii():
        try:
            name.encode("utf-8")
        except UnicodeEncodeError as error:
            raise _LineError("'user' holds half of a surrogate pair, which is no character") from error
    return name


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _LineError(f"'text' must be a string, found {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else "a number of too many digits"


def _lines(source: Source) -> Iterator[bytes]:
    """Lines without their line feed; the last one may lack it."""
    begun: list[bytes] = []
    length = 0
    for chunk in source.chunks():
        first, *rest = chunk.split(b"\n")
        begun.append(first)
        length += len(first)
        if length > LONGEST_LINE:
            raise InputError(f"{source.path}: a line of more than {LONGEST_LINE:,} bytes; is it JSON lines?")
        if rest:
            yield b"".join(begun)
            yield from rest[:-1]
            begun, length = [rest[-1]], len(rest[-1])
    if begun:
        yield b"".join(begun)
