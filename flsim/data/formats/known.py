"""The formats that an import can read, and detection of a file's format."""

import re
from pathlib import Path

from flsim.base.errors import InputError
from flsim.base.extensions import is_custom, refuse_unknown
from flsim.data.formats import hdf5, parquet, tff_sqlite
from flsim.data.formats.csv_rows import CSV
from flsim.data.formats.hdf5 import TFF_HDF5
from flsim.data.formats.json_values import JSON, is_lines
from flsim.data.formats.jsonl import JSONL
from flsim.data.formats.own import reader_of
from flsim.data.formats.parquet import PARQUET
from flsim.data.formats.posts import PACKED, Format
from flsim.data.formats.stackexchange import STACKEXCHANGE
from flsim.data.formats.text import TEXT
from flsim.data.formats.tff_sqlite import TFF_SQLITE

FORMATS: dict[str, Format] = {
    format.name: format for format in (TFF_SQLITE, TFF_HDF5, PARQUET, JSONL, JSON, CSV, STACKEXCHANGE, TEXT)
}
KNOWN = (
    "known are Stack Overflow as TensorFlow Federated hosts it (SQLite, HDF5), Parquet, lines or an array of "
    '{"user": ..., "text": ...}, LEAF (JSON), CSV (.csv, .tsv, or --format csv), the Posts.xml of a Stack Exchange '
    "dump, and plain text (.txt, or --format text); or give a custom reader with --format path/to/file.py:NAME"
)


def format_named(name: str) -> Format:
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
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_COMPRESSED = (b"7z\xbc\xaf\x27\x1c", b"PK\x03\x04", b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd")


def format_of(data: Path, source: Path) -> Format:
    """Return the format of a file by its content, or by its name if the content is ambiguous; or raise InputError."""
    with data.open("rb") as file:
        head = file.read(2**12)
    suffixes = [suffix for suffix in map(str.lower, source.suffixes) if suffix not in PACKED]
    suffix = suffixes[-1] if suffixes else ""
    if not head and suffix not in _SUFFIXES:
        raise InputError(
            f"{source}: the file is empty, so its format cannot be detected; name the file that has the text, or "
            "set --format"
        )
    if head.startswith(_COMPRESSED):
        raise InputError(f"{source}: the file is compressed; decompress it first")
    if head.startswith(tff_sqlite.SQLITE_MAGIC):
        with tff_sqlite.database(data, source) as connection:
            return _with_examples(TFF_SQLITE, source, "SQLite with the tables", sorted(tff_sqlite.tables(connection)))
    if head.startswith(hdf5.HDF5_MAGIC):
        with hdf5.hdf5(data, source) as opened:
            return _with_examples(TFF_HDF5, source, "HDF5 with the groups", [str(name) for name in opened])
    if head.startswith(parquet.MAGIC):
        return PARQUET
    head = head.removeprefix(_BYTE_ORDER_MARK)
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


def is_fragile(data: Path) -> bool:
    """Return whether inspecting a file can crash or hang its process: see `Format.fragile`."""
    with data.open("rb") as file:
        return file.read(len(hdf5.HDF5_MAGIC)) == hdf5.HDF5_MAGIC


def _with_examples(format: Format, source: Path, what: str, names: list[str]) -> Format:
    if "examples" in names:
        return format
    raise InputError(f"{source}: {what} {', '.join(names) or '(none)'}; {KNOWN}")
