"""Reading of untrusted Parquet files: only the expected columns, with the expected types."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from flsim.base.errors import InputError

MOST_ROWS = 10**7  # repeated rows need no space in a file, but need memory


def read_parquet(path: Path, schema: pa.Schema, optional: Sequence[str] = ()) -> pd.DataFrame:
    """Return the columns of `schema` with their types; the pandas metadata of the file is ignored.

    If a field is not nullable, no cell or item can be missing; `optional` columns may be absent. InputError otherwise,
    or if the file is damaged.
    """
    try:
        with pq.ParquetFile(path) as file:
            names = set(file.schema_arrow.names)
            missing = [name for name in schema.names if name not in names and name not in optional]
            if missing:
                raise InputError(f"{path}: has no column {missing[0]}; remove or restore it")
            if file.metadata.num_rows > MOST_ROWS:
                raise InputError(f"{path}: has {file.metadata.num_rows:,} rows, more than a run can have; remove it")
            present = pa.schema([field for field in schema if field.name in names])
            table = (
                file.read(columns=present.names)
                .select(present.names)
                .cast(pa.schema([field.with_nullable(True) for field in present]))
            )
        table.validate(full=True)  # also checks that text is UTF-8
        for field in present:
            chunks = table[field.name].chunks
            lists = (chunk.flatten() for chunk in chunks if pa.types.is_list(chunk.type))
            if not field.nullable and any(chunk.null_count for chunk in (*chunks, *lists)):
                raise InputError(f"{path}: cells of column {field.name} are missing; remove or restore it")
        return pd.DataFrame(table.to_pandas(ignore_metadata=True))
    except InputError:
        raise
    except (OSError, pa.ArrowException, ValueError, TypeError, KeyError, MemoryError) as error:
        raise InputError(f"{path}: not a readable Parquet file; remove or restore it") from error
