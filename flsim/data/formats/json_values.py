"""Reader of JSON that is not lines: an array of objects, indented objects one after another, and LEAF's layout.

That layout (https://leaf.cmu.edu) is one object, ``{"users": [...], "user_data": {USER: {"x": [TEXT, ...]}}}``. A file
is read completely, so large files should be JSON lines.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flsim.base.errors import InputError
from flsim.data.formats.jsonl import LONGEST_LINE, has_value, posts_of_object, reason_of
from flsim.data.formats.posts import Format, Part, Post, WrongFieldError, posts_of, whole_file

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
