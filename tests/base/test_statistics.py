"""Intervals and tests equal exact results from all outcomes, from definitions, or from published examples."""

import math
from collections.abc import Callable
from itertools import combinations, product

import numpy as np
import pytest
from helpers import enumerated
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from flsim.base.errors import InputError
from flsim.base.statistics import (
    EXCHANGES,
    at_least,
    auroc,
    differ_by_more_than_chance,
    difference_interval,
    holm,
    log_rank_p,
    lower_bound,
    mcnemar_p,
    paired_t_p,
    roc,
    share_interval,
    sign_flip_p,
    signed_rank_p,
    t_interval,
    upper_bound,
)

Floats = NDArray[np.float64]
CANARIES = 48


def listed_p(only_a: int, only_b: int) -> float:
    """Return McNemar's exact p-value: the share of divisions of the discordant that are no likelier than the given."""
    ways = [math.comb(only_a + only_b, count) for count in range(only_a + only_b + 1)]
    return sum(way for way in ways if way <= ways[only_a]) / sum(ways)


def test_mcnemar_equals_the_sum_over_all_divisions() -> None:
    """The interval of the discordant excludes one half if p is below 5%, and includes it otherwise."""
    for only_a, only_b in product(range(13), repeat=2):
        p = mcnemar_p(only_a, only_b)
        assert p == pytest.approx(listed_p(only_a, only_b), rel=1e-12)
        low, high = share_interval(only_a, only_a + only_b)
        assert (p < 0.05) == (not low <= 0.5 <= high)


@pytest.mark.parametrize("discordant", [0, 1, 5, 13, 40])
def test_the_interval_of_the_discordant_always_covers(discordant: int) -> None:
    """For a grid of true shares, intervals of at least 95% of the outcomes contain the truth, computed exactly."""
    intervals = np.array([share_interval(a, discordant) for a in range(discordant + 1)])
    for share in np.linspace(0, 1, 101):
        covers = (intervals[:, 0] <= share) & (share <= intervals[:, 1])
        assert stats.binom.pmf(np.flatnonzero(covers), discordant, share).sum() >= 0.95 - 1e-12


COUNTS = st.lists(st.integers(-6, 6), min_size=2, max_size=7)


@given(COUNTS)
def test_the_sign_flip_test_uses_all_sign_flips(differences: list[int]) -> None:
    sums = np.array(list(product((-1, 1), repeat=len(differences)))) @ np.array(differences)
    assert sign_flip_p(differences) == pytest.approx(float((np.abs(sums) >= abs(sum(differences))).mean()))
    assert np.isnan(sign_flip_p(differences[:1]))
    assert sign_flip_p([1, -1] * 55) == 1  # the shares of these 2^110 sums add up to 1 + 2e-16


@pytest.mark.parametrize("measure", [roc, auroc])
@pytest.mark.parametrize(
    ("members", "others", "message"),
    [
        ([], [1.0], "no members"),
        ([1.0], [], "no others"),
        ([np.nan], [1.0], "scores of members: some scores are not finite"),
        ([1.0], [np.inf], "scores of others: some scores are not finite"),
    ],
)
def test_missing_and_infinite_scores_are_refused(
    measure: Callable[[Floats, Floats], object], members: list[float], others: list[float], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        measure(np.array(members), np.array(others))


def test_holm_equals_an_example_by_hand() -> None:
    """The values are computed by hand: sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1, each at least the one before."""
    assert holm([0.03, 0.01, float("nan"), 0.04, 0.02]) == pytest.approx(
        [0.06, 0.04, float("nan"), 0.06, 0.06], nan_ok=True
    )
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_rejects_what_stepping_down_does(p: list[float]) -> None:
    """By definition, the smallest p is rejected while p <= level / (number remaining), until the first larger one."""
    corrected = holm(p)
    assert all(old <= new <= min(1.0, len(p) * old) for old, new in zip(p, corrected, strict=True))
    for level in (0.05, 0.3):
        rejected = set()
        for place, (value, index) in enumerate(sorted((value, index) for index, value in enumerate(p))):
            if (len(p) - place) * value > level:
                break
            rejected.add(index)
        assert {index for index, value in enumerate(corrected) if value <= level} == rejected


@pytest.mark.parametrize("probabilities", [(0.1, 0.3, 0.6), (0.3, 0.3, 0.3), (0.2,)])
def test_sums_of_coins_are_those_of_all_outcomes(probabilities: tuple[float, ...]) -> None:
    for successes in range(len(probabilities) + 2):
        expected = enumerated(probabilities, successes)
        assert at_least(probabilities, successes) == pytest.approx(expected, rel=1e-12)
    assert at_least(probabilities, 0) == at_least(probabilities, -1) == 1.0


def test_sums_of_coins_keep_their_digits() -> None:
    """Two or more of three have 3 p^2 (1 - p) + p^3, in which 1 - p is 1 in float64; naive sums can exceed 1."""
    assert at_least([1e-20] * 3, 2) == pytest.approx(3e-40, rel=1e-12, abs=0)
    rng = np.random.default_rng(5)
    assert max(at_least(rng.uniform(0.9999, 1, 40).tolist(), 1) for _ in range(50)) <= 1.0


@pytest.mark.parametrize(("successes", "trials", "tail"), [(14, 48, 0.025), (1, 7, 0.2), (7, 7, 0.01)])
def test_exact_bounds_invert_binomial_tails(successes: int, trials: int, tail: float) -> None:
    low, high = lower_bound(successes, trials, tail), upper_bound(successes, trials, tail)
    assert stats.binom.sf(successes - 1, trials, low) == pytest.approx(tail, rel=1e-9)
    assert (
        high == 1 if successes == trials else stats.binom.cdf(successes, trials, high) == pytest.approx(tail, rel=1e-9)
    )
    assert lower_bound(0, trials, tail) == 0


def test_the_interval_of_a_difference_is_newcombes() -> None:
    """The values are Newcombe's (1998), Table II, example (a), method 10; and Wilson's formula at 80% confidence."""
    assert difference_interval(56, 70, 48, 80) == pytest.approx((0.0524, 0.3339), abs=5e-5)
    z = stats.norm.ppf(0.9)  # 80%

    def wilson(hits: int, trials: int) -> tuple[float, float]:
        p, spread = hits / trials, z * math.sqrt(hits / trials * (1 - hits / trials) / trials + z**2 / 4 / trials**2)
        middle, scale = p + z**2 / 2 / trials, 1 + z**2 / trials
        return (middle - spread) / scale, (middle + spread) / scale

    (low, high), (other_low, other_high) = wilson(3, 10), wilson(1, 20)
    d = 3 / 10 - 1 / 20
    expected = d - math.hypot(0.3 - low, other_high - 0.05), d + math.hypot(high - 0.3, 0.05 - other_low)
    assert difference_interval(3, 10, 1, 20, confidence=0.8) == pytest.approx(expected, rel=1e-9)


def test_log_rank_is_mantels_sum_over_all_exchanges() -> None:
    """Observed minus expected deaths (Mantel, 1966) are compared with all 126 ways to choose 4 of 9 canaries."""
    one = [(1, False), (3, False), (4, True), (6, False)]
    other = [(2, False), (5, False), (8, True), (9, False), (9, False)]
    both = one + other

    def excess(group: list[tuple[int, bool]]) -> float:
        total = 0.0
        for time in sorted({time for time, censored in both if not censored}):
            at_risk = sum(at >= time for at, _ in both)
            deaths = sum(at == time and not censored for at, censored in both)
            in_group = sum(at >= time for at, _ in group)
            total += sum(at == time and not censored for at, censored in group) - deaths * in_group / at_risk
        return total

    sums = [abs(excess([both[place] for place in places])) for places in combinations(range(9), 4)]
    expected = sum(value >= abs(excess(one)) - 1e-9 for value in sums) / len(sums)
    found = log_rank_p(one, other)
    draws = EXCHANGES
    assert found == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / draws) + 1 / draws)
    known = [(1, False)]
    assert math.isnan(log_rank_p([], known))
    assert math.isnan(log_rank_p(known, []))
    assert log_rank_p([(1, True)], [(2, True)]) == 1


@pytest.mark.parametrize("confidence", [0.95, 0.6])
def test_intervals_of_means_are_students(confidence: float) -> None:
    values = np.array([1.0, 2.0, 4.0, 9.0])
    deviation = math.sqrt((9 + 4 + 0 + 25) / 3)
    half = stats.t.isf((1 - confidence) / 2, 3) * deviation / 2
    assert t_interval(values, confidence) == pytest.approx((4 - half, 4 + half), rel=1e-12)
    assert all(map(math.isnan, t_interval(values[:1])))


def test_p_values_of_paired_differences() -> None:
    values = np.array([1.0, 2.0, 4.0, -1.0])
    statistic = 1.5 / (math.sqrt((0.25 + 0.25 + 6.25 + 6.25) / 3) / 2)
    assert paired_t_p(values) == pytest.approx(2 * stats.t.sf(statistic, 3), rel=1e-12)
    assert math.isnan(paired_t_p(values[:1]))
    assert paired_t_p(np.zeros(3)) == 1
    assert paired_t_p(np.full(3, 0.1)) == 0
    assert paired_t_p(np.array([0.0, 0.0, 1.0])) == pytest.approx(2 * stats.t.sf(1, 2))


@given(*[st.integers(0, CANARIES)] * 2)
def test_chance_is_fishers_exact_test(one: int, other: int) -> None:
    """p is that of Fisher's exact test: the hypergeometric probabilities of all counts that are at most as likely."""
    odds = stats.hypergeom.pmf(range(CANARIES + 1), 2 * CANARIES, one + other, CANARIES)
    p = odds[odds <= odds[one] * (1 + 1e-9)].sum()
    assert differ_by_more_than_chance((one, other), (CANARIES, CANARIES)) == (p < 0.05)
    assert differ_by_more_than_chance((other, one), (CANARIES, CANARIES)) == (p < 0.05)


@settings(max_examples=50)
@given(st.lists(st.floats(-20, 20).map(lambda bits: round(bits, 1)), min_size=2, max_size=20))
def test_the_interval_excludes_zero_if_p_is_below_5_percent(differences: list[float]) -> None:
    values = np.array(differences)
    (low, high), p, mean = t_interval(values), paired_t_p(values), float(values.mean())
    assert low <= mean <= high
    assert 0 <= p <= 1
    assert 0 <= signed_rank_p(values) <= 1
    if abs(p - 0.05) > 1e-6 and np.ptp(differences) > 0:
        assert (p < 0.05) == (not low <= 0 <= high)


@settings(max_examples=40)
@given(st.lists(st.integers(-3, 3), min_size=2, max_size=7))
def test_the_signed_rank_test_tries_all_signs_on_few_canaries(differences: list[int]) -> None:
    """Zeros are ranked, and then dropped (Pratt, 1959)."""
    values = np.array(differences, float)
    ranks = stats.rankdata(np.abs(values))[values != 0]
    signs = np.array(list(product((-1, 1), repeat=len(ranks))))
    statistic = abs(float((ranks * np.sign(values[values != 0])).sum()))
    assert signed_rank_p(values) == pytest.approx(float((np.abs(signs @ ranks) >= statistic - 1e-9).mean()))
