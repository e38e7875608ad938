"""Bounds equal values that follow from their definition: enumeration, scipy.stats, or numerical integration."""

import math
from typing import Any, cast

import numpy as np
import pytest
import scipy
from gaussian_claims import curve_of_gaussian
from helpers import enumerated
from scipy.stats import beta, binom, norm

from flsim.attacks.audit import bounds, rounds
from flsim.attacks.audit.audit import Subject, of_ranks, pooled, rate_at
from flsim.attacks.audit.claim import Claim, LedgerTest
from flsim.base.errors import InputError
from flsim.base.statistics import auroc, auroc_interval, roc, share_interval
from flsim.privacy.conventions import sound_convention


@pytest.mark.parametrize(("epsilon", "share"), [(0.7, 0.3), (0.0, 0.3), (5.0, 1e-4)])
def test_a_hit_is_as_likely_as_the_definition_says(epsilon: float, share: float) -> None:
    odds = math.exp(epsilon) * share / (1 - share)
    assert bounds.hit_probability(epsilon, share) == pytest.approx(odds / (1 + odds), rel=1e-12)
    assert bounds.hit_probability(epsilon, 1.0) == 1.0


def test_the_share_of_references_is_exceeded_by_none_of_all_canaries() -> None:
    """The share of a set is Beta(t, R - t + 1); each of m canaries has 1 / m of the significance."""
    for threshold, references, canaries in ((20, 20_000, 48), (1, 500, 3)):
        share = bounds.share_of_references(threshold, references, canaries)
        assert beta.sf(share, threshold, references - threshold + 1) == pytest.approx(0.01 / canaries, rel=1e-6)
    share = bounds.share_of_references(5, 100, 7, significance=0.2)
    assert beta.sf(share, 5, 96) == pytest.approx(0.2 / 7, rel=1e-9)


@pytest.mark.parametrize(("hits", "groups"), [(3, (5, 5, 5, 5)), (4, (1, 2, 5, 1, 3)), (2, (5, 1, 1, 1, 1, 1))])
def test_bounds_of_hits_of_groups_solve_their_equation(hits: int, groups: tuple[int, ...]) -> None:
    share, significance = 0.1, 0.03

    def q(epsilon: float, users: int) -> float:
        return share * math.exp(users * epsilon) / (share * math.exp(users * epsilon) + 1 - share)

    bound = bounds.epsilon_of_hits(hits, share, groups, significance)
    expected = enumerated([q(bound, users) for users in groups], hits)
    if enumerated([share] * len(groups), hits) < significance:
        assert expected == pytest.approx(significance, rel=1e-6)
    else:
        assert bound == 0


def test_bounds_of_hits_at_their_ends() -> None:
    assert bounds.epsilon_of_hits(0, 0.3, (1, 1)) == 0
    assert bounds.epsilon_of_hits(1, 0.3, (1, 1)) == 0  # 1 - 0.7^2 > 0.05
    assert bounds.epsilon_of_hits(1, 1e-40, (1, 1)) == bounds.HIGHEST == 60  # at epsilon 60, a hit has about 1e-14


def test_bounds_of_ranks_divide_the_significance() -> None:
    """The share is exceeded with probability 0.01; 0.04 of the significance remains for the hits."""
    share = beta.isf(0.01 / 6, 2, 499)
    expected = bounds.epsilon_of_hits(5, share, (1, 2, 5, 1, 1, 1), 0.04)
    assert bounds.epsilon_of_ranks(5, 2, 500, (1, 2, 5, 1, 1, 1)) == pytest.approx(expected, rel=1e-6)
    expected = bounds.epsilon_of_hits(5, share, (1, 2, 5, 1, 1, 1), 0.19)
    assert bounds.epsilon_of_ranks(5, 2, 500, (1, 2, 5, 1, 1, 1), 0.2) == pytest.approx(expected, rel=1e-6)


def test_default_thresholds() -> None:
    """The threshold is a thousandth of the references, at least 1, and 100 from 100,000 references on."""
    found = [bounds.default_threshold(references) for references in (1, 1_999, 2_000, 99_999, 100_000, 2_000_000)]
    assert found == [1, 1, 2, 99, 100, 100]


def test_detections_of_a_test_by_ranks() -> None:
    found = bounds.detection_at(np.array([1.0, 3.0, 3.0, 4.0, 10.0]), 9, 3)
    assert {name: found[name] for name in ("threshold", "fpr", "detected", "trials", "estimate")} == {
        **{"threshold": 3, "fpr": 0.3, "detected": 3, "trials": 5, "estimate": 0.6}
    }
    assert found["fpr_high"] == pytest.approx(beta.ppf(0.975, 3, 7), rel=1e-9)
    assert (found["low"], found["high"]) == share_interval(3, 5)
    assert math.isnan(bounds.detection_at(np.array([]), 9, 3)["estimate"])
    assert bounds.p_values(np.array([1.0, 10.0]), 9).tolist() == [0.1, 1.0]


def test_levels_of_ranks_are_those_that_the_references_can_have() -> None:
    found = bounds.detections_by_level(np.array([1.0, 15.0, 200.0]), 1_999)
    assert {level: (one["threshold"], one["detected"]) for level, one in found.items()} == {
        **{1e-3: (2, 1), 1e-2: (20, 2), 1e-1: (200, 3)}
    }
    assert bounds.detections_by_level(np.array([1.0]), 999)[1e-3]["threshold"] == 1
    assert bounds.LEVELS == (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)


@pytest.mark.parametrize("level", [0.02, 0.1, 0.4])
@pytest.mark.parametrize("confidence", [0.95, 0.6])
def test_intervals_of_rates_are_those_of_two_scores(level: float, confidence: float) -> None:
    """The k-th highest of n others has a rate of at most `level` if Bin(n, level) is k or more."""
    rng = np.random.default_rng(3)
    members, others = rng.normal(1, 1, 150), np.sort(rng.normal(0, 1, 120))[::-1]
    tail = (1 - confidence) / 4
    is_below = [binom.sf(k - 1, 120, level) for k in range(1, 121)]
    strict = max((k for k in range(1, 121) if is_below[k - 1] >= 1 - tail), default=0)
    lax = next(k for k in range(1, 121) if is_below[k - 1] <= tail)
    low = share_interval(int((members > others[strict - 1]).sum()), 150, 1 - 2 * tail)[0] if strict else 0.0
    high = share_interval(int((members >= others[lax - 1]).sum()), 150, 1 - 2 * tail)[1]
    assert roc(members, others).interval(level, confidence) == pytest.approx((low, high), rel=1e-12)


def test_an_interval_ends_at_1_if_no_threshold_is_surely_above_the_level() -> None:
    """The lowest of 3 others has a rate above 0.9 with probability 0.27; therefore, there is no upper bound."""
    curve = roc(np.array([1.0, 2.0]), np.array([0.0, 0.5, 1.5]))
    assert curve.interval(0.9)[1] == 1.0


def test_rates_at_a_level_are_those_of_the_lowest_threshold() -> None:
    curve = roc(np.array([5.0, 4.0, 2.0, 0.0]), np.array([4.5, 3.0, 1.0, 0.5, -1.0]))
    at = curve.at(0.4)  # two of five others, 4.5 and 3; the threshold is just above 1
    assert (at.level, at.alarms, at.detected, at.tpr) == (0.4, 2, 3, 0.75)
    assert (at.low, at.high) == curve.interval(0.4)
    at = curve.at(0.39)
    assert (at.alarms, at.detected) == (1, 2)


def test_bootstraps_draw_units() -> None:
    """Members of A score above all others, those of B below: the area is 0, a mixture, or 1, with weights 1:2:1."""
    members, others = np.array([1.0, 1.0, 1.0, -1.0]), np.array([0.0, 0.0])
    units = (["a", "a", "a", "b"], ["c", "c"])
    rng = np.random.default_rng(0)
    assert auroc_interval(members, others, units, rng) == (0.0, 1.0)
    # Quantiles 0.3 and 0.7 are in the half of the draws that have both authors: 3 of 4 members are above the others.
    assert auroc_interval(members, others, units, rng, confidence=0.4) == (0.75, 0.75)
    # Quantiles 0.2 and 0.8 are in the outer quarters.
    assert auroc_interval(members, others, units, rng, confidence=0.6) == (0.0, 1.0)


def test_intervals_of_separated_scores_depend_on_the_units_of_the_smaller_side() -> None:
    """Three units are in order with a probability of 0.025 if each has a probability of 0.025 ** (1 / 3)."""
    above, below, units = np.array([3.0, 4.0, 5.0, 5.0]), np.array([0.0, 1.0, 2.0]), (list("abcc"), list("xyz"))
    rng = np.random.default_rng(0)
    assert auroc_interval(above, below, units, rng) == pytest.approx((0.025 ** (1 / 3), 1.0))
    assert auroc_interval(below, above, units[::-1], rng) == pytest.approx((0.0, 1 - 0.025 ** (1 / 3)))


def test_areas_count_equal_scores_half() -> None:
    assert auroc(np.array([1.0, 2.0]), np.array([1.0, 0.0, 2.0])) == pytest.approx((1.5 + 2.5) / 6)


@pytest.mark.parametrize(("detected", "alarms"), [(40, 3), (12, 1), (49, 30), (3, 40)])
def test_bounds_of_one_threshold_are_ratios_of_exact_bounds(detected: int, alarms: int) -> None:
    """Bounds follow Jagielski, Ullman and Oprea (2020), section 4: of hits, or of misses with exchanged classes."""
    delta, tail = 0.01, 0.02
    tpr_low, fpr_high = beta.ppf(tail, detected, 51 - detected), beta.isf(tail, alarms + 1, 60 - alarms)
    tnr_low, fnr_high = beta.ppf(tail, 60 - alarms, alarms + 1), beta.isf(tail, 51 - detected, detected)
    expected = max(0.0, math.log((tpr_low - delta) / fpr_high), math.log((tnr_low - delta) / fnr_high))
    bound = bounds.epsilon_of_threshold(detected, 50, alarms, 60, delta, 2 * tail)
    assert bound == pytest.approx(expected, rel=1e-9)
    assert bounds.epsilon_of_threshold(detected, 50, alarms, 60, delta) == bounds.epsilon_of_threshold(
        detected, 50, alarms, 60, delta, 0.05
    )


def test_a_threshold_that_finds_nothing_proves_nothing() -> None:
    assert bounds.epsilon_of_threshold(0, 50, 60, 60, 0.01) == 0
    assert bounds.epsilon_of_threshold(1, 50, 0, 60, 0.5) == 0


@pytest.mark.parametrize(("mu", "delta"), [(0.5, 1e-5), (1.0, 0.01), (4.0, 1e-9)])
def test_epsilons_of_gaussians_invert_their_deltas(mu: float, delta: float) -> None:
    """Delta integrates max(0, p - e^epsilon q) of N(mu, 1) and N(0, 1), which is over x > epsilon / mu + mu / 2."""
    epsilon = bounds.epsilon_of_gaussian(mu, delta)
    start = epsilon / mu + mu / 2
    assert norm.sf(start - mu) - math.exp(epsilon) * norm.sf(start) == pytest.approx(delta, rel=1e-6)
    assert bounds.epsilon_of_gaussian(0.01, 0.01) == 0  # delta at epsilon 0 is 2 Phi(0.005) - 1 = 0.004


def test_a_claim_of_several_points_allows_what_all_of_them_do() -> None:
    claim = bounds.Allowed(np.array([0.5, 2.0, 900.0]), np.array([0.1, 1e-3, 0.0]))
    for fpr in (1e-4, 0.05, 0.2, 0.6, 0.9):
        lines = [math.exp(0.5) * fpr + 0.1, math.exp(2) * fpr + 1e-3]
        lines += [1 - math.exp(-0.5) * (0.9 - fpr), 1 - math.exp(-2) * (1 - 1e-3 - fpr), 1.0]
        assert claim.tpr(fpr) == pytest.approx(min(lines), rel=1e-12)
        assert claim.least_probability(1 - fpr) == pytest.approx(1 - min(lines), rel=1e-9)
    assert claim.tpr(1.0) == 1.0
    assert claim.least_probability(0.0) == 0.0


def cosine_density(t: float, dimension: int) -> float:
    """Return the density of the cosine of a uniform direction, normalized by its integral."""
    half = (dimension - 3) / 2
    return float((1 - t * t) ** half / scipy.integrate.quad(lambda x: (1 - x * x) ** half, -1, 1)[0])


@pytest.mark.parametrize(("dimension", "mean", "deviation"), [(60, 0.2, 0.13), (60, 0.1, 0.1), (200, 0.15, 0.07)])
@pytest.mark.parametrize("epsilon", [0.0, 0.8, 2.0])
def test_deltas_of_cosines_are_integrals(dimension: int, mean: float, deviation: float, epsilon: float) -> None:
    places = np.linspace(-1, 1, 400_001)
    half = (dimension - 3) / 2
    chance = (1 - places**2) ** half * cosine_density(0.0, dimension)
    taking_part = norm.pdf(places, mean, deviation)
    beyond = norm.sf(1, mean, deviation) + norm.cdf(-1, mean, deviation)  # beyond -1 and 1, chance has no density
    one = np.trapezoid(np.maximum(0, taking_part - math.exp(epsilon) * chance), places) + beyond
    other = np.trapezoid(np.maximum(0, chance - math.exp(epsilon) * taking_part), places)
    expected = max(one, other)
    assert rounds.delta_of_cosines(mean, deviation, dimension, epsilon) == pytest.approx(expected, rel=1e-3)
    if expected < rounds.delta_of_cosines(mean, deviation, dimension, 0.0):
        found = rounds.epsilon_of_cosines(mean, deviation, dimension, expected)
        assert found == pytest.approx(epsilon, abs=2e-3)


@pytest.mark.parametrize("mu", [0.5, 1.0, 3.0])
def test_cosines_of_many_parameters_are_gaussian(mu: float) -> None:
    """With the deviation of chance, 1 / sqrt(d), a mean of mu / sqrt(d) is mu-GDP."""
    spread = 1e-4  # 1 / sqrt(d) of 1e8 parameters
    expected = bounds.epsilon_of_gaussian(mu, 1e-3)
    assert rounds.epsilon_of_cosines(mu * spread, spread, 10**8, 1e-3) == pytest.approx(expected, abs=1e-3)
    assert rounds.epsilon_of_cosines(0.0, spread, 10**8, 1e-3) == 0


def test_canary_users_have_two_sides() -> None:
    cosines, present = np.array([0.1, 0.2, 0.3, -0.1, 0.0]), np.array([True, True, True, False, False])
    users = rounds.CanaryUsers(cosines, present, np.array([0.05]), True, 60, 0.01)
    assert users.members.tolist() == [0.1, 0.2, 0.3]
    assert users.others.tolist() == [-0.1, 0.0, 0.05]
    assert users.estimate(users.members) == pytest.approx(rounds.epsilon_of_cosines(0.2, 0.1, 60, 0.01))
    deviation = math.sqrt((0.1**2 + 0.0**2 + 0.05**2 - 3 * (0.05 / 3) ** 2) / 2)
    assert users.estimate(users.others) == pytest.approx(rounds.epsilon_of_cosines(-0.05 / 3, deviation, 60, 0.01))
    few = rounds.CanaryUsers(cosines[:3], np.array([True, False, False]), np.array([]), True, 60, 0.01)
    assert few.estimate(few.members) is few.estimate(np.zeros(3)) is None
    assert few.estimate(few.others) is not None


def test_normal_cosines_reach_beyond_1_on_both_sides() -> None:
    """Cosines 0.4, 0.5, 0.6 have deviation 0.1: 1 is 5 deviations away. Delta 1e-3 allows 1e-6, and 1e-4 only 1e-7."""
    tail = norm.sf(1, 0.5, 0.1) + norm.cdf(-1, 0.5, 0.1)
    assert 1e-7 < tail < 1e-6
    for sign in (1, -1):
        assert rounds._beyond(sign * 0.5, 0.1) == pytest.approx(tail, rel=1e-9, abs=0)
        cosines = sign * np.array([0.4, 0.5, 0.6])
        for delta, is_too_small in ((1e-3, False), (1e-4, True)):
            users = rounds.CanaryUsers(cosines, np.ones(3, bool), np.array([0.0, 0.1]), True, 60, delta)
            assert users.is_too_small(users.members) == is_too_small
            assert (users.estimate(users.members) is None) == is_too_small
        with pytest.raises(InputError, match=r"has probability 2\.9e-07 beyond 1, and at most 1e-07 is allowed"):
            rounds.epsilon_of_cosines(sign * 0.5, 0.1, 60, 1e-4)


def p_of_coins(epsilon: float, delta: float, canaries: int, made: int, right: int) -> float:
    """Return the bound of Steinke et al. (2023), Theorem 5.2, as its sums: beta + alpha 2 m delta."""
    q = math.exp(epsilon) / (1 + math.exp(epsilon))
    law = [math.comb(made, count) * q**count * (1 - q) ** (made - count) for count in range(made + 1)]
    alpha = max(sum(law[right - step : right]) / step for step in range(1, right + 1))
    return min(1.0, sum(law[right:]) + 2 * canaries * delta * alpha)


@pytest.mark.parametrize("right", [1, 4, 7, 9])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.003), (0.3, 0.003), (2.5, 1e-3), (1.0, 0.0)])
def test_p_values_of_coins_are_the_sums_of_the_theorem(right: int, epsilon: float, delta: float) -> None:
    expected = p_of_coins(epsilon, delta, 30, 9, right)
    assert bounds.p_value(epsilon, delta, 30, 9, right) == pytest.approx(expected, rel=1e-9)
    assert bounds.p_value(epsilon, 0.9, 30, 9, right) == 1.0
    assert bounds.p_value(epsilon, delta, 30, 9, 0) == 1.0


@pytest.mark.parametrize("users", [1, 2, 5])
@pytest.mark.parametrize("significance", [0.05, 0.2])
def test_bounds_of_coins_of_groups_solve_their_equation(users: int, significance: float) -> None:
    """By Vadhan (2017), Lemma 2.2, g users have delta (1 + e^epsilon + ... + e^((g - 1) epsilon))."""
    bound = bounds.epsilon_of_coins(100, 40, 39, 1e-5, significance, users)
    delta = 1e-5 * sum(math.exp(user * bound) for user in range(users))
    assert p_of_coins(users * bound, delta, 100, 40, 39) == pytest.approx(significance, rel=1e-5)


def test_bounds_of_coins_of_groups_whose_delta_is_used_up() -> None:
    """At epsilon 60, a group of 20 has e^1200 delta: 1 for any delta above 0, and 0 for delta 0."""
    assert bounds.p_value(0.0, 1.0, 50, 50, 50) == 1
    assert [bounds._delta_of_group(delta, 60.0, 20) for delta in (1e-300, 0.0)] == [1.0, 0.0]
    with_delta, without = (bounds.epsilon_of_coins(50, 50, 50, delta, users=20) for delta in (1e-300, 0.0))
    assert without == pytest.approx(math.log(0.05 ** (1 / 50) / (1 - 0.05 ** (1 / 50))) / 20, rel=1e-6)
    assert with_delta == pytest.approx(without, rel=1e-6)
    assert bounds.epsilon_of_coins(50, 50, 50, 0.5, users=20) == 0
    assert bounds.epsilon_of_coins(50, 50, 10, 0.0, users=20) == 0


def test_a_bound_ends_where_the_search_ends() -> None:
    assert bounds.epsilon_of_coins(10**30, 10**4, 10**4, 0.0) < bounds.HIGHEST
    assert bounds.mu_refuted(lambda least: True) == 30
    assert bounds.mu_refuted(lambda least: False) == 0
    mu = bounds.mu_refuted(lambda least: least(0.5) > norm.cdf(-1.7))  # refuted if mu is below 1.7
    assert mu == pytest.approx(1.7, abs=2e-9)


def test_guesses_are_of_the_highest_and_of_the_lowest_scores() -> None:
    scores = np.array([5.0, 1.0, 4.0, 2.0, 3.0, 0.0, 6.0])
    planted = np.array([True, True, False, False, True, False, True])
    # Two guesses of each kind: 6 and 5 are planted; 0 is not, and 1 is.
    assert bounds.correct_guesses(scores, planted, 2) == 3
    # Three guesses of each kind: 4 is not planted, and 2 is not.
    assert bounds.correct_guesses(scores, planted, 3) == 4
    assert bounds.correct_guesses(scores, planted, 0) == 0
    # Equal scores are ordered by position, for any coins.
    assert bounds.correct_guesses(np.zeros(4), np.array([False, True, False, True]), 1) == 2


@pytest.mark.parametrize("mu", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("x", [0.05, 0.3, 0.9])
def test_least_probabilities_of_one_value_and_of_sets(mu: float, x: float) -> None:
    """The docstring of `of_set` proves T(x) / f - x; (k - 1) T(x) is Mahloujifar et al. (2024), Theorem 3.2."""
    least = bounds.gaussian(mu)
    expected = norm.cdf(norm.ppf(x) - mu)
    assert least(x) == pytest.approx(expected, rel=1e-12)
    assert bounds.of_set(least, 0.3)(x) == pytest.approx(expected / 0.3 - x, rel=1e-12)
    assert bounds.of_one(least)(x) == pytest.approx(expected, rel=1e-12)
    assert bounds.of_one(least, 5)(x) == pytest.approx(4 * expected, rel=1e-12)
    assert bounds.of_group(least, 5)(x) == pytest.approx(norm.cdf(norm.ppf(x) - 5 * mu), rel=1e-6)


def test_a_set_without_privacy_loss_is_hit_as_often_as_its_share() -> None:
    """For T(x) = x, if a hit has probability f, then the miss has 1 - f, and not 1."""
    assert bounds.of_set(bounds.gaussian(0.0), 0.3)(0.3) == pytest.approx(0.7, rel=1e-12)


def refuted_by_lists(least: bounds.LeastProbability, canaries: int, made: int, right: int, level: float) -> bool:
    """Return whether Mahloujifar et al. (2024), Algorithm 3, refutes, by h and r of each number of right guesses."""
    h, r = [0.0] * (right + 1), [0.0] * (right + 1)
    h[right], r[right] = level * right / canaries, level * (made - right) / canaries
    for i in range(right - 1, -1, -1):
        r[i] = max(r[i + 1], least(h[i + 1]))
        h[i] = min(1.0, h[i + 1] + i * (r[i] - r[i + 1]) / (made - i))
    return h[0] + r[0] > made / canaries


@pytest.mark.parametrize(
    ("canaries", "made", "right", "level"), [(30, 30, 25, 0.05), (40, 25, 24, 0.1), (9, 9, 9, 0.2)]
)
def test_refutations_are_those_of_the_algorithm(canaries: int, made: int, right: int, level: float) -> None:
    """`is_refuted` and lists refute Gaussian mechanisms up to the same mu, for coins and for sets of the share 0.3."""
    for turned in (bounds.of_one, lambda least: bounds.of_set(least, 0.3)):
        found = bounds.mu_refuted(lambda least: bounds.is_refuted(turned(least), canaries, made, right, level))  # noqa: B023
        listed = bounds.mu_refuted(lambda least: refuted_by_lists(turned(least), canaries, made, right, level))  # noqa: B023
        assert 0.1 < found < 5
        assert found == pytest.approx(listed, abs=1e-8)


def test_the_last_step_of_a_refutation_has_no_right_guess() -> None:
    """One canary with one right guess has `level` hits and T = 0.95 misses, and is refuted if their sum exceeds 1."""
    for level in (0.04, 0.06):
        assert bounds.is_refuted(lambda x: 0.95, 1, 1, 1, level) == (level > 0.05)


def subject(ranks_: list[float], groups: list[int], references: int, claim: Claim | None = None) -> Subject:
    none = np.empty(0)
    return Subject(cast(Any, None), 1, "user", np.array(ranks_), np.array(groups), references, none, None, claim=claim)


@pytest.mark.parametrize(("sampler", "neighbours"), [("fixed-size", 5), ("poisson", 10)])
@pytest.mark.parametrize("mu", [0.1, 3.0])
def test_canaries_of_several_runs_are_one_sample(mu: float, sampler: str, neighbours: int) -> None:
    """Ranks and groups are joined, the smaller R is used, and the claim is that of the largest group, of five users."""
    curve = curve_of_gaussian(mu)
    claim = Claim(sound_convention(sampler), bounds.epsilon_of_gaussian(mu, 1e-5), 1e-5, curve)
    runs = [subject([1.0, 2.0, 900.0, 1.0], [1, 2, 1, 1], 1_000, claim), subject([3.0, 1.0, 2.0], [1, 1, 5], 2_000)]
    joined = pooled(runs)
    rate = rate_at(joined, bounds.detection_at(joined.ranks, joined.references, 2))
    assert (rate["detected"], rate["n_in"], rate["fpr"]) == (5, 7, 2 / 1_001)
    least = bounds.of_group(curve.least_probability, neighbours)
    assert rate["allowed"] == pytest.approx(1 - least(1 - rate["fpr_high"]))
    bound, test, *_ = of_ranks(joined, 2)
    assert bound["low"] == bounds.epsilon_of_ranks(5, 2, 1_000, [1, 2, 1, 1, 1, 1, 5])
    share = beta.isf(0.01 / 7, 2, 999)
    assert test["refuted"] == bounds.is_refuted(bounds.of_set(least, share), 7, 7, 5, 0.04) == (mu < 1)
    needed = [right for right in range(8) if bounds.is_refuted(bounds.of_set(least, share), 7, 7, right, 0.04)]
    assert test["needed"] == (needed[0] if needed else None)
    largest = LedgerTest.of_ranks(7, 2, 1_000, neighbours).largest(1e-5)
    assert test["refutable"] == (max if needed else min)(largest, claim.epsilon)
    bare = subject([1.0, 5.0], [1, 1], 10)
    assert [row["method"] for row in of_ranks(bare, 1)] == ["epsilon"]
    assert rate_at(bare, bounds.detection_at(bare.ranks, 10, 1))["allowed"] is None


# Values of epsilon_one_run (Steinke, Nasr and Jagielski, 2023) and of epsilon_one_run_fdp with k = 2 (Mahloujifar et
# al., 2024), which jax_privacy's auditing.py at 8967688 computes from counts.
@pytest.mark.parametrize(
    ("canaries", "made", "right", "delta", "one_run", "f_dp"),
    [
        (1000, 100, 100, 1e-5, 3.4654, 5.5490),
        (1000, 100, 95, 1e-5, 2.1652, 3.3233),
        (1000, 100, 80, 1e-5, 0.9553, 1.4022),
        (1000, 1000, 600, 1e-5, 0.2972, 0.5835),
        (1000, 1000, 520, 1e-5, 0.0, 0.0),
        (1000, 30, 30, 1e-5, 2.2239, 3.0827),
        (100, 20, 20, 1e-5, 1.8196, 3.2394),
        (48, 10, 10, 1e-4, 1.0343, 1.5708),
        (48, 48, 40, 1e-4, 0.9380, 1.8936),
    ],
)
def test_one_run_bounds(canaries: int, made: int, right: int, delta: float, one_run: float, f_dp: float) -> None:
    assert bounds.epsilon_of_coins(canaries, made, right, delta) == pytest.approx(one_run, abs=1e-4)
    mu = bounds.mu_refuted(lambda least: bounds.is_refuted(bounds.of_one(least), canaries, made, right))
    assert bounds.epsilon_of_gaussian(mu, delta) == pytest.approx(f_dp, abs=1e-4)


def test_thresholds_are_those_of_tensorflow_privacy() -> None:
    """The value is in tensorflow/privacy at 03035d5, research/audit_2020/audit_test.py: 500 of 500, 0 of 500, 99%."""
    assert bounds.epsilon_of_threshold(500, 500, 0, 500, significance=0.01) == pytest.approx(4.541915810224092)


def test_a_level_of_one_of_n_is_one_false_positive() -> None:
    """This holds although 1 / 98 times 98 is below 1 in float64."""
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
    """The threshold is drawn with the others, and its error counts; the last line shows that a known one would fail."""
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
    """Others score 0 to 9, members 5 to 14. The rate of scores from 8 on is 0.2, and 7 of 10 members are found."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        low, high = roc(rng.integers(5, 15, 300).astype(float), rng.integers(0, 10, 300).astype(float)).interval(0.2)
        assert low <= 0.7 <= high
    assert roc(np.ones(50), np.ones(50)).interval(0.1) == (0.0, 1.0)
    low, high = roc(np.ones(400), np.zeros(400)).interval(0.1)
    assert (low, high) == (share_interval(400, 400, 0.975)[0], 1.0)
