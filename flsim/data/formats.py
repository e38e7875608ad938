"""Which reader a source is for."""

from flsim.data.jsonl import read_jsonl
from flsim.data.posts import Reader, Source
from flsim.data.stackexchange import read_stackexchange
from flsim.errors import InputError

READERS: dict[str, Reader] = {"stackexchange": read_stackexchange, "jsonl": read_jsonl}

_SUFFIXES = {".xml": "stackexchange", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl"}
_BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
_COMPRESSED = (b"7z\xbc\xaf\x27\x1c", b"PK\x03\x04", b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd")


def reader_of(source: Source, format: str | None = None) -> Reader:
    """The reader of a format, or of the format that the source's first character and its name suggest.

    Raises:
        InputError: an unknown format, or a source that is neither XML nor JSON lines.
    """
    if format is None:
        format = _format_of(source)
    if format not in READERS:
        raise InputError(f"format must be one of {', '.join(READERS)}, found {format!r}")
    return READERS[format]


def _format_of(source: Source) -> str:
    head = source.head
    if head.startswith(_COMPRESSED):
        raise InputError(f"{source.path}: compressed; unpack it first")
    for mark in _BYTE_ORDER_MARKS:
        head = head.removeprefix(mark)
    first = head.replace(b"\0", b"").lstrip()[:1]  # UTF-16 has a zero beside each ASCII character
    if first == b"<":
        return "stackexchange"
    if first == b"{":
        return "jsonl"
    suffix = source.path.suffix.lower()
    if suffix not in _SUFFIXES:
        raise InputError(
            f"{source.path}: neither XML nor JSON lines; give the Posts.xml of a Stack Exchange dump, "
            'or lines of {"user": ..., "text": ...}'
        )
    return _SUFFIXES[suffix]
