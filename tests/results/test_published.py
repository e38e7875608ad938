"""Published numbers: the same as in the papers' tables, consistent with each other and with the papers' words."""

import math

import pytest

from flsim.base.errors import InputError
from flsim.results.published import matching, published_rows, with_question

THAKKAR, CARLINI = "thakkar2020.csv", "carlini2018.csv"
Row = dict[str, object]


def thakkar(*tables: str) -> list[Row]:
    return [row for table in tables for row in published_rows(THAKKAR, table)]


def numbers(rows: list[Row], name: str) -> list[float]:
    return [float(str(row[name])) for row in rows]


def test_thakkar_is_as_its_text_says() -> None:
    """Section 4.2 has the ranges of each regime; everything extracted by beam search is also memorized by sampling."""
    ranges = {
        ("IID", "SGD"): ((52, 54), (42, 45)),
        ("IID", "FedAvg"): ((65, 69), (56, 58)),
        ("Non-IID", "SGD"): ((37, 51), (19, 39)),
        ("Non-IID", "FedAvg"): ((19, 26), (0, 2)),
    }
    for (data, optimizer), (rs, bs) in ranges.items():
        rows = [row for row in thakkar("1") if (row["data"], row["optimizer"]) == (data, optimizer)]
        sizes = [32, 64, 128, 256] if optimizer == "SGD" else [500, 1000, 2000, 5000]
        assert [row["batch_size"] for row in rows] == sizes
        for name, (low, high) in (("rs", rs), ("bs", bs)):
            assert (min(numbers(rows, name)), max(numbers(rows, name))) == (low, high)
    rows = thakkar("1", "2", "3", "4")
    assert all(0 <= bs <= rs <= 90 for bs, rs in zip(numbers(rows, "bs"), numbers(rows, "rs"), strict=True))
    assert {row["canaries"] for row in rows} == {90}
    for row in rows:
        for metric in ("rs", "bs"):
            assert (row[metric] == 0) == (row[f"{metric}_lowest"] == "-")
        assert ("epsilon_paper" in row) == ("delta" in row) == (row["optimizer"] == "DP-FedAvg")
        assert 0.2 < float(str(row["accuracy"])) < 0.25


def test_carlini_is_as_its_text_says() -> None:
    """Captions and sections 6 and 8: shapes of the tables, six private models, recurrent networks memorize most."""
    architectures, sizes, secrets, private = (published_rows(CARLINI, table) for table in "1247")
    assert [len(rows) for rows in (architectures, sizes, secrets, private)] == [9, 35, 20, 9]
    recurrent = [row for row in architectures if row["architecture"] in ("LSTM", "GRU")]
    others = [row for row in architectures if row not in recurrent]
    assert min(numbers(recurrent, "mean_exposure")) > max(numbers(others, "mean_exposure"))
    assert max(numbers(recurrent, "test_loss")) < min(numbers(others, "test_loss"))
    expected = {(2**power, units) for power in range(4, 11) for units in range(50, 300, 50)}
    assert {(row["batch_size"], row["units"]) for row in sizes} == expected
    for one in secrets:
        assert 0 < float(str(one["extracted"])) <= 1
    noisy = [row for row in private if math.isfinite(float(str(row.get("epsilon", "inf"))))]
    assert len(noisy) == 6
    assert {row["optimizer"] for row in noisy} == {"RMSProp"}
    assert max(numbers(noisy, "mean_exposure")) < 9.5 < 31


def test_a_row_is_found_by_value_and_without_case() -> None:
    rows = published_rows(THAKKAR, "1")
    found = matching(rows, {"data": "non-iid", "optimizer": "fedavg", "batch_size": 500.0})
    assert found is not None
    assert (found["rs"], found["bs"], found["accuracy"]) == (21, 0, 0.244)
    assert matching(rows, {"batch_size": 501}) is None
    private = published_rows(CARLINI, "7")
    for epsilon, exposure in (("", 31.0), (2e8, 3.2), ("2e8", 3.2)):
        found = matching(private, {"optimizer": "RMSProp", "epsilon": epsilon})
        assert found is not None
        assert found["mean_exposure"] == exposure
    clipped = matching(private, {"epsilon": math.inf})
    assert clipped is not None
    assert clipped["optimizer"] == "SGD"


def test_what_the_paper_asked_is_in_its_rows() -> None:
    """Section 4.1: canaries of 5 words, |R| of 2M, a prefix length of 1. The Secret Sharer has no such question."""
    asked = {(row["references"], row["prefix"], row["length"]) for row in thakkar("1", "2", "3", "4")}
    assert asked == {(2_000_000, 1, 5)}
    row = published_rows(THAKKAR, "1")[9]
    older = {name: cell for name, cell in row.items() if name not in ("references", "prefix", "length")}
    assert with_question(older) == with_question(row) == row
    secret = published_rows(CARLINI, "1")[0]
    other = {"table": "9", "rs": 65, "canaries": 90}
    assert (with_question(secret), with_question(other)) == (secret, other)


def test_what_names_no_one_row_is_one_line() -> None:
    rows = published_rows(THAKKAR, "1")
    with pytest.raises(InputError, match="8 rows of the published table have data IID; use more of table, data, opt"):
        matching(rows, {"data": "IID"})
    with pytest.raises(InputError, match="cohort: not a column of the published table; choose one of table, data"):
        matching(rows, {"cohort": 500})
    with pytest.raises(InputError, match=r"thakkar2020\.csv: there is no table 5; choose one of 1, 2, 3, 4"):
        published_rows(THAKKAR, "5")
    with pytest.raises(InputError, match=r"other\.csv: there is no such file of published numbers; choose one of"):
        published_rows("other.csv", "1")
