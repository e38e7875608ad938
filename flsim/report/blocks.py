"""Blocks of the sections of a report, which template.html lays out, and the text of numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd
from markupsafe import Markup

from flsim.show.figure import swatch
from flsim.show.table import Column, Field, table_of
from flsim.show.table import Table as ShownTable


@dataclass(frozen=True)
class Note:
    """A paragraph in smaller type."""

    text: str


@dataclass(frozen=True)
class Facts:
    """A list of names, each with a description."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """A table whose first column names its rows."""

    caption: str
    columns: Sequence[Column]
    notes: Sequence[str] = ()

    @property
    def rows(self) -> list[tuple[str, ...]]:
        return list(zip(*(column.cells for column in self.columns), strict=True))


@dataclass(frozen=True)
class Figure:
    """Panels of one width, side by side if they fit."""

    caption: str
    panels: Sequence[tuple[str, Markup]]
    legend: Sequence[tuple[int, str]] = ()

    @property
    def swatches(self) -> list[tuple[Markup, str]]:
        return [(swatch(style), text) for style, text in self.legend]


@dataclass(frozen=True)
class Fold:
    """Folded blocks, which a click opens; a printed report shows them."""

    title: str
    blocks: "Sequence[Block]"
    is_open: bool = False


Block = Note | Facts | Table | Figure | Fold


@dataclass(frozen=True)
class Section:
    """A part of the report with a heading."""

    id: str
    title: str
    blocks: list[Block] = field(default_factory=list)


def shown(table: ShownTable, caption: str, most: int = 8) -> list[Block]:
    """Return a table of the command line with all columns side by side; folded if it has more than `most` rows."""
    columns = [*table.labels, *(column for unit in table.units for column in unit)]
    below, *others = (" ".join(part.split()) for part in table.below.split("\n\n"))
    explained = " ".join(filter(None, dict.fromkeys([*(column.note for column in columns), below])))
    block = Table(caption, columns, list(filter(None, [explained, *others])))
    return [block] if len(block.rows) <= most else [Fold(f"{caption}: {len(block.rows)} rows", [block])]


def listed(
    caption: str, rows: Sequence[Mapping[Any, Any]], fields: Sequence[Field], *notes: str, most: int = 8
) -> list[Block]:
    """Return rows as a table of the fields that some row has, see `shown`; no block without rows."""
    return shown(table_of(pd.DataFrame(rows, dtype=object), fields, [], notes), caption, most) if rows else []


def folded(figure: Figure, title: str, most: int) -> list[Block]:
    """Return a figure with its first panels shown, and all others folded."""
    if not figure.panels:
        return []
    rest = replace(figure, caption=f"{figure.caption} (continued)", panels=figure.panels[most:])
    first = replace(figure, panels=figure.panels[:most])
    return [first, *([Fold(f"{title}: {len(rest.panels)} more", [rest])] if rest.panels else [])]


def number(value: Any, template: str = "{:.1f}") -> str:
    """Return a number as text with a real minus sign; a dash if it is missing."""
    if value is None or pd.isna(value):
        return "–"
    return template.format(value).replace("-", "\N{MINUS SIGN}")


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, such as "1 run" or "2 runs"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def duration(seconds: float | None) -> str:
    """Return wall-clock time in a suitable unit; a dash if it is not known."""
    if seconds is None:
        return "–"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
