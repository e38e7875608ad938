"""The search for settings: halving and widening, against losses that are written out."""

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
    """Return the outcome with these perplexities, and the share and the trials that each step asked for."""
    steps = search(TrialGroup("one", "one", {}, ranges), rule, np.random.Generator(np.random.PCG64(0)), is_possible)
    asked, (share, trials) = [], next(steps)
    while True:
        asked.append((share, [*trials]))
        try:
            share, trials = steps.send([perplexity(trial.values, share) for trial in trials.values()])
        except StopIteration as end:
            return end.value, asked


def test_halving_is_that_of_a_written_out_example() -> None:
    """Trial 6 starts best and ends worse than 3; trial 7 diverges; 0, 1, 2 and 7 go after the first rung, 4 and 5 then.

    First rung 9 8 7 4 5 6 3 inf: the least four are 6, 3, 4, 5. Second: 3 has 2.0, 4 has 4.5, 5 has 5.5, 6 has 2.5:
    the least two are 3 and 6. Third: 3 has 1.0 and 6 has 2.4.
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
    """The best rate is 1.6. Its neighbours, 0.8 and 3.2, are finite and worse, or 3.2 diverges."""
    perplexities = {0.8: 25.0, 1.6: 20.0, 3.2: above}
    found, _ = outcome(SearchRule(), EIGHT, lambda point, _: perplexities.get(point[RATE], 40.0))
    assert (found.values, found.is_limited_by_stability) == ({RATE: 1.6}, is_limited)


def test_a_best_value_at_the_edge_widens_the_range_by_the_grids_own_steps() -> None:
    """The least loss is at 51.2 = 0.1 * 2^9, two steps beyond; four further values are tried, halved as the first."""
    found, asked = outcome(SearchRule(halving=(0.5, 1.0)), EIGHT, lambda point, _: abs(math.log2(point[RATE] / 51.2)))
    assert [trial.values[RATE] for trial in found.trials[8:]] == [25.6, 51.2, 102.4, 204.8]
    assert found.values == {RATE: 51.2}
    assert found.widenings == 1
    assert asked[2:] == [(0.5, [8, 9, 10, 11]), (1.0, [8, 9])]


def test_of_two_settings_only_the_one_at_its_edge_is_widened() -> None:
    ranges = {RATE: Range(1.0, 8.0, points=4), MOMENTUM: Range(0.0, 1.0, "linear", points=3)}

    def loss(point: Point, _: float) -> float:
        return abs(math.log2(point[RATE] / 0.5)) + abs(point[MOMENTUM] - 0.5)

    found, _ = outcome(SearchRule(trials=12, halving=(1.0,)), ranges, loss)
    assert [trial.values for trial in found.trials[12:]] == [{RATE: 0.5, MOMENTUM: 0.5}, {RATE: 0.25, MOMENTUM: 0.5}]
    assert found.values == {RATE: 0.5, MOMENTUM: 0.5}


def test_a_random_search_stays_in_its_range_and_widens_by_half_of_it() -> None:
    """Values are between 1 and 100, so half of the range's width is a factor 10."""
    rule, ranges = SearchRule(method="random", trials=16, halving=(1.0,)), {RATE: Range(1.0, 100.0)}
    found, _ = outcome(rule, ranges, lambda point, _: -min(point[RATE], 150.0) + point[RATE] / 1e6)
    first = [trial.values[RATE] for trial in found.trials[:16]]
    beyond = [trial.values[RATE] for trial in found.trials[16:24]]
    assert min(first) >= 1.0
    assert max(first) <= 100.0
    assert sum(value < 10.0 for value in first) in range(3, 14)  # drawn evenly by logarithm: 8 expected of 16
    assert max(first) < min(beyond)
    assert max(beyond) <= 10 * max(first) * 1.001
    assert open_sides([trial.values for trial in found.trials], found.values) == []


def test_values_that_cannot_be_are_the_end_of_a_range() -> None:
    rule, ranges = SearchRule(halving=(1.0,)), {MOMENTUM: Range(0.2, 0.9, "linear")}
    found, _ = outcome(rule, ranges, lambda point, _: -point[MOMENTUM], lambda point: point[MOMENTUM] < 1)
    assert found.values == {MOMENTUM: 0.9}  # the next step would be 1
    assert (found.widenings, len(found.trials)) == (0, 8)


def test_what_has_no_best_inside_is_an_error() -> None:
    with pytest.raises(RunFailed, match=r"all 8 trials diverged; search lower values of local\.learning_rate"):
        outcome(SearchRule(), EIGHT, lambda _, __: INF)
    with pytest.raises(RunFailed, match="at the edge after 2 extensions; search a range around this value"):
        outcome(SearchRule(widenings=2), EIGHT, lambda point, _: -point[RATE])


@pytest.mark.parametrize("halving", [(0.5,), (0.5, 0.5, 1.0), ()])
def test_a_rule_that_cannot_be_is_refused(halving: tuple[float, ...]) -> None:
    with pytest.raises(InputError, match="ascending shares above 0 that end with 1"):
        SearchRule(halving=halving)
