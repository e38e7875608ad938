import json
from pathlib import Path

import numpy as np
import pytest
from dumps import write_jsonl
from helpers import MakeCorpus
from hypothesis import given
from hypothesis import strategies as st

from flsim.data import inspect as inspect_module
from flsim.data.importing import ImportHParams, import_corpus
from flsim.data.inspect import QUANTILES, describe, inspect


def test_counts_of_a_corpus_made_by_hand(make_corpus: MakeCorpus) -> None:
    """V = 12: words 1 to 8, OOV 9."""
    corpus = make_corpus(
        train=[[[1, 2], [9]], [[3] * 20]], test=[[[9, 9, 1, 1]], [[1]], [[2], [3]]], vocabulary_size=12
    )
    found = inspect(corpus)
    assert (found["users"], found["records"], found["words"]) == (2, 3, 23)
    assert (found["heldout_users"], found["test_users"]) == (0, 3)
    assert (found["vocabulary"], found["record_words"]) == (12, 20)
    assert found["splits"]["train"] == {
        "users": 2,
        "records": 3,
        "words": 23,
        "oov_share": 1 / 23,
        "records_per_user": {"min": 1, "5%": 1, "median": 1, "95%": 2, "max": 2},
        "words_per_record": {"min": 1, "5%": 1, "median": 2, "95%": 20, "max": 20},
    }
    assert found["splits"]["test"]["oov_share"] == 2 / 7
    assert found["splits"]["heldout"] == {
        "users": 0,
        "records": 0,
        "words": 0,
        "oov_share": None,
        "records_per_user": {},
        "words_per_record": {},
    }
    assert json.loads(json.dumps(found)) == found
    lines = describe(found).splitlines()
    assert lines[1].split() == ["train", "2", "3", "23", "4.3%", "1-2", "1-20"]
    assert lines[2].split() == ["heldout", "0", "0", "0"]
    assert max(map(len, lines)) <= 80


@given(st.lists(st.integers(0, 30), min_size=1, max_size=50))
def test_quantiles_are_the_smallest_lengths_that_do(lengths: list[int]) -> None:
    found = inspect_module._quantiles(inspect_module._histogram(np.cumsum([0, *lengths])))
    ranked = sorted(lengths)
    assert found["min"] == ranked[0]
    assert found["max"] == ranked[-1]
    for name, share in QUANTILES.items():
        assert found[name] == next(x for x in ranked if sum(y <= x for y in ranked) >= share * len(ranked))


def test_histograms_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.arange(50) % 11
    for chunk in (1, 7, 49, 50, 51):
        monkeypatch.setattr(inspect_module, "_CHUNK", chunk)
        found = inspect_module._histogram(np.cumsum([0, *lengths]))
        np.testing.assert_array_equal(found, np.bincount(lengths))


def test_an_imported_corpus_says_what_was_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect_module, "_CHUNK", 7)
    posts = [("long", "a b c d. e f g h! a a a a a?"), ("long", "b c. d"), ("short", "a. b")]
    source = write_jsonl(tmp_path / "posts.jsonl", posts)
    corpus = import_corpus([source], tmp_path / "corpus", ImportHParams(7, 5, 13, heldout=0.0, test=0.0))
    found = inspect(corpus)
    assert found["dropped"] == {
        "posts_without_words": 0,
        "records_of_short_users": 2,
        "remainder_records": 2,
        "remainder_words": 4,
        "users_too_short": 1,
        "words_of_short_users": 3,
        "words_truncated": 1,
    }
    assert (found["users"], found["records"], found["words"]) == (1, 3, 15)
    oov_words = corpus.manifest["parameters"]["oov_words"]["train"]
    assert (
        found["splits"]["train"]["oov_share"] == oov_words / 15 == 7 / 15
    )  # a, then "." and b of those found once more
    text = describe(found)
    assert "dropped      2 records of short users" in text
    assert "source       posts.jsonl" in text
    assert found["digest"] in text
