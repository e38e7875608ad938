"""The text: it fits 80 columns whatever is in it, and says what a person must know."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import MakeCorpus
from hypothesis import given, settings
from hypothesis import strategies as st

from flsim.base.files import new_folder
from flsim.data.corpus import Corpus, CorpusWriter
from flsim.data.describe import REASONS, describe
from flsim.data.inspect import LENGTHS, inspect, unit_of
from flsim.data.manifest import SPLITS, WHOLE
from flsim.data.records import Records
from flsim.data.vocabulary import Layout, Vocabulary


def write(path: Path, splits: dict[str, list[str]], **manifest: Any) -> Corpus:
    """Users by name, each of two records of two words."""
    with new_folder(path) as folder, CorpusWriter(folder, Vocabulary(("a", "b"), (2, 1)), Layout(6)) as writer:
        for split, users in splits.items():
            for user in users:
                writer.splits[split].add(user, Records.from_lists([[1, 2], [3, 1]]))
        writer.finish(**{"dropped": {}, "sources": [], "parameters": {}, **manifest})
    return Corpus.open(path)


def text_of(path: Path, splits: dict[str, list[str]], **manifest: Any) -> str:
    """The text as one line."""
    return " ".join(describe(inspect(write(path, splits, **manifest))).split())


def test_the_splits_and_the_lengths(make_corpus: MakeCorpus) -> None:
    """V = 12: words 1 to 8, OOV 9."""
    found = inspect(
        make_corpus(train=[[[1, 2], [9]], [[3] * 20]], test=[[[9, 9, 1, 1]], [[1]], [[2], [3]]], vocabulary_size=12)
    )
    rows = [line.split() for line in describe(found).splitlines()]
    assert rows[0] == ["split", "authors", "users", "records", "words", "OOV"]
    assert rows[1] == ["train", "2", "2", "3", "23", "4.3%"]
    assert rows[2] == ["heldout", "0", "0", "0", "0"]
    assert rows[3] == ["test", "3", "3", "4", "7", "28.6%"]
    assert ["words", "per", "record", "1", "1", "2", "20", "20"] in rows
    assert ["records", "per", "user", "1", "1", "1", "2", "2"] in rows
    assert ["words", "per", "user", "3", "3", "3", "20", "20"] in rows
    assert "coverage     of train's words: all 95.7%" in describe(found)
    assert "frequent     w2 w0 w1\n" in describe(found)


def test_who_is_a_member(tmp_path: Path) -> None:
    safe = text_of(tmp_path / "safe", {"train": ["a#0", "a#1"], "heldout": ["b#0"], "test": ["c#0"]})
    assert "held-out users are the safe non-members for user-level attacks" in safe
    assert "no test author is in train" in safe
    assert "WARNING" not in safe
    dated = text_of(tmp_path / "dated", {"train": ["a#0", "b", "c", "d", "e"], "heldout": ["f"], "test": [*"abcdz"]})
    assert "4 of 5 test authors are train authors too (a, b, c and 1 more), so members" in dated
    assert "safe non-members for user-level attacks" in dated
    leaky = text_of(tmp_path / "leaky", {"train": ["a#0", "b#0"], "heldout": ["a#1", "c#0"]})
    assert "WARNING 1 of 2 held-out authors are train authors too (a): they are members" in leaky
    assert "safe" not in leaky
    assert "none held out: user-level attacks have no safe non-members" in text_of(tmp_path / "none", {"train": ["a"]})


def test_drops_in_words(tmp_path: Path) -> None:
    dropped = {"users_too_short": 30, "posts_without_owner": 0, "mice_that_ran": 7, "posts_in_latin": 1}
    parameters = {"read": {"users": 40, "posts": 1000}}
    text = text_of(tmp_path / "corpus", {"train": ["a"]}, dropped=dropped, parameters=parameters)
    assert "30 authors 75.0% too short for a balanced user" in text
    assert "1 posts 0.1% in latin" in text
    assert "7 mice that ran" in text
    assert "author is not known" not in text
    assert all(unit_of(reason) for reason in REASONS)
    dropped = {"rows_with_forbidden_characters": 64, "posts_without_words": 7}
    text = text_of(tmp_path / "ascii", {"train": ["a"]}, dropped=dropped, parameters={"ascii": True})
    assert "7 posts without words: formulas, code or pictures alone, or text all of which --ascii removed" in text
    assert "kept 64 rows, without the characters that XML forbids" in text
    changed = {"rows_with_forbidden_characters": 64}
    assert "dropped" not in text_of(tmp_path / "changed", {"train": ["a"]}, dropped=changed)


def test_formats_notes_and_warnings(tmp_path: Path) -> None:
    text = text_of(
        tmp_path / "corpus",
        {"train": ["a"]},
        sources=[{"name": "so.sqlite", "bytes": 1234, "sha256": "", "format": "tff-sqlite"}, {"name": "x", "bytes": 1}],
        notes=["letters are lower case"],
        warnings=["12 users in train, but 342,477 were published"],
    )
    assert "source so.sqlite, tff-sqlite, 1,234 bytes source x, 1 bytes" in text
    assert "note letters are lower case" in text
    assert "WARNING 12 users in train, but 342,477 were published" in text


texts = st.text(max_size=120)
numbers = st.integers(0, 10**9 - 1)
quantiles = st.lists(numbers, min_size=5, max_size=5).map(
    lambda found: dict(zip(("min", "5%", "median", "95%", "max"), sorted(found), strict=True))
)


@st.composite
def summaries(draw: st.DrawFn) -> dict[str, Any]:
    """Anything that `inspect` might return, of up to a thousand million words, with any text where text comes from
    outside."""
    splits = {}
    whole = draw(st.sampled_from([(), tuple(WHOLE.values())]))
    for name in (*SPLITS, *whole):
        splits[name] = {
            **{unit: draw(numbers) for unit in ("users", "records", "words", "words_occurring")},
            "oov_share": draw(st.none() | st.floats(0, 1)),
            "coverage": {"100": draw(st.floats(0, 1)), "1000": 1.0, "10000": 1.0, "all": 1.0},
            "most_frequent": [{"word": word, "count": 1} for word in draw(st.lists(texts, max_size=10))],
            **{length: draw(quantiles | st.just({})) for length in LENGTHS},
        }
    dropped = {reason: draw(numbers) for reason in [*REASONS, *draw(st.lists(texts, max_size=2))]}
    return {
        **{key: draw(numbers) for key in ("vocabulary", "record_words")},
        "layout": draw(st.sampled_from(["tff", "fedjax", "fedml"])),
        "by": draw(st.sampled_from(["words", "characters"])),
        "dropped": dropped,
        "parameters": {"ascii": draw(st.booleans())},
        "dropped_shares": {reason: draw(st.none() | st.floats(0, 1)) for reason in dropped},
        "splits": splits,
        "utility": "test-whole" if whole else "test",
        "membership": {
            **{f"{name}_authors": draw(numbers) for name in splits},
            **{f"{name}_also_train": draw(st.lists(texts, max_size=5)) for name in ("heldout", "test")},
            **{f"{name}_only": draw(numbers) for name in ("heldout", "test")},
        },
        "sources": [{"name": draw(texts), "bytes": draw(numbers), "format": "jsonl"}],
        "notes": draw(st.lists(texts, max_size=2)),
        "warnings": draw(st.lists(texts, max_size=2)),
        "authors": [{"author": draw(texts), "share": draw(st.floats(0, 1))} for _ in range(draw(st.integers(0, 5)))],
        "author_warnings": draw(st.lists(texts, max_size=2)),
        "digest": "0" * 64,
    }


@settings(max_examples=60)
@given(summary=summaries())
def test_no_line_is_longer_than_80_columns_and_none_steers_the_terminal(summary: dict[str, Any]) -> None:
    text = describe(summary)
    assert max(map(len, text.split("\n"))) <= 80
    assert all(sign.isprintable() for sign in text.replace("\n", ""))


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_any_terminal_can_show_it(tmp_path: Path, encoding: str) -> None:
    write(tmp_path / "corpus", {"train": ["a", "ümläut#0"], "test": ["ümläut#1"]}, notes=["日本"])
    command = [sys.executable, "-m", "flsim", "data", "inspect", "corpus"]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True, env=environment)
    text = done.stdout.decode(encoding)
    assert ("note         日本\n" if encoding == "utf-8" else "note         ??\n") in text
    assert ("?ml?ut" if encoding == "ascii" else "ümläut") in text
    assert max(map(len, text.splitlines())) <= 80
