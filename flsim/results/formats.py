"""Tables as files, CSV and Parquet, and their cells as text, whatever they are about."""

import io
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from flsim.base.files import named_file


def note(text: str, width: int = 80) -> str:
    """A sentence below a table: lines of at most so many characters, but for words that are longer, such as paths."""
    return textwrap.fill(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False) + "\n"


def text_of(values: "pd.Series[Any]") -> list[str]:
    """Cells of values as they are; empty where one is missing."""
    return ["" if pd.isna(value) else str(value) for value in values]


def formatted(values: "pd.Series[Any]", template: str, scale: float = 1) -> list[str]:
    """Cells of numbers, in a format, times `scale`; empty where one is missing."""
    return ["" if pd.isna(value) else template.format(value * scale) for value in values]


def to_csv(table: pd.DataFrame) -> str:
    """All columns under their own names; numbers in full, accuracy as a fraction, blank where unknown."""
    return table.to_csv(index=False, lineterminator="\n")


def from_csv(text: str, types: Mapping[str, str]) -> pd.DataFrame:
    """The table that `to_csv` wrote, exactly; `types` has pandas' name of each column's type."""
    # Numbers are converted afterwards: pandas' own parser may miss the last bit.
    cells = pd.read_csv(io.StringIO(text), dtype="string", keep_default_na=False, na_values=[""])
    return cells.astype({name: types[name] for name in cells.columns})


def write_parquet(table: pd.DataFrame, path: Path) -> None:
    """All columns, with their types; read it with `pandas.read_parquet`. Raises as `flsim.base.files.named_file`."""
    with named_file(path) as partial:
        table.to_parquet(partial, index=False)
