"""Levels of a ROC curve: one false positive of n is a level of n others, however 1 / n is rounded; and intervals."""

import numpy as np
import pytest
from scipy.stats import binom, norm

from flsim.base.errors import InputError
from flsim.base.statistics import roc, share_interval


def test_a_level_of_one_of_n_is_one_false_positive() -> None:
    """1 / 98 times 98 is below 1 in float64."""
    assert 1 / 98 * 98 < 1
    for count in range(1, 400):
        members, others = (np.arange(count, dtype=np.float64) for _ in range(2))
        members += 0.5
        at = roc(members, others).at(1 / count)
        assert (at.alarms, at.detected) == (1, min(2, count))


def test_a_level_below_one_of_n_is_refused() -> None:
    with pytest.raises(InputError, match="needs 99 non-members, found 98"):
        roc(np.array([1.0]), np.arange(98.0)).at(1 / 99)


@pytest.mark.parametrize("level", [0.001, 0.01, 0.1])
@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_intervals_hold_the_rate_of_the_population(level: float, shift: float) -> None:
    """The threshold is drawn with the others, and counts as drawn: it must not as known, as the last line shows."""
    rng, truth, draws, others = (
        np.random.default_rng(0),
        norm.sf(norm.isf(level) - shift),
        400,
        500 if level > 0.001 else 1_000,
    )
    hits = known = 0
    for _ in range(draws):
        at = roc(rng.normal(shift, 1, 1_000), rng.normal(0, 1, others)).at(level)
        low, high = share_interval(at.detected, 1_000)
        hits, known = hits + (at.low <= truth <= at.high), known + (low <= truth <= high)
        assert at.low <= at.tpr <= at.high
    assert binom.cdf(hits, draws, 0.95) > 0.01
    assert binom.cdf(known, draws, 0.95) < 1e-6


def test_intervals_of_equal_scores() -> None:
    """Others have 0 to 9, members 5 to 14. At a rate of 0.2, that of scores from 8 on, 7 of 10 members are found."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        low, high = roc(rng.integers(5, 15, 300).astype(float), rng.integers(0, 10, 300).astype(float)).interval(0.2)
        assert low <= 0.7 <= high
    assert roc(np.ones(50), np.ones(50)).interval(0.1) == (0.0, 1.0)
    low, high = roc(np.ones(400), np.zeros(400)).interval(0.1)
    assert (low, high) == (share_interval(400, 400, 0.975)[0], 1.0)
