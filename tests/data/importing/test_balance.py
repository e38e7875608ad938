"""Where authors are cut, what counts as a written word, and who is kept out."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flsim.data.importing.gather import cut, split_of, written

lengths = st.lists(st.integers(0, 20), max_size=60)


def users_of(lengths: list[int], words_per_user: int) -> tuple[list[list[int]], list[int]]:
    """The records of each user, by their lengths, and the remainder."""
    ends = cut(np.array(lengths, np.int64), words_per_user).tolist()
    users = [lengths[first:last] for first, last in zip([0, *ends], ends, strict=False)]
    return users, lengths[ends[-1] if ends else 0 :]


@given(lengths, st.integers(1, 60))
def test_cutting_loses_nothing_and_keeps_order(lengths: list[int], words_per_user: int) -> None:
    users, remainder = users_of(lengths, words_per_user)
    assert [record for user in [*users, remainder] for record in user] == lengths


@given(lengths, st.integers(1, 60))
def test_users_are_balanced(lengths: list[int], words_per_user: int) -> None:
    """A user ends with the record that brings it to `words_per_user`: one record less would not do."""
    users, remainder = users_of(lengths, words_per_user)
    for user in users:
        assert sum(user) >= words_per_user > sum(user[:-1])
    assert sum(remainder) < words_per_user


@pytest.mark.parametrize(
    ("token", "is_word"),
    [
        ("don't", True),
        ("well-known", True),
        ("7", True),
        ("'cause", True),
        ("c++", True),
        ("<URL>", True),
        ("<oov>", True),
        ("é", True),
        (".", False),
        ("<", False),
        ("--", False),
        ("_", False),
    ],
)
def test_written_words_have_a_letter_or_a_digit(token: str, is_word: bool) -> None:
    assert written([token]).tolist() == [is_word]


def test_the_papers_example_of_4030_words() -> None:
    users, remainder = users_of([10] * 403, 2_000)
    assert [sum(user) for user in users] == [2_000, 2_000]
    assert sum(remainder) == 30


def test_splits_have_the_shares_that_were_asked_for() -> None:
    """4,000 authors: a share's standard deviation is below 0.8%."""
    splits = Counter(split_of(f"author{index}", heldout=0.1, test=0.3, seed=7) for index in range(4_000))
    assert abs(splits["heldout"] / 4_000 - 0.1) < 0.03
    assert abs(splits["test"] / 4_000 - 0.3) < 0.03
    assert splits.total() == 4_000


def test_splits_depend_on_the_seed_and_nothing_else() -> None:
    def splits(seed: int) -> list[str]:
        return [split_of(f"author{index}", 0.2, 0.2, seed) for index in range(100)]

    assert splits(0) == splits(0) != splits(1)
    assert {split_of(name, 0.0, 0.0, 3) for name in "abc"} == {"train"}
