"""Cohorts are a pure function of (seed, round, population), uniform and without replacement."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from flsim.errors import InputError
from flsim.rng import stream
from flsim.sampling import fixed_size_cohort, shard_ranges


@given(population=st.integers(1, 500), data=st.data(), seed=st.integers(0, 2**40), round_=st.integers(0, 10**6))
def test_a_cohort_is_distinct_sorted_and_repeatable(
    population: int, data: st.DataObject, seed: int, round_: int
) -> None:
    size = data.draw(st.integers(1, population))
    cohort = fixed_size_cohort(seed, round_, population, size)
    assert cohort.tolist() == sorted(set(cohort.tolist()))
    assert len(cohort) == size
    assert cohort.min() >= 0
    assert cohort.max() < population
    np.testing.assert_array_equal(cohort, fixed_size_cohort(seed, round_, population, size))


def test_every_user_is_as_likely() -> None:
    """20,000 draws of 5 of 20 users; the chi-squared test rejects falsely once in 10,000 (fixed seed). Counts within a
    round are negatively correlated, which makes the statistic smaller: its mean is 20 (1 - 1/4) = 15, not 19."""
    counts = np.zeros(20)
    for round_ in range(20_000):
        counts[fixed_size_cohort(0, round_, 20, 5)] += 1
    statistic = ((counts - 5_000) ** 2 / 5_000).sum() * 19 / 15
    assert stats.chi2(19).sf(statistic) > 1e-4


def test_rounds_and_seeds_draw_differently() -> None:
    draws = {tuple(fixed_size_cohort(seed, round_, 1_000, 10)) for seed in range(5) for round_ in range(5)}
    assert len(draws) == 25


@pytest.mark.parametrize("size", [0, 11, -1])
def test_impossible_cohorts_are_refused(size: int) -> None:
    with pytest.raises(InputError, match=r"training\.cohort must be between 1 and the 10 training users"):
        fixed_size_cohort(0, 0, 10, size)


@given(population=st.integers(1, 300), data=st.data())
def test_shards_cover_every_user_once(population: int, data: st.DataObject) -> None:
    shards = data.draw(st.integers(1, population))
    ranges = shard_ranges(population, shards)
    assert [user for first, last in ranges for user in range(first, last)] == list(range(population))
    assert {last - first for first, last in ranges} <= {population // shards, population // shards + 1}


def test_more_shards_than_users_are_refused() -> None:
    with pytest.raises(InputError, match=r"system\.shards must be between 1 and the 3 training users, found 4"):
        shard_ranges(3, 4)


def test_streams_differ_by_seed_purpose_and_every_key() -> None:
    keys: list[tuple[int, str, tuple[int | str, ...]]] = [
        (0, "a", ()),
        (1, "a", ()),
        (0, "b", ()),
        (0, "a", (1,)),
        (0, "a", (2,)),
        (0, "a", ("1",)),
        (0, "a", (1, 2)),
        (0, "a", (12,)),
        (0, "a/1", ()),
    ]
    draws = {int(stream(seed, purpose, *rest).integers(2**62)) for seed, purpose, rest in keys}
    assert len(draws) == len(keys)
    assert stream(3, "a", np.int64(4)).random() == stream(3, "a", 4).random()  # type: ignore[arg-type]
