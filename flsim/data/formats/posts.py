"""The interface of all readers: parts of a file, and posts of users.

A format cuts a file into parts that can be read in any order and in any process, with little memory. A reader counts
dropped data in `dropped`, under a reason that names the unit (``posts_without_owner``).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from flsim.base.errors import InputError
from flsim.data.sentences import records

PART_BYTES = 2**26  # bytes of input in a part, approximately,
PART_RECORDS = 200_000  # or sentences, depending on the format
# sentences of a user, in formats that store a user in one piece; the largest published user has 194,167
USER_RECORDS = 10**6
LONGEST_RECORD = 2**20  # bytes of a sentence or of its record; longer sentences are dropped and counted
POST_RECORDS = 64  # sentences of a post, in readers of sentences

PACKED = {".gz", ".bz2", ".xz", ".lzma", ".zst", ".7z"}  # suffixes of compressed files

OOV_WORD = "<oov>"  # the token that replaces rare words in formats of token ids


@dataclass(frozen=True, slots=True)
class Post:
    user: str  # the name of the author, unique within the corpus
    # sentences as words joined by single spaces, without other white space; can be empty. If the reader asks for texts
    # (`Reading.whole`), the complete text as its author wrote it
    sentences: list[str]
    split: str | None = None  # "train", "heldout" or "test" if the source states it; None lets the import draw it
    prompt: str | None = None  # the text that the sentences answer, which a model reads and is not trained to write


@dataclass(frozen=True, slots=True)
class Reading:
    ascii: bool = False  # whether characters outside ASCII are removed, see `flsim.data.sentences.records`
    delimiter: str | None = None  # between two fields of CSV; None is a tab in .tsv files, and a comma in others
    whole: bool = False  # whether a text is one sentence, with its white space and capitals, for a tokenizer
    prompt_column: str | None = None  # the key or column of the prompt; None reads no prompts


OPTIONS = ("--user-column", "--text-column", "--prompt-column")  # that name columns, in the order of `Part.named`


@dataclass(frozen=True, slots=True)
class Part:
    path: Path  # the data on disk; for compressed sources, a scratch file with another name
    source: Path  # the file as the user named it, for messages and for formats that read the file's name
    first: int  # begin of the part, in the unit of the format: bytes, rowids, row groups or clients
    last: int  # end of the part: exclusive, except for rowids: the last one
    columns: tuple[str, str] = ("user", "text")  # the keys or columns of user and text, for formats that name them
    line: int = 1  # number of the part's first line in the file, from 1, for formats that count lines
    reading: Reading = Reading()  # the options for reading the source

    @property
    def named(self) -> tuple[str, ...]:
        """Return the columns of user and text, and that of the prompt if prompts are read; see `OPTIONS`."""
        prompt = self.reading.prompt_column
        return self.columns if prompt is None else (*self.columns, prompt)


def post_of(user: str, text: str, reading: Reading, split: str | None = None, prompt: str | None = None) -> Post:
    """Return the post of a plain text, which `flsim.data.sentences.records` cuts unless texts stay complete."""
    if reading.whole:
        return Post(user, [text] if text.strip() else [], split, prompt)
    return Post(user, records(text, reading.ascii), split)


@dataclass(frozen=True)
class Format:
    """A format of files: functions that cut a file into parts and read a part, which raise InputError if they cannot.

    `parts` maps (data, source, columns) to the parts, in the file's order, and `read` yields the posts of (part,
    dropped), in order.
    """

    name: str  # as users write it
    parts: Callable[[Path, Path, tuple[str, str]], list[Part]]
    read: Callable[[Part, Counter[str]], Iterator[Post]]
    fragile: bool = False  # whether a damaged file can crash or hang the library, so a separate process reads it
    about: Mapping[str, Any] = field(default_factory=dict)  # further entries of a source in the manifest


def ranges(first: int, last: int, parts: int) -> list[tuple[int, int]]:
    """Cut [first, last) into at most `parts` ranges of about equal length; no range is empty."""
    parts = max(1, min(parts, last - first))
    bounds = [first + (last - first) * part // parts for part in range(parts + 1)]
    return [(begin, end) for begin, end in pairwise(bounds) if begin < end]


def parts_between(bounds: list[int], data: Path, source: Path, columns: tuple[str, str]) -> list[Part]:
    return [Part(data, source, first, last, columns) for first, last in pairwise(bounds)]


def whole_file(data: Path, source: Path, columns: tuple[str, str]) -> list[Part]:
    """Return the only part of a file that cannot be divided; none for an empty file."""
    size = data.stat().st_size
    return parts_between([0, size] if size else [], data, source, columns)


def unpacked_name(source: Path) -> str:
    """Return a file's name without the suffix of its compression, because compression must not change identities."""
    return source.stem if source.suffix.lower() in PACKED else source.name


def split_of_name(source: Path) -> str | None:
    """Return the split that ends a published file's name (``_train``, ``_held_out``, ``_test``), or None."""
    stem = source.name.split(".")[0].lower()
    names = {"_train": "train", "_held_out": "heldout", "_heldout": "heldout", "_test": "test"}
    return next((split for ending, split in names.items() if stem.endswith(ending)), None)


def user_name(name: Any) -> str | None:
    """Return a user's name as text; None if it is not UTF-8, contains half of a surrogate pair, or is empty."""
    try:
        if isinstance(name, bytes):
            return name.decode("utf-8")
        name.encode("utf-8")
    except (UnicodeError, AttributeError):
        return None
    return str(name)


def published(user: str, split: str | None, tokens: Iterable[bytes], dropped: Counter[str]) -> Iterator[Post]:
    """Yield posts of up to 64 sentences of a user, split only at white space, and count invalid sentences."""
    sentences: list[str] = []
    for text in tokens:
        if len(text) > LONGEST_RECORD:
            dropped["records_too_long"] += 1
            continue
        try:
            words = text.decode("utf-8").split()
        except UnicodeDecodeError:
            dropped["records_not_utf8"] += 1
            continue
        if not words:
            dropped["records_without_words"] += 1
            continue
        sentences.append(" ".join(words))
        if len(sentences) == POST_RECORDS:
            yield Post(user, sentences, split)
            sentences = []
    if sentences:
        yield Post(user, sentences, split)


@contextmanager
def reading(source: Path, what: str, kinds: tuple[type[Exception], ...]) -> Iterator[None]:
    """Turn errors of a library about a file, whose messages may quote the file, into input errors of one line."""
    try:
        yield
    except InputError:
        raise
    except kinds as error:
        printable = "".join(character if character.isprintable() else " " for character in str(error)[:1_000])
        message = " ".join(printable.split())[:200]
        raise InputError(f"{source}: {what} ({message}); check that it is complete, or download it again") from error


# The rules for the author and the text of a post, which are the same in all formats of plain text. A null is None, NaN
# (which pandas writes for a null), or a string of white space.

LONGEST_TEXT = 2**24  # characters
EXACT = 2**53  # from this value on, a float represents several integers
USER, TEXT, PROMPT = 0, 1, 2  # places in `columns`, and after them


class WrongFieldError(Exception):
    """The fault of an author, a text or a prompt, and why: the end of a sentence that begins with the field's name."""

    def __init__(self, place: int, why: str) -> None:
        super().__init__(why)
        self.place, self.why = place, why


def posts_of(
    user: Any, text: Any, dropped: Counter[str], reading: Reading, split: str | None = None, prompt: Any = None
) -> Iterator[Post]:
    """Yield the post of an author and a text, or one post for each text of a list.

    Posts without author or text (null or blank), of more than `LONGEST_TEXT` characters, or with half of a surrogate
    pair are dropped. An author is a string, or an integer, also as a float: 7, 7.0 and "7" are one author. The prompt
    is what these texts answer, or null. Raises WrongFieldError for other types.
    """
    if not (is_null(prompt) or isinstance(prompt, str)):
        raise WrongFieldError(PROMPT, "must be a string")
    texts = text if isinstance(text, list) and text else [text]
    name = author_of(user)
    for one in texts:
        if name is None:
            dropped["posts_without_user"] += 1
        elif is_null(one) or one == []:
            dropped["posts_without_text"] += 1
        elif not isinstance(one, str):
            raise WrongFieldError(TEXT, "must be a string or a list of strings")
        elif len(one) > LONGEST_TEXT:
            dropped["posts_too_long"] += 1
        elif any(user_name(string) is None for string in (name, one, prompt or "")):
            dropped["posts_not_utf8"] += 1
        else:
            yield post_of(name, one, reading, split, None if is_null(prompt) else prompt)


def author_of(user: Any) -> str | None:
    """Return an author's name; None for a null. Raises WrongFieldError for other types than strings and integers."""
    if is_null(user):
        return None
    if isinstance(user, float) and user.is_integer():
        if abs(user) >= EXACT:
            raise WrongFieldError(USER, "is a float too large to be a single integer; write authors as strings")
        return str(int(user))
    if isinstance(user, bool) or not isinstance(user, str | int):
        raise WrongFieldError(USER, "must be a string or an integer")
    return str(user)


def is_null(value: Any) -> bool:
    return (
        value is None
        or (isinstance(value, float) and math.isnan(value))
        or (isinstance(value, str) and not value.strip())
    )
