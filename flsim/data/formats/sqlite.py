"""Reading of untrusted SQLite files, in ranges of rowids."""

import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from flsim.base.errors import InputError
from flsim.data.formats import posts
from flsim.data.formats.posts import Part, library_message, ranges

MAGIC = b"SQLite format 3\0"
SMALLEST_ROW = 8  # bytes of a page


@contextmanager
def database(data: Path, source: Path) -> Iterator[sqlite3.Connection]:
    """Open a database read-only: no other file is read, written or locked.

    Text is returned as bytes, as stored.

    Raises:
        InputError: SQLite raised an error in the block, or a journal has changes that are not in the file.
    """
    log = data.with_name(f"{data.name}-wal")
    if log.exists() and log.stat().st_size:
        raise InputError(f"{source}: its last changes are still in {log.name}; close the program that writes it")
    try:
        uri = f"file:{quote(os.fsencode(data.absolute()))}?mode=ro&immutable=1"
        with closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as connection:
            connection.text_factory = bytes
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("PRAGMA cell_size_check = ON")
            yield connection
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter for a message that quotes damaged text
        raise InputError(
            f"{source}: SQLite cannot read it ({library_message(error)}); check that it is complete, or "
            "download it again"
        ) from error


def tables(connection: sqlite3.Connection) -> set[str]:
    """Return the names of a database's tables."""
    rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    return {name.decode("utf-8", "replace") for (name,) in rows}


def require(connection: sqlite3.Connection, source: Path, required: Mapping[str, tuple[str, ...]]) -> None:
    """Raise InputError with the name of the first missing table or column."""
    present = tables(connection)
    for table, columns in required.items():
        if table not in present:
            raise InputError(f"{source}: no table {table!r}; its tables: {', '.join(sorted(present)) or 'none'}")
        names = [name.decode() for (name,) in connection.execute("SELECT name FROM pragma_table_info(?)", (table,))]
        for column in columns:
            if column not in names:
                raise InputError(f"{source}: table {table!r} has no column {column!r}; its columns: {', '.join(names)}")


def span(connection: sqlite3.Connection, table: str) -> tuple[int, int] | None:
    """Return the first and the last rowid of a table; None if it is empty.

    There are two queries, because one query for both would scan the table.
    """
    ((first,),) = connection.execute(f"SELECT min(rowid) FROM {table}")
    ((last,),) = connection.execute(f"SELECT max(rowid) FROM {table}")
    return None if first is None or last is None else (first, last)


def rowid_parts(
    connection: sqlite3.Connection, data: Path, source: Path, columns: tuple[str, str], table: str
) -> list[Part]:
    """Return parts of a table by ranges of rowids of equal length.

    Gaps are ignored, because finding them needs a scan.
    """
    bounds = span(connection, table)
    if bounds is None:
        return []
    first, last = bounds
    size = data.stat().st_size
    rows = min(last - first + 1, size // SMALLEST_ROW)
    pieces = max(-(-rows // posts.PART_RECORDS), -(-size // posts.PART_BYTES))
    return [Part(data, source, begin, end - 1, columns) for begin, end in ranges(first, last + 1, pieces)]


def ascending(rows: Iterable[tuple[Any, ...]], part: Part) -> Iterator[tuple[Any, ...]]:
    """Yield rows whose first column is the rowid, as long as rowids ascend.

    Raises:
        InputError: rowids do not ascend. Without this check, reading a damaged file whose pages form a loop would not
            end.
    """
    before = part.first - 1
    for row in rows:
        if row[0] <= before:
            raise InputError(f"{part.source}: the file is damaged: rowid {row[0]} follows {before}; download it again")
        before = row[0]
        yield row
