from flsim.data.formats.canonical import RECORDS, USERS, warnings


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
