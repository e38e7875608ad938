"""Power: against simulated experiments, lists of all outcomes, published sample sizes, and what was measured.

A simulation is seeded; its margin is such that it would fail for one seed in a million if the formula is right.
"""

import pytest
from scipy import stats

from flsim.base.rng import stream
from flsim.results.power import (
    ALPHA,
    SD_CANARIES,
    SD_SEEDS,
    Spread,
    canaries_for,
    power_of_exposure,
    seeds_for,
)

SIMULATIONS = 20_000
CHANCE = 1e-6


def within(found: int, rate: float) -> bool:
    low, high = stats.binom.ppf(CHANCE / 2, SIMULATIONS, rate), stats.binom.isf(CHANCE / 2, SIMULATIONS, rate)
    return bool(low <= found <= high)


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
