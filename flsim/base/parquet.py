"""Parquet files, read without trust: columns of the types that were written, whatever else a file may say."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from flsim.base.errors import InputError

MOST_ROWS = 10**7  # a row that repeats takes no room in a file, and would in memory


def read_parquet(path: Path, schema: pa.Schema, optional: Sequence[str] = ()) -> pd.DataFrame:
    """The columns of `schema`, in their types; what a file says to pandas is passed over.

    Args:
        path: of the file.
        schema: names and types; no cell may be missing, nor an item of a list, where a field is not nullable.
        optional: names of columns that may be absent.

    Raises:
        InputError: it is damaged, or has other columns.
    """
    try:
        with pq.ParquetFile(path) as file:
            there = set(file.schema_arrow.names)
            missing = [name for name in schema.names if name not in there and name not in optional]
            if missing:
                raise InputError(f"{path}: has no column {missing[0]}; remove or restore it")
            if file.metadata.num_rows > MOST_ROWS:
                raise InputError(f"{path}: has {file.metadata.num_rows:,} rows, more than a run ever writes; remove it")
            wanted = pa.schema([field for field in schema if field.name in there])
            table = file.read(columns=wanted.names).select(wanted.names).cast(_nullable(wanted))
        table.validate(full=True)  # also of text, that it is UTF-8
        for field in wanted:
            if not field.nullable and _lacks(table[field.name]):
                raise InputError(f"{path}: cells of column {field.name} are missing; remove or restore it")
        frame: pd.DataFrame = table.to_pandas(ignore_metadata=True)
        return frame
    except InputError:
        raise
    except (OSError, pa.ArrowException, ValueError, TypeError, KeyError, MemoryError) as error:
        raise InputError(f"{path}: damaged, not a readable Parquet file; remove or restore it") from error


def _nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_nullable(True) for field in schema])


def _lacks(column: pa.ChunkedArray) -> bool:
    return any(
        chunk.null_count or (pa.types.is_list(chunk.type) and chunk.flatten().null_count) for chunk in column.chunks
    )
