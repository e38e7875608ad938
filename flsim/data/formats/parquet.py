"""Reader of Parquet files with a column of users and a column of plain text.

Users are strings or integers, also as floats. A text is a string, or a list of texts.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flsim.base.errors import InputError
from flsim.data.formats import posts
from flsim.data.formats.posts import OPTIONS, Format, Part, Post, WrongFieldError, posts_of, reading

MAGIC = b"PAR1"
BATCH = 256  # rows in memory at a time


@contextmanager
def _open(data: Path, source: Path) -> Iterator[Any]:
    kinds = (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError)
    with (
        reading(source, "cannot be read as Parquet", kinds),
        pq.ParquetFile(data, memory_map=False, pre_buffer=False, buffer_size=2**16) as file,
    ):
        yield file


def parquet_parts(data: Path, source: Path, columns: tuple[str, str]) -> list[Part]:
    """Return the parts of a file: ranges of row groups."""
    with _open(data, source) as file:
        _check_columns(file.schema_arrow, source, columns)
        bounds, rows, size = [0], 0, 0
        for group in range(file.metadata.num_row_groups):
            metadata = file.metadata.row_group(group)
            rows, size = rows + metadata.num_rows, size + metadata.total_byte_size
            if rows >= posts.PART_RECORDS or size >= posts.PART_BYTES or group == file.metadata.num_row_groups - 1:
                bounds.append(group + 1)
                rows = size = 0
    return posts.parts_between(bounds, data, source, columns)


def _check_columns(schema: Any, source: Path, columns: tuple[str, ...]) -> None:
    for column, option, expected, ok in zip(
        columns,
        OPTIONS,
        ("strings or integers", "strings or lists of strings", "strings"),
        (
            (_is_text, pa.types.is_integer, pa.types.is_floating, pa.types.is_null),
            (_is_text, _is_texts, pa.types.is_null),
            (_is_text, pa.types.is_null),
        ),
        strict=False,
    ):
        if schema.names.count(column) != 1:
            names = ", ".join(schema.names) or "none"
            raise InputError(
                f"{source}: no column {column!r}; its columns are {names}; name the right column with {option}"
            )
        kind = schema.field(column).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not any(test(kind) for test in ok):
            raise InputError(f"{source}: column {column!r} has {kind}, not {expected}")


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_texts(kind: Any) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(is_list and (_is_text(kind.value_type) or pa.types.is_null(kind.value_type)))


def read_parquet(part: Part, dropped: Counter[str]) -> Iterator[Post]:
    """Yield one post per text; `flsim.data.formats.posts.posts_of` states which ones are dropped."""
    with _open(part.path, part.source) as file:
        _check_columns(file.schema_arrow, part.source, part.named)
        groups = range(part.first, part.last)
        for batch in file.iter_batches(BATCH, row_groups=groups, columns=list(part.named), use_threads=False):
            for row in zip(*(batch.column(name).to_pylist() for name in part.named), strict=True):
                user, text, prompt = (*row, None)[:3]
                try:
                    yield from posts_of(user, text, dropped, part.reading, prompt=prompt)
                except WrongFieldError as error:
                    raise InputError(
                        f"{part.source}: column {part.named[error.place]!r} {error.why}, found {row[error.place]!s:.40}"
                    ) from error


PARQUET = Format("parquet", parquet_parts, read_parquet)
