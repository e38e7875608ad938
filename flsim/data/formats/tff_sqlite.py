"""Reader of ``stackoverflow.sqlite`` as TensorFlow Federated hosts it, with a tf.Example for each sentence.

The tables are ``examples(split_name, client_id, serialized_example_proto)`` and ``client_metadata(client_id,
split_name, num_examples)``. Tokens are split at white space and otherwise unchanged. A client in several splits is an
author in each split.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError

from flsim.base.errors import InputError
from flsim.data.formats.hdf5 import (
    child,
    client_label,
    client_parts,
    hdf5,
    holds_strings,
    is_group,
    members,
    plain,
    slices,
    too_large,
)
from flsim.data.formats.posts import (
    LONGEST_RECORD,
    POST_RECORDS,
    Format,
    Part,
    Post,
    published,
    split_of_name,
    user_name,
)
from flsim.data.formats.sqlite import ascending, database, require, rowid_parts, span

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


def _example() -> Any:
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_MESSAGES, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


Example: Any = _example()
"""The message class: `Example.FromString(bytes).features.feature["tokens"].bytes_list.value[0]`."""


# Reader of TensorFlow Federated's older copies of Stack Overflow, ``stackoverflow_{train,held_out,test}.h5``.
#  ``/examples/<client_id>/tokens`` is a dataset of strings, one per sentence. The other features are not read. Tokens
# are split at white space and otherwise unchanged. The file name contains the split.

GROUP = "examples"


def tff_hdf5_parts(data: Path, source: Path, columns: tuple[str, str]) -> list[Part]:
    """Return the parts of a file: ranges of clients, in the file's order."""
    return client_parts(data, source, columns, len(members(data, source, GROUP)[GROUP]))


def read_tff_hdf5(part: Part, dropped: Counter[str]) -> Iterator[Post]:
    """Yield posts of up to 64 sentences of a client.

    Dropped are ``users_not_utf8`` (the client id), ``users_too_large`` (a million sentences, or a chunk of 256 MB),
    ``records_not_utf8``, ``records_too_long`` (more than 1 MB) and ``records_without_words``.

    Raises:
        InputError: libhdf5 cannot read the part, or a client has no strings ``tokens``.
    """
    split = split_of_name(part.source)
    names = members(part.path, part.source, GROUP)[GROUP][part.first : part.last]
    with hdf5(part.path, part.source) as file:
        clients = child(file, GROUP)
        for name in names:
            user = user_name(name)
            tokens = _tokens(clients, name, part.source)
            if user is None:
                dropped["users_not_utf8"] += 1
            elif too_large(tokens):
                dropped["users_too_large"] += 1
            else:
                texts = (text for piece in slices(tokens) for text in piece.tolist())
                yield from published(user, split, texts, dropped)


def _tokens(clients: Any, name: str | bytes, source: Path) -> Any:
    client = child(clients, name)
    if not is_group(client) or "tokens" not in client:
        raise InputError(f"{source}: client {client_label(name)} has no dataset 'tokens'")
    tokens = child(client, "tokens")
    if not plain(tokens) or len(tokens.shape) != 1 or not holds_strings(tokens):
        raise InputError(
            f"{source}: client {client_label(name)}: 'tokens' is not a one-dimensional dataset of strings in this file"
        )
    return tokens


TFF_HDF5 = Format("tff-hdf5", tff_hdf5_parts, read_tff_hdf5, fragile=True)


TABLES = {
    "examples": ("split_name", "client_id", "serialized_example_proto"),
    "client_metadata": ("client_id", "split_name", "num_examples"),
}
SPLITS = {b"train": "train", b"heldout": "heldout", b"test": "test"}
DAMAGES = {"records_not_tf_example", "records_without_tokens", "records_not_utf8"}
TOO_LONG = 0  # replaces a record that is too long
FEW = 10**6  # largest number of rows that can be counted quickly

_ROWS = f"""
SELECT rowid, split_name, client_id,
    CASE WHEN length(serialized_example_proto) > {LONGEST_RECORD} THEN {TOO_LONG} ELSE serialized_example_proto END
FROM examples WHERE rowid BETWEEN ? AND ? ORDER BY rowid
"""


def tff_sqlite_parts(data: Path, source: Path, columns: tuple[str, str]) -> list[Part]:
    """Return the parts of a file: ranges of rowids."""
    with database(data, source) as connection:
        require(connection, source, TABLES)
        return rowid_parts(connection, data, source, columns, "examples")


def read_tff_sqlite(part: Part, dropped: Counter[str]) -> Iterator[Post]:
    """Yield posts of up to 64 consecutive sentences of the same author and split.

    Dropped are ``records_too_long`` (more than 1 MB), ``records_not_tf_example``, ``records_without_tokens`` (the
    feature ``tokens`` is not one bytes value), ``records_not_utf8`` (tokens or client id) and
    ``records_without_words``.

    Raises:
        InputError: SQLite cannot read the part, a split is not train, heldout or test, or no record can be read.
    """
    drops: Counter[str] = Counter()
    sentences_read = 0
    with database(part.path, part.source) as connection:
        rows = ascending(connection.execute(_ROWS, (part.first, part.last)), part)
        for (split, client), group in groupby(rows, itemgetter(1, 2)):
            name = user_name(client)
            post = Post(name or "", [], _split(split, part))
            for _, _, _, proto in group:
                try:
                    post.sentences.append(_sentence(proto, name))
                except _DropError as drop:
                    drops[str(drop)] += 1
                if len(post.sentences) == POST_RECORDS:
                    sentences_read += POST_RECORDS
                    yield post
                    post = Post(post.user, [], post.split)
            if post.sentences:
                sentences_read += len(post.sentences)
                yield post
    dropped.update(drops)
    if drops and not sentences_read and drops.keys() <= DAMAGES:
        raise InputError(
            f"{part.source}: no record of rowids {part.first} to {part.last} is a tf.Example with tokens "
            f"({', '.join(f'{reason}: {count:,}' for reason, count in drops.items())})"
        )


class _DropError(Exception):
    """The reason why a record is dropped."""


def _split(name: Any, part: Part) -> str:
    if name not in SPLITS:
        raise InputError(f"{part.source}: unknown split_name {name!r:.40}; use train, heldout or test")
    return SPLITS[name]


def _sentence(proto: Any, user: str | None) -> str:
    if proto == TOO_LONG:
        raise _DropError("records_too_long")
    try:
        feature = Example.FromString(proto).features.feature.get("tokens")
    except (DecodeError, TypeError) as error:
        raise _DropError("records_not_tf_example") from error
    if feature is None or len(feature.bytes_list.value) != 1:
        raise _DropError("records_without_tokens")
    try:
        words = feature.bytes_list.value[0].decode().split()
    except UnicodeDecodeError as error:
        raise _DropError("records_not_utf8") from error
    if user is None:
        raise _DropError("records_not_utf8")
    if not words:
        raise _DropError("records_without_words")
    return " ".join(words)


def check_tff_sqlite(data: Path, source: Path) -> list[str]:
    """Return a warning if the number of examples differs from that in `client_metadata`.

    Examples are counted only in a small table; for larger tables, rowids bound the number.
    """
    with database(data, source) as connection:
        require(connection, source, TABLES)
        ((stated,),) = connection.execute("SELECT total(num_examples) FROM client_metadata")
        bounds = span(connection, "examples")
        present = 0 if bounds is None else bounds[1] - bounds[0] + 1
        if stated < present <= FEW:  # there can be gaps
            ((present,),) = connection.execute("SELECT count(*) FROM examples")
    if stated > present or (stated < present <= FEW):
        return [
            f"{source}: client_metadata counts {stated:,.0f} examples, but there are {present:,}; check that the "
            "file is complete"
        ]
    return []


TFF_SQLITE = Format("tff-sqlite", tff_sqlite_parts, read_tff_sqlite, check_tff_sqlite)
