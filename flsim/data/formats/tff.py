"""The files of TensorFlow Federated, SQLite and HDF5, without TensorFlow."""

import os
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import groupby
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any
from urllib.parse import quote

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError

from flsim.base.errors import InputError
from flsim.data.formats import posts
from flsim.data.formats.posts import (
    LONGEST_RECORD,
    USER_RECORDS,
    Format,
    Part,
    Post,
    published,
    ranges,
    reading,
    split_of_name,
    user_name,
)

# Decoder of tf.Example, TensorFlow's record of named features, without TensorFlow.
#  The messages are those of tensorflow/core/example/{example,feature}.proto. They are built in a separate pool, so that
# they do not conflict with an installed TensorFlow.

_MESSAGES = """
name: "example.proto" package: "tensorflow" syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64List" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type {
  name: "Feature" oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: ".tensorflow.BytesList" oneof_index: 0 }
  field { name: "float_list" number: 2 type: TYPE_MESSAGE type_name: ".tensorflow.FloatList" oneof_index: 0 }
  field { name: "int64_list" number: 3 type: TYPE_MESSAGE type_name: ".tensorflow.Int64List" oneof_index: 0 }
}
message_type {
  name: "Features"
  nested_type {
    name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
    field { name: "value" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".tensorflow.Feature" }
  }
  field {
    name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: ".tensorflow.Features.FeatureEntry"
  }
}
message_type {
  name: "Example"
  field { name: "features" number: 1 type: TYPE_MESSAGE type_name: ".tensorflow.Features" }
}
"""

_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(text_format.Parse(_MESSAGES, descriptor_pb2.FileDescriptorProto()))
Example: Any = message_factory.GetMessageClass(_POOL.FindMessageTypeByName("tensorflow.Example"))

SQLITE_MAGIC = b"SQLite format 3\0"
SMALLEST_ROW = 8  # bytes of a page

SPLITS = {b"train": "train", b"heldout": "heldout", b"test": "test"}
DAMAGES = {"records_not_tf_example", "records_without_tokens", "records_not_utf8"}
TOO_LONG = 0  # replaces a record that is too long

_ROWS = f"""
SELECT rowid, split_name, client_id,
    CASE WHEN length(serialized_example_proto) > {LONGEST_RECORD} THEN {TOO_LONG} ELSE serialized_example_proto END
FROM examples WHERE rowid BETWEEN ? AND ? ORDER BY rowid
"""


@contextmanager
def database(data: Path, source: Path) -> Iterator[sqlite3.Connection]:
    """Open a database read-only, without other files and locks; text is returned as stored bytes."""
    log = data.with_name(f"{data.name}-wal")
    if log.exists() and log.stat().st_size:
        raise InputError(f"{source}: its last changes are still in {log.name}; close the program that writes it")
    uri = f"file:{quote(os.fsencode(data.absolute()))}?mode=ro&immutable=1"
    # a UnicodeDecodeError is for a message that quotes damaged text
    with (
        reading(source, "SQLite cannot read it", (sqlite3.Error, UnicodeDecodeError)),
        closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as connection,
    ):
        connection.text_factory = bytes
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA cell_size_check = ON")
        yield connection


def tff_sqlite_parts(data: Path, source: Path, columns: tuple[str, str]) -> list[Part]:
    """Return the parts of a file: ranges of rowids of equal length, with gaps, because finding gaps needs a scan."""
    with database(data, source) as connection:
        connection.execute(f"{_ROWS} LIMIT 0", (0, 0))  # raises for a missing table or column
        # two queries, because one query for both would scan the table
        ((first,),) = connection.execute("SELECT min(rowid) FROM examples")
        ((last,),) = connection.execute("SELECT max(rowid) FROM examples")
    if first is None or last is None:
        return []
    size = data.stat().st_size
    rows = min(last - first + 1, size // SMALLEST_ROW)
    pieces = max(-(-rows // posts.PART_RECORDS), -(-size // posts.PART_BYTES))
    return [Part(data, source, begin, end - 1, columns) for begin, end in ranges(first, last + 1, pieces)]


def _ascending(rows: Iterable[tuple[Any, ...]], part: Part) -> Iterator[tuple[Any, ...]]:
    """Yield rows; raise InputError if rowids do not ascend: a damaged file whose pages form a loop would not end."""
    before = part.first - 1
    for row in rows:
        if row[0] <= before:
            raise InputError(f"{part.source}: the file is damaged: rowid {row[0]} follows {before}; download it again")
        before = row[0]
        yield row


def read_tff_sqlite(part: Part, dropped: Counter[str]) -> Iterator[Post]:
    """Yield posts of up to 64 consecutive sentences of the same author and split.

    Dropped records are too long (more than 1 MB), no tf.Example, without one bytes value ``tokens``, not UTF-8, or
    without words. InputError if SQLite cannot read the part, a split is unknown, or no record can be read.
    """
    drops: Counter[str] = Counter()
    sentences_read = 0
    with database(part.path, part.source) as connection:
        rows = _ascending(connection.execute(_ROWS, (part.first, part.last)), part)
        for (split, client), group in groupby(rows, itemgetter(1, 2)):
            if split not in SPLITS:
                raise InputError(f"{part.source}: unknown split_name {split!r:.40}; use train, heldout or test")
            name = user_name(client)
            for post in published(name or "", SPLITS[split], _examples(group, name, drops), drops):
                sentences_read += len(post.sentences)
                yield post
    dropped.update(drops)
    if drops and not sentences_read and drops.keys() <= DAMAGES:
        raise InputError(
            f"{part.source}: no record of rowids {part.first} to {part.last} is a tf.Example with tokens "
            f"({', '.join(f'{reason}: {count:,}' for reason, count in drops.items())})"
        )


def _examples(group: Iterable[tuple[Any, ...]], user: str | None, drops: Counter[str]) -> Iterator[bytes]:
    """Yield the feature ``tokens`` of the records of a client, and count those without it."""
    for _, _, _, proto in group:
        if proto == TOO_LONG:
            drops["records_too_long"] += 1
            continue
        try:
            feature = Example.FromString(proto).features.feature.get("tokens")
        except (DecodeError, TypeError):
            drops["records_not_tf_example"] += 1
            continue
        if feature is None or len(feature.bytes_list.value) != 1:
            drops["records_without_tokens"] += 1
        elif user is None:
            drops["records_not_utf8"] += 1
        else:
            yield feature.bytes_list.value[0]


TFF_SQLITE = Format("tff-sqlite", tff_sqlite_parts, read_tff_sqlite)

# Reader of TensorFlow Federated's older copies of Stack Overflow, ``stackoverflow_{train,held_out,test}.h5``.
#
# ``/examples/<client_id>/tokens`` is a dataset of strings, one per sentence. The file name contains the split. Reading
# can crash or loop forever in libhdf5 2.0, in 0.3% of files that were damaged at random. Therefore a separate process
# reads a file, and is killed after five minutes without progress.


try:
    import h5py
except ImportError:  # h5py is in the extra `hdf5`; only this format needs it
    h5py = None

HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
GROUP = "examples"
LARGEST_CHUNK = 2**28  # bytes; a compressed chunk is completely in memory
SLICE = 2**24  # bytes of a dataset that are in memory at a time

# The exceptions of h5py for errors of libhdf5 and for inconsistent content.
_ERRORS = (OSError, RuntimeError, LookupError, ValueError, TypeError, ArithmeticError, AttributeError, MemoryError)


def refuse_missing_h5py(file: Path) -> None:
    """Raise InputError about a file to be read or written if h5py, which the extra `hdf5` installs, is missing."""
    if h5py is None:
        raise InputError(f"{file}: HDF5 files need h5py, the extra 'hdf5', which is not installed; pip install h5py")


@contextmanager
def hdf5(data: Path, source: Path) -> Iterator[Any]:
    """Open a file, read-only and without locks; errors of libhdf5 in the block become InputError."""
    refuse_missing_h5py(source)
    with reading(source, "libhdf5 cannot read it", _ERRORS), h5py.File(data, "r", locking=False) as file:
        yield file


def _clients(data: Path, source: Path) -> tuple[str | bytes, ...]:
    with hdf5(data, source) as file:
        if GROUP not in file:
            raise InputError(f"{source}: no group {GROUP}; its groups: {', '.join(map(str, file)) or 'none'}")
        return tuple(_child(file, GROUP))


def _child(group: Any, name: str | bytes) -> Any:
    """Return a member of a group; KeyError if there is none in this file. Links can name any other file."""
    encoded = name if isinstance(name, bytes) else name.encode()
    if group.id.links.get_info(encoded).type != h5py.h5l.TYPE_HARD:
        raise KeyError(f"{name!r} is a link")
    return group[name]


def tff_hdf5_parts(data: Path, source: Path, columns: tuple[str, str]) -> list[Part]:
    """Return the parts of a file: ranges of equally many clients, in the file's order, of about 64 MB."""
    pieces = -(-data.stat().st_size // posts.PART_BYTES)
    clients = ranges(0, len(_clients(data, source)), pieces)
    return [Part(data, source, first, last, columns) for first, last in clients]


def read_tff_hdf5(part: Part, dropped: Counter[str]) -> Iterator[Post]:
    """Yield posts of up to 64 sentences of a client.

    Dropped are clients whose id is not UTF-8 or that are too large (a million sentences, or a chunk of 256 MB). Dropped
    sentences are not UTF-8, too long (more than 1 MB) or without words.
    """
    split = split_of_name(part.source)
    names = _clients(part.path, part.source)[part.first : part.last]
    with hdf5(part.path, part.source) as file:
        clients = _child(file, GROUP)
        for name in names:
            user, tokens = user_name(name), _tokens_of(clients, name, part.source)
            chunk = prod(tokens.chunks) if tokens.chunks else 1
            if user is None:
                dropped["users_not_utf8"] += 1
            elif len(tokens) > USER_RECORDS or chunk * tokens.dtype.itemsize > LARGEST_CHUNK:
                dropped["users_too_large"] += 1
            else:
                step = max(1, SLICE // max(tokens.dtype.itemsize, 2**10))
                texts = (text for at in range(0, len(tokens), step) for text in tokens[at : at + step].tolist())
                yield from published(user, split, texts, dropped)


def _tokens_of(clients: Any, name: str | bytes, source: Path) -> Any:
    """Return the dataset of a client's sentences, whose values are in the file itself."""
    client, label = _child(clients, name), repr(user_name(name) or name)[:60]
    if not isinstance(client, h5py.Group) or "tokens" not in client:
        raise InputError(f"{source}: client {label} has no dataset 'tokens'")
    tokens = _child(client, "tokens")
    is_inside = isinstance(tokens, h5py.Dataset) and not tokens.is_virtual and not tokens.external
    is_written = is_inside and tokens.shape is not None and (not tokens.size or tokens.id.get_storage_size())
    if not is_written or len(tokens.shape) != 1 or h5py.check_string_dtype(tokens.dtype) is None:
        raise InputError(f"{source}: client {label}: 'tokens' is not a one-dimensional dataset of strings in this file")
    return tokens


TFF_HDF5 = Format("tff-hdf5", tff_hdf5_parts, read_tff_hdf5, fragile=True)
