"""Reader of FedJAX's copies of Stack Overflow, ``stackoverflow_{train,held_out,test}.sqlite``, with one row per client.

The table is ``federated_data(client_id, data, num_examples)``, where `data` is zlib of a msgpack map from feature to
array. Arrays of bytes are extension type 4, which is msgpack of (shape, list of bytes). The file name contains the
split.
"""

import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack

from flsim.base.errors import InputError
from flsim.data.formats.posts import USER_RECORDS, Format, Part, Post, published, split_of_name, user_name
from flsim.data.formats.sqlite import ascending, database, require, rowid_parts

TABLES = {"federated_data": ("client_id", "data", "num_examples")}
LARGEST_USER = 2**28  # bytes after decompression
BYTES_ARRAY = 4
TOO_LARGE = 0

_ROWS = f"""
SELECT rowid, client_id, CASE WHEN length(data) > {LARGEST_USER} THEN {TOO_LARGE} ELSE data END, num_examples
FROM federated_data WHERE rowid BETWEEN ? AND ? ORDER BY rowid
"""


def fedjax_parts(data: Path, source: Path, columns: tuple[str, str]) -> list[Part]:
    """Return the parts of a file: ranges of rowids."""
    with database(data, source) as connection:
        require(connection, source, TABLES)
        return rowid_parts(connection, data, source, columns, "federated_data")


def read_fedjax(part: Part, dropped: Counter[str]) -> Iterator[Post]:
    """Yield posts of up to 64 sentences of a client.

    Counts of dropped data: ``users_too_large`` (256 MB after decompression, or a million sentences);
    ``users_not_fedjax`` (not zlib of msgpack of an array of bytes ``tokens``, or not `num_examples` of them);
    ``users_not_utf8`` (the client id); ``records_not_utf8``, ``records_too_long`` (more than 1 MB) and
    ``records_without_words``.

    Raises:
        InputError: SQLite cannot read the part, or no client in it can be read.
    """
    split = split_of_name(part.source)
    drops: Counter[str] = Counter()
    users = 0
    with database(part.path, part.source) as connection:
        for _, client, data, examples in ascending(connection.execute(_ROWS, (part.first, part.last)), part):
            users += 1
            name = user_name(client)
            if name is None:
                drops["users_not_utf8"] += 1
                continue
            try:
                tokens = _tokens(data, examples)
            except _DropError as drop:
                drops[str(drop)] += 1
                continue
            yield from published(name, split, tokens, drops)
    dropped.update(drops)
    if users and drops["users_not_fedjax"] == users:
        raise InputError(
            f"{part.source}: no client of rowids {part.first} to {part.last} contains zlib-compressed msgpack "
            "with num_examples tokens; check that the file is Stack Overflow as FedJAX hosts it"
        )


class _DropError(Exception):
    """The reason why a client is dropped."""


def _tokens(data: Any, examples: Any) -> list[bytes]:
    if data == TOO_LARGE:
        raise _DropError("users_too_large")
    try:
        tokens = _unpacked(_decompressed(data))
    except (zlib.error, msgpack.UnpackException, ValueError, TypeError) as error:
        raise _DropError("users_not_fedjax") from error
    if len(tokens) != examples:
        raise _DropError("users_not_fedjax")
    return tokens


def _decompressed(data: bytes) -> bytes:
    decompressor = zlib.decompressobj()
    whole = decompressor.decompress(data, LARGEST_USER)
    if decompressor.unconsumed_tail:
        raise _DropError("users_too_large")
    if not decompressor.eof:
        raise ValueError("cut short")
    return whole


def _unpacked(packed: bytes) -> list[bytes]:
    """Return the array `tokens` of a client.

    Other features are skipped without decoding, which is safe for deeply nested files.
    """
    features = _unpacker(packed)
    for _ in range(features.read_map_header()):
        if features.unpack() != "tokens":
            features.skip()
            continue
        array = features.unpack()
        if not isinstance(array, msgpack.ExtType) or array.code != BYTES_ARRAY:
            raise ValueError("not an array of bytes")
        inner = _unpacker(array.data)
        if inner.read_array_header() != 2:
            raise ValueError("not (shape, list)")
        shape, length = inner.unpack(), inner.read_array_header()
        if shape != [length]:
            raise ValueError("not of one dimension")
        if length > USER_RECORDS:
            raise _DropError("users_too_large")
        return [_bytes(inner.unpack()) for _ in range(length)]
    raise ValueError("no tokens")


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("not bytes")
    return value


def _unpacker(packed: bytes) -> Any:
    """Return a parser that yields one piece at a time; it refuses lists longer than a shape of one dimension."""
    unpacker = msgpack.Unpacker(max_buffer_size=LARGEST_USER, max_array_len=1, max_map_len=0)
    unpacker.feed(packed)
    return unpacker


FEDJAX = Format("fedjax-sqlite", fedjax_parts, read_fedjax)
