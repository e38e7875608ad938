"""Exposure from its definition."""

from math import e, log2

import pytest

from flsim.measures.memorization.exposure import exposure


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
