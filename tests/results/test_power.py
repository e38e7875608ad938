"""Power: against simulated experiments, lists of all outcomes, published sample sizes, and what was measured.

A simulation is seeded; its margin is such that it would fail for one seed in a million if the formula is right.
"""

import math
import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from flsim.base.rng import stream
from flsim.base.statistics import mcnemar_p
from flsim.results.power import (
    ALPHA,
    POWER,
    SD_CANARIES,
    SD_SEEDS,
    Spread,
    canaries_for,
    detectable_counts,
    detectable_exposure,
    power_of_counts,
    power_of_exposure,
    seeds_for,
)

RESULTS = Path(__file__).parents[2] / "docs" / "results.md"
SIMULATIONS = 20_000
CHANCE = 1e-6


def within(found: int, rate: float) -> bool:
    low, high = stats.binom.ppf(CHANCE / 2, SIMULATIONS, rate), stats.binom.isf(CHANCE / 2, SIMULATIONS, rate)
    return bool(low <= found <= high)


def test_the_spreads_are_those_that_were_measured() -> None:
    """From the demo's five seeds at a rate of 1; the table's decimals make the spread over canaries sure to 0.02."""
    section = RESULTS.read_text(encoding="utf-8").split("\nAt the rate of 1 ")[1].split("\n## ")[0]
    rows = re.findall(r"\| (-?\d\.\d\d) \((-?\d\.\d\d) to (-?\d\.\d\d)\) \|", section)
    assert len(rows) == 5
    means, lows, highs = np.array(rows, float).T
    over_canaries = (highs - lows) / 2 * math.sqrt(48) / stats.t.ppf(0.975, 47)
    variance = (over_canaries**2).mean()
    assert pytest.approx(math.sqrt(variance), abs=0.02) == SD_CANARIES
    assert pytest.approx(math.sqrt(means.var(ddof=1) - variance / 48), abs=0.02) == SD_SEEDS


@pytest.mark.parametrize(("canaries", "effect"), [(5, 3.0), (48, 1.2), (90, 0.0)])
def test_power_of_one_seed_is_that_of_simulated_runs(canaries: int, effect: float) -> None:
    drawn = stream(0, "one seed", canaries).normal(effect, SD_CANARIES, (SIMULATIONS, canaries))
    found = int((stats.ttest_1samp(drawn, 0, axis=1).pvalue < ALPHA).sum())
    assert within(found, power_of_exposure(effect, canaries))


@pytest.mark.parametrize(("seeds", "effect"), [(2, 5.0), (3, 2.5), (5, 1.5)])
def test_power_of_several_seeds_is_that_of_simulated_runs(seeds: int, effect: float) -> None:
    """Each seed has an effect of its own, and canaries of its own."""
    rng = stream(0, "seeds", seeds)
    means = effect + rng.normal(0, SD_SEEDS, (SIMULATIONS, seeds))
    for seed in range(seeds):
        means[:, seed] += rng.normal(0, SD_CANARIES, (SIMULATIONS, 12)).mean(axis=1)
    found = int((stats.ttest_1samp(means, 0, axis=1).pvalue < ALPHA).sum())
    assert within(found, power_of_exposure(effect, 12, seeds))


def test_sample_sizes_are_those_of_textbooks() -> None:
    """Paired t test, two-sided, 5%, 80%: n = 34 for d = 0.5, 15 for 0.8, 199 for 0.2 (G*Power 3; Cohen's d)."""
    assert [canaries_for(d, spread=Spread(canaries=1.0)) for d in (0.5, 0.8, 0.2)] == [34, 15, 199]
    assert [seeds_for(d, 10**9, spread=Spread(seeds=1.0)) for d in (0.5, 0.8, 0.2)] == [34, 15, 199]


EFFECTS = st.floats(0.05, 20)


@settings(max_examples=50)
@given(EFFECTS, st.integers(1, 200), st.integers(1, 12))
def test_power_is_a_probability_that_rises(effect: float, canaries: int, seeds: int) -> None:
    power = power_of_exposure(effect, canaries, seeds)
    assert 0 <= power <= 1
    assert power == power_of_exposure(-effect, canaries, seeds)
    assert power <= power_of_exposure(1.1 * effect, canaries, seeds) + 1e-9
    assert power <= power_of_exposure(effect, 2 * canaries, seeds) + 1e-9


@settings(max_examples=25)
@given(st.integers(2, 200), st.integers(1, 12))
def test_what_is_detectable_is_found_so_often(canaries: int, seeds: int) -> None:
    assert power_of_exposure(detectable_exposure(canaries, seeds), canaries, seeds) == pytest.approx(POWER)
    assert power_of_exposure(0.0, canaries, seeds) == pytest.approx(ALPHA)


@settings(max_examples=25)
@given(st.floats(0.3, 5), st.integers(2, 100))
def test_so_many_are_needed_and_no_fewer(effect: float, canaries: int) -> None:
    seeds = seeds_for(effect, canaries)
    assert seeds is not None
    assert power_of_exposure(effect, canaries, seeds) >= POWER
    assert seeds == 2 or power_of_exposure(effect, canaries, seeds - 1) < POWER
    needed = canaries_for(effect)
    assert needed is not None
    assert power_of_exposure(effect, needed) >= POWER > power_of_exposure(effect, needed - 1)


def test_what_cannot_be_found() -> None:
    """One canary has no spread; more canaries help between seeds up to a point; for no effect, none are enough."""
    assert power_of_exposure(9.0, 1) == 0
    assert detectable_exposure(1) == math.inf
    assert canaries_for(1.0, seeds=3) is None
    assert canaries_for(0.0) is None
    assert seeds_for(0.0, 48) is None
    assert power_of_exposure(1.0, 48, spread=Spread(canaries=0.0)) == 1
    assert power_of_exposure(1e9, 48) == 1


@pytest.mark.parametrize(("only_a", "only_b"), [(0.6, 0.1), (0.3, 0.0), (0.2, 0.2), (0.0, 0.5), (0.7, 0.3)])
def test_power_of_counts_is_that_of_all_outcomes(only_a: float, only_b: float) -> None:
    """Every number of canaries in a alone and in b alone, with its trinomial chance."""
    n, power = 9, 0.0
    for a, b in product(range(n + 1), repeat=2):
        if a + b <= n and mcnemar_p(a, b) <= ALPHA:
            neither = max(0.0, 1 - only_a - only_b)
            ways = math.factorial(n) / (math.factorial(a) * math.factorial(b) * math.factorial(n - a - b))
            power += ways * only_a**a * only_b**b * neither ** (n - a - b)
    assert power_of_counts(only_a, only_b, n) == pytest.approx(power, rel=1e-9, abs=1e-12)


def test_power_of_counts_is_that_of_simulated_runs() -> None:
    only_a, only_b = 0.2, 0.03
    drawn = stream(0, "counts").multinomial(48, [only_a, only_b, 1 - only_a - only_b], SIMULATIONS)
    pairs, counts = np.unique(drawn[:, :2], axis=0, return_counts=True)
    rejected = np.array([mcnemar_p(a, b) < ALPHA for a, b in pairs.tolist()])
    assert within(int(counts[rejected].sum()), power_of_counts(only_a, only_b, 48))


@pytest.mark.parametrize("canaries", [6, 12, 48, 90])
@pytest.mark.parametrize("only_b", [0.0, 2 / 240, 0.05])
def test_what_counts_can_show_is_found_so_often(canaries: int, only_b: float) -> None:
    least = detectable_counts(canaries, only_b)
    if math.isinf(least):
        assert power_of_counts(1 - only_b, only_b, canaries) < POWER
    else:
        assert power_of_counts(only_b + least, only_b, canaries) == pytest.approx(POWER)
        assert power_of_counts(only_b + 0.9 * least, only_b, canaries) < POWER


def test_five_canaries_show_nothing() -> None:
    """Five of five discordant ones the same way have p = 2 / 2^5, above 5%."""
    assert power_of_counts(1.0, 0.0, 5) == 0
    assert detectable_counts(5, 0.0) == math.inf
    assert power_of_counts(1.0, 0.0, 6) == 1
    assert power_of_counts(0.0, 0.0, 48) == 0
