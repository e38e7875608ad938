"""Numbers that were published, row by row, to hold runs against: the CSV files of experiments/.

A row has its table's cells under the file's column names: whole numbers as int, others as float, everything else and
the table's own name as text. Cells that are blank in the file are left out.
"""

import csv
from collections.abc import Mapping, Sequence
from importlib import resources

from flsim.base.errors import InputError

Cell = int | float | str


def published_rows(file: str, table: str) -> list[dict[str, object]]:
    """The rows of a published table, in its order.

    Args:
        file: of experiments/, e.g. ``"thakkar2020.csv"``.
        table: its name in the column `table`, e.g. ``"1"``.

    Raises:
        InputError: no such file, or no such table in it.
    """
    folder = resources.files("experiments")
    there = sorted(path.name for path in folder.iterdir() if path.name.endswith(".csv"))
    if file not in there:
        raise InputError(f"{file!s:.80}: no file of published numbers; choose of {', '.join(there)}")
    rows = list(csv.DictReader((folder / file).read_text(encoding="utf-8").splitlines()))
    found = [row for row in rows if row["table"] == str(table)]
    if not found:
        tables = ", ".join(dict.fromkeys(row["table"] for row in rows))
        raise InputError(f"{file}: has no table {table}; choose of {tables}")
    return [
        {name: cell if name == "table" else _parsed(cell) for name, cell in row.items() if cell != ""} for row in found
    ]


def matching(rows: Sequence[Mapping[str, object]], keys: Mapping[str, object]) -> dict[str, object] | None:
    """The row whose cells equal the keys: numbers by value, texts but for case, ``""`` a blank cell; None without one.

    Raises:
        InputError: a key is no column of these rows, or several rows match.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for name in keys:
        if name not in columns:
            raise InputError(f"{name}: no column of the published table; choose of {', '.join(columns)}")
    found = [row for row in rows if all(_comparable(row.get(name, "")) == _comparable(keys[name]) for name in keys)]
    if len(found) > 1:
        said = ", ".join(f"{name} {value}" for name, value in keys.items())
        raise InputError(f"{len(found)} rows of the published table have {said}; name more of {', '.join(columns)}")
    return dict(found[0]) if found else None


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
