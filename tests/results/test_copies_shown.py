"""Canaries of a number of copies, as tables, traces and figures name them."""

import math
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from shown import from_csv, to_markdown

from flsim.results import tables
from flsim.results.store import RunResults, read_run
from flsim.show.table import to_csv

MakeRun = Callable[..., Path]
LEGEND = "Copies: the fewest with a memorized canary, where their number was set."
COPIES = (10, 10, 1, 1, 4, 4)


@pytest.fixture
def run(make_run: MakeRun) -> RunResults:
    """Six canaries planted 10, 10, 1, 1, 4, 4 times; those of 4 and one of 10 are memorized."""
    found = {"rs": [1.0, 0.0, 0.0, 0.0, 1.0, 1.0], "bs": [0.0] * 6, "exposure": [3.0] * 6, "references": 999.0}
    return with_copies(make_run({10: found}, grid=[(0.1, 0.1)], copies=6))


def with_copies(folder: Path) -> RunResults:
    path = folder / "planted" / "roster.parquet"
    roster = pd.read_parquet(path).assign(p_u=math.nan, p_e=math.nan, planned_insertions=COPIES)
    roster.to_parquet(path)
    return read_run(folder)


def test_the_lowest_is_the_fewest_copies(run: RunResults) -> None:
    assert tables.lowest(run.roster) == "1 copy"
    assert tables.lowest(run.roster.iloc[:2]) == "10 copies"
    assert tables.lowest(run.roster.iloc[:0]) == "-"


def test_the_table_shows_it_and_the_legend_says_so(run: RunResults, make_run: MakeRun) -> None:
    table = tables.memorization_table([run])
    assert table[["rs", "rs_lowest", "bs", "bs_lowest"]].to_numpy().tolist() == [[3, "4 copies", 0, "-"]]
    text = " ".join(to_markdown(table).split())
    assert "4 copies" in text
    assert LEGEND in text
    pd.testing.assert_frame_equal(from_csv(to_csv(table)), table)
    shares = read_run(make_run({10: {"rs": [1.0] * 9, "bs": [0.0] * 9}}, name="shares"))
    assert "Copies" not in to_markdown(tables.memorization_table([shares]))
