"""Published numbers to compare runs with, row by row, from the CSV files of experiments/.

A row has its table's cells under the file's column names: integers as int, other numbers as float, and all other cells
and the name of the table as text. Blank cells are omitted.
"""

import csv
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

import pandas as pd

from flsim.base.errors import InputError
from flsim.results.store import RunResults

Cell = int | float | str
# The question of Random Sampling and Beam Search: |R|, the number of known words of a canary, and of all words.
ROW_OF_QUESTION = ("references", "prefix", "length")
# Column of the papers -> our column, and its type. All other columns, except `table` and `data`, describe the training.
RESULTS = {
    "canaries": ("published_canaries", "Int64"),
    **{name: (f"published_{name}", "Int64") for name in ROW_OF_QUESTION},
    "rs": ("published_rs", "Int64"),
    "rs_lowest": ("published_rs_lowest", "string"),
    "bs": ("published_bs", "Int64"),
    "bs_lowest": ("published_bs_lowest", "string"),
    "extracted": ("published_extracted", "Float64"),
    "mean_exposure": ("published_exposure", "Float64"),
    "accuracy": ("published_accuracy", "Float64"),
    "perplexity": ("published_perplexity", "Float64"),
    "test_loss": ("published_test_loss", "Float64"),
    "epsilon_paper": ("published_epsilon", "Float64"),
    "delta": ("published_delta", "Float64"),
    "epsilon": ("published_record_epsilon", "Float64"),
}
PREFIX = "published_"
COUNTED_OF = ("rs", "bs", "canaries")  # memorized canaries, and number of canaries
PUBLISHED = {
    "published_table": "string",
    "published_data": "string",
    "published_setting": "string",
    **dict(RESULTS.values()),
}
# A canary that ranks first among 20,000 references does not necessarily rank first among 2,000,000, and a shorter
# continuation ranks first more often. Therefore shares are compared in size only if they answer the same question.
# columns in addition to those of every table
ASKED = {name: "Int64" for name in ROW_OF_QUESTION if name != "references"}
WORDS = {
    "references": "|R| is {} here and {} in the paper",
    "prefix": "the length of the known prefix is {} here and {} in the paper",
    "length": "the length of canaries is {} here and {} in the paper",
}


def published_rows(file: str, table: str) -> list[dict[str, object]]:
    """Return the rows of a table, e.g. ``"1"`` of ``"thakkar2020.csv"``; InputError without this file or table."""
    files = _files()
    if file not in files:
        raise InputError(f"{file!s:.80}: there is no such file of published numbers; choose one of {', '.join(files)}")
    rows = [dict(row) for row in files[file] if row["table"] == str(table)]
    if not rows:
        tables = ", ".join(dict.fromkeys(str(row["table"]) for row in files[file]))
        raise InputError(f"{file}: there is no table {table}; choose one of {tables}")
    return rows


def with_question(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a published row with the columns of `ROW_OF_QUESTION`, which old sweeps did not store."""
    for rows in _files().values():
        for known in rows:
            if dict(row) == {name: cell for name, cell in known.items() if name not in ROW_OF_QUESTION}:
                return dict(known)
    return dict(row)


@cache
def _files() -> dict[str, list[dict[str, object]]]:
    """Return the rows of each file of experiments/, without blank cells."""
    paths = [path for path in resources.files("experiments").iterdir() if path.name.endswith(".csv")]
    return {
        path.name: [
            {name: cell if name == "table" else _parsed(cell) for name, cell in row.items() if cell != ""}
            for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines())
        ]
        for path in sorted(paths, key=lambda path: path.name)
    }


def matching(rows: Sequence[Mapping[str, object]], keys: Mapping[str, object]) -> dict[str, object] | None:
    """Return the row whose cells equal the keys (``""``: blank), by value, without case; InputError if several do."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for name in keys:
        if name not in columns:
            raise InputError(f"{name}: not a column of the published table; choose one of {', '.join(columns)}")
    matches = [row for row in rows if all(_comparable(row.get(name, "")) == _comparable(keys[name]) for name in keys)]
    if len(matches) > 1:
        names = ", ".join(f"{name} {value}" for name, value in keys.items())
        raise InputError(f"{len(matches)} rows of the published table have {names}; use more of {', '.join(columns)}")
    return dict(matches[0]) if matches else None


def _parsed(cell: str) -> Cell:
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            pass
    return cell


def _comparable(value: object) -> Cell:
    parsed = _parsed(str(value))
    return parsed.casefold() if isinstance(parsed, str) else parsed


def cells_of(row: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the columns of `PUBLISHED` for a row of `published_rows`; empty if there is no row."""
    if not row:
        return {}
    trained = {name: row[name] for name in row if name not in RESULTS or name == "epsilon"}
    table, data = trained.pop("table", ""), trained.pop("data", None)
    words = [value if isinstance(value, str) else f"{name} {value:g}" for name, value in trained.items()]
    cells = {ours: row[name] for name, (ours, _) in RESULTS.items() if name in row}
    return {"published_table": table, "published_data": data, "published_setting": ", ".join(words), **cells}


def asked(run: RunResults, published: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the columns of `ASKED` for a run with a published row of counts; empty for other runs."""
    if not published or not {*ROW_OF_QUESTION} & {*published}:
        return {}
    return {"prefix": run.prefix, "length": run.length}


def is_alike(table: pd.DataFrame) -> "pd.Series[bool]":
    """Return whether each row of a table answers the question of its published row; False if a part is unknown."""
    alike = pd.Series(data=True, index=table.index)
    for name in ROW_OF_QUESTION:
        alike &= (_column(table, name) == _column(table, PREFIX + name)).fillna(value=False).astype(bool)
    return alike


def differences(table: pd.DataFrame) -> str:
    """Return how the questions of rows and of their published rows differ: ``"|R| is 20 here and 30 in the paper"``."""
    parts = []
    for name, words in WORDS.items():
        ours, published = _column(table, name), _column(table, PREFIX + name)
        differ = ~(ours == published).fillna(value=False).astype(bool)
        if differ.any():
            parts.append(words.format(_listed(ours[differ]), _listed(published[differ])))
    return ", ".join(parts)


def _column(table: pd.DataFrame, name: str) -> "pd.Series[Any]":
    return table[name].astype("Int64") if name in table else pd.Series(pd.NA, table.index, "Int64")


def _listed(values: "pd.Series[Any]") -> str:
    texts = ["unknown" if pd.isna(value) else f"{value:,}" for value in values]
    return " or ".join(dict.fromkeys(texts))
