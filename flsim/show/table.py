"""The renderer of tables: a frame with its displayed columns, as text, LaTeX, CSV and Parquet.

A table has labels, which name a row, and units, which are columns that stay together. If all fit, there is one table.
Otherwise, extra columns are omitted if the rest fits. Otherwise, there are several tables with the same labels, and a
unit goes to the first table with space.
"""

import math
import re
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from flsim.base.files import named_file

TERMINAL = 80  # characters
PAGE = 92  # in the unit of `_printed`: measured, 4.5 to 5.1 points each at \small, for 6.5 inches of text
LATEX_HEADINGS = {
    "Eps.": r"$\varepsilon$",
    "Rec. eps.": r"Record-level $\varepsilon$",
    "CI_s": r"CI$_s$",
    "CI_c": r"CI$_c$",
}
LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "`": r"\textasciigrave{}",
    # At the beginning of a row, these would become arguments of the previous end of a row.
    "[": "{[}",
    "*": "{*}",
}


def note(text: str, width: int = 80) -> str:
    """Return a sentence below a table, in lines of at most `width` characters without broken words such as paths."""
    return textwrap.fill(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False) + "\n"


def text_of(values: "pd.Series[Any]") -> list[str]:
    """Return values as cells; a missing value is empty."""
    return ["" if pd.isna(value) else str(value) for value in values]


def formatted(values: "pd.Series[Any]", template: str, scale: float = 1) -> list[str]:
    """Return numbers times `scale` as cells, in a format; a missing number is empty."""
    return ["" if pd.isna(value) else template.format(value * scale) for value in values]


def to_csv(table: pd.DataFrame) -> str:
    """Return all columns with their names; numbers with all digits, accuracy as a fraction, blank if unknown."""
    return table.to_csv(index=False, lineterminator="\n")


def write_parquet(table: pd.DataFrame, path: Path) -> None:
    """Write all columns with their types; `pandas.read_parquet` reads the file."""
    with named_file(path) as partial:
        table.to_parquet(partial, index=False)


@dataclass(frozen=True)
class Column:
    """A displayed column of a table."""

    heading: str  # its name
    cells: list[str]  # a text per row; can be empty
    is_number: bool = True  # whether it is right-aligned
    is_extra: bool = False  # whether it is omitted if all other columns then fit in one table
    is_late: bool = False  # whether its unit is last if there are several tables
    note: str = ""  # a sentence below the table that explains the column


Columns = Sequence[Column]


@dataclass(frozen=True, eq=False)
class Table:
    """A table."""

    frame: pd.DataFrame  # all numbers, for files
    labels: Columns  # displayed columns that name a row
    units: Sequence[Columns]  # columns that stay together
    below: str = ""  # lines below the table
    remarks: str = ""  # the lines that are comments in LaTeX

    def markdown(self, width: int = TERMINAL) -> str:
        """Return tables of at most `width` characters, and the explanations of their columns."""
        return markdown(self.labels, self.units, self.below, width)

    def latex(self) -> str:
        """Return the same columns as LaTeX tabulars, which need the package booktabs."""
        return latex(self.labels, self.units, self.remarks)

    def csv(self) -> str:
        """Return all columns of the frame with their names; numbers with all digits, blank if unknown."""
        return to_csv(self.frame)

    def text(self, format: str) -> str:
        """Return the table as "md", "latex" or "csv"."""
        return {"md": self.markdown, "latex": self.latex, "csv": self.csv}[format]()


@dataclass(frozen=True)
class Field:
    """A displayed column of a frame."""

    heading: str  # its heading
    name: str  # the column of the frame
    template: str = ""  # format of a number; empty for text
    scale: float = 1  # factor of displayed numbers
    # columns of the ends of its 95% interval, which is shown next to it; empty without an interval
    ends: tuple[str, ...] = ()
    note: str = ""  # a sentence below the table
    is_late: bool = False  # whether its unit is last if there are several tables
    is_extra: bool = False  # whether it is omitted if all other columns then fit in one table


def columns_of(frame: pd.DataFrame, fields: Iterable[Field]) -> list[Column]:
    """Return the fields that the frame has a value of, as columns."""
    columns = []
    for field in fields:
        if field.name not in frame or (len(frame) and frame[field.name].isna().all()):
            continue
        values = frame[field.name]
        cells = formatted(values, field.template, field.scale) if field.template else text_of(values)
        columns.append(Column(field.heading, cells, bool(field.template), field.is_extra, field.is_late, field.note))
        if field.ends:
            low, high = (formatted(frame[end], field.template, field.scale) for end in field.ends)
            to = " to " if "+" in field.template else "-"
            cells = [f"{one}{to}{other}" if one else "" for one, other in zip(low, high, strict=True)]
            columns.append(Column("95%", cells, is_late=field.is_late))
    return columns


def table_of(
    frame: pd.DataFrame, labels: Iterable[Field], units: Iterable[Iterable[Field]], notes: Iterable[str] = ()
) -> Table:
    """Return a table of fields, with fields of a unit side by side, and sentences below."""
    columns = [columns_of(frame, unit) for unit in units]
    return Table(frame, columns_of(frame, labels), list(filter(None, columns)), "".join(map(note, notes)))


def json_rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return one mapping per row; None replaces values that are unknown or not finite."""
    return [{str(name): _plain(value) for name, value in row.items()} for row in table.to_dict("records")]


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(one) for one in value]
    if value is None or pd.isna(value):
        return None
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def markdown(labels: Columns, units: Sequence[Columns], more: str = "", width: int = TERMINAL) -> str:
    """Return aligned tables, each at most `width` characters wide, then the notes of all columns, then `more`.

    Tables after the first omit rows without a value. Cells have no padding if the table only fits without padding. If
    labels are too long for a unit, rows are numbered, and a list above has the labels.
    """
    words, tables = _fitting(labels, units, _tight, width)
    text = ""
    for row, (words_of_row, *others) in enumerate(zip(*(label.cells for label in words), strict=True), 1):
        text += note(_escaped(f"{row}. {words_of_row}" + "".join(f" ({other})" for other in others if other)), width)
    is_tight = any(_tight(table) <= width < _tight(table) + 2 * len(table) for table in tables)
    pad, named = "" if is_tight else " ", len(labels) - len(words) + bool(words)
    parts = [text] * bool(text) + [_markdown(table, pad, named * bool(place)) for place, table in enumerate(tables)]
    return "\n".join([*parts, _notes(tables, units, width) + more])


def latex(labels: Columns, units: Sequence[Columns], more: str = "") -> str:
    """Return LaTeX tabulars for booktabs, with notes as comments; long labels are in a table, and rows are numbered."""
    words, tables = _fitting(labels, units, _printed, PAGE)
    comments = ["needs \\usepackage{booktabs}", *(_notes(tables, units, TERMINAL - 2) + more).splitlines()]
    tables = [[tables[0][0], *words]] * bool(words) + tables
    return "".join(f"% {line}".rstrip() + "\n" for line in comments) + "\n\\bigskip\\noindent\n".join(
        map(_tabular, tables)
    )


def _notes(tables: Sequence[Columns], units: Sequence[Columns], width: int) -> str:
    shown = [column for table in tables for column in table]
    notes = list(dict.fromkeys(column.note for column in shown if column.note))
    omitted = dict.fromkeys(column.heading for unit in units for column in unit if column not in shown)
    if omitted:
        names = ", ".join(omitted)
        notes.append(f"Omitted for lack of space: {names}; see `flsim table` or `flsim canaries` with --format csv.")
    return "".join(note(text, width) for text in notes)


def _fitting(
    labels: Columns, units: Sequence[Columns], size: Callable[[Columns], int], width: int
) -> tuple[Columns, list[list[Column]]]:
    """Return the labels of row numbers, and the tables."""
    tables = _arranged(labels, units, size, width)
    words = [label for label in labels if not label.is_number]
    if not words or max(map(size, tables)) <= width:
        return [], tables
    numbers = Column("Row", [str(row) for row in range(1, len(words[0].cells) + 1)])
    return words, _arranged([numbers, *(label for label in labels if label.is_number)], units, size, width)


def _arranged(
    labels: Columns, units: Sequence[Columns], size: Callable[[Columns], int], width: int
) -> list[list[Column]]:
    whole = [*labels, *(column for unit in units for column in unit)]
    for columns in (whole, [column for column in whole if not column.is_extra]):
        if size(columns) <= width:
            return [columns]
    tables: list[list[Column]] = []
    for unit in sorted(units, key=lambda unit: unit[0].is_late):
        into = next((table for table in tables if size([*table, *unit]) <= width), None)
        if into is None:
            tables.append([*labels, *unit])
        else:
            into += unit
    return tables


def _escaped(text: str) -> str:
    """Return text that Markdown prints literally in one line; a line feed of a phrase becomes a space."""
    return re.sub(r"([\\|*`\[]|<(?=\S))", r"\\\1", re.sub(r"[\r\n]+", " ", text))


def _widths(columns: Columns) -> list[int]:
    # A rule needs at least a hyphen, and a colon if a column is right-aligned.
    return [max(map(len, ["-:", *map(_escaped, (column.heading, *column.cells))])) for column in columns]


def _tight(columns: Columns) -> int:
    """Return the number of characters of a line without padding."""
    return sum(_widths(columns)) + len(columns) + 1


def _printed(columns: Columns) -> int:
    """Return the approximate width of a printed tabular in characters, with two between columns."""
    headings = [
        re.sub(r"\\[a-z]+|[${}\\]", "", LATEX_HEADINGS.get(column.heading, column.heading)) for column in columns
    ]
    return sum(max(map(len, [heading, *column.cells])) + 2 for heading, column in zip(headings, columns, strict=True))


def _markdown(columns: Columns, pad: str, named: int = 0) -> str:
    """Return one table, without rows that are empty after `named` columns; `pad` is on both sides of every cell."""
    widths = _widths(columns)

    def line(cells: Sequence[str]) -> str:
        aligned = [
            cell.rjust(size) if column.is_number else cell.ljust(size)
            for cell, size, column in zip(cells, widths, columns, strict=True)
        ]
        return "|" + "|".join(f"{pad}{cell}{pad}" for cell in aligned) + "|\n"

    rule = [
        "-" * (size - column.is_number) + ":" * column.is_number for size, column in zip(widths, columns, strict=True)
    ]
    rows = zip(*(map(_escaped, column.cells) for column in columns), strict=True)
    shown = [line(row) for row in rows if any(row[named:])]
    return "".join([line([_escaped(column.heading) for column in columns]), line(rule), *shown])


def _tabular(columns: Columns) -> str:
    alignment = "".join("r" if column.is_number else "l" for column in columns)
    rows = zip(*(column.cells for column in columns), strict=True)
    headings = [LATEX_HEADINGS.get(column.heading, _latex(column.heading)) for column in columns]
    lines = [
        rf"\begin{{tabular}}{{{alignment}}}",
        r"\toprule",
        " & ".join(headings) + r" \\",
        r"\midrule",
        *(" & ".join(map(_latex, cells)) + r" \\" for cells in rows),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _latex(text: str) -> str:
    """Return text that LaTeX prints literally, with batch sizes as formulas of the paper."""
    escaped = "".join(LATEX.get(character) or _known(character) for character in text).replace("--", "-{}-")
    return re.sub(r"\bb\\_([ur]) ?= ?(\d+)", r"$b_\1 = \2$", escaped)


def _known(character: str) -> str:
    """Return a character that every LaTeX can print, or the number of another character, e.g. ``[U+6F22]``."""
    if character.isascii() or (character <= "ÿ" and unicodedata.decomposition(character)[:4].isalnum()):
        return character
    return f"{{[}}U+{ord(character):04X}]"
