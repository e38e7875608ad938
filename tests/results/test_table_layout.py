"""Columns side by side: nothing is lost, nothing is wider than asked, and rows keep what they are about."""

import resource
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reported import write_run
from shown import to_markdown

from flsim.cli.options import print_or_write
from flsim.results.store import read_run
from flsim.results.tables import memorization_table
from flsim.show.table import Column, latex, markdown

WORDS = st.text(st.sampled_from("abc DEF,=_1"), max_size=60).map(str.strip)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[Column], list[list[Column]]]:
    """One or two labels of up to 60 characters, and units of up to four columns with cells of their own."""
    rows = draw(st.integers(1, 3))
    labels = [
        Column(f"L{index}", [draw(WORDS) or "-" for _ in range(rows)], is_number=False)
        for index in range(draw(st.integers(1, 2)))
    ]
    units: list[list[Column]] = []
    for unit in range(draw(st.integers(1, 6))):
        units.append([])
        extra = draw(st.booleans())
        for column in range(draw(st.integers(1, 4))):
            cells = [f"{unit}.{column}.{row}" for row in range(rows)]
            units[-1].append(Column(f"U{unit}C{column}", cells, is_extra=extra and column > 0))
    return labels, units


@settings(max_examples=100)
@given(layouts(), st.integers(60, 120))
def test_all_is_shown_once_within_the_width(layout: tuple[list[Column], list[list[Column]]], width: int) -> None:
    labels, units = layout
    text = markdown(labels, units, width=width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    parts = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")]
    cells = [[[cell.strip() for cell in line.strip("|").split("|")] for line in part] for part in parts]
    headings = [heading for part in cells for heading in part[0]]
    needed = [column.heading for unit in units for column in unit if not column.is_extra]
    extra = [column.heading for unit in units for column in unit if column.is_extra]
    assert sorted(heading for heading in headings if heading in needed) == needed
    found = [heading for heading in headings if heading in extra]
    assert sorted(found) in ([], extra)
    assert sorted(found) == extra or len(parts) == 1  # left out only for one table
    for part in cells:
        for row, line in enumerate(part[2:]):
            for heading, cell in zip(part[0], line, strict=True):
                if heading.startswith("U"):
                    assert cell == f"{heading[1]}.{heading[3]}.{row}"
        has_numbers = part[0][0] == "Row"
        for row, line in enumerate(part[2:]):
            assert line[0] == (str(row + 1) if has_numbers else labels[0].cells[row])
    if cells[0][0][0] == "Row":
        listed = " ".join(lines[: lines.index("")])
        for row, words in enumerate(zip(*(label.cells for label in labels), strict=True), 1):
            assert f"{row}. {' '.join(words[0].split())}" in listed


def test_notes_are_said_once_and_in_latex_as_comments() -> None:
    columns = [Column("A", ["1"], note="A: a number."), Column("B", ["2"], note="A: a number."), Column("C", ["3"])]
    labels = [Column("Setting", ["x"], is_number=False)]
    assert markdown(labels, [columns], "More.\n").endswith("|\n\nA: a number.\nMore.\n")
    assert "% A: a number.\n% More.\n\\begin{tabular}{lrrr}\n" in latex(labels, [columns], "More.\n")


def test_a_table_is_whole_or_absent(tmp_path: Path) -> None:
    """The file fails after 64 bytes, as on a full disk."""
    table = memorization_table([read_run(write_run(tmp_path / "run"))])
    out = tmp_path / "out"
    out.mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            print_or_write(to_markdown(table), out / "table.md")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(out.iterdir()) == []
    print_or_write(to_markdown(table), out / "table.md")
    assert (out / "table.md").read_text(encoding="utf-8") == to_markdown(table)
