"""Reader of Parquet files with a column of users, which are strings or whole numbers, and a column of plain text."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flsim.base.errors import InputError
from flsim.data.formats import posts
from flsim.data.formats.posts import Format, Part, Post, library_message, post_of

MAGIC = b"PAR1"
BATCH = 256  # rows in memory at a time
LONGEST_TEXT = 2**24  # characters


@contextmanager
def _open(data: Path, source: Path) -> Iterator[Any]:
    try:
        with pq.ParquetFile(data, memory_map=False, pre_buffer=False, buffer_size=2**16) as file:
            yield file
    except InputError:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        raise InputError(
            f"{source}: cannot be read as Parquet ({library_message(error)}); is it complete? Get it again"
        ) from error


def parquet_parts(data: Path, source: Path, columns: tuple[str, str]) -> list[Part]:
    """Return the parts of a file: ranges of row groups."""
    with _open(data, source) as file:
        _check_columns(file.schema_arrow, source, columns)
        bounds, rows, size = [0], 0, 0
        for group in range(file.metadata.num_row_groups):
            about = file.metadata.row_group(group)
            rows, size = rows + about.num_rows, size + about.total_byte_size
            if rows >= posts.PART_RECORDS or size >= posts.PART_BYTES or group == file.metadata.num_row_groups - 1:
                bounds.append(group + 1)
                rows = size = 0
    return posts.parts_between(bounds, data, source, columns)


def _check_columns(schema: Any, source: Path, columns: tuple[str, str]) -> None:
    for column, option, expected, ok in zip(
        columns,
        ("--user-column", "--text-column"),
        ("strings or whole numbers", "strings"),
        ((_is_text, pa.types.is_integer), (_is_text,)),
        strict=True,
    ):
        if schema.names.count(column) != 1:
            names = ", ".join(schema.names) or "none"
            raise InputError(f"{source}: no column {column!r}; its columns: {names}; name the right one with {option}")
        kind = schema.field(column).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not any(test(kind) for test in ok):
            raise InputError(f"{source}: column {column!r} has {kind}, not {expected}")


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def read_parquet(part: Part, dropped: Counter[str]) -> Iterator[Post]:
    """Yield one post per row; 7 and "7" are one user.

    Dropped, under the first reason that applies, are ``posts_without_user`` (null, or white space alone),
    ``posts_without_text`` (null) and ``posts_too_long`` (16 million characters).

    Raises:
        InputError: the part cannot be read, or is not UTF-8.
    """
    with _open(part.path, part.source) as file:
        groups = range(part.first, part.last)
        for batch in file.iter_batches(BATCH, row_groups=groups, columns=list(part.columns), use_threads=False):
            for user, text in zip(*(batch.column(name).to_pylist() for name in part.columns), strict=True):
                if user is None or not str(user).strip():
                    dropped["posts_without_user"] += 1
                elif text is None:
                    dropped["posts_without_text"] += 1
                elif len(text) > LONGEST_TEXT:
                    dropped["posts_too_long"] += 1
                else:
                    yield post_of(str(user), text, ascii=part.reading.ascii)


PARQUET = Format("parquet", parquet_parts, read_parquet)
