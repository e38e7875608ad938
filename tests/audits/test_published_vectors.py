"""Bounds against values of others, each with its source."""

import pytest

from flsim.attacks.audit import coins, ranks, trade_off


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


def test_thresholds_are_those_of_tensorflow_privacy() -> None:
    """tensorflow/privacy at 03035d5, research/audit_2020/audit_test.py: 500 of 500 and 0 of 500 at 99%."""
    assert ranks.epsilon_of_threshold(500, 500, 0, 500, significance=0.01) == pytest.approx(4.541915810224092)
