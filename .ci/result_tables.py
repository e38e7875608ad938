"""Write the tables and commands of the results into README and docs/, from the files in experiments/results.

A page has a place for each between two comments:

    <!-- table: NAME -->              all columns of NAME.csv
    <!-- table: NAME: COLUMN, ... --> some columns
    <!-- table: NAME: COLUMN, ...; ROWS --> some columns of the rows whose first cell has the regular expression ROWS
    <!-- commands: NAME -->           the commands of section [NAME] in sources.toml, and its files
    <!-- end -->

experiments/README.md describes the files. Pages show numbers with the digits of the files.
"""

import csv
import os
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FRAMES = ROOT / "experiments" / "results"
REGION = re.compile(r"<!-- (table|commands): ([\w-]+)(?:: ([\w, ]+))?(?:; (.+?))? -->\n(.*?)<!-- end -->\n", re.DOTALL)
NUMBER = re.compile(r"[+-]?(\d[\d,]*(\.\d+)?|\.\d+)(e[+-]?\d+)?")
# Columns of an interval or a link, which are part of the cell of another column.
PARTS = re.compile(r".+_(low|high|error)|interval_over|page")


@dataclass(frozen=True)
class Value:
    """A value as the files state it, with its 95% interval: two ends or half its width; "" without one.

    Attributes:
        over: the unit that the interval is over.
    """

    text: str
    low: str = ""
    high: str = ""
    error: str = ""
    over: str = "seeds"

    def __neg__(self) -> "Value":
        return Value(_negative(self.text), _negative(self.high), _negative(self.low), self.error, self.over)

    def __str__(self) -> str:
        text = f"{int(self.text):,}" if re.fullmatch(r"\d{4,}", self.text) else self.text
        if self.error:
            return f"{text} ± {self.error}"
        ends = f"{self.low} to {self.high}" if self.low else ""
        unit = "" if self.over == "seeds" else f", over {self.over}"
        return f"{text} ({ends}{unit})" if text and ends else text or ends


def _negative(number: str) -> str:
    if not number or not float(number):
        return number
    return number.removeprefix("-") if number.startswith("-") else f"-{number}"


@cache
def sources() -> dict[str, Any]:
    """Return the experiments by name, with the headings of columns under "headings"."""
    return tomllib.loads((FRAMES / "sources.toml").read_text(encoding="utf-8"))


@cache
def rows_of(frame: str) -> list[dict[str, str]]:
    """Return the rows of a file, with texts as values."""
    with (FRAMES / f"{frame}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def value_of(row: dict[str, str], column: str) -> Value:
    """Return a value of a row; `=FRAME/ROW/COLUMN` is the value of another file, and `=-...` its negative.

    Raises:
        ValueError: not exactly one row of FRAME has ROW in its first column.
    """
    text = row[column]
    if reference := re.fullmatch(r"=(-?)([\w-]+)/(.+)/(\w+)", text):
        sign, frame, name, other = reference.groups()
        (found,) = (one for one in rows_of(frame) if next(iter(one.values())) == name)
        return -value_of(found, other) if sign else value_of(found, other)
    low, high, error = (row.get(f"{column}_{end}", "") for end in ("low", "high", "error"))
    return Value(text, low, high, error, row.get("interval_over") or "seeds")


def table(frame: str, columns: list[str], pattern: str, page: Path) -> str:
    """Return columns of the rows that match as a table in Markdown; without `columns` all.

    Columns of numbers are at the right. The first column links to the page that the row names.
    """
    rows = [row for row in rows_of(frame) if re.search(pattern, next(iter(row.values())))]
    headings = sources()["headings"]
    units, unit = {row.get("interval_over") or "seeds" for row in rows}, ""
    if len(units) == 1 and "seeds" not in units:  # the unit is then in the heading, not in each cell
        unit = f" (interval over {rows[0]['interval_over']})"
        rows = [{**row, "interval_over": ""} for row in rows]
    columns = columns or list(dict.fromkeys(re.sub("_(low|high|error)$", "", name) for name in rows[0]))
    columns = [name for name in columns if not PARTS.fullmatch(name)]
    cells = [[str(value_of({column: "", **row}, column)) for column in columns] for row in rows]
    for row, line in zip(rows, cells, strict=True):
        if row.get("page"):
            line[0] = f"[{line[0]}]({os.path.relpath(ROOT / 'docs' / row['page'], page.parent)})"
    is_number = [all(NUMBER.fullmatch(cell) for cell in column if cell) for column in zip(*cells, strict=True)]
    rule = ["---:" if number else "---" for number in is_number]
    with_interval = [column for column in columns if f"{column}_low" in rows[0]]
    names = [headings.get(name, name.replace("_", " ")) + (unit if name in with_interval else "") for name in columns]
    if columns[0] == "difference":  # differences of percentages are in percentage points
        names = [name.replace(", %", ", percentage points") for name in names]
    lines = [f"| {' | '.join(line)} |" for line in (names, *cells)]
    return "\n".join([lines[0], f"|{'|'.join(rule)}|", *lines[1:]]) + "\n"


def commands(name: str) -> str:
    """Return the commands and the files of an experiment as a block, below the reason why the tests do not run it."""
    source = sources()[name]
    files = " ".join(f"{frame}.csv" for frame in source["frames"])
    lines = f"{source['commands'].strip()}\n# numbers, in experiments/results: {files}"
    return f"<!-- not run: {source['not_run']} -->\n```sh\n{lines}\n```\n"


def written(page: Path, text: str) -> str:
    """Return the text of a page with its tables and commands as the files state them."""

    def region(found: re.Match[str]) -> str:
        kind, name, columns, pattern, _ = (part or "" for part in found.groups())
        of_table = columns.split(", ") if columns else []
        body = table(name, of_table, pattern, page) if kind == "table" else commands(name)
        return f"{found[0].splitlines()[0]}\n{body}\n<!-- end -->\n"

    return REGION.sub(region, text)


def pages() -> list[Path]:
    """Return the pages that have such places."""
    every = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [page for page in every if REGION.search(page.read_text(encoding="utf-8"))]


if __name__ == "__main__":
    for path in pages():
        path.write_text(written(path, path.read_text(encoding="utf-8")), encoding="utf-8")
        print(path)
