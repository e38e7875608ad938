"""Halving finds a user who fails alone, and only such a one."""

import math
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from server.federated.exchange import culprit


@given(users=st.integers(1, 300), data=st.data())
def test_whoever_fails_alone_is_found_in_few_tries(users: int, data: st.DataObject) -> None:
    guilty = data.draw(st.sets(st.integers(0, users - 1), min_size=1))
    tries = 0

    def fails(some: Sequence[int]) -> bool:
        nonlocal tries
        tries += 1
        return not guilty.isdisjoint(some)

    assert culprit(range(users), fails) in guilty
    assert tries <= math.ceil(math.log2(users)) + 2  # nobody, each half, and the one in the end


@given(users=st.integers(0, 100), needed=st.integers(2, 100))
def test_nobody_is_blamed_for_what_many_do_together(users: int, needed: int) -> None:
    assert culprit(range(users), lambda some: len(some) >= needed) is None


@given(users=st.integers(0, 100))
def test_nobody_is_blamed_where_all_fails_or_nothing(users: int) -> None:
    assert culprit(range(users), lambda some: True) is None
    assert culprit(range(users), lambda some: False) is None
