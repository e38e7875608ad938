"""Canaries without a copy are in no share: tables show them apart, as the null control."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from shown import over_seeds, to_markdown

from flsim.base.errors import InputError
from flsim.results import tables
from flsim.results.differences import Pair, compare_runs, differences, planned, to_wide
from flsim.results.store import RunResults
from flsim.show.differences import runs_to_markdown

MakeSeries = Callable[..., list[RunResults]]


def without(run: RunResults, *indices: int) -> RunResults:
    """The run, as if no record had been drawn for these of its nine canaries."""
    drawn = [0 if index in indices else 3 for index in range(9)]
    return replace(run, roster=run.roster.assign(planned_insertions=drawn))


def test_shares_and_means_are_of_planted_canaries(make_series: MakeSeries) -> None:
    """Canary i has 2 + i / 2 bits, RS those of 4 bits and more: 4 to 8, BS only the last. Canaries 0, 1 and 8 go."""
    [run] = make_series([2.0])
    table = tables.memorization_table([without(run, 0, 1, 8)])
    row = table.iloc[0]
    assert (row["canaries"], row["rs"], row["bs"]) == (6, 4, 0)
    assert row["mean_exposure"] == pytest.approx(np.mean([3, 3.5, 4, 4.5, 5, 5.5]))
    assert (row["controls"], row["rs_controls"], row["bs_controls"]) == (3, 1, 1)
    assert row["false_positive_rate"] == 1 / 10_001
    text = to_markdown(table)
    assert "RS /6" in text
    assert "1/1 of 3" in text
    assert "1 / (|R| + 1), here 0.0001" in " ".join(text.split())


def test_a_run_that_planted_nothing_has_no_share(make_series: MakeSeries) -> None:
    row = tables.memorization_table([without(make_series([2.0])[0], *range(9))]).iloc[0]
    assert (row["canaries"], row["controls"], row["rs_controls"]) == (0, 9, 5)
    assert row[["rs", "rs_share_low", "mean_exposure"]].isna().all()


def test_seeds_that_planted_different_numbers_are_averaged(make_series: MakeSeries) -> None:
    """Seed 0 plants canaries 4 to 8, seed 1 all; RS finds 5 of 5 and 7 of 9, so 12 of 14 pooled."""
    first, second = make_series([2.0, 3.0])
    table = over_seeds([without(first, 0, 1, 2, 3), second])
    row = table.iloc[0]
    assert (row["canaries"], row["rs"], row["controls"], row["rs_controls"]) == (7.0, 6.0, 4, 0)
    assert row["mean_exposure"] == pytest.approx(np.mean([5.0, 5.0]))
    assert row["rs_share_low"] < 12 / 14 < row["rs_share_high"]
    assert "0/0 of 4" in to_markdown(table)


def test_pairs_are_of_canaries_that_either_run_planted(make_series: MakeSeries) -> None:
    """Both lack canary 0; canary 1 is in one of them. Bits are 4 + i / 2 and 2 + i / 2."""
    [a], [b] = make_series([4.0]), make_series([2.0], name="non-iid")
    a, b = without(a, 0), without(b, 0, 1)
    compared = compare_runs(a, b)
    row = to_wide(compared.table).iloc[0]
    assert (row["n"], row["exposure_difference"]) == (8, 2.0)
    assert compared.never_planted == 1
    assert "1 canary, planted in neither run, is in no number." in runs_to_markdown(compared)
    assert to_wide(differences([Pair("row", planned([a]), planned([b]))]))["canaries_value_a"].tolist() == [8.0]
    with pytest.raises(InputError, match="1 of 9 canaries were planted"):
        compare_runs(without(a, *range(1, 9)), without(b, *range(1, 9)))
