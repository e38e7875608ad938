"""What a report's sections are made of; template.html says how each looks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pandas as pd
from markupsafe import Markup

from flsim.report.svg import swatch

Cell = str | Markup


@dataclass(frozen=True)
class Prose:
    """A paragraph."""

    kind: ClassVar = "prose"
    text: Cell
    is_note: bool = False


@dataclass(frozen=True)
class Facts:
    """Names and what is said of each."""

    kind: ClassVar = "facts"
    pairs: Sequence[tuple[str, Cell]]


@dataclass(frozen=True)
class Heading:
    """Of a column.

    Attributes:
        text: a few words.
        is_number: whether cells are aligned at the right.
    """

    text: Cell
    is_number: bool = True


def left(text: Cell) -> Heading:
    """Of a column of words."""
    return Heading(text, is_number=False)


@dataclass(frozen=True)
class Table:
    """A table whose rows begin with what they are about.

    Attributes:
        caption: what it shows.
        headings: of all columns.
        rows: a cell for each.
        note: below it.
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
    """Small panels, as many beside each other as fit.

    Attributes:
        caption: what they show.
        groups: of panels.
        legend: what each style of line is.
        is_small: whether panels are narrow enough for two on a phone.
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
class Fold:
    """Blocks behind a line that opens them; paper shows them."""

    kind: ClassVar = "fold"
    title: Cell
    blocks: "Sequence[Block]"
    is_open: bool = False


Block = Prose | Facts | Table | Figure | Fold


@dataclass(frozen=True)
class Section:
    """A part of the report with a heading of its own."""

    id: str
    title: str
    blocks: list[Block] = field(default_factory=list)


def number(value: Any, template: str = "{:.1f}", missing: str = "–") -> str:
    """A number as people read it, with a minus that is one; a dash where there is none."""
    if value is None or pd.isna(value):
        return missing
    return template.format(value).replace("-", "\N{MINUS SIGN}")


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def listed(words: Sequence[str]) -> str:
    """Words with commas, and an "and" before the last."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def duration(seconds: float | None) -> str:
    """Of the clock, in the unit that suits it."""
    if seconds is None:
        return "–"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
