"""A frame with the columns that people read of it, in every format: the one renderer of tables."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from flsim.show import formats, layout
from flsim.show.layout import Columns


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


def json_rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return one mapping per row; None stands for values that are unknown or not finite."""
    rows = table.astype(object).where(table.notna(), None).to_dict("records")
    return [
        {
            str(name): None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in row.items()
        }
        for row in rows
    ]
