"""Numbers and tables of a plan as short text. A class whose fields are `cell`s is a row of a table, or a table."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from flsim.show.table import Column, markdown

Text = Callable[[Any], str]


@dataclass(frozen=True)
class Cell:
    """The presentation of a field in tables: a heading or question, the text of a value, and a note below the table."""

    heading: str
    text: Text = str
    note: str = ""
    is_number: bool = True


def cell(heading: str, text: Text = str, note: str = "", is_number: bool = True) -> Any:
    """Return a field of a dataclass that is a cell of tables; see `Cell`."""
    return field(metadata={"cell": Cell(heading, text, note, is_number)})


def columns(rows: Sequence[Any], names: str = "", head: str = "") -> list[Column]:
    """Return the columns of rows of one class that are not empty.

    Args:
        rows: at least one row.
        names: fields to show, divided by spaces; all if empty.
        head: text before the first heading.
    """
    filled = list[Column]()
    for item in fields(rows[0]):
        values = [getattr(row, item.name) for row in rows]
        if "cell" in item.metadata and (not names or item.name in names.split()):
            form: Cell = item.metadata["cell"]
            cells = ["" if value in (None, "", {}) else form.text(value) for value in values]
            if any(cells):
                heading = head * (not filled) + form.heading
                filled.append(Column(heading, cells, form.is_number, note=form.note))
    return filled


def table(rows: Sequence[Any], more: str = "") -> str:
    """Return the table of rows of one class, then `more`."""
    label, *others = columns(rows)
    return markdown([label], [[column] for column in others], more)


def answers(*parts: Any) -> str:
    """Return a table of question, value and unit with the fields of some objects, whose texts end with a unit."""
    answered = [(item.metadata["cell"], getattr(part, item.name)) for part in parts for item in fields(part)]
    texts = [form.text(value).rpartition(" ") for form, value in answered]
    cells = [Column("Value", [text[0] for text in texts]), Column("Unit", [text[2] for text in texts], is_number=False)]
    return markdown([Column("Question", [form.heading for form, _ in answered], is_number=False)], [cells])


def with_unit(template: str, unit: str, missing: str = "none") -> Text:
    """Return a function that formats numbers of a unit; `missing` stands for None."""
    return lambda value: f"{missing if value is None else template.format(value)} {unit}"


def duration(seconds: float) -> str:
    """Return an approximate duration: 0.042 s, 40 s, 12 min, 3.5 h, 20 days."""
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    for unit, size_, most in (("s", 1.0, 90), ("min", 60.0, 90), ("h", 3600.0, 48)):
        amount = seconds / size_
        if amount < most:
            return f"{amount:.1f} {unit}" if amount < 9.95 and unit == "h" else f"{amount:.0f} {unit}"
    return f"{seconds / 86_400:,.1f} days" if seconds < 10 * 86_400 else f"{seconds / 86_400:,.0f} days"


def size(amount: float) -> str:
    """Return bytes in powers of ten: 4.1 GB."""
    return f"{amount:.0f} B" if amount < 1e3 else f"{_three(amount)}B"


def number(amount: float) -> str:
    """Return a short number: 11,896 or 92.9 M."""
    return f"{amount:,.0f}" if amount < 1e6 else _three(amount).rstrip()


def share(fraction: float) -> str:
    """Return a share in percent, with two digits."""
    return f"{100 * fraction:.2g}%" if fraction < 0.995 else f"{100 * fraction:,.0f}%"


def three_digits(value: float) -> str:
    """Return a number with three digits, or with all digits of a larger whole number."""
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"


def _three(amount: float) -> str:
    power = min(4, int(math.log10(max(amount, 1) * 1.0005) // 3))
    value = amount / 1000**power
    return f"{value:.{0 if value >= 99.95 else 1}f} {['', 'k', 'M', 'G', 'T'][power]}"
