"""Bounds against values of others, each with its source."""

import math

import numpy as np
import pytest
import scipy
from scipy.special import ndtr, ndtri

from flsim.attacks.audit import coins, guesses, thresholds, trade_off
from flsim.base.statistics import roc


# Values of Steinke, Nasr and Jagielski (2023) and of Mahloujifar et al. (2024) as jax_privacy's auditing.py at 8967688
# computes them from counts: epsilon_one_run, epsilon_one_run_fdp (k = 2).
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
    assert coins.epsilon_of_coins(canaries, made, right, delta) == pytest.approx(one_run, abs=1e-4)
    mu = coins.mu_refuted(lambda least: coins.is_refuted(coins.of_one(least), canaries, made, right))
    assert trade_off.epsilon_of_gaussian(mu, delta) == pytest.approx(f_dp, abs=1e-4)


@pytest.mark.parametrize(
    ("shift", "one_run", "f_dp"),
    [(1, 1.13346, 2.164749), pytest.param(4, 4.395568, 9.133752, marks=pytest.mark.nightly)],
)
def test_one_run_bounds_of_normal_scores(shift: float, one_run: float, f_dp: float) -> None:
    """jax_privacy, tests/auditing_test.py at 8967688: 10,000 normal quantiles of each kind, delta 1e-6.

    It guesses "planted" above a threshold, abstains below, and has the largest bound of all thresholds at vertices of
    the ROC's convex hull, each at its part of 5%.
    """
    quantiles = ndtri((np.arange(10_000) + 0.5) / 10_000)
    curve = roc(quantiles + shift, quantiles)
    vertices = scipy.spatial.ConvexHull(np.stack([curve.fpr, curve.tpr], axis=1)).vertices
    right, wrong = (np.round(10_000 * rates[vertices]).astype(int) for rates in (curve.tpr, curve.fpr))
    best_one, best_mu = 0.0, 0.0
    for place in np.argsort(wrong / right.clip(1))[:300]:
        hits, made = int(right[place]), int(right[place] + wrong[place])
        part = 0.05 / len(vertices)

        def refuted(least: trade_off.LeastProbability, hits: int = hits, made: int = made, part: float = part) -> bool:
            return coins.is_refuted(coins.of_one(least), 20_000, made, hits, part)

        if hits and coins.p_value(best_one, 1e-6, 20_000, made, hits) < part:
            best_one = coins.epsilon_of_coins(20_000, made, hits, 1e-6, part)
        if hits and refuted(trade_off.gaussian(best_mu + 1e-6)):
            best_mu = coins.mu_refuted(refuted)
    assert best_one == pytest.approx(one_run, rel=1e-5)
    assert trade_off.epsilon_of_gaussian(best_mu, 1e-6) == pytest.approx(f_dp, rel=1e-4)


def test_thresholds_are_those_of_tensorflow_privacy() -> None:
    """tensorflow/privacy at 03035d5, research/audit_2020/audit_test.py: 500 of 500 and 0 of 500 at 99%."""
    assert thresholds.epsilon_of_threshold(500, 500, 0, 500, significance=0.01) == pytest.approx(4.541915810224092)


@pytest.mark.parametrize("mu", [0.5, 1.0, 3.0])
def test_a_whole_curve_allows_what_the_gaussian_mechanism_does(mu: float) -> None:
    """Dong, Roth and Su (2022), equation 6, from 400 points of delta(epsilon)."""
    epsilons = np.linspace(0, 40, 4_000)
    curve = trade_off.Allowed(epsilons, np.array([trade_off.delta_of_gaussian(mu, epsilon) for epsilon in epsilons]))
    for x in (1e-4, 1e-3, 0.01, 0.1, 0.5, 0.9):
        assert curve.tpr(x) == pytest.approx(ndtr(ndtri(x) + mu), abs=1e-4)
        assert curve.least_probability(x) == pytest.approx(trade_off.gaussian(mu)(x), abs=1e-4)
        assert trade_off.of_group(trade_off.gaussian(mu), 3)(x) == pytest.approx(trade_off.gaussian(3 * mu)(x))


def test_epsilons_of_gaussians_are_dp_accounting_s() -> None:
    from dp_accounting import GaussianDpEvent
    from dp_accounting.pld import PLDAccountant

    for mu in (0.5, 1.2255, 3.0):
        theirs = PLDAccountant().compose(GaussianDpEvent(1 / mu)).get_epsilon(1e-5)
        assert trade_off.epsilon_of_gaussian(mu, 1e-5) == pytest.approx(theirs, abs=2e-3)


@pytest.mark.parametrize(
    ("canaries", "hits", "references", "threshold", "fresh", "shared"),
    [
        (48, 14, 20_000, 1, 8.4256, 6.2510),
        (48, 14, 20_000, 20, 5.4289, 4.7059),
        (48, 1, 20_000, 1, 3.0626, 0.6967),
        (90, 23, 2_000_000, 1, 13.0017, 10.7652),
        (90, 23, 2_000_000, 100, 8.3965, 8.0238),
        (48, 10, 100, 1, 2.59, 0.3665),
    ],
)
def test_bounds_of_hits_solve_their_equation(
    canaries: int, hits: int, references: int, threshold: int, fresh: float, shared: float
) -> None:
    """The binomial tail at the bound is the significance, by scipy.stats; and the figures of a second computation."""
    users = [1] * canaries
    share = threshold / (references + 1)
    bound = guesses.epsilon_of_hits(hits, share, users)
    q = share * math.exp(bound) / (share * math.exp(bound) + 1 - share)
    assert scipy.stats.binom.sf(hits - 1, canaries, q) == pytest.approx(0.05, rel=1e-6)
    assert bound == pytest.approx(fresh, abs=1e-4)
    assert guesses.epsilon_of_ranks(hits, threshold, references, users) == pytest.approx(shared, abs=1e-4)
