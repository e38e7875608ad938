"""Readers of JSON: one object ``{"user": ..., "text": ...}`` per line, in UTF-8, with plain text (not HTML)."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

from flsim.base.errors import InputError
from flsim.data.formats import posts
from flsim.data.formats.posts import OPTIONS, USER, Format, Part, Post, WrongFieldError, posts_of, whole_file

LONGEST_LINE = 2**24  # bytes
CHUNK = 2**16  # bytes
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SHOWN_KEYS = 10  # longest excerpt in an error
MISSING = object()


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
    """Return the offset of the first line at or after an offset; the end of the file if there is none."""
    file.seek(offset - 1)
    while line := file.readline(CHUNK):
        if line.endswith(b"\n"):
            break
    return file.tell()


def read_jsonl(part: Part, dropped: Counter[str]) -> Iterator[Post]:
    """Yield one post per text; blank lines and other keys are ignored, and lines over 16 MB are ``posts_too_long``."""
    is_key = cache(partial(_occurs, part.path))
    with part.path.open("rb") as file:
        offset = part.first
        file.seek(offset)
        while offset < part.last:
            line = file.readline(LONGEST_LINE + 1)
            if not line:
                raise InputError(f"{part.source}: the file became shorter while flsim read it; import it again")
            start, offset = offset, offset + len(line)
            try:
                if len(line) > LONGEST_LINE and not line.endswith(b"\n"):
                    if not line.removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"{"):
                        what = f"a line of more than {LONGEST_LINE:,} bytes that is not a JSON object"
                        raise WrongFieldError(USER, f"{what}; {_expected(part.columns)}")
                    offset = _after_line_feed(file, file.tell() + 1)
                    dropped["posts_too_long"] += 1
                    continue
                if start == 0:
                    line = line.removeprefix(BYTE_ORDER_MARK)
                if line.strip():
                    yield from _posts(line.removesuffix(b"\n"), part, dropped, is_key)
            except WrongFieldError as error:
                line_number = 1
                file.seek(0)
                while start > 0 and (chunk := file.read(min(2**20, start))):
                    line_number += chunk.count(b"\n")
                    start -= len(chunk)
                raise InputError(f"{part.source}: line {line_number}: {error}") from error


def _expected(columns: tuple[str, str]) -> str:
    return f"expected {{{json.dumps(columns[0])}: ..., {json.dumps(columns[1])}: ...}}"


def _occurs(path: Path, key: str) -> bool:
    """Return whether the object in any line of a file has a value for a key."""
    with path.open("rb") as file:
        while line := file.readline(LONGEST_LINE + 1):
            with suppress(ValueError, RecursionError):
                if has_value(json.loads(line.decode("utf-8-sig")), key):
                    return True
    return False


def _posts(line: bytes, part: Part, dropped: Counter[str], is_key: Callable[[str], bool]) -> Iterator[Post]:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        why = f"not UTF-8 (byte {error.start + 1} of the line); convert the file to UTF-8"
        raise WrongFieldError(USER, why) from error
    except (ValueError, RecursionError) as error:
        raise WrongFieldError(USER, f"not JSON ({reason_of(error)}); {_expected(part.columns)}") from error
    yield from posts_of_object(value, part, dropped, is_key)


def posts_of_object(value: Any, part: Part, dropped: Counter[str], is_key: Callable[[str], bool]) -> Iterator[Post]:
    """Yield the posts of a JSON object; a missing key counts as null if any object of the file has the key."""
    if not isinstance(value, dict):
        raise WrongFieldError(USER, f"not a JSON object; {_expected(part.columns)}")
    fields = []
    for place, key in enumerate(part.named):
        inner = _value_at(value, key)
        if inner is MISSING and not is_key(key):
            raise WrongFieldError(place, f"no {key!r}; {_keys_of(value)}; name the right one with {OPTIONS[place]}")
        fields.append(None if inner is MISSING else inner)
    user, text, prompt = (*fields, None)[:3]
    try:
        yield from posts_of(user, text, dropped, part.reading, prompt=prompt)
    except WrongFieldError as error:
        why = f"{part.named[error.place]!r} {error.why}, found {_abbreviated(fields[error.place])}"
        raise WrongFieldError(error.place, why) from error


def has_value(value: Any, key: str) -> bool:
    return isinstance(value, dict) and _value_at(value, key) not in (MISSING, None)


def _value_at(value: dict[str, Any], key: str) -> Any:
    """Return the value of a key, or of ``author.id``: the key ``id`` of the object ``author``; otherwise `MISSING`."""
    inner: Any = value
    for step in [key] if key in value else key.split("."):
        if inner is None:
            return None
        if not isinstance(inner, dict) or step not in inner:
            return MISSING
        inner = inner[step]
    return inner


def _keys_of(value: dict[str, Any]) -> str:
    first, others = ", ".join(map(_abbreviated, list(value)[:SHOWN_KEYS])) or "none", len(value) - SHOWN_KEYS
    return f"its keys are {first}" + (f" and {others:,} others" if others > 0 else "")


def _abbreviated(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def reason_of(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else "a number with too many digits"


JSONL = Format("jsonl", jsonl_parts, read_jsonl)

# Reader of JSON that is not lines: an array of objects, indented objects one after another, and LEAF's layout.
#
# That layout (https://leaf.cmu.edu) is one object, ``{"users": [...], "user_data": {USER: {"x": [TEXT, ...]}}}``. A
# file is read completely, so large files should be JSON lines.


LARGEST = 2**30  # bytes of a file, which needs several times as much memory
LEAF_DATA, LEAF_TEXTS = "user_data", "x"
LEAF_KEYS = {"users", "num_samples", "hierarchies", LEAF_DATA}

_WHITE_SPACE = re.compile(r"[ \t\n\r]*")
_LEAF = re.compile(rb'\s*\{\s*"(?:(?:users|num_samples|hierarchies)"\s*:\s*\[|user_data"\s*:\s*\{)')


def read_json(part: Part, dropped: Counter[str]) -> Iterator[Post]:
    """Yield one post per text; `flsim.data.formats.posts.posts_of` states which ones are dropped."""
    values = _values(part.path, part.source)
    if len(values) == 1 and _is_leaf(values[0]):
        yield from _leaf_posts(values[0][LEAF_DATA], part, dropped)
        return
    for number, value in enumerate(values, start=1):
        try:
            yield from posts_of_object(value, part, dropped, lambda key: any(has_value(one, key) for one in values))
        except WrongFieldError as error:
            raise InputError(f"{part.source}: object {number}: {error}") from error


def is_lines(data: Path) -> bool:
    """Return whether a file that begins with an object holds JSON lines: its first line is not only a part of it."""
    with data.open("rb") as file:
        line = next((line for line in iter(lambda: file.readline(LONGEST_LINE + 1), b"") if line.strip()), b"")
    if _LEAF.match(line) or len(line) > LONGEST_LINE:
        return not _LEAF.match(line)
    try:
        json.loads(line.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        return error.pos < len(error.doc.rstrip())  # otherwise the object continues on the next line
    except (ValueError, RecursionError):
        pass
    return True


def _values(data: Path, source: Path) -> list[Any]:
    """Return the members of the array in a file, or its values one after another; raise InputError for other text."""
    if (size := data.stat().st_size) > LARGEST:
        raise InputError(
            f"{source}: {size:,} bytes of JSON, but at most {LARGEST:,} are read; write one object per line"
        )
    try:
        text = data.read_text(encoding="utf-8-sig")
        values: list[Any] = []
        end = _skip(text, 0)
        while end < len(text):
            value, end = json.JSONDecoder().raw_decode(text, end)
            values.append(value)
            end = _skip(text, end)
    except json.JSONDecodeError as error:
        raise InputError(f"{source}: line {error.lineno}: not JSON ({error.msg})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{source}: not UTF-8; convert the file to UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source}: not JSON ({reason_of(error)})") from error
    return values[0] if len(values) == 1 and isinstance(values[0], list) else values


def _skip(text: str, place: int) -> int:
    return _WHITE_SPACE.match(text, place).end()  # type: ignore[union-attr]


def _is_leaf(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() <= LEAF_KEYS and isinstance(value.get(LEAF_DATA), dict)


def _leaf_posts(data: dict[str, Any], part: Part, dropped: Counter[str]) -> Iterator[Post]:
    if part.reading.prompt_column is not None:
        raise InputError(f"{part.source}: has LEAF's layout, which has no prompts; remove --prompt-column")
    for user, value in data.items():
        texts = value.get(LEAF_TEXTS) if isinstance(value, dict) else None
        where = f"{LEAF_TEXTS!r} of user {user!r:.40}"
        if not isinstance(texts, list):
            raise InputError(f"{part.source}: {where} is not a list, which the layout of LEAF requires")
        try:
            yield from posts_of(user, texts, dropped, part.reading)
        except WrongFieldError as error:
            raise InputError(
                f"{part.source}: {where} {error.why}; write a reader: --format my_reader.py:NAME"
            ) from error


JSON = Format("json", whole_file, read_json)
