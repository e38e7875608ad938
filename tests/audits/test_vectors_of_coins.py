"""Bounds of coins and of sets whose values follow from their definition: sums, and the algorithm as lists."""

import math
from typing import Any, cast

import numpy as np
import pytest
from scipy.stats import beta, norm

from flsim.attacks.audit import coins, guesses, ranks, trade_off
from flsim.attacks.audit.audit import of_ranks, pooled, rate_at
from flsim.attacks.audit.claim import Claim, LedgerTest
from flsim.attacks.audit.subject import Subject
from flsim.privacy.conventions import sound_convention
from flsim.privacy.ledger import EPSILONS


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
    assert coins.p_value(epsilon, delta, 30, 9, right) == pytest.approx(expected, rel=1e-9)
    assert coins.p_value(epsilon, 0.9, 30, 9, right) == 1.0
    assert coins.p_value(epsilon, delta, 30, 9, 0) == 1.0


@pytest.mark.parametrize("users", [1, 2, 5])
@pytest.mark.parametrize("significance", [0.05, 0.2])
def test_bounds_of_coins_of_groups_solve_their_equation(users: int, significance: float) -> None:
    """Vadhan (2017), Lemma 2.2: g users have delta (1 + e^epsilon + ... + e^((g - 1) epsilon))."""
    bound = coins.epsilon_of_coins(100, 40, 39, 1e-5, significance, users)
    delta = 1e-5 * sum(math.exp(user * bound) for user in range(users))
    assert p_of_coins(users * bound, delta, 100, 40, 39) == pytest.approx(significance, rel=1e-5)


def test_bounds_of_coins_of_groups_where_the_group_has_no_delta_left() -> None:
    """At epsilon 60 a group of 20 has e^1200 delta: 1 of any delta above 0, and 0 of none."""
    assert coins.p_value(0.0, 1.0, 50, 50, 50) == 1
    assert [coins._delta_of_group(delta, 60.0, 20) for delta in (1e-300, 0.0)] == [1.0, 0.0]
    with_delta, without = (coins.epsilon_of_coins(50, 50, 50, delta, users=20) for delta in (1e-300, 0.0))
    assert without == pytest.approx(math.log(0.05 ** (1 / 50) / (1 - 0.05 ** (1 / 50))) / 20, rel=1e-6)
    assert with_delta == pytest.approx(without, rel=1e-6)
    assert coins.epsilon_of_coins(50, 50, 50, 0.5, users=20) == 0
    assert coins.epsilon_of_coins(50, 50, 10, 0.0, users=20) == 0


def test_a_bound_ends_where_the_search_ends() -> None:
    assert coins.epsilon_of_coins(10**30, 10**4, 10**4, 0.0) < guesses.HIGHEST
    assert coins.mu_refuted(lambda least: True) == 30
    assert coins.mu_refuted(lambda least: False) == 0
    mu = coins.mu_refuted(lambda least: least(0.5) > norm.cdf(-1.7))  # refuted below mu of 1.7
    assert mu == pytest.approx(1.7, abs=2e-9)


def test_guesses_are_of_the_highest_and_of_the_lowest_scores() -> None:
    scores = np.array([5.0, 1.0, 4.0, 2.0, 3.0, 0.0, 6.0])
    planted = np.array([True, True, False, False, True, False, True])
    # Two of each kind: 6 and 5 are planted; 0 is not, 1 is.
    assert coins.correct_guesses(scores, planted, 2) == 3
    # Three of each kind: 4 is not planted, 2 is not.
    assert coins.correct_guesses(scores, planted, 3) == 4
    assert coins.correct_guesses(scores, planted, 0) == 0
    # Equal scores are ordered by position, whatever the coins.
    assert coins.correct_guesses(np.zeros(4), np.array([False, True, False, True]), 1) == 2


@pytest.mark.parametrize("mu", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("x", [0.05, 0.3, 0.9])
def test_least_probabilities_of_one_value_and_of_sets(mu: float, x: float) -> None:
    """T(x) / f - x, as its docstring proves; (k - 1) T(x) of Mahloujifar et al. (2024), Theorem 3.2."""
    least = trade_off.gaussian(mu)
    expected = norm.cdf(norm.ppf(x) - mu)
    assert least(x) == pytest.approx(expected, rel=1e-12)
    assert coins.of_set(least, 0.3)(x) == pytest.approx(expected / 0.3 - x, rel=1e-12)
    assert coins.of_one(least)(x) == pytest.approx(expected, rel=1e-12)
    assert coins.of_one(least, 5)(x) == pytest.approx(4 * expected, rel=1e-12)
    assert trade_off.of_group(least, 5)(x) == pytest.approx(norm.cdf(norm.ppf(x) - 5 * mu), rel=1e-6)


def test_a_set_without_privacy_loss_is_hit_as_often_as_its_share() -> None:
    """T(x) = x: of a hit with probability f the miss has 1 - f, and not 1."""
    assert coins.of_set(trade_off.gaussian(0.0), 0.3)(0.3) == pytest.approx(0.7, rel=1e-12)


def refuted_by_lists(least: trade_off.LeastProbability, canaries: int, made: int, right: int, level: float) -> bool:
    """Return whether Mahloujifar et al. (2024), Algorithm 3, refutes: h and r of each number of right guesses."""
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
    """Both refute Gaussian mechanisms up to the same mu, of coins and of sets of the share 0.3."""
    for turned in (coins.of_one, lambda least: coins.of_set(least, 0.3)):
        found = coins.mu_refuted(lambda least: coins.is_refuted(turned(least), canaries, made, right, level))  # noqa: B023
        listed = coins.mu_refuted(lambda least: refuted_by_lists(turned(least), canaries, made, right, level))  # noqa: B023
        assert 0.1 < found < 5
        assert found == pytest.approx(listed, abs=1e-8)


def test_the_last_step_of_a_refutation_has_no_right_guess() -> None:
    """One canary with one right guess has 0.05 hits and T(0.05) misses, and is refuted if the sum exceeds 1."""
    for level in (0.04, 0.06):
        assert coins.is_refuted(lambda x: 0.95, 1, 1, 1, level) == (level > 0.05)


def subject(ranks_: list[float], groups: list[int], references: int, claim: Claim | None = None) -> Subject:
    none = np.empty(0)
    return Subject(cast(Any, None), 1, "user", np.array(ranks_), np.array(groups), references, none, None, claim=claim)


@pytest.mark.parametrize(("sampler", "neighbours"), [("fixed-size", 5), ("poisson", 10)])
@pytest.mark.parametrize("mu", [0.1, 3.0])
def test_canaries_of_several_runs_are_one_sample(mu: float, sampler: str, neighbours: int) -> None:
    """Ranks and groups are joined, the smaller R counts, and the claim is that of the largest group, of five users."""
    curve = trade_off.Allowed(EPSILONS, np.array([trade_off.delta_of_gaussian(mu, epsilon) for epsilon in EPSILONS]))
    claim = Claim(sound_convention(sampler), trade_off.epsilon_of_gaussian(mu, 1e-5), 1e-5, curve)
    runs = [subject([1.0, 2.0, 900.0, 1.0], [1, 2, 1, 1], 1_000, claim), subject([3.0, 1.0, 2.0], [1, 1, 5], 2_000)]
    joined = pooled(runs)
    rate = rate_at(joined, ranks.detection_at(joined.ranks, joined.references, 2))
    assert (rate["detected"], rate["n_in"], rate["fpr"]) == (5, 7, 2 / 1_001)
    least = trade_off.of_group(curve.least_probability, neighbours)
    assert rate["allowed"] == pytest.approx(1 - least(1 - rate["fpr_high"]))
    bound, test, *_ = of_ranks(joined, 2)
    assert bound["low"] == guesses.epsilon_of_ranks(5, 2, 1_000, [1, 2, 1, 1, 1, 1, 5])
    share = beta.isf(0.01 / 7, 2, 999)
    assert test["refuted"] == coins.is_refuted(coins.of_set(least, share), 7, 7, 5, 0.04) == (mu < 1)
    needed = [right for right in range(8) if coins.is_refuted(coins.of_set(least, share), 7, 7, right, 0.04)]
    assert test["needed"] == (needed[0] if needed else None)
    largest = LedgerTest.of_ranks(7, 2, 1_000, neighbours).largest(1e-5)
    assert test["refutable"] == (max if needed else min)(largest, claim.epsilon)
    bare = subject([1.0, 5.0], [1, 1], 10)
    assert [row["method"] for row in of_ranks(bare, 1)] == ["epsilon"]
    assert rate_at(bare, ranks.detection_at(bare.ranks, 10, 1))["allowed"] is None
