"""Tests compare forgetting times with a known truth, and cover their censoring."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binom, norm

from flsim.attacks.forgetting.success import (
    CanaryTime,
    accuracy,
    best_threshold,
    canary_times,
    forgetting_time,
    grid,
    p_after_window,
)

DISTANCE, DECAY, ALPHA = 3.0, 20.0, 0.6
DRAWS, CANARIES = 200, 600
KS = grid(200)


def success_of(threshold: float, distance: float, deviation: float) -> float:
    """Return a threshold's accuracy for normal scores with mean `distance` in arm IN and mean 0 in arm OUT."""
    return float(norm.cdf((distance - threshold) / deviation) + norm.cdf(threshold / deviation)) / 2


@pytest.fixture(scope="module")
def claims() -> list[tuple[int | None, list[float]]]:
    """Return T(0.6) of simulated groups whose arms approach each other, and the accuracy of each chosen threshold."""
    rng, chooses = np.random.default_rng(0), np.arange(CANARIES) % 2 == 0
    drawn = []
    for _ in range(DRAWS):
        hardness = rng.normal(0, 1, CANARIES)  # of a canary, in both arms and at every k
        bounds, true = [], []
        for k in KS:
            members, others = (hardness + rng.normal(0, 1, CANARIES) for _ in range(2))
            d = DISTANCE * math.exp(-k / DECAY) * math.sqrt(2)  # the scores' standard deviation
            bounds.append(accuracy(members + d, others, chooses)[1])
            true.append(success_of(best_threshold(members[chooses] + d, others[chooses]), d, math.sqrt(2)))
        drawn.append((forgetting_time(KS, bounds, ALPHA), true))
    return drawn


def test_at_most_five_percent_of_times_are_too_short(claims: list[tuple[int | None, list[float]]]) -> None:
    """The attack of the chosen thresholds succeeds more often than alpha at T or later in at most 5% of groups."""
    too_short = sum(
        time is not None and max(true[KS.index(time) :]) > ALPHA  # all later k
        for time, true in claims
    )
    assert too_short <= binom.ppf(0.999, DRAWS, 0.05)


def test_most_times_are_the_next_k_of_the_grid(claims: list[tuple[int | None, list[float]]]) -> None:
    """At k = 50, the accuracy is 0.55. With 600 trials, its bound is below 0.6 in more than nine of ten draws."""
    times = [time for time, _ in claims]
    assert sum(time == 50 for time in times) > 0.85 * DRAWS
    assert None not in times


def test_a_bound_near_the_truth_is_too_low_in_at_most_five_percent() -> None:
    """With a single k and independent arms, a claim about the threshold that half of the canaries chose is wrong in at
    most 5% of draws. If the best threshold has an accuracy of 0.6, at most 7% of draws claim 0.6."""
    canaries, draws = 80, 2_000
    rng, chooses = np.random.default_rng(1), np.arange(canaries) % 2 == 0
    wrong, claimed = 0, 0
    for best in (0.61, ALPHA):
        d = 2 * norm.ppf(best)
        for _ in range(draws):
            members, others = rng.normal(d, 1, canaries), rng.normal(0, 1, canaries)
            is_claimed = accuracy(members, others, chooses)[1] <= ALPHA
            if best == ALPHA:
                claimed += is_claimed
            else:
                wrong += is_claimed and success_of(best_threshold(members[chooses], others[chooses]), d, 1) > ALPHA
    assert 0 < wrong <= binom.ppf(0.999, draws, 0.05)
    assert claimed <= binom.ppf(0.999, draws, 0.07)


def after(rounds: list[int], *p: list[float]) -> pd.DataFrame:
    return pd.DataFrame(p, columns=rounds)


def test_a_canary_is_forgotten_at_the_first_evaluation_with_p_above_a_twentieth() -> None:
    """Later evaluations do not count, so longer training does not give later times. NaN means no evaluation."""
    p = after([0, 5, 10, 15], [0.01, 0.3, 0.04, 0.2], [0.01, 0.05, 0.01, 0.03], [0.9, 0.01, 0.01, 0.01])
    expected = [CanaryTime(5, is_censored=False), CanaryTime(15, is_censored=True), CanaryTime(0, is_censored=False)]
    assert canary_times(p) == expected
    assert canary_times(p.iloc[:, :2]) == [expected[0], CanaryTime(5, is_censored=True), expected[2]]
    assert canary_times(after([0, 5], [math.nan, 0.2], [0.01, math.nan], [math.nan, math.nan])) == [
        CanaryTime(5, is_censored=False),
        CanaryTime(0, is_censored=True),
    ]
    assert canary_times(after([])) == []


def test_p_values_after_the_window_have_rounds_since_its_end() -> None:
    """Rounds count from the window's end, 20, not from the last use. Unused c, and d without an end, are excluded."""
    rows = [(canary, at, at / 1_000) for canary in "abcd" for at in (10, 20, 30)]
    observed = pd.DataFrame(rows, columns=["canary", "round", "p_in"]).assign(run="r")
    observed["last_round"] = observed["canary"].map({"a": 20, "b": 20, "c": 20}).astype("Int64")
    observed["last_use"] = observed["canary"].map({"a": 3, "b": 20, "d": 20}).astype("Int64")
    p = p_after_window(observed)
    assert p.to_dict("index") == {("r", "a"): {0: 0.02, 10: 0.03}, ("r", "b"): {0: 0.02, 10: 0.03}}
