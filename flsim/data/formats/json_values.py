"""Reader of JSON that is not lines: an array of objects, indented objects one after another, and LEAF's layout.

That layout (https://leaf.cmu.edu) is one object, ``{"users": [...], "user_data": {USER: {"x": [TEXT, ...]}}}``. A file
is one part, decoded object by object (in LEAF's layout user by user), of at most `LARGEST` characters each.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

from flsim.base.errors import InputError
from flsim.data.formats.jsonl import LONGEST_LINE, occurs, posts_of_object, reason_of
from flsim.data.formats.posts import Format, Part, Post, WrongFieldError, posts_of, whole_file

LARGEST = 2**26  # characters of an object, or of a user in LEAF's layout
CHUNK = 2**16  # characters
LONGEST_TOKEN = 64  # characters; an error this close to the end of a chunk can be a token that is cut
LEAF_DATA, LEAF_TEXTS = "user_data", "x"
LEAF_KEYS = {"users", "num_samples", "hierarchies", LEAF_DATA}

_WHITE_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


def read_json(part: Part, dropped: Counter[str]) -> Iterator[Post]:
    """Yield one post per text; `flsim.data.formats.posts.posts_of` states which ones are dropped."""
    is_leaf_layout = is_leaf(part.path)
    is_key = cache(partial(occurs, part.path, _objects))
    with part.path.open(encoding="utf-8-sig", newline="") as file:
        scanner = _Scanner(file)
        try:
            if is_leaf_layout:
                if part.reading.prompt_column is not None:
                    raise InputError(f"{part.source}: has LEAF's layout, which has no prompts; remove --prompt-column")
                yield from _leaf_posts(scanner, part, dropped)
                return
            for value in _values(scanner):
                yield from posts_of_object(value, part, dropped, is_key)
        except (_JsonError, WrongFieldError) as error:
            line = error.line if isinstance(error, _JsonError) else scanner.line_of_value
            raise InputError(f"{part.source}: line {line}: {error}") from error
        except UnicodeDecodeError as error:
            # the file is read ahead, so the line is unknown
            raise InputError(f"{part.source}: not UTF-8; convert the file to UTF-8") from error


def is_lines(data: Path) -> bool:
    """Return whether a file that begins with an object holds JSON lines, whose reader names faults of all others."""
    if is_leaf(data):
        return False
    with data.open("rb") as file:
        line = b""
        while not line.strip(b" \t\r\n\xef\xbb\xbf"):
            line = file.readline(LONGEST_LINE + 1)
            if not line:
                return True
    try:
        json.loads(line.decode("utf-8-sig"))
        return True
    except (ValueError, RecursionError):
        # `_objects` yields the first value only if it is complete
        return len(line) > LONGEST_LINE or not isinstance(next(_objects(data), None), dict)


def is_leaf(data: Path) -> bool:
    """Return whether a file has the layout of LEAF: an object with `LEAF_KEYS`, of which ``user_data`` is an object."""
    try:
        with data.open(encoding="utf-8-sig", newline="") as file:
            scanner = _Scanner(file)
            for key in scanner.members():
                if key not in LEAF_KEYS:
                    return False
                if key == LEAF_DATA:
                    return scanner.peek() == "{"
                scanner.value()
    except (_JsonError, UnicodeDecodeError):
        pass
    return False


def _objects(path: Path) -> Iterator[Any]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from _values(_Scanner(file))
    except (_JsonError, UnicodeDecodeError):
        return


def _values(scanner: "_Scanner") -> Iterator[Any]:
    if scanner.peek() != "[":
        while scanner.peek():
            yield scanner.value()
        return
    scanner.take("[")
    if scanner.peek() != "]":
        yield scanner.value()
        while scanner.peek() != "]":
            scanner.take(",")
            yield scanner.value()
    scanner.take("]")
    scanner.take("")


def _leaf_posts(scanner: "_Scanner", part: Part, dropped: Counter[str]) -> Iterator[Post]:
    for key in scanner.members():
        if key != LEAF_DATA:
            scanner.value()
            continue
        for user in scanner.members():
            value = scanner.value()
            texts = value.get(LEAF_TEXTS) if isinstance(value, dict) else None
            if not isinstance(texts, list):
                raise scanner.error(f"user {user!r:.40} has no list {LEAF_TEXTS!r}, which the layout of LEAF requires")
            try:
                yield from posts_of(user, texts, dropped, part.reading)
            except WrongFieldError as error:
                raise scanner.error(
                    f"{LEAF_TEXTS!r} of user {user!r:.40} {error.why}; write a reader: --format my_reader.py:NAME"
                ) from error
    scanner.take("")


class _JsonError(Exception):
    """A fault of a file, with its line number, from 1."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(what)
        self.line = line


class _Scanner:
    def __init__(self, file: IO[str]) -> None:
        self._file, self._text, self._place, self._line = file, "", 0, 1
        self._value_place = 0
        self._is_complete = False  # whether the file has no more text

    @property
    def line_of_value(self) -> int:
        """Return the number of the line in which the last value began, from 1, if no character was read since."""
        return self._line_at(self._value_place)

    def peek(self) -> str:
        """Return the next character that is not white space; nothing at the end of the file."""
        while True:
            self._place = _WHITE_SPACE.match(self._text, self._place).end()  # type: ignore[union-attr]
            if self._place < len(self._text):
                return self._text[self._place]
            if self._is_complete:
                return ""
            self._read()

    def take(self, character: str) -> None:
        """Skip the next character, which must be this character; the empty string is the end of the file."""
        if self.peek() != character:
            following, expected = (repr(sign) if sign else "the end" for sign in (self.peek(), character))
            raise self.error(f"not JSON (expected {expected}, found {following})")
        self._place += len(character)

    def members(self) -> Iterator[str]:
        """Yield the keys of an object's members; the caller reads the value of each key before the next key."""
        self.take("{")
        while self.peek() != "}":
            if self.peek() != '"':
                raise self.error("not JSON (expected a key in double quotes)")
            key = self.value()
            self.take(":")
            yield key
            if self.peek() != "}":
                self.take(",")
        self.take("}")

    def value(self) -> Any:
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._place)
            except json.JSONDecodeError as error:
                is_cut = error.pos > len(self._text) - LONGEST_TOKEN or error.msg.startswith("Unterminated string")
                if self._is_complete or not is_cut:
                    raise self.error(f"not JSON ({error.msg})", error.pos) from error
            except (ValueError, RecursionError) as error:
                raise self.error(f"not JSON ({reason_of(error)})") from error
            else:
                if end < len(self._text) or self._is_complete:  # otherwise a number can continue
                    self._value_place, self._place = self._place, end
                    return value
            if len(self._text) - self._place > LARGEST:
                raise self.error(f"a value over {LARGEST:,} characters; write one object per line")
            self._read()

    def error(self, what: str, place: int | None = None) -> _JsonError:
        """Return the error of a fault at a place in the text, by default the next character."""
        return _JsonError(self._line_at(self._place if place is None else place), what)

    def _line_at(self, place: int) -> int:
        return self._line + self._text.count("\n", 0, place)

    def _read(self) -> None:
        self._line = self._line_at(self._place)
        rest = self._text[self._place :]
        chunk = self._file.read(max(CHUNK, len(rest)))
        self._text, self._place, self._is_complete = rest + chunk, 0, not chunk


JSON = Format("json", whole_file, read_json)
