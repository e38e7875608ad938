"""The deadline follows how long replies take; one that was too short is made up for before a run fails."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.federated.rounds import FIRST, FLOOR, Deadline

SECONDS = st.floats(1e-3, 1e6)


@pytest.mark.parametrize(
    ("replies", "attempts"),
    [
        ([], [3600, 3600, 3600, 3600]),
        ([0.4, 0.1], [60, 120, 240, 3600]),
        ([2.0, 30.0, 1.0], [300, 600, 1200, 3600]),
        ([180.0], [1800, 3600, 3600, 3600]),
        ([1500.0], [3600, 3600, 3600, 3600]),
        ([2400.0], [4800, 4800, 4800, 4800]),
    ],
)
def test_it_is_ten_times_the_longest_reply_and_doubles(replies: list[float], attempts: list[float]) -> None:
    deadline = Deadline(None)
    for seconds in replies:
        deadline.saw(seconds)
    assert [deadline.of_attempt(attempt, 3) for attempt in range(4)] == attempts


@given(st.lists(SECONDS, max_size=5), st.integers(0, 6))
def test_no_attempt_is_hasty_and_the_last_has_an_hour(replies: list[float], retries: int) -> None:
    """Whatever was measured: never below the floor nor twice the longest reply, never shorter than the one before."""
    deadline = Deadline(None)
    for seconds in replies:
        deadline.saw(seconds)
    attempts = [deadline.of_attempt(attempt, retries) for attempt in range(retries + 1)]
    assert attempts == sorted(attempts)
    assert attempts[0] >= max([FLOOR, *(2 * seconds for seconds in replies)])
    assert attempts[-1] == deadline.patience >= FIRST


@given(st.floats(0.1, 1e5), st.lists(SECONDS, max_size=5))
def test_a_number_holds_whatever_is_measured(fixed: float, replies: list[float]) -> None:
    deadline = Deadline(fixed)
    for seconds in replies:
        deadline.saw(seconds)
    assert {deadline.of_attempt(attempt, 3) for attempt in range(4)} == {deadline.patience} == {fixed}
