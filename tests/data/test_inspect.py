"""Numbers of a corpus, against counts made the naive way."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from dumps import peak_kilobytes, write_jsonl
from helpers import MakeCorpus
from hypothesis import given, settings
from hypothesis import strategies as st

from flsim.base.files import new_folder
from flsim.data.authors import author_of
from flsim.data.corpus import Corpus, CorpusWriter
from flsim.data.importing.gather import ImportHParams
from flsim.data.importing.run import import_corpus
from flsim.data.inspect import BINS, Distribution, inspect, unit_of
from flsim.data.manifest import SPLITS
from flsim.data.records import Records
from flsim.data.vocabulary import LAYOUTS, Layout, Vocabulary

User = tuple[str, list[list[int]]]  # name, records of ranks of words, from 0; the first rank that is no word is OOV
VOCABULARY = 12

names = st.sampled_from(["ann", "bob#1", "c#", "d#x", "ann#0", "ann#12", "bob#1#3"])
users = st.lists(st.tuples(names, st.lists(st.lists(st.integers(0, 8), max_size=5), max_size=4)), max_size=4)


def write(path: Path, splits: dict[str, list[User]], layout: Layout, **manifest: Any) -> Corpus:
    words = tuple(f"w{rank}" for rank in range(layout.words))
    vocabulary = Vocabulary(words, tuple(range(layout.words, 0, -1)), layout.name)
    ids = [layout.first_word + rank for rank in range(layout.words)] + [layout.oov]
    with new_folder(path) as folder, CorpusWriter(folder, vocabulary, layout) as writer:
        for split, written in splits.items():
            for name, records in written:
                writer.splits[split].add(
                    name, Records.from_lists([[ids[rank] for rank in record] for record in records])
                )
        writer.finish(**{"dropped": {}, "sources": [], "parameters": {}, **manifest})
    return Corpus.open(path, verify=True)


def naive_quantiles(lengths: list[int]) -> dict[str, int]:
    shares = {"min": 0.0, "5%": 0.05, "median": 0.5, "95%": 0.95, "max": 1.0}
    ranked = sorted(lengths)
    return {
        name: next(x for x in ranked if sum(y <= x for y in ranked) >= share * len(ranked))
        for name, share in shares.items()
        if ranked
    }


def naive_lengths(split: list[User]) -> dict[str, list[int]]:
    return {
        "words_per_record": [len(record) for _, records in split for record in records],
        "records_per_user": [len(records) for _, records in split],
        "words_per_user": [sum(map(len, records)) for _, records in split],
    }


@settings(max_examples=60)
@given(
    splits=st.fixed_dictionaries(dict.fromkeys(SPLITS, users)),
    layout=st.sampled_from(sorted(LAYOUTS)),
    window=st.sampled_from([1, 2, 7, 1000]),
)
def test_every_number_is_the_naive_one(splits: dict[str, list[User]], layout: str, window: int) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("flsim.data.records.WINDOW", window)
        found = inspect(write(Path(folder) / "corpus", splits, Layout(VOCABULARY, 20, layout)))
    assert json.loads(json.dumps(found)) == found
    assert (found["layout"], found["vocabulary"], found["record_words"]) == (layout, VOCABULARY, 20)
    for name, split in splits.items():
        numbers = found["splits"][name]
        lengths = naive_lengths(split)
        ranks = Counter(rank for _, records in split for record in records for rank in record)
        assert numbers["users"] == len(split)
        assert numbers["records"] == len(lengths["words_per_record"])
        assert numbers["words"] == ranks.total()
        oov = ranks.pop(8, 0)
        total = ranks.total() + oov
        assert numbers["oov_share"] == (oov / total if total else None)
        assert numbers["coverage"] == {"all": ranks.total() / total if total else None}
        assert numbers["words_occurring"] == len(ranks)
        assert numbers["most_frequent"] == [
            {"word": f"w{rank}", "count": ranks[rank]} for rank in sorted(ranks, key=lambda rank: (-ranks[rank], rank))
        ]
        for length, values in lengths.items():
            assert numbers[length] == naive_quantiles(values)
            histogram = numbers["histograms"][length]
            bins = list(pairwise(histogram["edges"]))
            assert histogram["counts"] == [sum(low <= x < high for x in values) for low, high in bins]
            assert sum(histogram["counts"]) == len(values)
    authors = {name: {author_of(user) for user, _ in split} for name, split in splits.items()}
    membership = found["membership"]
    assert {name: membership[f"{name}_authors"] for name in SPLITS} == {name: len(of) for name, of in authors.items()}
    for name in ("heldout", "test"):
        assert membership[f"{name}_also_train"] == sorted(
            author for author in authors[name] if author in authors["train"]
        )
        assert membership[f"{name}_only"] == sum(author not in authors["train"] for author in authors[name])


def test_an_author_is_a_user_without_its_number() -> None:
    pairs = {"ai/8#0": "ai/8", "ai/8#12": "ai/8", "7": "7", "a#1#2": "a#1", "c#": "c#", "d#x": "d#x", "e#1\n": "e#1\n"}
    assert {user: author_of(user) for user in pairs} == pairs


def test_keys_that_programs_rely_on(make_corpus: MakeCorpus) -> None:
    """V = 12: words 1 to 8, OOV 9."""
    found = inspect(make_corpus(train=[[[1, 2], [9]], [[3] * 20]], test=[[[9, 9, 1, 1]], [[1]], [[2], [3]]]))
    assert (found["users"], found["records"], found["words"]) == (2, 3, 23)
    assert (found["heldout_users"], found["test_users"]) == (0, 3)
    assert {"vocabulary", "record_words", "dropped", "sources", "parameters", "digest"} < set(found)
    expected = {
        "users": 2,
        "records": 3,
        "words": 23,
        "oov_share": 1 / 23,
        "records_per_user": {"min": 1, "5%": 1, "median": 1, "95%": 2, "max": 2},
        "words_per_record": {"min": 1, "5%": 1, "median": 2, "95%": 20, "max": 20},
    }
    assert expected.items() <= found["splits"]["train"].items()
    assert found["splits"]["test"]["oov_share"] == 2 / 7


def test_the_most_frequent_words_cover_the_most(tmp_path: Path) -> None:
    """200 words, of which the last 100 occur twice and the first 100 once: 100 cover 2/3, were it not for 60 OOV."""
    records = [[rank] * (1 + (rank >= 100)) for rank in range(200)] + [[200] * 60]
    found = inspect(write(tmp_path / "corpus", {"train": [("a", records)]}, Layout(204, 60)))["splits"]["train"]
    assert found["coverage"] == {"100": 200 / 360, "all": 300 / 360}
    assert found["most_frequent"] == [{"word": f"w{rank}", "count": 2} for rank in range(100, 110)]
    assert found["words_occurring"] == 200


def test_drops_have_shares_of_what_was_read(tmp_path: Path) -> None:
    posts = [("long", "a b c d. e f g h! a a a a a?"), ("long", "b c. d"), ("short", "a. b")]
    source = write_jsonl(tmp_path / "posts.jsonl", posts)
    corpus = import_corpus([source], tmp_path / "corpus", ImportHParams(7, 5, 13, heldout=0.0, test=0.0))
    found = inspect(corpus)
    dropped = {reason: count for reason, count in found["dropped"].items() if count}
    assert dropped == {
        "records_of_short_users": 2,
        "remainder_records": 2,
        "remainder_words": 4,
        "users_too_short": 1,
        "words_of_short_users": 3,
        "words_truncated": 1,
    }
    # Sentences of 5, 5, 6, 3, 1, 2 and 1 words, punctuation included, of two authors.
    assert found["parameters"]["read"] == {"posts": 3, "records": 7, "words": 23, "users": 2}
    shares = {reason: found["dropped_shares"][reason] for reason in dropped}
    assert shares == {
        "records_of_short_users": 2 / 7,
        "remainder_records": 2 / 7,
        "remainder_words": 4 / 23,
        "users_too_short": 1 / 2,
        "words_of_short_users": 3 / 23,
        "words_truncated": 1 / 23,
    }
    assert found["splits"]["train"]["oov_share"] == 7 / 15  # a, then "." and b of those found once more
    assert found["sources"][0]["format"] == "jsonl"


def test_shares_are_none_where_nobody_counted(tmp_path: Path) -> None:
    dropped = {"posts_without_owner": 3, "mice_that_ran": 2, "words_truncated": 1}
    read = {"read": {"posts": 12, "words": 0}}
    corpus = write(tmp_path / "corpus", {}, Layout(VOCABULARY), dropped=dropped, parameters=read)
    shares = {"posts_without_owner": 0.25, "mice_that_ran": None, "words_truncated": None}
    assert inspect(corpus)["dropped_shares"] == shares
    assert [unit_of(reason) for reason in ("users_too_short", "remainder_words", "words_of_short_users", "mice")] == [
        "users",
        "words",
        "words",
        None,
    ]


def test_warnings_and_notes_are_passed_on_and_may_be_missing(tmp_path: Path) -> None:
    corpus = write(tmp_path / "corpus", {}, Layout(VOCABULARY), warnings=["few users"], notes=["no case"])
    assert (inspect(corpus)["warnings"], inspect(corpus)["notes"]) == (["few users"], ["no case"])
    del corpus.manifest["warnings"], corpus.manifest["notes"]
    assert (inspect(corpus)["warnings"], inspect(corpus)["notes"]) == ([], [])


INSPECT = """
import sys
from pathlib import Path
from flsim.data.corpus import Corpus
from flsim.data.inspect import inspect
assert inspect(Corpus.open(Path(sys.argv[1])))["words"] == int(sys.argv[2])
"""


def test_memory_does_not_grow_with_words_and_records(tmp_path: Path) -> None:
    """160 MB of tokens and 160 MB of records' starts, in 100 users, take less than 40 MB more than next to nothing."""
    layout = Layout(VOCABULARY)
    peaks = []
    for users in (1, 100):
        path = tmp_path / f"corpus{users}"
        vocabulary = Vocabulary(tuple("abcdefgh"), tuple(range(8, 0, -1)))
        records = Records(np.resize(np.arange(1, 9, dtype=np.uint16), 800_000), np.arange(0, 800_001, 4))
        with new_folder(path) as folder, CorpusWriter(folder, vocabulary, layout) as writer:
            for user in range(users):
                writer.splits["train"].add(str(user), records)
            writer.finish({}, [], {})
        peaks.append(peak_kilobytes(INSPECT, path, Path(str(users * 800_000))))
    assert (tmp_path / "corpus100/train/tokens.u16").stat().st_size == 160_000_000
    assert (tmp_path / "corpus100/train/records.i64").stat().st_size == 160_000_008
    assert peaks[1] - peaks[0] < 40_000


lengths_strategy = st.one_of(
    st.lists(st.integers(0, 30), min_size=1, max_size=50),
    st.lists(st.integers(0, 10**7), min_size=1, max_size=50),
    st.lists(st.integers(0, 7).map(lambda power: 10**power), min_size=1, max_size=50),
)


def distribution(values: list[int]) -> Distribution:
    return Distribution.count([np.array(values)])


@given(values=lengths_strategy, more=lengths_strategy)
def test_bins_hold_every_value_once(values: list[int], more: list[int]) -> None:
    """The counts of both lists are in the bins of the whole list."""
    whole = distribution(values) + distribution(more)
    edges, scale = whole.edges()
    bins = list(pairwise(edges))
    assert 1 <= len(bins) <= BINS
    assert all(low < high for low, high in bins)
    assert whole.binned(edges) == [sum(low <= x < high for x in values + more) for low, high in bins]
    assert distribution(values).binned(edges) == [sum(low <= x < high for x in values) for low, high in bins]
    assert sum(distribution(more).binned(edges)) == len(more)
    median = sorted(values + more)[(len(values + more) - 1) // 2]
    longtailed = max(values + more) > 10 * max(1, median)
    assert (scale == "log") == (longtailed and max(values + more) - min(values + more) >= BINS)


@given(values=lengths_strategy, cut=st.integers(0, 50))
def test_a_distribution_in_pieces_is_that_of_the_whole(values: list[int], cut: int) -> None:
    pieces = Distribution.count([np.array(values[:cut], np.int64), np.array(values[cut:], np.int64)])
    distinct = sorted(set(values))
    assert pieces.values.tolist() == distinct
    assert pieces.counts.tolist() == [values.count(value) for value in distinct]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], ([], "linear")),
        ([7], ([7, 8], "linear")),
        ([1, 20], (list(range(1, 22)), "linear")),  # a record's words: a bin each
        ([46, 110, 181], (list(range(40, 191, 10)), "linear")),
        ([865, 1_700, 2_128], (list(range(800, 2_201, 100)), "linear")),
        ([0, 3, 10**6], ([0, 1, 2, 3, 6, 11, 20], "log")),  # ratios of 10^(6/23), rounded; two that meet are one
    ],
)
def test_edges_are_round(values: list[int], expected: tuple[list[int], str]) -> None:
    edges, scale = distribution(values).edges()
    assert (edges[: len(expected[0])], scale) == expected
    assert not values or edges[-1] > max(values)


def test_edges_of_a_long_tail_have_one_ratio() -> None:
    edges, scale = distribution([1_000] * 9 + [10**9]).edges()
    ratios = np.array(edges[1:]) / edges[:-1]
    assert scale == "log"
    assert len(ratios) == BINS
    np.testing.assert_allclose(ratios, 10 ** (6 / BINS), rtol=1e-3)
