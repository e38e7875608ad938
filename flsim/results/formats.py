"""Tables as text and files: Markdown, LaTeX, CSV and Parquet, whatever they are about."""

import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from flsim.files import new_file

LATEX_HEADINGS = {
    "Lowest": r"Lowest $(p_u, p_e)$",
    "Bits": "Exposure (bits)",
    "Rec. eps.": r"Record-level $\varepsilon$",
    "CI_s": r"$\pm$ (seeds)",
    "CI_c": r"$\pm$ (canaries)",
}
LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
}


def note(text: str, width: int = 80) -> str:
    """A sentence below a table: lines of at most so many characters, but for words that are longer, such as paths."""
    return textwrap.fill(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False) + "\n"


@dataclass(frozen=True)
class Column:
    """A column that people read.

    Attributes:
        heading: its name.
        cells: a text per row; empty where there is nothing to say.
        is_number: to be aligned at the right.
    """

    heading: str
    cells: list[str]
    is_number: bool = True


def text_of(values: "pd.Series[Any]") -> list[str]:
    """Cells of values as they are; empty where one is missing."""
    return ["" if pd.isna(value) else str(value) for value in values]


def formatted(values: "pd.Series[Any]", template: str, scale: float = 1) -> list[str]:
    """Cells of numbers, in a format, times `scale`; empty where one is missing."""
    return ["" if pd.isna(value) else template.format(value * scale) for value in values]


def to_csv(table: pd.DataFrame) -> str:
    """All columns under their own names; numbers in full, accuracy as a fraction, blank where unknown."""
    return table.to_csv(index=False, lineterminator="\n")


def from_csv(text: str, types: Mapping[str, str]) -> pd.DataFrame:
    """The table that `to_csv` wrote, exactly; `types` has pandas' name of each column's type."""
    # Numbers are converted afterwards: pandas' own parser may miss the last bit.
    cells = pd.read_csv(io.StringIO(text), dtype="string", keep_default_na=False, na_values=[""])
    return cells.astype({name: types[name] for name in cells.columns})


def write_parquet(table: pd.DataFrame, path: Path) -> None:
    """All columns, with their types; read it with `pandas.read_parquet`."""
    with new_file(path) as partial:
        table.to_parquet(partial, index=False)


def markdown(columns: Sequence[Column], width: int = 80) -> str:
    """Columns aligned; cells go without padding where only that fits `width` characters."""
    escaped = [[re.sub(r"([\\|*<`\[])", r"\\\1", cell) for cell in column.cells] for column in columns]
    # A rule takes a hyphen at least, and a colon where a column is aligned at the right.
    widths = [max(map(len, ["-:", column.heading, *cells])) for column, cells in zip(columns, escaped, strict=True)]
    tight = sum(widths) + len(widths) + 1
    pad = "" if tight <= width < tight + 2 * len(widths) else " "

    def line(cells: Sequence[str]) -> str:
        aligned = [
            cell.rjust(size) if column.is_number else cell.ljust(size)
            for cell, size, column in zip(cells, widths, columns, strict=True)
        ]
        return "|" + "|".join(f"{pad}{cell}{pad}" for cell in aligned) + "|\n"

    rule = [
        "-" * (size - column.is_number) + ":" * column.is_number for size, column in zip(widths, columns, strict=True)
    ]
    lines = [line([column.heading for column in columns]), line(rule), *map(line, zip(*escaped, strict=True))]
    return "".join(lines)


def latex(columns: Sequence[Column]) -> str:
    """Columns as a tabular, ready to paste; it needs the package booktabs."""
    alignment = "".join("r" if column.is_number else "l" for column in columns)
    body = [
        " & ".join(map(_latex, cells)) + r" \\" for cells in zip(*(column.cells for column in columns), strict=True)
    ]
    lines = [
        r"% needs \usepackage{booktabs}",
        rf"\begin{{tabular}}{{{alignment}}}",
        r"\toprule",
        " & ".join(LATEX_HEADINGS.get(column.heading, _latex(column.heading)) for column in columns) + r" \\",
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _latex(text: str) -> str:
    """Text that LaTeX prints as it stands, batch sizes as the paper's mathematics."""
    escaped = "".join(LATEX.get(character, character) for character in text)
    return re.sub(r"\bb\\_([ur]) = (\d+)", r"$b_\1 = \2$", escaped)
