"""Statistics at inputs whose values follow from their definition: enumeration, or formulas written out.

The inputs leave no term of a formula at 0 or 1.
"""

import math
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.stats import beta, binom, hypergeom, nct, t

from flsim.results import agreement, ceiling, inference, power


@pytest.mark.parametrize("confidence", [0.95, 0.6])
def test_intervals_of_means_are_students(confidence: float) -> None:
    values = np.array([1.0, 2.0, 4.0, 9.0])
    deviation = math.sqrt((9 + 4 + 0 + 25) / 3)
    half = t.isf((1 - confidence) / 2, 3) * deviation / 2
    assert inference.t_interval(values, confidence) == pytest.approx((4 - half, 4 + half), rel=1e-12)
    assert not any(map(math.isnan, inference.t_interval(values[:2])))
    assert all(map(math.isnan, inference.t_interval(values[:1])))


def test_p_values_of_paired_differences() -> None:
    values = np.array([1.0, 2.0, 4.0, -1.0])
    statistic = 1.5 / (math.sqrt((0.25 + 0.25 + 6.25 + 6.25) / 3) / 2)
    assert inference.paired_t_p(values) == pytest.approx(2 * t.sf(statistic, 3), rel=1e-12)
    assert 0 < inference.paired_t_p(values[:2]) < 1
    assert math.isnan(inference.paired_t_p(values[:1]))
    assert inference.paired_t_p(np.zeros(3)) == 1
    assert inference.paired_t_p(np.full(3, 0.1)) == 0
    assert inference.paired_t_p(np.array([0.0, 0.0, 1.0])) == pytest.approx(2 * t.sf(1, 2))


def test_p_values_of_signed_ranks_are_those_of_all_signs() -> None:
    """Wilcoxon (1945), by all 2^5 signs of the ranks; zeros keep their ranks (Pratt, 1959)."""
    assert inference.signed_rank_p(np.zeros(3)) == 1
    values = np.array([0.5, -1.0, 1.5, 2.0, 2.5])
    sums = [sum(rank * sign for rank, sign in enumerate(signs, 1)) for signs in product((0, 1), repeat=5)]
    observed = 1 + 3 + 4 + 5
    expected = 2 * np.mean([total >= observed for total in sums])
    assert inference.signed_rank_p(values) == pytest.approx(expected)
    with_zero = [sum(rank * sign for rank, sign in enumerate(signs, 2)) for signs in product((0, 1), repeat=5)]
    expected = 2 * np.mean([total >= 2 + 4 + 5 + 6 for total in with_zero])
    assert inference.signed_rank_p(np.append(values, 0.0)) == pytest.approx(expected)


@pytest.mark.parametrize(("only_a", "only_b"), [(7, 2), (0, 5), (3, 3), (1, 0)])
def test_mcnemars_test_and_its_interval_are_binomial(only_a: int, only_b: int) -> None:
    count = only_a + only_b
    law = binom.pmf(np.arange(count + 1), count, 0.5)
    expected = law[law <= law[only_a] * (1 + 1e-9)].sum()
    assert inference.mcnemar_p(only_a, only_b) == pytest.approx(expected, rel=1e-9)
    low = beta.ppf(0.1, only_a, only_b + 1) if only_a else 0
    high = beta.ppf(0.9, only_a + 1, only_b) if only_b else 1
    assert inference.discordant_interval(only_a, only_b, 0.8) == pytest.approx((low, high), abs=1e-9)
    assert inference.mcnemar_p(0, 0) == 1
    assert inference.discordant_interval(0, 0) == (0, 1)


@pytest.mark.parametrize("differences", [[3, -1, 2], [1, 1, 0, 4], [5, 5], [0, 0, 2], [-3, 1, 0, 0, 2]])
def test_sign_flips_are_enumerated(differences: list[int]) -> None:
    sums = [
        abs(sum(sign * size for sign, size in zip(signs, differences, strict=True)))
        for signs in product((-1, 1), repeat=len(differences))
    ]
    expected = np.mean([total >= abs(sum(differences)) for total in sums])
    assert inference.sign_flip_p(differences) == pytest.approx(expected, rel=1e-12)
    assert math.isnan(inference.sign_flip_p(differences[:1]))


def test_holm_steps_down() -> None:
    assert inference.holm([0.01, math.nan, 0.04, 0.03]) == pytest.approx([0.03, math.nan, 0.06, 0.06], nan_ok=True)
    assert inference.holm([0.2, 0.6, 0.9]) == pytest.approx([0.6, 1.0, 1.0])
    assert inference.holm([]) == []


@pytest.mark.parametrize(("found", "canaries"), [(0, 7), (3, 7), (7, 7)])
def test_intervals_of_shares_invert_binomial_tails(found: int, canaries: int) -> None:
    low, high = agreement.share_interval(found, canaries, 0.8)
    assert low == 0 if found == 0 else binom.sf(found - 1, canaries, low) == pytest.approx(0.1, rel=1e-9)
    assert high == 1 if found == canaries else binom.cdf(found, canaries, high) == pytest.approx(0.1, rel=1e-9)


def test_sizes_at_the_ends_of_an_interval_are_the_same() -> None:
    cases = [0.19, 0.2, 0.3, 0.4, 0.41]
    assert [agreement.size(0.2, 0.4, value) for value in cases] == ["higher", "same", "same", "same", "lower"]


def test_fishers_test_is_hypergeometric() -> None:
    def p(one: int, other: int, totals: tuple[int, int]) -> float:
        law = hypergeom.pmf(np.arange(sum(totals) + 1), sum(totals), one + other, totals[0])
        return float(law[law <= law[one] * (1 + 1e-9)].sum())

    for one, other in product(range(13), range(9)):
        for level in (0.05, 0.3):
            expected = p(one, other, (12, 8)) < level
            assert agreement.differ_by_more_than_chance((one, other), (12, 8), level) == expected


def test_orders_are_counted_pair_by_pair() -> None:
    """Theirs differ in 5 of 6 pairs; ours agree in 3, tie in 1 and disagree in 1."""
    ours, theirs = [1.0, 1.0, 3.0, 2.0], [1.0, 2.0, 3.0, 3.0]
    found = agreement.order(ours, theirs)
    assert (found.pairs, found.agreeing) == (5, 4.5)
    assert found.of_rows == pytest.approx((2.5 / 3, 2.5 / 3, 1.0, 1.0))
    is_clear = np.zeros((4, 4), bool)
    is_clear[0, 1] = is_clear[1, 0] = is_clear[0, 2] = is_clear[2, 0] = is_clear[2, 3] = is_clear[3, 2] = True
    found = agreement.order(ours, theirs, is_clear)
    assert (found.pairs, found.agreeing, found.clear_pairs, found.clear_agreeing) == (5, 4.5, 2, 1.5)
    assert found.of_rows == pytest.approx((0.75, 0.5, 1.0, math.nan), nan_ok=True)
    assert found.tau == pytest.approx(4 / 5)  # (4 - 0) / sqrt(5 x 5)
    assert math.isnan(agreement.order([1.0, 1.0], [1.0, 2.0]).tau)
    assert math.isnan(agreement.order([1.0, 2.0], [1.0, 1.0]).tau)


SPREAD = power.Spread(canaries=2.5, seeds=0.7)


@pytest.mark.parametrize(("canaries", "seeds"), [(12, 1), (48, 5), (7, 2)])
@pytest.mark.parametrize(("effect", "alpha"), [(0.9, 0.05), (-2.0, 0.01)])
def test_power_is_that_of_the_noncentral_t(canaries: int, seeds: int, effect: float, alpha: float) -> None:
    """Cohen (1988), section 2: both tails of the noncentral t distribution."""
    sizes, sd = (canaries, 2.5) if seeds == 1 else (seeds, math.sqrt(0.7**2 + 2.5**2 / canaries))
    shift, critical = effect * math.sqrt(sizes) / sd, t.isf(alpha / 2, sizes - 1)
    expected = nct.sf(critical, sizes - 1, shift) + nct.cdf(-critical, sizes - 1, shift)
    assert power.power_of_exposure(effect, canaries, seeds, SPREAD, alpha) == pytest.approx(expected, abs=1e-6)


def test_power_at_its_ends() -> None:
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
    assert power.detectable_exposure(12, 1, power.Spread(0.0, 0.0)) >= 0


def test_numbers_of_canaries_and_seeds_are_the_least() -> None:
    needed = power.canaries_for(1.0, 1, SPREAD, 0.01, 0.6)
    assert needed is not None
    assert power.power_of_exposure(1.0, needed, 1, SPREAD, 0.01) >= 0.6
    assert power.power_of_exposure(1.0, needed - 1, 1, SPREAD, 0.01) < 0.6
    seeds = power.seeds_for(1.0, 20, SPREAD, 0.01, 0.6)
    assert seeds is not None
    assert power.power_of_exposure(1.0, 20, seeds, SPREAD, 0.01) >= 0.6
    assert power.power_of_exposure(1.0, 20, seeds - 1, SPREAD, 0.01) < 0.6
    assert power.seeds_for(50.0, 20) == 2  # one seed asks another question
    assert power.canaries_for(0.01, 5) is None
    assert power.seeds_for(0.0, 20) is None
    assert power.MOST == 1_000_000


@pytest.mark.parametrize(("only_a", "only_b", "alpha"), [(0.3, 0.1, 0.05), (0.5, 0.0, 0.2), (0.6, 0.4, 0.05)])
def test_power_of_counts_sums_all_outcomes(only_a: float, only_b: float, alpha: float) -> None:
    """All numbers of canaries in a only, in b only, and in neither or both, of 12."""
    expected = 0.0
    for a in range(13):
        for b in range(13 - a):
            chance = math.comb(12, a) * math.comb(12 - a, b) * only_a**a * only_b**b
            chance *= max(0.0, 1 - only_a - only_b) ** (12 - a - b)
            expected += chance * (inference.mcnemar_p(a, b) <= alpha)
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
    assert ceiling.ceiling(1023) == 10
    assert ceiling.is_at_ceiling([10.0, 9.9999999, 9.99999, 9.0], 1023).tolist() == [True, True, False, False]
    assert ceiling.is_at_ceiling([10.0], None).tolist() == [False]
    assert ceiling.AtCeiling(3, 4).share == 0.75
    assert ceiling.AtCeiling(0, 0).share == 0


def test_canaries_at_the_ceiling_are_counted_over_runs() -> None:
    def run(exposures: list[float] | None, references: int | None) -> Any:
        return SimpleNamespace(of_planted=lambda name, round_: exposures, references=lambda round_: references)

    runs = [run([10.0, 3.0, 10.0], 1023), run([2.0], 3), run([2.0], 7), run(None, 3), run([2.0], None)]
    assert ceiling.at_ceiling((run, 5) for run in runs) == ceiling.AtCeiling(3, 5)


def test_the_measured_spreads_of_the_plan() -> None:
    """The comment at the constants states five half widths and differences."""
    halves, differences = [1.07, 0.835, 0.82, 0.685, 0.795], [3.62, 2.06, 1.88, 1.19, 1.81]
    spreads = [half * math.sqrt(48) / t.ppf(0.975, 47) for half in halves]
    canaries = math.sqrt(np.mean(np.square(spreads)))
    assert pytest.approx(canaries, abs=0.005) == power.SD_CANARIES
    seeds = math.sqrt(np.var(differences, ddof=1) - canaries**2 / 48)
    assert pytest.approx(seeds, abs=0.005) == power.SD_SEEDS
    assert power.detectable_counts(60) == power.detectable_counts(60, 2 / (5 * 48))
    assert (power.ALPHA, power.POWER) == (0.05, 0.8)
