"""Writers of files in the formats that `flsim.data.formats.known` reads, in their publishers' schemas.

All writers take examples, (split, client_id, tokens), with split one of train, heldout, test and tokens joined by
spaces. They hold one client at a time in memory. Formats with one row or group per client need the examples of a client
to follow each other. Formats without splits omit them.
"""

import csv
import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from xml.sax.saxutils import quoteattr

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flsim.data.formats.tff import Example, refuse_missing_h5py

Examples = Iterable[tuple[str, str, str]]

DATE, SCORE, TAGS, TITLE, KIND = (
    b"2010-07-15 18:15:58.5 UTC",
    -1,
    b"android|monkey",
    b"writing to / system",
    b"question",
)
ROW_GROUP = 50_000  # rows

_TFF_TABLES = """
CREATE TABLE examples (split_name TEXT NOT NULL, client_id TEXT NOT NULL, serialized_example_proto BLOB NOT NULL);
CREATE TABLE client_metadata (client_id TEXT NOT NULL, split_name TEXT NOT NULL, num_examples INTEGER NOT NULL);
"""
_TFF_INDEXES = """
CREATE INDEX idx_examples_client_id ON examples (client_id);
CREATE INDEX idx_examples_client_id_split ON examples (split_name, client_id);
CREATE INDEX idx_metadata_client_id ON client_metadata (client_id);
"""


def tf_example(tokens: str) -> bytes:
    """Return a serialized tf.Example with all six features."""
    example = Example()
    feature = example.features.feature
    for name, value in (("creation_date", DATE), ("tags", TAGS), ("title", TITLE), ("type", KIND)):
        feature[name].bytes_list.value.append(value)
    feature["score"].int64_list.value.append(SCORE)
    feature["tokens"].bytes_list.value.append(tokens.encode())
    return bytes(example.SerializeToString())


def write_tff_sqlite(path: Path, examples: Examples) -> None:
    """Write the file that TensorFlow Federated hosts; examples may be in any order."""
    counts: Counter[tuple[str, str]] = Counter()

    def rows() -> Iterator[tuple[str, str, bytes]]:
        for split, client, tokens in examples:
            counts[client, split] += 1
            yield split, client, tf_example(tokens)

    with _database(path) as connection:
        connection.executescript(_TFF_TABLES)
        connection.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows())
        metadata = ((*key, count) for key, count in counts.items())
        connection.executemany("INSERT INTO client_metadata VALUES (?, ?, ?)", metadata)
        connection.executescript(_TFF_INDEXES)


@contextmanager
def _database(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a new database that is written without a journal, because a killed writer begins again."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;")
        yield connection


def write_tff_hdf5(path: Path, examples: Examples, fixed_length: bool = False) -> None:
    """Write one of TensorFlow Federated's older files, which have one split each."""
    refuse_missing_h5py(path)
    import h5py

    with h5py.File(path, "w") as file:
        clients = file.create_group("examples")
        for _, client, texts in _clients(examples):
            group = clients.create_group(client)
            features = {"creation_date": DATE, "tags": TAGS, "title": TITLE, "type": KIND}
            columns = {name: [value] * len(texts) for name, value in features.items()}
            for name, values in {**columns, "tokens": [text.encode() for text in texts]}.items():
                kind = f"S{max(1, *map(len, values))}" if fixed_length else object
                strings = None if fixed_length else h5py.string_dtype()
                group.create_dataset(name, data=np.array(values, kind), dtype=strings)
            group.create_dataset("score", data=np.full(len(texts), SCORE, np.int64))


def write_parquet(path: Path, examples: Examples, columns: tuple[str, str] = ("user", "text")) -> None:
    """Write columns of user and text, in row groups of 50,000."""
    schema = pa.schema([(name, pa.string()) for name in columns])
    with pq.ParquetWriter(path, schema) as writer:
        for rows in _batches(examples, ROW_GROUP):
            arrays = [pa.array([row[index] for row in rows], pa.string()) for index in (1, 2)]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def write_jsonl(path: Path, examples: Examples, columns: tuple[str, str] = ("user", "text")) -> None:
    """Write one JSON object per example."""
    user, text = columns
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps({user: client, text: tokens}) + "\n" for _, client, tokens in examples)


def write_csv(path: Path, examples: Examples) -> None:
    """Write a header, and one row per example."""
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("user", "text"))
        rows.writerows((client, tokens) for _, client, tokens in examples)


def write_text(path: Path, examples: Examples) -> None:
    """Write one line per example, without its user."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{tokens}\n" for _, _, tokens in examples)


def write_stackexchange(path: Path, examples: Examples) -> None:
    """Write a Posts.xml with one post per sentence."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.write('<?xml version="1.0" encoding="utf-8"?>\n<posts>\n')
        for number, (_, client, tokens) in enumerate(examples, start=1):
            html = tokens.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
            body = quoteattr(f"<p>{html}</p>\n", {"\n": "&#xA;"})
            owner = quoteattr(client)
            file.write(f'  <row Id="{number}" PostTypeId="1" Score="{SCORE}" Body={body} OwnerUserId={owner} />\n')
        file.write("</posts>")


def _clients(examples: Examples) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the examples of each client that follow each other and have the same split."""
    for (split, client), group in groupby(examples, itemgetter(0, 1)):
        yield split, client, [tokens for _, _, tokens in group]


def _batches(examples: Examples, size: int) -> Iterator[list[tuple[str, str, str]]]:
    rows: list[tuple[str, str, str]] = []
    for example in examples:
        rows.append(example)
        if len(rows) == size:
            yield rows
            rows = []
    if rows:
        yield rows
