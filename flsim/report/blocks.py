"""Blocks of the sections of a report, which template.html lays out, and the text of numbers."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from markupsafe import Markup

from flsim.show.figure import swatch

Cell = str | Markup
NUMBER = re.compile(r"[−+]?\d")


@dataclass(frozen=True)
class Note:
    """A paragraph in smaller type."""

    text: Cell


@dataclass(frozen=True)
class Facts:
    """A list of names, each with a description."""

    pairs: Sequence[tuple[str, Cell]]


@dataclass(frozen=True)
class Table:
    """A table whose first column names its rows."""

    caption: Cell
    headings: Sequence[Cell]
    rows: Sequence[Sequence[Cell]]
    note: Cell = ""

    @property
    def is_number(self) -> list[bool]:
        """Return for each column whether it has numbers, which are right-aligned."""
        columns = list(zip(*self.rows, strict=True)) or [()] * len(self.headings)
        filled = [[cell for cell in column if cell != "–"] for column in columns]
        return [place > 0 and all(map(NUMBER.match, cells)) for place, cells in enumerate(filled)]


@dataclass(frozen=True)
class Figure:
    """Panels of one width, side by side if they fit."""

    caption: Cell
    panels: Sequence[tuple[Cell, Markup]]
    legend: Sequence[tuple[int, str]] = ()

    @property
    def swatches(self) -> list[tuple[Markup, str]]:
        return [(swatch(style), text) for style, text in self.legend]


@dataclass(frozen=True)
class Fold:
    """Folded blocks, which a click opens; a printed report shows them."""

    title: Cell
    blocks: "Sequence[Block]"
    is_open: bool = False


Block = Note | Facts | Table | Figure | Fold


@dataclass(frozen=True)
class Section:
    """A part of the report with a heading."""

    id: str
    title: str
    blocks: list[Block] = field(default_factory=list)


def folded(block: Table | Figure, title: str, most: int = 8) -> list[Block]:
    """Return a table or a figure with its first rows or panels shown, and all others folded."""
    if isinstance(block, Table):
        return [block] if len(block.rows) <= most else [Fold(f"{title}: {len(block.rows)}", [block])]
    if not block.panels:
        return []
    rest = Figure(f"{block.caption} (continued)", block.panels[most:], block.legend)
    first = Figure(block.caption, block.panels[:most], block.legend)
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
