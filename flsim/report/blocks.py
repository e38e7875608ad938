"""Blocks that a report's sections consist of; template.html lays out each kind."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pandas as pd
from markupsafe import Markup

from flsim.report.svg import swatch

Cell = str | Markup


@dataclass(frozen=True)
class Prose:
    """A paragraph, or a note in smaller type."""

    kind: ClassVar = "prose"
    text: Cell
    is_note: bool = False


@dataclass(frozen=True)
class Facts:
    """A list of names, each with a description."""

    kind: ClassVar = "facts"
    pairs: Sequence[tuple[str, Cell]]


@dataclass(frozen=True)
class Heading:
    """The heading of a column.

    Attributes:
        text: a few words.
        is_number: whether the column's cells are aligned at the right.
    """

    text: Cell
    is_number: bool = True


def left(text: Cell) -> Heading:
    """Return the heading of a column of words."""
    return Heading(text, is_number=False)


@dataclass(frozen=True)
class Table:
    """A table whose first column names its rows.

    Attributes:
        caption: what the table shows.
        headings: headings of all columns.
        rows: the cells of each row.
        note: text below the table.
    """

    kind: ClassVar = "table"
    caption: Cell
    headings: Sequence[Heading]
    rows: Sequence[Sequence[Cell]]
    note: Cell = ""


@dataclass(frozen=True)
class Group:
    """Panels that are read together, each below its title."""

    panels: Sequence[tuple[Cell, Markup]]
    title: Cell = ""


@dataclass(frozen=True)
class Figure:
    """Small panels, side by side as far as they fit.

    Attributes:
        caption: what the panels show.
        groups: groups of panels.
        legend: style and meaning of each kind of line.
        is_small: whether two panels fit side by side on a phone.
    """

    kind: ClassVar = "figure"
    caption: Cell
    groups: Sequence[Group]
    legend: Sequence[tuple[int, str]] = ()
    is_small: bool = False

    @property
    def swatches(self) -> list[tuple[Markup, str]]:
        return [(swatch(style), text) for style, text in self.legend]


@dataclass(frozen=True)
class Dots:
    """A figure with a row for each value: its name, a drawing on a common scale, and the value in words.

    Attributes:
        caption: what the figure shows.
        rows: name, drawing and words of each row.
        scale: the axis below the drawings.
    """

    kind: ClassVar = "dots"
    caption: Cell
    rows: Sequence[tuple[Cell, Markup, Cell]]
    scale: Markup


@dataclass(frozen=True)
class Fold:
    """Blocks behind a line that opens them; a printed report shows them."""

    kind: ClassVar = "fold"
    title: Cell
    blocks: "Sequence[Block]"
    is_open: bool = False


Block = Prose | Facts | Table | Figure | Dots | Fold


@dataclass(frozen=True)
class Section:
    """A part of the report with its own heading."""

    id: str
    title: str
    blocks: list[Block] = field(default_factory=list)


def number(value: Any, template: str = "{:.1f}", missing: str = "–") -> str:
    """Return a number as text with a real minus sign; a dash if it is missing."""
    if value is None or pd.isna(value):
        return missing
    return template.format(value).replace("-", "\N{MINUS SIGN}")


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, such as "1 run" or "2 runs"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def listed(words: Sequence[str]) -> str:
    """Return words separated by commas, with "and" before the last."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def duration(seconds: float | None) -> str:
    """Return wall-clock time in the unit that suits it; a dash if it is not known."""
    if seconds is None:
        return "–"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
