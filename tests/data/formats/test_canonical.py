import pytest

from flsim.data.formats.canonical import FORMATS, RECORDS, USERS, balanced_warnings, warnings


def test_the_published_counts_are_those_of_tensorflow_federated() -> None:
    """From the docstring of tff.simulation.datasets.stackoverflow.load_data."""
    assert USERS == {"train": 342_477, "heldout": 38_758, "test": 204_088}
    assert RECORDS == {"train": 135_818_730, "heldout": 16_491_230, "test": 16_586_035}


def test_what_is_whole_is_not_mentioned() -> None:
    assert warnings({"tff-sqlite"}, USERS, RECORDS) == []
    assert warnings({"tff-hdf5"}, {"train": 342_477}, {"train": 135_818_730, "test": 0}) == []


def test_a_mismatch_names_both_numbers() -> None:
    first, second = warnings({"pfl-hdf5", "fedjax-sqlite"}, {**USERS, "test": 5}, {**RECORDS, "train": 135_818_729})
    assert first.startswith("5 users in test, but Stack Overflow as published has 204,088")
    assert second.startswith("135,818,729 sentences in train, but Stack Overflow as published has 135,818,730")


def test_other_formats_are_not_compared() -> None:
    for names in ({"jsonl"}, {"tff-sqlite", "stackexchange"}, set()):
        assert warnings(names, {"train": 1}, {"train": 1}) == []


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_balanced_users_as_in_the_paper_are_not_mentioned(name: str) -> None:
    for users, records in ((392_000, 93_000_000), (391_204, 92_700_001), (399_000, 92_000_000)):
        assert balanced_warnings({name}, 2_000, USERS, users, records) == []


def test_other_numbers_of_balanced_users_or_records_are_mentioned_with_the_papers() -> None:
    for users, records in ((383_000, 93_000_000), (392_000, 95_000_000), (392_000, 135_818_730)):
        (warning,) = balanced_warnings({"tff-sqlite"}, 2_000, USERS, users, records)
        assert warning.startswith(f"{users:,} balanced train users with {records:,} records, ")
        assert "about 392,000 with 93,000,000, 237 a user" in warning


def test_only_all_of_stack_overflow_in_users_of_the_papers_size_is_compared() -> None:
    assert balanced_warnings({"tff-sqlite"}, 1_000, USERS, 5, 5) == []
    assert balanced_warnings({"tff-sqlite"}, None, USERS, 5, 5) == []
    assert balanced_warnings({"tff-sqlite"}, 2_000, {**USERS, "train": 342_476}, 5, 5) == []
    assert balanced_warnings({"jsonl"}, 2_000, USERS, 5, 5) == []
    assert balanced_warnings(set(), 2_000, USERS, 5, 5) == []
