"""Exposure from its definition."""

from math import comb, e, expm1, inf, log, log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flsim.measures.memorization.exposure import exposure, exposure_interval


@pytest.mark.parametrize("references", [1, 7, 2_000_000])
def test_from_the_best_rank_to_the_worst(references: int) -> None:
    assert exposure(1, references) == log2(references + 1)
    assert exposure(references + 1, references) == 0


def test_half_the_rank_is_one_bit_more() -> None:
    assert exposure(8, 99) == pytest.approx(exposure(16, 99) + 1)
    assert exposure(4, 7) == 1  # among 8 sequences, in the better half


def test_a_canary_that_was_never_seen_expects_log2_e_bits() -> None:
    """Its rank is uniform: the mean of -log2 u over u in (0, 1] is log2 e; in steps of 1/n, less by order log(n)/n."""
    n = 10_000
    mean = sum(exposure(rank, n - 1) for rank in range(1, n + 1)) / n
    assert mean == pytest.approx(log2(e), abs=log2(n) / n)


@pytest.mark.parametrize("rank", [0, 12])
def test_a_rank_that_is_none(rank: int) -> None:
    with pytest.raises(ValueError, match="from 1 to 11"):
        exposure(rank, 10)


def binomial_tail(count: int, trials: int, p: float) -> float:
    """Pr[Binomial(trials, p) >= count]."""
    return sum(comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(count, trials + 1))


@settings(max_examples=50, derandomize=True)
@given(st.integers(1, 60), st.data(), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_the_interval_is_where_the_rank_is_no_surprise(references: int, data: st.DataObject, confidence: float) -> None:
    """Clopper and Pearson: at either end, as few or as many references as were met come with half of 1 - confidence."""
    rank = data.draw(st.integers(1, references + 1))
    low, high = exposure_interval(rank, references, confidence=confidence)
    tail = (1 - confidence) / 2
    if rank == 1:
        assert high == inf
    else:
        assert binomial_tail(rank - 1, references, 2**-high) == pytest.approx(tail)
    if rank == references + 1:
        assert low == 0
    else:
        assert 1 - binomial_tail(rank, references, 2**-low) == pytest.approx(tail)


@pytest.mark.parametrize("share", [1 / 256, 0.01, 0.3, 0.9])
def test_the_interval_covers_at_least_as_often_as_it_says(share: float) -> None:
    """Over all that R can be: the sum of the probabilities of ranks whose interval holds -log2 of the share."""
    references, covered = 100, 0.0
    for found in range(references + 1):
        low, high = exposure_interval(found + 1, references, space=256)
        probability = comb(references, found) * share**found * (1 - share) ** (references - found)
        covered += probability * (low <= -log2(share) <= high)
    assert covered >= 0.95


def test_a_canary_of_rank_one_has_no_upper_end_but_the_space() -> None:
    """No reference of 2,000,000 met: the share is below 1 - 0.025^(1/2,000,000)."""
    low, high = exposure_interval(1, 2_000_000)
    assert (exposure(1, 2_000_000), high) == (log2(2_000_001), inf)
    assert low == pytest.approx(-log2(-expm1(log(0.025) / 2_000_000)))
    assert exposure_interval(1, 2_000_000, space=9_996**4) == (low, log2(9_996**4))


def test_the_interval_of_no_rank() -> None:
    with pytest.raises(ValueError, match="from 1 to 11"):
        exposure_interval(12, 10)
