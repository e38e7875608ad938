"""CSV and Parquet files of tables, and text of their cells."""

import textwrap
from pathlib import Path
from typing import Any

import pandas as pd

from flsim.base.files import named_file


def note(text: str, width: int = 80) -> str:
    """Return a sentence below a table, in lines of at most `width` characters.

    Longer words, such as paths, are not broken.
    """
    return textwrap.fill(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False) + "\n"


def text_of(values: "pd.Series[Any]") -> list[str]:
    """Return values as cells; a missing value is empty."""
    return ["" if pd.isna(value) else str(value) for value in values]


def formatted(values: "pd.Series[Any]", template: str, scale: float = 1) -> list[str]:
    """Return numbers times `scale` as cells, in a format; a missing number is empty."""
    return ["" if pd.isna(value) else template.format(value * scale) for value in values]


def to_csv(table: pd.DataFrame) -> str:
    """Return all columns under their own names; numbers in full, accuracy as a fraction, blank if unknown."""
    return table.to_csv(index=False, lineterminator="\n")


def write_parquet(table: pd.DataFrame, path: Path) -> None:
    """Write all columns with their types; `pandas.read_parquet` reads the file.

    Raises:
        InputError: as for `flsim.base.files.named_file`.
    """
    with named_file(path) as partial:
        table.to_parquet(partial, index=False)
