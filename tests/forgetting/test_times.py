"""Forgetting times against a known truth, their censoring, and the log-rank test against a published example."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from flsim.forgetting.success import accuracy
from flsim.forgetting.times import (
    CanaryTime,
    canary_time,
    evaluated_by,
    forgetting_time,
    grid,
    log_rank_p,
    median_time,
    reached,
)

DISTANCE, DECAY, ALPHA = 3.0, 20.0, 0.6
TRUE_TIME = DECAY * math.log(DISTANCE / (2 * norm.ppf(ALPHA)))  # 35.6: Phi(d/2) is 0.6 there
DRAWS, CANARIES = 400, 600


def test_the_grid_ends_where_evaluations_do() -> None:
    """And steps near its end, which would hold the same evaluations, are left out."""
    assert [grid(longest) for longest in (0, 1, 2, 7, 111)] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 5, 7],
        [0, 1, 2, 5, 10, 20, 50, 111],
    ]


def test_an_evaluation_counts_at_the_next_k() -> None:
    """Canary 0 is evaluated 0, 5, 10 and 15 rounds after its last use, canary 1 once before and at 3 and 8."""
    since = np.array([0, 5, 10, 15, np.nan, 3, 8])
    canaries = np.array([0, 0, 0, 0, 1, 1, 1])
    assert evaluated_by(since, canaries, [0, 1, 2, 5, 10, 15]).tolist() == [0, 5, 10, 15, -1, 5, 10]
    assert evaluated_by(since, canaries, [0, 20]).tolist() == [0, -1, -1, 20, -1, -1, 20]  # the last of each canary
    assert evaluated_by(since, canaries, [0, 8]).tolist() == [0, 8, -1, -1, -1, -1, 8]  # later ones count nowhere
    assert reached(since, canaries) == 8  # half of two canaries were evaluated there
    assert reached(since[:4], canaries[:4]) == 15
    assert reached(np.array([np.nan]), np.array([0])) is None


def test_a_time_needs_all_later_bounds() -> None:
    ks = [0, 1, 2, 5]
    assert forgetting_time(ks, [0.9, 0.58, 0.7, 0.55], 0.6) == 5
    assert forgetting_time(ks, [0.5, 0.5, 0.5, 0.5], 0.6) == 0
    assert forgetting_time(ks, [0.5, 0.5, 0.5, 0.61], 0.6) is None
    assert forgetting_time(ks, [0.5, math.nan, 0.5, 0.6], 0.6) == 2
    assert forgetting_time([], [], 0.6) is None


@pytest.fixture(scope="module")
def claims() -> list[int | None]:
    """Return T(0.6) of simulated groups whose arms approach each other exponentially."""
    rng = np.random.default_rng(0)
    ks = grid(200)
    times = []
    for _ in range(DRAWS):
        hardness = rng.normal(0, 1, CANARIES)  # of a canary, in both arms and at every k
        bounds = []
        for k in ks:
            members, others = (hardness + rng.normal(0, 1, CANARIES) for _ in range(2))
            d = DISTANCE * math.exp(-k / DECAY) * math.sqrt(2)  # the scores' standard deviation
            bounds.append(accuracy(members + d, others).upper)
        times.append(forgetting_time(ks, bounds, ALPHA))
    return times


def test_at_most_five_percent_of_times_are_too_short(claims: list[int | None]) -> None:
    too_short = sum(time is not None and time < TRUE_TIME for time in claims)
    assert too_short <= 0.05 * DRAWS + 3 * math.sqrt(0.05 * 0.95 * DRAWS)


def test_most_times_are_the_next_k_of_the_grid(claims: list[int | None]) -> None:
    """At k = 50 the accuracy is 0.55, whose bound is below 0.6 for 600 trials in more than nine of ten draws."""
    assert sum(time == 50 for time in claims) > 0.85 * DRAWS
    assert None not in claims


def test_a_bound_at_the_truth_is_claimed_in_five_percent() -> None:
    """The worst case of a single k: the accuracy is exactly alpha, and the arms are independent."""
    rng = np.random.default_rng(1)
    d = 2 * norm.ppf(ALPHA)
    claimed = sum(accuracy(rng.normal(d, 1, CANARIES), rng.normal(0, 1, CANARIES)).upper <= ALPHA for _ in range(2_000))
    assert claimed <= 0.05 * 2_000 + 3 * math.sqrt(0.05 * 0.95 * 2_000) + 0.01 * 2_000  # a threshold loses a little


def test_a_canary_is_forgotten_when_it_stays_unsurprising() -> None:
    since = np.array([np.nan, 0, 5, 10, 15])
    assert canary_time(since, np.array([0.001, 0.01, 0.3, 0.04, 0.2])) == CanaryTime(15, is_censored=False)
    assert canary_time(since, np.array([0.001, 0.01, 0.3, 0.2, 0.2])) == CanaryTime(5, is_censored=False)
    assert canary_time(since, np.array([0.001, 0.9, 0.3, 0.2, 0.2])) == CanaryTime(0, is_censored=False)
    assert canary_time(since, np.array([0.001, 0.9, 0.3, 0.2, 0.05])) == CanaryTime(15, is_censored=True)
    assert canary_time(since[:1], np.array([0.001])) is None


def times(ended: list[int], censored: list[int]) -> list[CanaryTime]:
    flags = [False] * len(ended) + [True] * len(censored)
    return [CanaryTime(time, flag) for time, flag in zip([*ended, *censored], flags, strict=True)]


ASTROCYTOMA = times([6, 13, 21, 30, 37, 38, 49, 50, 63, 79, 86, 98, 202, 219], [31, 47, 80, 82, 82, 149])
GLIOBLASTOMA = times(
    [
        *(10, 10, 12, 13, 14, 15, 16, 17, 18, 20, 24, 24, 25, 28),
        *(30, 33, 35, 37, 40, 40, 46, 48, 76, 81, 82, 91, 112, 181),
    ],
    [34, 40, 70],
)


def test_log_rank_of_the_published_example() -> None:
    """Bland and Altman, "The logrank test" (2004): survival with two tumours; scipy's documentation has the data."""
    assert log_rank_p(ASTROCYTOMA, GLIOBLASTOMA) == pytest.approx(0.00618, abs=5e-6)


def test_log_rank_of_nothing_to_tell() -> None:
    assert math.isnan(log_rank_p([], ASTROCYTOMA))
    assert log_rank_p(times([], [5, 5]), times([], [5])) == 1.0
    assert log_rank_p(times([0, 0, 0], []), times([0, 0], [])) == 1.0


def test_log_rank_of_one_law_finds_a_difference_in_five_percent() -> None:
    """Geometric times on the grid, a third censored, 1,000 pairs of groups of 30."""
    rng = np.random.default_rng(3)
    ks = np.array(grid(100))

    def group() -> list[CanaryTime]:
        drawn = ks[np.minimum(rng.geometric(0.2, 30) - 1, len(ks) - 1)]
        return [CanaryTime(min(int(time), 20), is_censored=time > 20) for time in drawn]

    wrong = sum(log_rank_p(group(), group()) <= 0.05 for _ in range(1_000))
    assert wrong <= 50 + 4 * math.sqrt(1_000 * 0.05 * 0.95)


def test_median_times() -> None:
    """The median is the time by which half of the canaries are forgotten, and censored where fewer than half are."""
    assert median_time(times([0, 5, 5, 10], [10])) == CanaryTime(5, is_censored=False)
    assert median_time(times([0], [10, 20])) == CanaryTime(20, is_censored=True)
    assert median_time(times([], [10])) == CanaryTime(10, is_censored=True)
    assert median_time([]) is None
