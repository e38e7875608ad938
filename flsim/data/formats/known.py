"""The formats that an import can read, with those of custom code, and detection of a file's format."""

import codecs
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flsim.base.errors import InputError
from flsim.base.extensions import custom_code_errors, is_custom, parts, refuse_unknown, resolve, source_digest
from flsim.data.formats import posts, rows, tff
from flsim.data.formats.rows import CSV, JSON, JSONL, PARQUET, TEXT, is_lines
from flsim.data.formats.stackexchange import STACKEXCHANGE
from flsim.data.formats.tff import TFF_HDF5, TFF_SQLITE
from flsim.data.manifest import SPLITS

# Custom readers of files.
#
#     def reader(path):                       # flsim data import FILE --format my_format.py:reader
#         yield "user", "Plain text. It is cut into sentences as the text of other formats is."
#         yield "user", ["sentences of words", "that are taken as they are"], "train"
#
# A reader may also be a `flsim.data.formats.posts.Format`, which cuts its files into parts that are read in parallel.

YIELDS = "yield (user, text) or (user, text, split), where text is a string or a list of sentences"


def reader_of(name: str) -> posts.Format:
    """Return the format of a custom reader ``path/to/file.py:NAME``, a function or a `Format`."""
    user_code = _Reader(name, source_digest(name))
    thing = user_code.resolved()
    path, attribute = parts(name)
    return posts.Format(
        f"{path.name}:{attribute}",  # without the folder, which is not a property of a corpus
        user_code.parts,
        user_code.read,
        isinstance(thing, posts.Format) and thing.fragile,
        {"format_sha256": user_code.sha256},
    )


@dataclass(frozen=True)
class _Reader:
    """A custom reader by name, which other processes can import, and digest, which must not change in an import."""

    name: str
    sha256: str

    def resolved(self) -> Any:
        if source_digest(self.name) != self.sha256:
            raise InputError(f"{parts(self.name)[0]}: the file changed while sources were read; import them again")
        thing: Any = resolve(self.name, {}, "format")
        if not isinstance(thing, posts.Format) and not callable(thing):
            raise InputError(
                f"{self.name}: found {type(thing).__name__}, not a function of a path or a Format of flsim"
            )
        return thing

    def parts(self, data: Path, source: Path, columns: tuple[str, str]) -> list[posts.Part]:
        thing = self.resolved()
        if not isinstance(thing, posts.Format):
            return [posts.Part(data, source, 0, 1, columns)]
        with _naming(source):
            return thing.parts(data, source, columns)

    def read(self, part: posts.Part, dropped: Counter[str]) -> Iterator[posts.Post]:
        thing = self.resolved()
        with _naming(part.source):
            yielded = thing.read(part, dropped) if isinstance(thing, posts.Format) else thing(part.path)
            yield from _posts(self.name, yielded, part.reading, dropped)


@contextmanager
def _naming(source: Path) -> Iterator[None]:
    """Add the source, the custom file and its line to errors of the custom code."""
    try:
        with custom_code_errors(InputError):
            yield
    except InputError as error:
        raise InputError(f"{source}: {error}") from error


def _posts(name: str, yielded: Any, reading: posts.Reading, dropped: Counter[str]) -> Iterator[posts.Post]:
    if not isinstance(yielded, Iterable):
        raise InputError(f"{name}: returned {type(yielded).__name__}; {YIELDS}")
    for value in yielded:
        try:
            yield from _posts_of(value, reading, dropped)
        except InputError as error:
            frame = getattr(yielded, "gi_frame", None)  # the line of the `yield` at which the generator waits
            where = f"{parts(name)[0]}:{frame.f_lineno}" if frame else name
            raise InputError(f"{where}: yielded {error}") from error


def _posts_of(value: Any, reading: posts.Reading, dropped: Counter[str]) -> Iterator[posts.Post]:
    prompt = None
    if isinstance(value, posts.Post):
        prompt = value.prompt
        value = (value.user, value.sentences, value.split)
    if not isinstance(value, tuple) or len(value) not in (2, 3):
        raise InputError(f"{_shortened(value)}; {YIELDS}")
    user, text, split = value if len(value) == 3 else (*value, None)
    if split is not None and split not in SPLITS:
        raise InputError(f"the split {_shortened(split)}; a split is one of {', '.join(SPLITS)}")
    try:
        if not isinstance(text, list | tuple):
            yield from posts.posts_of(user, text, dropped, reading, split)
            return
        if not all(isinstance(sentence, str) for sentence in text):
            raise InputError(f"the text {_shortened(text)}; {YIELDS}")
        author = posts.author_of(user)
    except posts.WrongFieldError as error:
        what, field = (("user", user), ("text", text))[error.place]
        raise InputError(f"the {what} {_shortened(field)}, which {error.why}; {YIELDS}") from error
    if author is None:
        dropped["posts_without_user"] += 1
    elif any(posts.user_name(string) is None for string in (author, *text, prompt or "")):
        dropped["posts_not_utf8"] += 1
    else:
        joined = (" ".join(sentence.split()) for sentence in text)
        yield posts.Post(author, [sentence for sentence in joined if sentence], split, prompt)


def _shortened(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


FORMATS: dict[str, posts.Format] = {
    format.name: format for format in (TFF_SQLITE, TFF_HDF5, PARQUET, JSONL, JSON, CSV, STACKEXCHANGE, TEXT)
}
KNOWN = (
    "known are Stack Overflow as TensorFlow Federated hosts it (SQLite, HDF5), Parquet, lines or an array of "
    '{"user": ..., "text": ...}, LEAF (JSON), CSV (.csv, .tsv, or --format csv), the Posts.xml of a Stack Exchange '
    "dump, and plain text (.txt, or --format text); or give a custom reader with --format path/to/file.py:NAME"
)


def format_named(name: str) -> posts.Format:
    """Return a format by a key of `FORMATS`, or the format of a custom reader ``path/to/file.py:NAME``."""
    refuse_unknown(name, FORMATS, "format")
    return reader_of(name) if is_custom(name) else FORMATS[name]


_SUFFIXES = {
    ".xml": STACKEXCHANGE,
    ".jsonl": JSONL,
    ".ndjson": JSONL,
    ".json": JSONL,
    ".csv": CSV,
    ".tsv": CSV,
    ".txt": TEXT,
}
_ARRAY = re.compile(rb"\s*\[\s*\{\s*\"")  # of objects; other text can begin with a bracket
_COMPRESSED = (b"7z\xbc\xaf\x27\x1c", b"PK\x03\x04", b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd")


def format_of(data: Path, source: Path) -> posts.Format:
    """Return the format of a file by its content, or by its name if the content is ambiguous; or raise InputError."""
    with data.open("rb") as file:
        head = file.read(2**12)
    suffixes = [suffix for suffix in map(str.lower, source.suffixes) if suffix not in posts.PACKED]
    suffix = suffixes[-1] if suffixes else ""
    if not head and suffix not in _SUFFIXES:
        raise InputError(
            f"{source}: the file is empty, so its format cannot be detected; name the file that has the text, or "
            "set --format"
        )
    if head.startswith(_COMPRESSED):
        raise InputError(f"{source}: the file is compressed; decompress it first")
    if head.startswith(tff.SQLITE_MAGIC):
        return TFF_SQLITE
    if head.startswith(tff.HDF5_MAGIC):
        return TFF_HDF5
    if head.startswith(rows.MAGIC):
        return PARQUET
    head = head.removeprefix(codecs.BOM_UTF8)
    first = head.lstrip()[:1]
    if first == b"<":
        return STACKEXCHANGE
    if first == b"{":
        return JSONL if is_lines(data) else JSON
    if first == b"[" and (_ARRAY.match(head) or _SUFFIXES.get(suffix) is JSONL):
        return JSON
    if suffix not in _SUFFIXES:
        raise InputError(f"{source}: begins with {head[:16]!r}, which is not a known format; {KNOWN}")
    return _SUFFIXES[suffix]
