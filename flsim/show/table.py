"""A frame with the columns that people read of it, in every format: the one renderer of tables."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from flsim.show import formats, layout
from flsim.show.layout import Column, Columns


@dataclass(frozen=True, eq=False)
class Table:
    """A table.

    Attributes:
        frame: all numbers, for files.
        labels: columns that name a row, for people.
        units: columns that stay together.
        below: lines below the table.
        remarks: those of them that LaTeX has as comments.
    """

    frame: pd.DataFrame
    labels: Columns
    units: Sequence[Columns]
    below: str = ""
    remarks: str = ""

    def markdown(self, width: int = layout.TERMINAL) -> str:
        """Return as many tables as `width` characters take, and what their columns mean."""
        return layout.markdown(self.labels, self.units, self.below, width)

    def latex(self) -> str:
        """Return the same columns as tabulars, ready to paste; they need the package booktabs."""
        return layout.latex(self.labels, self.units, self.remarks)

    def csv(self) -> str:
        """Return all columns of the frame under their own names; numbers in full, blank if unknown."""
        return formats.to_csv(self.frame)

    def text(self, format: str) -> str:
        """Return the table as "md", "latex" or "csv"."""
        return {"md": self.markdown, "latex": self.latex, "csv": self.csv}[format]()


@dataclass(frozen=True)
class Field:
    """A column of a frame as people read it.

    Attributes:
        heading: its heading.
        name: the column of the frame.
        template: format of a number; empty for text.
        scale: factor of displayed numbers.
        ends: columns of the ends of its 95% interval, which stands beside it; empty without one.
        note: a sentence below the table.
        is_late: whether the unit that it begins comes last if there are several tables.
    """

    heading: str
    name: str
    template: str = ""
    scale: float = 1
    ends: tuple[str, ...] = ()
    note: str = ""
    is_late: bool = False


def columns_of(frame: pd.DataFrame, fields: Iterable[Field]) -> list[Column]:
    """Return the fields that the frame has a value of, as columns."""
    columns = []
    for field in fields:
        if field.name not in frame or (len(frame) and frame[field.name].isna().all()):
            continue
        values = frame[field.name]
        cells = formats.formatted(values, field.template, field.scale) if field.template else formats.text_of(values)
        columns.append(Column(field.heading, cells, bool(field.template), is_late=field.is_late, note=field.note))
        if field.ends:
            low, high = (formats.formatted(frame[end], field.template, field.scale) for end in field.ends)
            to = " to " if "+" in field.template else "-"
            cells = [f"{one}{to}{other}" if one else "" for one, other in zip(low, high, strict=True)]
            columns.append(Column("95%", cells, is_late=field.is_late))
    return columns


def table_of(
    frame: pd.DataFrame, labels: Iterable[Field], units: Iterable[Iterable[Field]], notes: Iterable[str] = ()
) -> Table:
    """Return a table of fields, those of a unit side by side, with sentences below."""
    columns = [columns_of(frame, unit) for unit in units]
    return Table(frame, columns_of(frame, labels), list(filter(None, columns)), "".join(map(formats.note, notes)))


def json_rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return one mapping per row; None stands for values that are unknown or not finite."""
    return [{str(name): _plain(value) for name, value in row.items()} for row in table.to_dict("records")]


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(one) for one in value]
    if value is None or pd.isna(value):
        return None
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
