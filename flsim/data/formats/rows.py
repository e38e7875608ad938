"""Tables in which each row is a record: CSV and Parquet."""

import csv
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flsim.base.errors import InputError
from flsim.data.formats import posts
from flsim.data.formats.posts import (
    OPTIONS,
    Format,
    Part,
    Post,
    WrongFieldError,
    posts_of,
    reading,
    unpacked_name,
    whole_file,
)

LONGEST_FIELD = 2**24  # characters; longest field, which bounds a quote that never ends
_FLOAT = re.compile(r"-?[0-9]{1,300}\.0+")


def read_csv(part: Part, dropped: Counter[str]) -> Iterator[Post]:
    """Yield one post per row; blank lines and other columns are ignored, and empty fields are nulls."""
    csv.field_size_limit(LONGEST_FIELD)
    with part.path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file, delimiter=_delimiter(part), strict=True)
        try:
            header = next(rows, [])
            named = zip(part.named, OPTIONS, strict=False)
            places = [_place(header, column, option, part, _delimiter(part)) for column, option in named]
            for row in rows:
                if not row:
                    continue
                if len(row) != len(header):
                    raise InputError(
                        f"{part.source}: line {rows.line_num}: a row of {len(row)} fields, but the header has "
                        f"{len(header)}; put quotes around fields that hold {_delimiter(part)!r}, quotes or line feeds"
                    )
                user, text, prompt = (*(row[place] for place in places), None)[:3]
                # "7.0", which pandas writes for an integer in a column with nulls, is an integer
                author = float(str(user)) if _FLOAT.fullmatch(str(user)) else user
                yield from posts_of(author, text, dropped, part.reading, prompt=prompt)
        except WrongFieldError as error:
            raise InputError(
                f"{part.source}: line {rows.line_num}: {part.named[error.place]!r} {error.why}, found {user:.40}"
            ) from error
        except UnicodeDecodeError as error:
            # the file is read ahead, so the line is unknown
            raise InputError(f"{part.source}: not UTF-8; convert the file to UTF-8") from error
        except csv.Error as error:
            raise InputError(f"{part.source}: line {rows.line_num}: not CSV ({error})") from error


def _delimiter(part: Part) -> str:
    default = "\t" if unpacked_name(part.source).lower().endswith(".tsv") else ","
    return part.reading.delimiter or default


def _place(columns: list[str], column: str, option: str, part: Part, delimiter: str = "") -> int:
    """Return the place of the only column with this name; raise InputError for none, or for several."""
    if columns.count(column) != 1:
        names = ", ".join(columns)[:200] or "none"
        separated, other = (f", separated by {delimiter!r},", ", or set --delimiter") if delimiter else ("", "")
        raise InputError(
            f"{part.source}: no column {column!r}; its columns{separated} are {names}; name the right column with "
            f"{option}{other}"
        )
    return columns.index(column)


CSV = Format("csv", whole_file, read_csv)

# Reader of Parquet files with a column of users and a column of plain text.
#
# Users are strings or integers, also as floats. A text is a string, or a list of texts.


MAGIC = b"PAR1"
BATCH = 256  # rows in memory at a time


@contextmanager
def _open(data: Path, source: Path) -> Iterator[Any]:
    kinds = (pa.ArrowException, OSError, ValueError, LookupError, OverflowError, MemoryError)
    with (
        reading(source, "cannot be read as Parquet", kinds),
        pq.ParquetFile(data, memory_map=False, pre_buffer=False, buffer_size=2**16) as file,
    ):
        yield file


def parquet_parts(data: Path, source: Path, columns: tuple[str, str]) -> list[Part]:
    """Return the parts of a file: ranges of row groups."""
    with _open(data, source) as file:
        bounds, rows, size = [0], 0, 0
        for group in range(file.metadata.num_row_groups):
            metadata = file.metadata.row_group(group)
            rows, size = rows + metadata.num_rows, size + metadata.total_byte_size
            if rows >= posts.PART_RECORDS or size >= posts.PART_BYTES or group == file.metadata.num_row_groups - 1:
                bounds.append(group + 1)
                rows = size = 0
    return posts.parts_between(bounds, data, source, columns)


def read_parquet(part: Part, dropped: Counter[str]) -> Iterator[Post]:
    """Yield one post per text; `flsim.data.formats.posts.posts_of` states which ones are dropped."""
    with _open(part.path, part.source) as file:
        for column, option in zip(part.named, OPTIONS, strict=False):
            _place(file.schema_arrow.names, column, option, part)
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
