import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flsim.data import spill as spill_module
from flsim.data.balance import Tally, balanced, count_tokens, cut, split_of, written_words
from flsim.data.spill import Spill

lengths = st.lists(st.integers(1, 20), max_size=60)


def records_of(lengths: list[int]) -> list[str]:
    """Records of these many words, all words different."""
    return [" ".join(f"{record}.{word}" for word in range(length)) for record, length in enumerate(lengths)]


@given(lengths, st.integers(1, 60))
def test_cutting_loses_nothing_and_keeps_order(lengths: list[int], words_per_user: int) -> None:
    records = records_of(lengths)
    users, remainder = cut(records, words_per_user)
    assert [record for user in [*users, remainder] for record in user] == records


@given(lengths, st.integers(1, 60))
def test_users_are_balanced(lengths: list[int], words_per_user: int) -> None:
    """A user ends with the record that brings it to `words_per_user`: one record less would not do."""
    users, remainder = cut(records_of(lengths), words_per_user)
    for user in users:
        assert count_tokens(user) >= words_per_user > count_tokens(user[:-1])
    assert count_tokens(remainder) < words_per_user


@pytest.mark.parametrize(
    ("record", "words"),
    [("", 0), (".", 0), ("( a ) , b . !", 2), ("don't <URL> 3 - x-y <", 4), ("< URL >", 0), ("well-known", 1)],
)
def test_punctuation_is_not_written_words(record: str, words: int) -> None:
    assert written_words(record) == words


def test_users_are_balanced_by_written_words() -> None:
    """Four words and a full stop a record: three records make 12 words."""
    users, remainder = cut(["a b c d ."] * 7, 12)
    assert [len(user) for user in users] == [3, 3]
    assert remainder == ["a b c d ."]


def test_the_papers_example_of_4030_words() -> None:
    users, remainder = cut(records_of([10] * 403), 2_000)
    assert [count_tokens(user) for user in users] == [2_000, 2_000]
    assert count_tokens(remainder) == 30


@given(st.dictionaries(st.text(max_size=3), lengths, max_size=8), st.integers(1, 60))
def test_what_is_kept_and_what_is_dropped_add_up(authors: dict[str, list[int]], words_per_user: int) -> None:
    tally = Tally()
    kept = list(balanced(((name, records_of(found)) for name, found in authors.items()), words_per_user, tally))
    records = [record for author in kept for user in author.users for record in user]
    dropped = tally.dropped
    assert len(kept) + dropped["users_too_short"] == tally.read["users"] == len(authors)
    assert len(records) + dropped["records_of_short_users"] + dropped["remainder_records"] == sum(
        map(len, authors.values())
    )
    assert count_tokens(records) + dropped["words_of_short_users"] + dropped["remainder_words"] == sum(
        map(sum, authors.values())
    )
    short = [(sum(found), name) for name, found in authors.items() if sum(found) < words_per_user]
    assert tally.longest == max([(0, ""), *short])


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


@given(
    st.lists(st.tuples(st.text(max_size=3), st.lists(st.sampled_from(["a", "b c", "d e f"]), max_size=3)), max_size=30),
    st.integers(1, 7),
)
def test_the_spill_regroups_like_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory, posts: list[tuple[str, list[str]]], buckets: int
) -> None:
    spill = Spill(tmp_path_factory.mktemp("spill") / "spill", buckets)
    expected: dict[str, list[str]] = {}
    for author, records in posts:
        spill.add(author, records)
        expected.setdefault(author, []).extend(records)
    spill.flush()
    found = [author for bucket in range(len(spill)) for author in spill.read(bucket)]
    assert found == sorted(expected.items(), key=lambda item: hashlib.sha256(item[0].encode()).digest())


def test_the_spill_goes_to_disk_when_its_buffers_are_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill_module, "BUFFERED", 100)
    spill = Spill(tmp_path / "spill", 3)
    for number in range(50):
        spill.add(str(number % 7), [f"w{number}"])
    on_disk = "".join(path.read_text() for path in (tmp_path / "spill").iterdir())
    written = sum(len(f'"{number % 7}"\tw{number}\n') for number in range(50))
    assert written - 100 <= len(on_disk) < written
    spill.flush()
    found = dict(author for bucket in range(3) for author in spill.read(bucket))
    assert found == {str(author): [f"w{number}" for number in range(author, 50, 7)] for author in range(7)}
    assert json.loads((tmp_path / "spill").joinpath("bucket-0000").read_text().split("\t")[0]) in found
    spill.remove()
    assert not (tmp_path / "spill").exists()
