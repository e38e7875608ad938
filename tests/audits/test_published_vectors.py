"""Bounds against values of others, each with its source."""

import numpy as np
import pytest
import scipy
from scipy.special import ndtri

from flsim.attacks.audit import coins, ranks, trade_off
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
    assert ranks.epsilon_of_threshold(500, 500, 0, 500, significance=0.01) == pytest.approx(4.541915810224092)
