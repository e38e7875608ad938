"""Tests compare success and times of forgetting with values that follow from their definitions."""

import math
from itertools import product

import numpy as np
import pandas as pd
import pytest
from scipy.stats import beta, binom, t

from flsim.attacks.forgetting import advantage, success
from flsim.attacks.forgetting.measure import by_k
from flsim.attacks.forgetting.success import CanaryTime
from flsim.base.statistics import AtLevel, median_interval, share_interval


def test_accuracy_is_measured_on_the_canaries_that_do_not_choose_the_threshold() -> None:
    """Canaries 0, 2 and 4 choose the threshold 2.5. Of four scores of canaries 1 and 3, it is wrong about one, a 2."""
    members, others = np.array([3.0, 4.0, 5.0, 2.0, 6.0]), np.array([0.0, 1.0, 1.0, 0.0, 2.0])
    chooses = np.array([True, False, True, False, True])
    assert success.accuracy(members, others, chooses) == pytest.approx((0.75, beta.isf(0.05, 4, 1), 4))
    assert success.accuracy(members[:2], others[:2], chooses[:2]) == (1.0, 1.0, 2)
    # A score at the threshold, 3, halfway between 2 and 4, counts as a non-member.
    estimate, _, trials = success.accuracy(np.array([4.0, 3.0]), np.array([2.0, 3.0]), chooses[:2])
    assert (estimate, trials) == (0.5, 2)
    *undefined, trials = success.accuracy(members[:1], others[:1], chooses[:1])
    assert np.isnan(undefined).all()
    assert trials == 0


def test_best_thresholds_are_halfway_between_scores() -> None:
    assert success.best_threshold(np.array([3.0, 5.0]), np.array([0.0, 1.0])) == 2
    assert success.best_threshold(np.array([3.0, 7.0]), np.array([0.0, 4.0, 4.0])) == 5.5
    assert success.best_threshold(np.array([0.0]), np.array([1.0])) == math.inf


def test_a_canary_is_in_the_same_half_at_all_rounds() -> None:
    """Every second used canary chooses, in the order of seeds and names. Canary b was never used, so c is second."""
    rows = [(round_, canary) for round_ in (10, 20) for canary in "abcd"] + [(30, "c"), (30, "d")]
    rows_of = pd.DataFrame(rows, columns=["round", "canary"]).assign(seed=0, run="r")
    rows_of["last_use"] = rows_of["canary"].map({"a": 5, "c": 6, "d": 7})
    chooses = success.halves(rows_of)
    assert {canary: set(chooses[rows_of["canary"] == canary]) for canary in "acd"} == {
        "a": {True},
        "c": {False},
        "d": {True},
    }


def test_rates_at_a_tenth_need_ten_non_members() -> None:
    scores = np.arange(10.0)
    assert success.at_level(scores, scores[:9]) is None
    assert success.at_level(scores[:0], scores) is None
    found = success.at_level(scores + 0.5, scores)
    assert found is not None
    assert (found.level, found.alarms, found.detected) == (0.1, 1, 2)


def test_precision_and_heuristic_epsilon_use_the_observed_false_positive_rate() -> None:
    at = AtLevel(0.1, 3, 12, 0.6, 0.0, 1.0)
    low, high = share_interval(12, 20)
    expected = tuple(tpr / (tpr + 0.075) for tpr in (0.6, low, high))
    assert success.precision_at(at, 20, 40) == pytest.approx(expected)
    assert success.heuristic_epsilon(at, 40) == pytest.approx(math.log(0.6 / 0.075))
    none = AtLevel(0.1, 0, 12, 0.6, 0.0, 1.0)
    assert success.precision_at(none, 20, 40)[0] == pytest.approx(0.6 / 0.7)
    assert success.heuristic_epsilon(none, 40) == pytest.approx(math.log(6))
    assert success.heuristic_epsilon(AtLevel(0.1, 3, 0, 0.0, 0.0, 1.0), 40) == 0
    assert success.heuristic_epsilon(AtLevel(0.1, 30, 1, 0.05, 0.0, 1.0), 40) == 0


@pytest.mark.parametrize("count", [5, 6, 11, 40])
def test_intervals_of_medians_invert_the_sign_test(count: int) -> None:
    """The interval excludes k - 1 values on each side, for the largest k with P[Bin(n, 1/2) < k] <= 0.025."""
    values = np.random.default_rng(count).permutation(np.arange(1.0, count + 1))
    median, low, high = median_interval(values)
    assert median == (count + 1) / 2
    allowed = [k for k in range(1, count) if binom.cdf(k - 1, count, 0.5) <= 0.025]
    if allowed:
        assert (low, high) == (max(allowed), count + 1 - max(allowed))
    else:
        assert math.isnan(low)
        assert math.isnan(high)
    assert all(map(math.isnan, median_interval(np.array([]))))


def test_least_alpha_is_the_bound_of_half_the_trials() -> None:
    assert success.least_alpha(101) == pytest.approx(beta.isf(0.05, 51, 51))
    assert success.least_alpha(48) == pytest.approx(beta.isf(0.05, 25, 24))
    assert math.isnan(success.least_alpha(0))


def test_grids_have_steps_up_to_three_quarters_of_the_end_and_the_end() -> None:
    assert success.grid(0) == [0]
    assert success.grid(7) == [0, 1, 2, 5, 7]
    assert success.grid(2_000) == [0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000]
    assert success.grid(20) == [0, 1, 2, 5, 10, 20]  # 15 is three quarters


def since(**canaries: list[float]) -> pd.DataFrame:
    """Return evaluations of one run by canary, each with its rounds since last use."""
    rows = [(canary, number, value) for canary, values in canaries.items() for number, value in enumerate(values)]
    return pd.DataFrame(rows, columns=["canary", "round", "since"]).assign(seed=0, run="r")


def test_the_last_k_is_reached_by_half_of_the_used_canaries() -> None:
    reached = {"a": [math.nan, 1.0, 3.0], "b": [7.0], "c": [4.0]}
    assert by_k(since(**reached, d=[math.nan]))[1] == 4  # 3, 4 and 7
    assert by_k(since(**reached, d=[9.0]))[1] == 4  # 3, 4, 7 and 9: two at or after 7
    assert by_k(since(a=[0.0]))[1] == 0
    assert by_k(since(a=[math.nan])) == ([], None)


def test_an_evaluation_counts_once_at_the_next_k() -> None:
    """The grid is 0, 1, 2, 5. Evaluations 3 and 4 are in (2, 5], in which the later one counts, and 6 is excluded."""
    at, longest = by_k(since(b=[math.nan, 0.0, 1.0, 3.0, 4.0, 6.0], a=[2.0, 5.0]))
    assert longest == 5
    counted = {k: dict(zip(of_k["canary"], of_k["since"], strict=True)) for k, of_k in at}
    assert counted == {0: {"b": 0}, 1: {"b": 1}, 2: {"a": 2}, 5: {"a": 5, "b": 4}}


def test_a_forgetting_time_needs_all_later_bounds_below_alpha() -> None:
    ks = [0, 1, 2, 5]
    assert success.forgetting_time(ks, [0.5, 0.5, 0.5, 0.6], 0.6) == 0
    assert success.forgetting_time(ks, [0.5, 0.7, 0.5, 0.6], 0.6) == 2
    assert success.forgetting_time(ks, [0.5, math.nan, 0.5, 0.6], 0.6) == 2
    assert success.forgetting_time(ks, [0.5, 0.5, 0.5, 0.61], 0.6) is None


def kaplan_meier_median(observed: list[tuple[int, bool]]) -> float:
    """Return the first time at which the product of 1 - deaths / at risk is at most one half."""
    survival = 1.0
    for time in sorted({time for time, _ in observed}):
        at_risk = sum(other >= time for other, _ in observed)
        survival *= 1 - sum(other == time and not censored for other, censored in observed) / at_risk
        if survival <= 0.5 + 1e-9:
            return time
    return math.inf


def test_median_times_equal_those_of_kaplan_and_meier() -> None:
    for drawn in product([(1, False), (2, False), (2, True), (5, True), (9, False)], repeat=4):
        found = success.median_time([CanaryTime(*one) for one in drawn])
        expected = kaplan_meier_median([*drawn])
        assert found is not None
        if math.isinf(expected):
            assert found == CanaryTime(max(time for time, _ in drawn), is_censored=True)
        else:
            assert found == CanaryTime(int(expected), is_censored=False)
    assert success.median_time([]) is None


def observed(advantages: dict[tuple[int, int], list[float]], last_round: int = 10) -> pd.DataFrame:
    """Return observations by (seed, round) with these advantages of canaries."""
    rows = [
        {"seed": seed, "round": round_, "last_round": last_round, "uses": 1, "nats_out": 5.0, "nats_in": 5.0 - value}
        for (seed, round_), values in advantages.items()
        for value in values
    ]
    return pd.DataFrame(rows).astype({"last_round": "Int64"})


def test_the_advantage_counts_from_the_windows_end() -> None:
    table = observed(
        {
            **{(0, 5): [9.0, 9.0], (0, 10): [2.0, 4.0], (0, 20): [1.0, 1.0], (0, 30): [0.6, 0.0]},
            **{(1, 5): [9.0, 9.0], (1, 10): [4.0, 4.0], (1, 20): [2.0, 1.0], (1, 30): [2.0, 1.0]},
        }
    )
    found = advantage.by_seed(table)
    assert found["advantage"].tolist() == pytest.approx([3.0, 4.0])
    assert found["left"].isna().all()  # the interval 3.5 +- 12.7 x 0.5 contains 0
    table = observed({(seed, at): [value + seed / 50] for seed in range(3) for at, value in ((10, 4.0), (30, 1.0))})
    found = advantage.by_seed(table)
    assert found["left"].tolist() == pytest.approx([1 / 4, 1.02 / 4.02, 1.04 / 4.04])
    mean, half = 4.02, t.isf(0.025, 2) * 0.02 / math.sqrt(3)
    group = advantage.of_group(found)
    ends = group["advantage"], group["advantage_low"], group["advantage_high"]
    assert ends == pytest.approx((mean, mean - half, mean + half))
    pair = advantage.of_pair(found, found * 2)
    assert pair["left_difference"] == pytest.approx(-found["left"].mean())
    small = observed({(seed, at): [value + seed / 500] for seed in range(3) for at, value in ((10, 0.4), (30, 0.1))})
    assert advantage.by_seed(small)["left"].tolist() == pytest.approx([1 / 4, 0.102 / 0.402, 0.104 / 0.404])
    assert advantage.by_seed(table[table["round"] == 10])["left"].isna().all()


def test_advantage_curves_are_means_over_seeds_without_unused_canaries() -> None:
    table = observed({(0, 10): [1.0, 3.0], (1, 10): [4.0], (0, 20): [1.0]})
    table.loc[len(table)] = {**table.iloc[0].to_dict(), "uses": 0, "nats_in": -100.0}
    points = advantage.advantage_curve(table)
    half = t.isf(0.025, 1) * math.sqrt(2) / math.sqrt(2)
    assert points[0] == pytest.approx((10, 3, 3 - half, 3 + half))
    assert points[1][:2] == (20, 1)
    assert math.isnan(points[1][2])
