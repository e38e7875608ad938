"""What every reader takes and gives: parts of a file, posts of users.

A format cuts a file into parts that may be read in any order and in any process; the posts of the parts, one part
after another, are the posts of the file. A reader holds little of its part in memory, and adds what it leaves out to
`dropped` under a reason that names the unit (``posts_without_owner``).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

PART_BYTES = 2**26  # of input; a part has about so many,
PART_RECORDS = 200_000  # or so many sentences, whichever the format can tell
USER_RECORDS = 10**6  # of one user, in formats that have them in one piece; the largest published has 194,167
LONGEST_RECORD = 2**20  # bytes of a sentence or of its record; longer ones are no text, and are dropped and counted
POST_RECORDS = 64  # sentences that a reader of sentences joins to one post

OOV_WORD = "<oov>"
"""A word that is known to be out of vocabulary: what formats of token ids have in place of rare words."""


@dataclass(frozen=True, slots=True)
class Post:
    """Something that a user wrote.

    Attributes:
        user: the author's name, unique within the corpus.
        sentences: each its words joined by single spaces, with no other white space in it; maybe none.
        split: ``"train"``, ``"heldout"`` or ``"test"`` where the source itself says; the import draws it where None.
    """

    user: str
    sentences: list[str]
    split: str | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a file.

    Attributes:
        path: the data on disk, possibly unpacked to a scratch file of another name.
        source: the file as the user named it, for messages and for what a format tells from names.
        first: where the part begins, in the format's own unit: bytes, rowids, row groups, clients.
        last: where it ends: exclusive, but for rowids, where it is the last one.
        columns: the keys or columns of user and text, for formats that name them.
    """

    path: Path
    source: Path
    first: int
    last: int
    columns: tuple[str, str] = ("user", "text")


def no_warnings(_data: Path, _source: Path) -> list[str]:
    return []


@dataclass(frozen=True)
class Format:
    """A format: how to cut a file into parts, how to read one.

    Attributes:
        name: as users write it.
        parts: (data, source, columns) -> the parts, in the file's order. Raises InputError where the file is not of the
            format.
        read: (part, dropped) -> its posts, in order. Raises InputError where the part cannot be read.
        check: (data, source) -> warnings about the file as a whole.
        lost: what the format has lost of the text, said once and kept in the manifest.
        fragile: the library that reads it can crash or hang where a file is damaged: not to be let into one's process.
        about: what a manifest says of a source besides the format's name: of a user's own format, its source's digest.
    """

    name: str
    parts: Callable[[Path, Path, tuple[str, str]], list[Part]]
    read: Callable[[Part, Counter[str]], Iterator[Post]]
    check: Callable[[Path, Path], list[str]] = no_warnings
    lost: str = ""
    fragile: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)


def ranges(first: int, last: int, parts: int) -> list[tuple[int, int]]:
    """Cut [first, last) into at most so many ranges of about equal length, none of them empty.

    >>> ranges(0, 5, 2), ranges(3, 3, 4)
    ([(0, 2), (2, 5)], [])
    """
    parts = max(1, min(parts, last - first))
    bounds = [first + (last - first) * part // parts for part in range(parts + 1)]
    return [(begin, end) for begin, end in pairwise(bounds) if begin < end]


def parts_between(bounds: list[int], data: Path, source: Path, columns: tuple[str, str]) -> list[Part]:
    """The parts that begin and end at ascending bounds."""
    return [Part(data, source, first, last, columns) for first, last in pairwise(bounds)]


def split_of_name(source: Path) -> str | None:
    """The split that a file's name ends in, as published: ``_train``, ``_held_out``, ``_test``; None for other names.

    >>> [split_of_name(Path(name)) for name in ("stackoverflow_held_out.sqlite", "my_test.h5.bz2", "a.h5")]
    ['heldout', 'test', None]
    """
    stem = source.name.split(".")[0].lower()
    names = {"_train": "train", "_held_out": "heldout", "_heldout": "heldout", "_test": "test"}
    return next((split for ending, split in names.items() if stem.endswith(ending)), None)


def user_name(name: Any) -> str | None:
    """A user's name as text; None of what is not UTF-8, half of a surrogate pair, or no name at all."""
    try:
        if isinstance(name, bytes):
            return name.decode("utf-8")
        name.encode("utf-8")
    except (UnicodeError, AttributeError):
        return None
    return str(name)


def published(user: str, split: str | None, tokens: Iterable[bytes], dropped: Counter[str]) -> Iterator[Post]:
    """Posts of up to 64 sentences each of a user, split at white space only; what is no sentence is dropped."""
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


def said(error: Exception) -> str:
    """What a library says is wrong with a file, as part of one line: it may quote the file."""
    printable = "".join(character if character.isprintable() else " " for character in str(error)[:1_000])
    return " ".join(printable.split())[:200]
