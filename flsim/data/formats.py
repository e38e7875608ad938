"""Which format a file is of."""

from pathlib import Path

from flsim.data.jsonl import JSONL
from flsim.data.posts import Format
from flsim.data.stackexchange import STACKEXCHANGE
from flsim.errors import InputError

FORMATS: dict[str, Format] = {format.name: format for format in (STACKEXCHANGE, JSONL)}

_SUFFIXES = {".xml": STACKEXCHANGE, ".jsonl": JSONL, ".ndjson": JSONL, ".json": JSONL}
_BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
_COMPRESSED = (b"7z\xbc\xaf\x27\x1c", b"PK\x03\x04", b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd")


def format_of(data: Path, source: Path) -> Format:
    """The format that a file's content is of; where there is no content to tell from, its name.

    Args:
        data: the data on disk.
        source: the file as the user named it.

    Raises:
        InputError: none of the formats: what was found, and what is known.
    """
    with data.open("rb") as file:
        head = file.read(2**12)
    if head.startswith(_COMPRESSED):
        raise InputError(f"{source}: compressed; unpack it first")
    for mark in _BYTE_ORDER_MARKS:
        head = head.removeprefix(mark)
    first = head.replace(b"\0", b"").lstrip()[:1]  # UTF-16 has a zero beside each ASCII character
    if first == b"<":
        return STACKEXCHANGE
    if first == b"{":
        return JSONL
    suffix = source.suffix.lower()
    if suffix not in _SUFFIXES:
        raise InputError(
            f"{source}: neither XML nor JSON lines; give the Posts.xml of a Stack Exchange dump, "
            'or lines of {"user": ..., "text": ...}'
        )
    return _SUFFIXES[suffix]
