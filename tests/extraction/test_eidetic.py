"""Numbers of records and users whose text contains a string: the index against a search of every record."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from populations import split_of

from flsim.attacks.extraction.extract import copies_in, in_place, occurrences
from flsim.canaries.planting import Overlay
from flsim.canaries.population import Population
from flsim.canaries.spec import Canary
from flsim.data.records import Records

Phrase = list[int]
words = st.integers(1, 3)  # few, so that strings repeat
users = st.lists(st.lists(st.lists(words, max_size=7), max_size=4), min_size=1, max_size=6)


def canary(tokens: Phrase, **about: object) -> Canary:
    return Canary("c", tuple(tokens), 0.5, 0.5, **about)  # type: ignore[arg-type]


def counted(population: list[list[Phrase]], string: Phrase) -> tuple[int, int]:
    """Search every record for a string, word by word."""
    size = len(string)
    hits = [
        sum(any(record[at : at + size] == string for at in range(len(record) - size + 1)) for record in user)
        for user in population
    ]
    return sum(hits), sum(hit > 0 for hit in hits)


@settings(max_examples=40)
@given(users, st.lists(st.lists(words, min_size=1, max_size=5), min_size=1, max_size=8), st.integers(1, 5))
def test_counts_are_those_of_a_search(population: list[list[Phrase]], strings: list[Phrase], piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flsim.attacks.extraction.extract.RECORDS", piece)  # users lie in several pieces
        in_records, in_users = occurrences(
            Population.with_canaries(split_of(population), (), Overlay(np.empty(0, np.int64), np.empty(0, np.uint16))),
            Records.from_lists(strings),
        )
    assert list(zip(in_records.tolist(), in_users.tolist(), strict=True)) == [
        counted(population, string) for string in strings
    ]


POPULATION = [[[1, 1], [2, 2, 2]], [[3]], [[1, 2, 3, 1], [3, 3]]]


def in_records_and_users(canaries: tuple[Canary, ...], rounds: int) -> list[tuple[int, int]]:
    """Counts of each canary's phrase in the population, where they replace records 0 (of user 0), 2 and 4."""
    overlay = Overlay(np.array([0, 2, 4]), np.array([0, 0, 1], np.uint16))
    placed = in_place(Population.with_canaries(split_of(POPULATION), canaries, overlay), canaries, rounds)
    counts = occurrences(placed, Records.from_lists([list(one.tokens) for one in canaries]))
    assert (copies_in(placed, len(canaries)) == counts[0]).all()
    return list(zip(*(side.tolist() for side in counts), strict=True))


def test_canaries_count_from_the_first_round_of_their_window() -> None:
    canaries = canary([6, 6], first_round=3, last_round=4), canary([5, 6])
    assert in_records_and_users(canaries, 2) == [(0, 0), (1, 1)]
    assert in_records_and_users(canaries, 3) == in_records_and_users(canaries, 9) == [(2, 2), (1, 1)]


def test_pseudo_users_count_once_they_came() -> None:
    """Two of three records each, who come in round 2."""
    injected = canary([6, 5, 5], copies=6, pseudo_users=2, first_round=2, last_round=2)
    canaries = canary([6, 6]), canary([5, 6]), injected
    assert in_records_and_users(canaries, 1)[2] == (0, 0)
    assert in_records_and_users(canaries, 2)[2] == (6, 2)
