"""Helpers for tests of tables: tables as text, and tables that are read back from CSV."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from flsim.measures.quantity import Quantity
from flsim.results.rows import RunResults
from flsim.results.tables import By, described, memorization_table, types
from flsim.show.memorization import table_of_runs


def over_seeds(runs: Sequence[RunResults], **more: Any) -> pd.DataFrame:
    return memorization_table(runs, by="series", **more)


def to_markdown(table: pd.DataFrame, width: int = 80) -> str:
    return table_of_runs(table).markdown(width)


def to_latex(table: pd.DataFrame) -> str:
    return table_of_runs(table).latex()


def read_typed(text: str, types: Mapping[str, str]) -> pd.DataFrame:
    """Return exactly the written frame. Numbers are parsed separately: the parser of pandas may miss the last bit."""
    cells = pd.read_csv(io.StringIO(text), dtype="string", keep_default_na=False, na_values=[""])
    return cells.astype({name: types[name] for name in cells.columns})


def from_csv(text: str, own: Sequence[Quantity] = ()) -> pd.DataFrame:
    """Return the table, by run or by series, that was written as CSV."""
    by: By = "series" if "seeds" in text.partition("\n")[0].split(",") else "run"
    return described(read_typed(text, types(by, own)), own)
