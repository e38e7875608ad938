"""Schedules against all that could be, and costs against what they were made from."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flsim.base.errors import InputError
from flsim.planning.cost import Cost, Need, Observed, Work, fit, most_at_once, run_seconds, saturation, schedule

COST = Cost(start=10, base=0.5, per_size=0.25, pause=0, first_wait=4, evaluation=2, end=3)
SECONDS = st.lists(st.integers(1, 50), min_size=1, max_size=12)


def on_slots(seconds: Sequence[int], slots: int) -> list[tuple[float, float]]:
    return schedule([float(each) for each in seconds], [Need(1)] * len(seconds), cores=slots)


@given(SECONDS, st.integers(1, 5))
def test_a_schedule_lies_between_the_bounds_of_graham(seconds: list[int], slots: int) -> None:
    """Graham (1969): no list schedule is better than the bound below, or worse than the one above."""
    spans = on_slots(seconds, slots)
    makespan = max(end for _, end in spans)
    assert max(max(seconds), sum(seconds) / slots) <= makespan
    assert makespan <= sum(seconds) / slots + (1 - 1 / slots) * max(seconds) + 1e-9
    assert [end - begin for begin, end in spans] == seconds
    assert most_at_once(spans) == min(slots, len(seconds))


@given(SECONDS, st.integers(1, 4))
def test_a_schedule_is_that_of_a_clock(seconds: list[int], slots: int) -> None:
    """Second by second: whoever waits takes the first slot that is free."""
    waiting, left, begun = list(range(len(seconds))), dict[int, int](), dict[int, int]()
    for now in range(sum(seconds) + 1):
        left = {job: more for job, more in left.items() if more}
        while waiting and len(left) < slots:
            job = waiting.pop(0)
            left[job], begun[job] = seconds[job], now
        left = {job: more - 1 for job, more in left.items()}
    assert [begin for begin, _ in on_slots(seconds, slots)] == [begun[job] for job in range(len(seconds))]


def test_what_fits_goes_before_what_does_not() -> None:
    """Two cores and one GPU: the second run waits for the GPU, the third takes the core that is left."""
    needs = [Need(1, 0.6), Need(1, 0.6), Need(1)]
    assert schedule([4, 5, 3], needs, cores=2, gpus=1) == [(0, 4), (4, 9), (0, 3)]
    assert schedule([4, 5, 3], needs, cores=2, gpus=1, at_once=1) == [(0, 4), (4, 9), (9, 12)]


def test_tenths_of_a_gpu_add_up_to_one() -> None:
    assert most_at_once(schedule([1.0] * 10, [Need(1, 0.1)] * 10, cores=16, gpus=1)) == 10


def test_what_never_fits_is_refused() -> None:
    with pytest.raises(InputError, match="a run takes 3 cores and 0 GPUs; here are 2 and 0"):
        schedule([1], [Need(3)], cores=2)


def test_nothing_takes_no_time() -> None:
    assert schedule([], [], cores=2) == []
    assert most_at_once([]) == 0


@given(st.floats(0, 2), st.floats(0.001, 0.1), st.lists(st.integers(1, 500), min_size=2, max_size=6, unique=True))
def test_a_fit_recovers_what_rounds_cost(base: float, per_size: float, sizes: list[int]) -> None:
    observed = [Observed(size, 11, tuple(base + per_size * size for _ in range(5)), 0.5, 6, 2, 3) for size in sizes]
    cost = fit(observed)
    for size in (1, 40, 1_000):
        assert cost.round_seconds(size) == pytest.approx(base + per_size * size, rel=1e-6, abs=1e-6)
    assert (cost.start, cost.pause, cost.first_wait, cost.evaluation, cost.end) == (11, 0.5, 4, 2, 3)


def test_one_size_says_nothing_of_others() -> None:
    cost = fit([Observed(40, 1, (0.2, 0.6), 0, 0, 0, 0)])
    assert (cost.base, cost.per_size) == pytest.approx((0.4, 0.0))


def test_cold_starts_are_left_out() -> None:
    observed = [Observed(4, start, (0.1,), 0, 0, 0, 0) for start in (None, None, 12, 14)]
    assert fit(observed).start == 13


def test_a_moment_in_which_the_machine_did_something_else_is_left_out() -> None:
    assert fit([Observed(40, 1, (0.4,) * 9 + (9.0,), 0, 0, 0, 0)]).base == pytest.approx(0.4)


def test_a_fit_of_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="nothing was observed"):
        fit([])


def test_two_numbers_of_references_tell_what_one_costs_and_canaries_cost_alike() -> None:
    """3 s and 1 ms a reference for 9 canaries: 203 s for 200,000 references, and ten times that for 90 canaries."""
    observed = [
        Observed(4, 9, (0.1,), 0, 10 + seconds, seconds, 1, canaries=9, references=count)
        for count, seconds in ((4_000, 7.0), (1_000, 4.0))
    ]
    cost = fit(observed)
    assert cost.evaluation_seconds(9, 200_000) == pytest.approx(203)
    assert cost.evaluation_seconds(90, 200_000) == pytest.approx(2_030)
    assert cost.first_wait == pytest.approx(10)
    work = Work(rounds=1, size=4, evaluations=2, first_due=1, canaries=90, references=200_000)
    assert run_seconds(cost, work, saturated=1.0) == pytest.approx(9 + 0.1 + 10 + 2 * 2_030 + 1)


def test_an_evaluation_without_canaries_tells_what_utility_takes_with_any_number() -> None:
    """20 s of utility, and of 9 canaries 3 s and 1 ms a reference: 20 s and ten times 203 s for 90 canaries."""
    observed = [
        Observed(4, 9, (0.1,), 0, 10 + seconds, seconds, 1, canaries=canaries, references=count)
        for canaries, count, seconds in ((9, 4_000, 27.0), (9, 1_000, 24.0), (0, 4_000, 20.0))
    ]
    cost = fit(observed)
    assert cost.evaluation_seconds(9, 200_000) == pytest.approx(20 + 203)
    assert cost.evaluation_seconds(90, 200_000) == pytest.approx(20 + 2_030)
    assert cost.evaluation_seconds(0, 200_000) == pytest.approx(20)


def test_a_quantile_of_evaluations_is_taken_at_each_number_of_references() -> None:
    """At 1,000 references 4 and 6 s, at 4,000 references 7 and 9 s: 3 s and 1 ms a reference, or 5 s and 1 ms."""
    observed = [
        Observed(4, 9, (0.1,), 0, 20, seconds, 1, canaries=9, references=count)
        for count, seconds in ((1_000, 4.0), (1_000, 6.0), (4_000, 7.0), (4_000, 9.0))
    ]
    bounds = [fit(observed, quantile).evaluation_seconds(9, 200_000) for quantile in (0.0, None, 1.0)]
    assert bounds == pytest.approx([203, 204, 205])


def test_a_slow_quantile_is_no_quicker() -> None:
    observed = [Observed(4, 9, (0.1, 0.2, 0.3), 0, 5, 2, 1), Observed(40, 12, (1.0, 1.2, 2.0), 0, 7, 3, 2)]
    quick, middle, slow = (
        run_seconds(fit(observed, quantile), Work(100, 20, 4, 25), 1.0) for quantile in (0.1, None, 0.9)
    )
    assert quick < middle < slow


def test_a_run_by_hand() -> None:
    """100 rounds of 2 users, 1 s each; beside them an evaluation of 6 s and two of 2 s, and after them one of 2 s.

    On cores of their own they only add the last; where there are none, all of them.
    """
    work = Work(rounds=100, size=2, evaluations=4, first_due=25)
    assert run_seconds(COST, work, saturated=0.0) == 10 + 100 + 2 + 3
    assert run_seconds(COST, work, saturated=1.0) == 10 + 100 + (6 + 2 + 2) + 2 + 3


def test_a_single_evaluation_comes_after_training() -> None:
    assert run_seconds(COST, Work(100, 2, 1, 100), saturated=0.0) == 10 + 100 + 6 + 3


def test_evaluations_that_are_behind_end_later_than_training() -> None:
    """10 rounds of a second, each evaluated in 2 s, the first in 6 s, from second 1 on."""
    assert run_seconds(COST, Work(10, 2, 10, 1), saturated=0.0) == 10 + (1 + 6 + 9 * 2) + 3


@pytest.mark.parametrize(
    ("runs", "processes", "cores", "expected"),
    [(2, 1, 2, 1.0), (1, 1, 2, 0.0), (1, 1, 1, 1.0), (2, 1, 3, 0.5), (4, 2, 64, 0.0)],
)
def test_evaluators_without_a_core_of_their_own(runs: int, processes: int, cores: int, expected: float) -> None:
    assert saturation(runs, processes, 1, cores) == expected
