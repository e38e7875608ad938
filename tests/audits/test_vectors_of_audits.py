"""Bounds whose values follow from their definition: enumeration, scipy.stats, or numerical integration."""

import math

import numpy as np
import pytest
import scipy
from helpers import enumerated
from scipy.stats import beta, binom, norm

from flsim.attacks.audit import guesses, ranks, rounds, trade_off
from flsim.base.errors import InputError
from flsim.base.statistics import auroc, auroc_interval, roc, share_interval


@pytest.mark.parametrize(("epsilon", "share"), [(0.7, 0.3), (0.0, 0.3), (5.0, 1e-4)])
def test_a_hit_is_as_likely_as_the_definition_says(epsilon: float, share: float) -> None:
    odds = math.exp(epsilon) * share / (1 - share)
    assert guesses.hit_probability(epsilon, share) == pytest.approx(odds / (1 + odds), rel=1e-12)
    assert guesses.hit_probability(epsilon, 1.0) == 1.0


def test_the_share_of_references_is_exceeded_by_none_of_all_canaries() -> None:
    """The share of a set is Beta(t, R - t + 1); each of m canaries has an m-th of the significance."""
    for threshold, references, canaries in ((20, 20_000, 48), (1, 500, 3)):
        share = guesses.share_of_references(threshold, references, canaries)
        tail = beta.sf(share, threshold, references - threshold + 1)
        assert tail == pytest.approx(0.01 / canaries, rel=1e-6)
    share = guesses.share_of_references(5, 100, 7, significance=0.2)
    assert beta.sf(share, 5, 96) == pytest.approx(0.2 / 7, rel=1e-9)


@pytest.mark.parametrize(("hits", "groups"), [(3, (5, 5, 5, 5)), (4, (1, 2, 5, 1, 3)), (2, (5, 1, 1, 1, 1, 1))])
def test_bounds_of_hits_of_groups_solve_their_equation(hits: int, groups: tuple[int, ...]) -> None:
    share, significance = 0.1, 0.03

    def q(epsilon: float, users: int) -> float:
        return share * math.exp(users * epsilon) / (share * math.exp(users * epsilon) + 1 - share)

    bound = guesses.epsilon_of_hits(hits, share, groups, significance)
    expected = enumerated([q(bound, users) for users in groups], hits)
    if enumerated([share] * len(groups), hits) < significance:
        assert expected == pytest.approx(significance, rel=1e-6)
    else:
        assert bound == 0


def test_bounds_of_hits_at_their_ends() -> None:
    assert guesses.epsilon_of_hits(0, 0.3, (1, 1)) == 0
    assert guesses.epsilon_of_hits(1, 0.3, (1, 1)) == 0  # 1 - 0.7^2 > 0.05
    assert guesses.epsilon_of_hits(1, 1e-40, (1, 1)) == guesses.HIGHEST == 60  # at epsilon 60 a hit has 1e-14


def test_ranks_pay_for_their_shares() -> None:
    """The share is exceeded with probability 0.01, and 0.04 are left for the hits."""
    share = beta.isf(0.01 / 6, 2, 499)
    expected = guesses.epsilon_of_hits(5, share, (1, 2, 5, 1, 1, 1), 0.04)
    assert guesses.epsilon_of_ranks(5, 2, 500, (1, 2, 5, 1, 1, 1)) == pytest.approx(expected, rel=1e-6)
    expected = guesses.epsilon_of_hits(5, share, (1, 2, 5, 1, 1, 1), 0.19)
    assert guesses.epsilon_of_ranks(5, 2, 500, (1, 2, 5, 1, 1, 1), 0.2) == pytest.approx(expected, rel=1e-6)


def test_default_thresholds() -> None:
    """A thousandth of the references, at least 1, and 100 from 100,000 references on."""
    found = [guesses.default_threshold(references) for references in (1, 1_999, 2_000, 99_999, 100_000, 2_000_000)]
    assert found == [1, 1, 2, 99, 100, 100]


def test_detections_of_a_test_by_ranks() -> None:
    found = ranks.detection_at(np.array([1.0, 3.0, 3.0, 4.0, 10.0]), 9, 3)
    assert {name: found[name] for name in ("threshold", "fpr", "detected", "trials", "estimate")} == {
        **{"threshold": 3, "fpr": 0.3, "detected": 3, "trials": 5, "estimate": 0.6}
    }
    assert found["fpr_high"] == pytest.approx(beta.ppf(0.975, 3, 7), rel=1e-9)
    assert (found["low"], found["high"]) == share_interval(3, 5)
    assert math.isnan(ranks.detection_at(np.array([]), 9, 3)["estimate"])
    assert ranks.p_values(np.array([1.0, 10.0]), 9).tolist() == [0.1, 1.0]
    points = [values.tolist() for values in ranks.curve(np.array([1.0, 3, 3, 10]), 9)]
    assert points == [[0.1, 0.3, 1.0], [0.25, 0.75, 1.0]]


def test_levels_of_ranks_are_those_that_the_references_can_have() -> None:
    found = ranks.detections_by_level(np.array([1.0, 15.0, 200.0]), 1_999)
    assert {level: (one["threshold"], one["detected"]) for level, one in found.items()} == {
        **{1e-3: (2, 1), 1e-2: (20, 2), 1e-1: (200, 3)}
    }
    assert ranks.detections_by_level(np.array([1.0]), 999)[1e-3]["threshold"] == 1
    assert ranks.LEVELS == (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)


@pytest.mark.parametrize("level", [0.02, 0.1, 0.4])
@pytest.mark.parametrize("confidence", [0.95, 0.6])
def test_intervals_of_rates_are_those_of_two_scores(level: float, confidence: float) -> None:
    """The k-th highest of n others has a rate of at most `level` where Bin(n, level) is k or more."""
    rng = np.random.default_rng(3)
    members, others = rng.normal(1, 1, 150), np.sort(rng.normal(0, 1, 120))[::-1]
    tail = (1 - confidence) / 4
    is_below = [binom.sf(k - 1, 120, level) for k in range(1, 121)]
    strict = max((k for k in range(1, 121) if is_below[k - 1] >= 1 - tail), default=0)
    lax = next(k for k in range(1, 121) if is_below[k - 1] <= tail)
    low = share_interval(int((members > others[strict - 1]).sum()), 150, 1 - 2 * tail)[0] if strict else 0.0
    high = share_interval(int((members >= others[lax - 1]).sum()), 150, 1 - 2 * tail)[1]
    assert roc(members, others).interval(level, confidence) == pytest.approx((low, high), rel=1e-12)


def test_an_interval_of_rates_where_no_other_is_surely_above_the_level() -> None:
    """The lowest of 3 others has a rate above 0.9 with probability 0.27, so there is no upper bound."""
    curve = roc(np.array([1.0, 2.0]), np.array([0.0, 0.5, 1.5]))
    assert curve.interval(0.9)[1] == 1.0


def test_rates_at_a_level_are_those_of_the_lowest_threshold() -> None:
    curve = roc(np.array([5.0, 4.0, 2.0, 0.0]), np.array([4.5, 3.0, 1.0, 0.5, -1.0]))
    at = curve.at(0.4)  # two of five: 4.5 and 3, and members from just above 1
    assert (at.level, at.alarms, at.detected, at.tpr) == (0.4, 2, 3, 0.75)
    assert (at.low, at.high) == curve.interval(0.4)
    at = curve.at(0.39)
    assert (at.alarms, at.detected) == (1, 2)


def test_bootstraps_draw_units() -> None:
    """Members of author A score above all others, those of B below: an area of 0, a mixture, or 1 in 1:2:1."""
    members, others = np.array([1.0, 1.0, 1.0, -1.0]), np.array([0.0, 0.0])
    units = (["a", "a", "a", "b"], ["c", "c"])
    rng = np.random.default_rng(0)
    assert auroc_interval(members, others, units, rng) == (0.0, 1.0)
    # Quantiles 0.3 and 0.7 lie inside the half of the draws that have one of each: 3 of 4 members above.
    assert auroc_interval(members, others, units, rng, confidence=0.4) == (0.75, 0.75)
    # Quantiles 0.2 and 0.8 lie in the outer quarters.
    assert auroc_interval(members, others, units, rng, confidence=0.6) == (0.0, 1.0)


def test_areas_count_equal_scores_half() -> None:
    assert auroc(np.array([1.0, 2.0]), np.array([1.0, 0.0, 2.0])) == pytest.approx((1.5 + 2.5) / 6)


@pytest.mark.parametrize(("detected", "alarms"), [(40, 3), (12, 1), (49, 30), (3, 40)])
def test_bounds_of_one_threshold_are_ratios_of_exact_bounds(detected: int, alarms: int) -> None:
    """Jagielski, Ullman and Oprea (2020), section 4: of hits, or of misses with the classes exchanged."""
    delta, tail = 0.01, 0.02
    tpr_low, fpr_high = beta.ppf(tail, detected, 51 - detected), beta.isf(tail, alarms + 1, 60 - alarms)
    tnr_low, fnr_high = beta.ppf(tail, 60 - alarms, alarms + 1), beta.isf(tail, 51 - detected, detected)
    expected = max(0.0, math.log((tpr_low - delta) / fpr_high), math.log((tnr_low - delta) / fnr_high))
    bound = ranks.epsilon_of_threshold(detected, 50, alarms, 60, delta, 2 * tail)
    assert bound == pytest.approx(expected, rel=1e-9)
    assert ranks.epsilon_of_threshold(detected, 50, alarms, 60, delta) == ranks.epsilon_of_threshold(
        detected, 50, alarms, 60, delta, 0.05
    )


def test_a_threshold_that_finds_nothing_proves_nothing() -> None:
    assert ranks.epsilon_of_threshold(0, 50, 60, 60, 0.01) == 0
    assert ranks.epsilon_of_threshold(1, 50, 0, 60, 0.5) == 0


@pytest.mark.parametrize("mu", [0.5, 1.2255, 4.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.7, 5.0, 40.0])
def test_deltas_of_gaussians_are_integrals(mu: float, epsilon: float) -> None:
    """Delta is the integral of max(0, p - e^epsilon q) of N(mu, 1) and N(0, 1): above epsilon / mu + mu / 2."""
    start = epsilon / mu + mu / 2
    expected = norm.sf(start - mu) - (math.exp(epsilon) * norm.sf(start))
    assert trade_off.delta_of_gaussian(mu, epsilon) == pytest.approx(expected, rel=1e-6, abs=1e-15)
    assert trade_off.delta_of_gaussian(0, epsilon) == 0


@pytest.mark.parametrize(("mu", "delta"), [(0.5, 1e-5), (1.0, 0.01), (4.0, 1e-9)])
def test_epsilons_of_gaussians_invert_their_deltas(mu: float, delta: float) -> None:
    epsilon = trade_off.epsilon_of_gaussian(mu, delta)
    assert trade_off.delta_of_gaussian(mu, epsilon) == pytest.approx(delta, rel=1e-6)
    assert trade_off.epsilon_of_gaussian(0.01, 0.01) == 0  # delta at epsilon 0 is 2 Phi(0.005) - 1 = 0.004


def test_a_claim_of_several_points_allows_what_all_of_them_do() -> None:
    claim = trade_off.Allowed(np.array([0.5, 2.0, 900.0]), np.array([0.1, 1e-3, 0.0]))
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
    beyond = norm.sf(1, mean, deviation) + norm.cdf(-1, mean, deviation)  # where chance has no density
    one = np.trapezoid(np.maximum(0, taking_part - math.exp(epsilon) * chance), places) + beyond
    other = np.trapezoid(np.maximum(0, chance - math.exp(epsilon) * taking_part), places)
    expected = max(one, other)
    assert rounds.delta_of_cosines(mean, deviation, dimension, epsilon) == pytest.approx(expected, rel=1e-3)
    if expected < rounds.delta_of_cosines(mean, deviation, dimension, 0.0):
        found = rounds.epsilon_of_cosines(mean, deviation, dimension, expected)
        assert found == pytest.approx(epsilon, abs=2e-3)


@pytest.mark.parametrize("mu", [0.5, 1.0, 3.0])
def test_cosines_of_many_parameters_are_gaussian(mu: float) -> None:
    """With the deviation of chance, 1 / sqrt d, a mean of mu / sqrt d is mu-GDP."""
    spread = 1e-4  # of 1e8 parameters
    expected = trade_off.epsilon_of_gaussian(mu, 1e-3)
    found = rounds.epsilon_of_cosines(mu * spread, spread, 10**8, 1e-3)
    assert found == pytest.approx(expected, abs=1e-3)
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
    assert few.estimate(few.members) is None
    assert few.estimate(few.others) is not None


def test_normal_cosines_reach_beyond_1_on_both_sides() -> None:
    """Cosines of 0.4, 0.5 and 0.6 have a deviation of 0.1: 5 of it to 1. Delta 1e-3 allows 1e-6, 1e-4 only 1e-7."""
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
