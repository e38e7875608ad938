"""Tests of the search for settings: halving and widening of ranges, with perplexities that the tests give."""

import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from flsim.base.errors import InputError, RunFailed
from flsim.runs.sweeps.definition import GroupOutcome, Point, Range, SearchRule, TrialGroup, open_sides, search

RATE, MOMENTUM = "local.learning_rate", "local.momentum"
EIGHT = {RATE: Range(0.1, 12.8)}  # 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8
INF = math.inf


def outcome(
    rule: SearchRule,
    ranges: Mapping[str, Range],
    perplexity: Callable[[Point, float], float],
    is_possible: Callable[[Point], bool] = lambda _: True,
) -> tuple[GroupOutcome, list[tuple[float, list[int]]]]:
    """Return the outcome of a search with these perplexities, and the share and trials that each step trains."""
    steps = search(TrialGroup("one", "one", {}, ranges), rule, np.random.Generator(np.random.PCG64(0)), is_possible)
    asked, (share, trials) = [], next(steps)
    while True:
        asked.append((share, [*trials]))
        try:
            share, trials = steps.send([perplexity(trial.values, share) for trial in trials.values()])
        except StopIteration as end:
            return end.value, asked


def test_halving_keeps_the_better_half_of_the_trials_at_each_rung() -> None:
    """Trial 6 is best at first, and trial 3 at the end; trial 7 diverges.

    At the first rung, the lowest four of 9 8 7 4 5 6 3 inf are trials 6, 3, 4 and 5. At the second, trials 3 and 6 are
    the lowest two, with 2.0 and 2.5. At the third, trial 3 has 1.0 and trial 6 has 2.4.
    """
    table = {
        0.25: [9.0, 8.0, 7.0, 4.0, 5.0, 6.0, 3.0, INF],
        0.5: [INF, INF, INF, 2.0, 4.5, 5.5, 2.5, INF],
        1.0: [INF, INF, INF, 1.0, INF, INF, 2.4, INF],
    }
    place = {0.1 * 2**number: number for number in range(8)}
    found, asked = outcome(SearchRule(), EIGHT, lambda point, share: table[share][place[round(point[RATE], 1)]])
    assert asked == [(0.25, [*range(8)]), (0.5, [3, 4, 5, 6]), (1.0, [3, 6])]
    assert (found.values, found.perplexity, found.trials[3].perplexities) == ({RATE: 0.8}, 1.0, [4.0, 2.0, 1.0])
    assert [len(trial.perplexities) for trial in found.trials] == [1, 1, 1, 3, 2, 2, 3, 1]
    assert found.widenings == 0


@pytest.mark.parametrize(("above", "is_limited"), [(30.0, False), (INF, True)])
def test_a_neighbour_that_diverged_is_reported_as_the_limit_of_stability(above: float, is_limited: bool) -> None:
    """The best learning rate is 1.6. Its neighbours 0.8 and 3.2 are worse; in one case, 3.2 diverges."""
    perplexities = {0.8: 25.0, 1.6: 20.0, 3.2: above}
    found, _ = outcome(SearchRule(), EIGHT, lambda point, _: perplexities.get(point[RATE], 40.0))
    assert (found.values, found.is_limited_by_stability) == ({RATE: 1.6}, is_limited)


def test_a_best_value_at_the_edge_widens_the_range_by_steps_of_the_grid() -> None:
    """The minimum, at 51.2 = 0.1 * 2^9, is two steps outside; four more values are tried, and halved as the first."""
    found, asked = outcome(SearchRule(halving=(0.5, 1.0)), EIGHT, lambda point, _: abs(math.log2(point[RATE] / 51.2)))
    assert [trial.values[RATE] for trial in found.trials[8:]] == [25.6, 51.2, 102.4, 204.8]
    assert found.values == {RATE: 51.2}
    assert found.widenings == 1
    assert asked[2:] == [(0.5, [8, 9, 10, 11]), (1.0, [8, 9])]


def test_only_the_range_of_a_setting_at_its_edge_is_widened() -> None:
    ranges = {RATE: Range(1.0, 8.0, points=4), MOMENTUM: Range(0.0, 1.0, "linear", points=3)}

    def loss(point: Point, _: float) -> float:
        return abs(math.log2(point[RATE] / 0.5)) + abs(point[MOMENTUM] - 0.5)

    found, _ = outcome(SearchRule(trials=12, halving=(1.0,)), ranges, loss)
    assert [trial.values for trial in found.trials[12:]] == [{RATE: 0.5, MOMENTUM: 0.5}, {RATE: 0.25, MOMENTUM: 0.5}]
    assert found.values == {RATE: 0.5, MOMENTUM: 0.5}


def test_a_random_search_stays_in_its_range_and_widens_by_half_of_it() -> None:
    """Values are between 1 and 100, so half of the range's width is a factor of 10."""
    rule, ranges = SearchRule(method="random", trials=16, halving=(1.0,)), {RATE: Range(1.0, 100.0)}
    found, _ = outcome(rule, ranges, lambda point, _: -min(point[RATE], 150.0) + point[RATE] / 1e6)
    first = [trial.values[RATE] for trial in found.trials[:16]]
    beyond = [trial.values[RATE] for trial in found.trials[16:24]]
    assert min(first) >= 1.0
    assert max(first) <= 100.0
    assert sum(value < 10.0 for value in first) in range(3, 14)  # uniform in the logarithm: 8 of 16 expected
    assert max(first) < min(beyond)
    assert max(beyond) <= 10 * max(first) * 1.001
    assert open_sides([trial.values for trial in found.trials], found.values) == []


def test_a_range_is_not_widened_to_invalid_values() -> None:
    rule, ranges = SearchRule(halving=(1.0,)), {MOMENTUM: Range(0.2, 0.9, "linear")}
    found, _ = outcome(rule, ranges, lambda point, _: -point[MOMENTUM], lambda point: point[MOMENTUM] < 1)
    assert found.values == {MOMENTUM: 0.9}  # the next step would be 1
    assert (found.widenings, len(found.trials)) == (0, 8)


def test_a_search_without_a_best_value_inside_its_range_fails() -> None:
    with pytest.raises(RunFailed, match=r"all 8 trials diverged; search lower values of local\.learning_rate"):
        outcome(SearchRule(), EIGHT, lambda _, __: INF)
    with pytest.raises(RunFailed, match="at the edge after 2 extensions; search a range around this value"):
        outcome(SearchRule(widenings=2), EIGHT, lambda point, _: -point[RATE])


@pytest.mark.parametrize("halving", [(0.5,), (0.5, 0.5, 1.0), ()])
def test_invalid_shares_of_halving_are_refused(halving: tuple[float, ...]) -> None:
    with pytest.raises(InputError, match="ascending shares above 0 that end with 1"):
        SearchRule(halving=halving)
