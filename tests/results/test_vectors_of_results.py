"""Statistics at inputs whose values follow from definitions, as enumerations or formulas that are written out.

No term of a formula is 0 or 1 at these inputs."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.stats import nct, t

from flsim.base.errors import InputError
from flsim.base.statistics import mcnemar_p
from flsim.results import differences, power
from flsim.results import differences as ceiling
from flsim.results.sweeps import SweepRun

SPREAD = power.Spread(canaries=2.5, seeds=0.7)


@pytest.mark.parametrize(("canaries", "seeds"), [(12, 1), (48, 5), (7, 2)])
@pytest.mark.parametrize(("effect", "alpha"), [(0.9, 0.05), (-2.0, 0.01)])
def test_power_is_that_of_the_noncentral_t(canaries: int, seeds: int, effect: float, alpha: float) -> None:
    """Expected: both tails of the noncentral t distribution (Cohen, 1988, section 2)."""
    sizes, sd = (canaries, 2.5) if seeds == 1 else (seeds, math.sqrt(0.7**2 + 2.5**2 / canaries))
    shift, critical = effect * math.sqrt(sizes) / sd, t.isf(alpha / 2, sizes - 1)
    expected = nct.sf(critical, sizes - 1, shift) + nct.cdf(-critical, sizes - 1, shift)
    assert power.power_of_exposure(effect, canaries, seeds, SPREAD, alpha) == pytest.approx(expected, abs=1e-6)


def test_power_at_extreme_inputs() -> None:
    assert power.power_of_exposure(1.0, 1, 1) == 0
    assert 0 < power.power_of_exposure(1.0, 2, 1) < 1
    assert power.power_of_exposure(0.0, 10, 1, alpha=0.2) == 0.2
    assert power.power_of_exposure(1.0, 10, 1, spread=power.Spread(canaries=0.0)) == 1
    assert power.power_of_exposure(0.0, 10, 1, spread=power.Spread(canaries=0.0)) == 0.05
    assert power.power_of_exposure(1e6, 10, 1) == 1


@pytest.mark.parametrize(("canaries", "seeds", "alpha", "wanted"), [(12, 1, 0.05, 0.8), (48, 5, 0.01, 0.6)])
def test_detectable_effects_have_the_power(canaries: int, seeds: int, alpha: float, wanted: float) -> None:
    effect = power.detectable_exposure(canaries, seeds, SPREAD, alpha, wanted)
    assert power.power_of_exposure(effect, canaries, seeds, SPREAD, alpha) == pytest.approx(wanted, abs=1e-6)
    assert power.detectable_exposure(1, 1) == math.inf
    assert power.detectable_exposure(12, 1, power.Spread(0.0, 0.0)) == pytest.approx(0, abs=1e-9)


def test_numbers_of_canaries_and_seeds_are_the_least() -> None:
    needed = power.canaries_for(1.0, 1, SPREAD, 0.01, 0.6)
    assert needed is not None
    assert power.power_of_exposure(1.0, needed, 1, SPREAD, 0.01) >= 0.6
    assert power.power_of_exposure(1.0, needed - 1, 1, SPREAD, 0.01) < 0.6
    seeds = power.seeds_for(1.0, 20, SPREAD, 0.01, 0.6)
    assert seeds is not None
    assert power.power_of_exposure(1.0, 20, seeds, SPREAD, 0.01) >= 0.6
    assert power.power_of_exposure(1.0, 20, seeds - 1, SPREAD, 0.01) < 0.6
    assert power.seeds_for(50.0, 20) == 2  # one seed has no test over seeds
    assert power.canaries_for(0.01, 5) is None
    assert power.seeds_for(0.0, 20) is None


def test_sample_sizes_are_those_of_textbooks() -> None:
    """Paired two-sided t test, 5%, 80%: n is 34 for Cohen's d = 0.5, 15 for 0.8, and 199 for 0.2 (G*Power 3)."""
    sizes = (0.5, 0.8, 0.2)
    assert [power.canaries_for(d, spread=power.Spread(canaries=1.0)) for d in sizes] == [34, 15, 199]
    assert [power.seeds_for(d, 10**9, spread=power.Spread(seeds=1.0)) for d in sizes] == [34, 15, 199]


@pytest.mark.parametrize(("only_a", "only_b", "alpha"), [(0.3, 0.1, 0.05), (0.5, 0.0, 0.2), (0.6, 0.4, 0.05)])
def test_power_of_counts_sums_all_outcomes(only_a: float, only_b: float, alpha: float) -> None:
    """The sum is over all numbers of canaries in a only, in b only, and in neither or both, of 12."""
    expected = 0.0
    for a in range(13):
        for b in range(13 - a):
            chance = math.comb(12, a) * math.comb(12 - a, b) * only_a**a * only_b**b
            chance *= max(0.0, 1 - only_a - only_b) ** (12 - a - b)
            expected += chance * (mcnemar_p(a, b) <= alpha)
    assert power.power_of_counts(only_a, only_b, 12, alpha) == pytest.approx(expected, abs=1e-9)
    assert power.power_of_counts(0.0, 0.0, 12) == 0
    most = math.nextafter(0.3, 1) + math.ulp(1.0)  # 0.7 + most is above 1 by rounding
    assert power.power_of_counts(0.7, most, 12) == pytest.approx(power.power_of_counts(0.7, 0.3, 12))


def test_detectable_counts_have_the_power() -> None:
    found = power.detectable_counts(60, 0.05, 0.01, 0.6)
    assert power.power_of_counts(found + 0.05, 0.05, 60, 0.01) == pytest.approx(0.6, abs=1e-6)
    assert power.detectable_counts(5) == math.inf
    assert power.detectable_counts(6, 0.0, 0.05, 0.8) < 1


def test_the_ceiling_is_the_exposure_of_rank_1() -> None:
    assert ceiling.is_at_ceiling([10.0, 9.9999999, 9.99999, 9.0], 1023).tolist() == [True, True, False, False]
    assert ceiling.is_at_ceiling([10.0], None).tolist() == [False]
    assert ceiling.share_at_ceiling([]) == 0
    assert ceiling.MANY == 1 / 10


def test_canaries_at_the_ceiling_are_counted_over_runs() -> None:
    def run(exposures: list[float] | None, references: int | None) -> Any:
        return SimpleNamespace(of_planted=lambda name, round_: exposures, references=lambda round_: references)

    runs = [run([10.0, 3.0, 10.0], 1023), run([2.0], 3), run([2.0], 7), run(None, 3), run([2.0], None)]
    assert ceiling.share_at_ceiling((run, 5) for run in runs) == 3 / 5


def test_default_spreads_follow_from_measured_half_widths_and_differences() -> None:
    """The comment at the constants states the five half widths and differences."""
    halves, differences = [1.07, 0.835, 0.82, 0.685, 0.795], [3.62, 2.06, 1.88, 1.19, 1.81]
    spreads = [half * math.sqrt(48) / t.ppf(0.975, 47) for half in halves]
    canaries = math.sqrt(np.mean(np.square(spreads)))
    assert pytest.approx(canaries, abs=0.005) == power.SD_CANARIES
    seeds = math.sqrt(np.var(differences, ddof=1) - canaries**2 / 48)
    assert pytest.approx(seeds, abs=0.005) == power.SD_SEEDS
    assert power.detectable_counts(60) == power.detectable_counts(60, 2 / (5 * 48))
    assert (power.ALPHA, power.POWER) == (0.05, 0.8)


def sweep_of(*runs: tuple[str, str, str, int, int]) -> Any:
    """Return a sweep with runs of a name, a block, a partition, a cohort and a seed."""
    entries = []
    for name, grid, partition, cohort, seed in runs:
        axes = {"data.partition": partition, "training.cohort": cohort}
        entries.append(SweepRun(name, grid, seed, axes, None, None))
    return SimpleNamespace(path=Path("sweep"), runs=entries)


def test_twins_differ_only_in_the_partition() -> None:
    runs = [("n0", "one", "non-iid", 4, 0), ("i0", "one", "iid", 4, 0), ("i1", "one", "iid", 4, 1)]
    alone = [("i2", "one", "iid", 8, 0), ("n2", "two", "non-iid", 4, 0), ("c", "one", "central", 4, 0)]
    (pair,) = differences.twins(sweep_of(*runs, *alone))
    assert pair.row == "one cohort=4"
    assert [[run.name for run in side] for side in (pair.a, pair.b)] == [["i0", "i1"], ["n0"]]
    with pytest.raises(InputError, match="no row of this sweep has both partitions"):
        differences.twins(sweep_of(*alone))
