"""Bins hold every value once, and their edges are round; numbers on axes are short."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flsim.data.inspect import BINS, Distribution
from flsim.data.plot import short

lengths = st.one_of(
    st.lists(st.integers(0, 30), min_size=1, max_size=50),
    st.lists(st.integers(0, 10**7), min_size=1, max_size=50),
    st.lists(st.integers(0, 7).map(lambda power: 10**power), min_size=1, max_size=50),
)


def distribution(values: list[int]) -> Distribution:
    return Distribution.count([np.array(values)])


@given(values=lengths, more=lengths)
def test_bins_hold_every_value_once(values: list[int], more: list[int]) -> None:
    """Of both lists in the bins of the whole."""
    whole = distribution(values) + distribution(more)
    edges, scale = whole.edges()
    bins = list(pairwise(edges))
    assert 1 <= len(bins) <= BINS
    assert all(low < high for low, high in bins)
    assert whole.binned(edges) == [sum(low <= x < high for x in values + more) for low, high in bins]
    assert distribution(values).binned(edges) == [sum(low <= x < high for x in values) for low, high in bins]
    assert sum(distribution(more).binned(edges)) == len(more)
    median = sorted(values + more)[(len(values + more) - 1) // 2]
    longtailed = max(values + more) > 10 * max(1, median)
    assert (scale == "log") == (longtailed and max(values + more) - min(values + more) >= BINS)


@given(values=lengths, cut=st.integers(0, 50))
def test_a_distribution_in_pieces_is_that_of_the_whole(values: list[int], cut: int) -> None:
    pieces = Distribution.count([np.array(values[:cut], np.int64), np.array(values[cut:], np.int64)])
    distinct = sorted(set(values))
    assert pieces.values.tolist() == distinct
    assert pieces.counts.tolist() == [values.count(value) for value in distinct]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], ([], "linear")),
        ([7], ([7, 8], "linear")),
        ([1, 20], (list(range(1, 22)), "linear")),  # a record's words: a bin each
        ([46, 110, 181], (list(range(40, 191, 10)), "linear")),
        ([865, 1_700, 2_128], (list(range(800, 2_201, 100)), "linear")),
        ([0, 3, 10**6], ([0, 1, 2, 3, 6, 11, 20], "log")),  # ratios of 10^(6/23), rounded; two that meet are one
    ],
)
def test_edges_are_round(values: list[int], expected: tuple[list[int], str]) -> None:
    edges, scale = distribution(values).edges()
    assert (edges[: len(expected[0])], scale) == expected
    assert not values or edges[-1] > max(values)


def test_edges_of_a_long_tail_have_one_ratio() -> None:
    edges, scale = distribution([1_000] * 9 + [10**9]).edges()
    ratios = np.array(edges[1:]) / edges[:-1]
    assert scale == "log"
    assert len(ratios) == BINS
    np.testing.assert_allclose(ratios, 10 ** (6 / BINS), rtol=1e-3)


def test_short_numbers() -> None:
    numbers = {0: "0", 9_999: "9,999", 10_000: "10k", 999_499: "999k", 999_500: "1M", 1_049_321: "1.05M", 3e8: "300M"}
    assert {number: short(number) for number in numbers} == numbers
