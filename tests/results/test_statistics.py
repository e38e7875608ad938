"""How often intervals and tests are wrong: exactly, from all outcomes, where these can be listed; else simulated.

A simulation is seeded, so it passes or fails for good; its margin is such that it would fail for one seed in a million
if the rate is as stated.
"""

from collections.abc import Callable
from itertools import product
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from flsim.base.rng import stream
from flsim.results.inference import (
    discordant_interval,
    holm,
    mcnemar_p,
    paired_t_p,
    sign_flip_p,
    signed_rank_p,
    t_interval,
)

Floats = NDArray[np.float64]
SIMULATIONS = 2_000
CHANCE = 1e-6  # of a false failure, were the seed drawn anew


def within(count: int, of: int, rate: float) -> bool:
    """Whether so many of so many are as a rate makes likely, to either side."""
    low, high = stats.binom.ppf(CHANCE / 2, of, rate), stats.binom.isf(CHANCE / 2, of, rate)
    return bool(low <= count <= high)


def no_more(count: int, of: int, rate: float) -> bool:
    return bool(count <= stats.binom.isf(CHANCE, of, rate))


def exposures(rng: np.random.Generator, shift: float, canaries: int) -> Floats:
    """Differences of two runs' exposures: each canary has its own level, and the ceiling makes zeros."""
    level = rng.uniform(0, 16, canaries)
    a, b = (np.minimum(level + rng.normal(0, 1.5, canaries) + extra, 13.29) for extra in (shift, 0))
    return np.asarray(np.round(a - b, 9))


@pytest.mark.parametrize("canaries", [27, 90])
@pytest.mark.parametrize("test", [signed_rank_p, paired_t_p])
def test_tests_of_exposure_find_nothing_in_19_of_20(canaries: int, test: Callable[[Floats], float]) -> None:
    """Two models alike, whose canaries' differences are symmetric, with zeros, and not normal."""
    rng = stream(0, "exposures", canaries)
    found = sum(test(exposures(rng, 0.0, canaries)) < 0.05 for _ in range(SIMULATIONS))
    assert within(found, SIMULATIONS, 0.05)


def test_tests_of_exposure_find_what_is_there() -> None:
    """1.5 bits below the ceiling, with 27 canaries: both tests see it in most simulations."""
    rng = stream(0, "effects")
    drawn = [exposures(rng, 1.5, 27) for _ in range(200)]
    assert np.mean([signed_rank_p(values) < 0.05 for values in drawn]) > 0.5
    assert np.mean([paired_t_p(values) < 0.05 for values in drawn]) > 0.5


@pytest.mark.parametrize("canaries", [2, 9, 90])
def test_the_interval_over_canaries_has_the_true_difference_in_19_of_20(canaries: int) -> None:
    rng = stream(0, "canaries", canaries)
    intervals = [t_interval(rng.normal(2.0, 3.0, canaries)) for _ in range(SIMULATIONS)]
    assert within(sum(low <= 2.0 <= high for low, high in intervals), SIMULATIONS, 0.95)


@pytest.mark.parametrize("seeds", [2, 5])
def test_the_interval_over_seeds_has_the_true_difference_in_19_of_20(seeds: int) -> None:
    """Canaries of a seed share its effect: what is over seeds covers, and what pools all canaries does not."""
    rng = stream(0, "seeds", seeds)
    covered = pooled = 0
    for _ in range(SIMULATIONS):
        differences = 2.0 + rng.normal(0, 0.8, (seeds, 1)) + rng.normal(0, 2.9, (seeds, 48))
        low, high = t_interval(differences.mean(axis=1))
        covered += low <= 2.0 <= high
        low, high = t_interval(differences.ravel())
        pooled += low <= 2.0 <= high
    assert within(covered, SIMULATIONS, 0.95)
    assert not within(pooled, SIMULATIONS, 0.95)


def listed_p(only_a: int, only_b: int) -> float:
    """McNemar's exact test by listing: of all divisions of the discordant, those no likelier than what was seen."""
    ways = [comb(only_a + only_b, count) for count in range(only_a + only_b + 1)]
    return sum(way for way in ways if way <= ways[only_a]) / sum(ways)


def test_mcnemar_is_that_of_all_divisions() -> None:
    for only_a, only_b in product(range(13), repeat=2):
        assert mcnemar_p(only_a, only_b) == pytest.approx(listed_p(only_a, only_b), rel=1e-12)
    assert mcnemar_p(0, 5) == 2 / 2**5  # five of five: not yet below 5%
    assert mcnemar_p(6, 0) == 2 / 2**6


def test_mcnemar_is_never_wrong_more_often_than_promised() -> None:
    """Exactly: of any number of discordant canaries, all divisions, where either model is as likely.

    So it holds whatever the chance of being discordant, and however that differs between canaries.
    """
    for number in range(49):
        ways = stats.binom.pmf(np.arange(number + 1), number, 0.5)
        assert sum(way for a, way in enumerate(ways) if mcnemar_p(a, number - a) < 0.05) <= 0.05


def test_mcnemar_holds_where_some_canaries_are_easier_than_others() -> None:
    """Each canary has its own chance of being memorized, by either model: what a list of configurations makes."""
    rng, simulations = stream(0, "mcnemar"), 20_000
    chances = rng.beta(0.5, 0.5, 48)
    a, b = (rng.random((simulations, 48)) < chances for _ in range(2))
    pairs, counts = np.unique(np.stack([(a & ~b).sum(1), (~a & b).sum(1)], 1), axis=0, return_counts=True)
    found = sum(
        count for (only_a, only_b), count in zip(pairs, counts, strict=True) if mcnemar_p(only_a, only_b) < 0.05
    )
    assert no_more(int(found), simulations, 0.05)


@pytest.mark.parametrize("discordant", [0, 1, 5, 13, 40])
def test_the_interval_of_the_discordant_always_covers(discordant: int) -> None:
    """Exactly, for a grid of true shares: at least 95% of outcomes have an interval with the truth in it."""
    intervals = np.array([discordant_interval(a, discordant - a) for a in range(discordant + 1)])
    for share in np.linspace(0, 1, 101):
        covers = (intervals[:, 0] <= share) & (share <= intervals[:, 1])
        assert stats.binom.pmf(np.flatnonzero(covers), discordant, share).sum() >= 0.95 - 1e-12


def test_the_interval_of_the_discordant_and_mcnemar_agree() -> None:
    for only_a, only_b in product(range(13), repeat=2):
        low, high = discordant_interval(only_a, only_b)
        assert (mcnemar_p(only_a, only_b) < 0.05) == (not low <= 0.5 <= high)


COUNTS = st.lists(st.integers(-6, 6), min_size=2, max_size=7)


def all_flips(differences: list[int]) -> NDArray[np.int64]:
    return np.asarray(np.array(list(product((-1, 1), repeat=len(differences)))) @ np.array(differences))


@given(COUNTS)
def test_the_sign_flips_are_all_of_them(differences: list[int]) -> None:
    sums = all_flips(differences)
    assert sign_flip_p(differences) == pytest.approx(float((np.abs(sums) >= abs(sum(differences))).mean()))


@settings(max_examples=30)
@given(COUNTS)
def test_the_sign_flips_are_never_wrong_more_often_than_promised(sizes: list[int]) -> None:
    """Exactly: whatever the differences' sizes, at most 5% (and 20%) of their signs are found."""
    flips = np.array(list(product((-1, 1), repeat=len(sizes)))) * np.array(sizes)
    found = np.array([sign_flip_p(signed.tolist()) for signed in flips])
    for level in (0.05, 0.2):
        assert (found <= level).mean() <= level


def test_a_t_test_of_a_few_whole_numbers_would_not_do() -> None:
    """Three seeds whose counts differ by one, either way, or not at all: equal ones have no spread, so t is sure."""
    rng = stream(0, "whole")
    drawn = rng.integers(-1, 2, (SIMULATIONS, 3)).astype(float)
    assert not no_more(sum(paired_t_p(values) < 0.05 for values in drawn), SIMULATIONS, 0.05)
    assert all(sign_flip_p(values.astype(int).tolist()) >= 2 / 2**3 for values in drawn[:100])


def test_one_seed_has_no_sign_flips() -> None:
    assert np.isnan(sign_flip_p([3]))
    assert np.isnan(paired_t_p(np.array([3.0])))
    assert sign_flip_p([0, 0, 0]) == 1


def test_holm_is_his_example() -> None:
    """By hand: sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1, each at least the one before."""
    assert holm([0.03, 0.01, float("nan"), 0.04, 0.02]) == pytest.approx(
        [0.06, 0.04, float("nan"), 0.06, 0.06], nan_ok=True
    )
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_rejects_what_stepping_down_does(p: list[float]) -> None:
    """The definition: reject the smallest while p <= level / (number left), and stop at the first that is larger."""
    corrected = holm(p)
    assert all(old <= new <= min(1.0, len(p) * old) for old, new in zip(p, corrected, strict=True))
    for level in (0.05, 0.3):
        rejected = set()
        for place, (value, index) in enumerate(sorted((value, index) for index, value in enumerate(p))):
            if (len(p) - place) * value > level:
                break
            rejected.add(index)
        assert {index for index, value in enumerate(corrected) if value <= level} == rejected


@pytest.mark.parametrize("shared", [0.0, 0.9])
def test_holm_is_rarely_wrong_about_any_of_a_family(shared: float) -> None:
    """Six true hypotheses, of tests alone or alike, and two false ones: any false find in at most 5% of families."""
    rng, simulations = stream(0, "holm", str(shared)), 4_000
    z = np.sqrt(shared) * rng.normal(size=(simulations, 1)) + np.sqrt(1 - shared) * rng.normal(size=(simulations, 8))
    z[:, 6:] += 3.0
    found = np.array([holm(p) for p in 2 * stats.norm.sf(np.abs(z))]) < 0.05
    assert no_more(int(found[:, :6].any(axis=1).sum()), simulations, 0.05)
    assert found[:, 6:].mean() > 0.5
    uncorrected = (2 * stats.norm.sf(np.abs(z[:, :6])) < 0.05).any(axis=1).sum()
    assert not no_more(int(uncorrected), simulations, 0.05)
