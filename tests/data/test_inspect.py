"""The numbers that `inspect` reports equal counts made in a naive way."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from dumps import peak_kilobytes
from helpers import Flsim, MakeCorpus
from hypothesis import given, settings
from hypothesis import strategies as st

from flsim.base.files import new_folder
from flsim.data.corpus import Corpus, CorpusWriter
from flsim.data.inspect import describe, inspect
from flsim.data.manifest import SPLITS
from flsim.data.records import LAYOUTS, Layout, Records, Vocabulary, author_of

User = tuple[str, list[list[int]]]  # name, and records of word ranks from 0; the first rank after the words is OOV
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


SHARES = {"min": 0.0, "5%": 0.05, "median": 0.5, "95%": 0.95, "max": 1.0}


@settings(max_examples=30)
@given(
    splits=st.fixed_dictionaries(dict.fromkeys(SPLITS, users)),
    layout=st.sampled_from(sorted(LAYOUTS)),
    window=st.sampled_from([1, 2, 7, 1000]),
)
def test_every_number_equals_the_naive_count(splits: dict[str, list[User]], layout: str, window: int) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("flsim.data.records.WINDOW", window)
        found = inspect(write(Path(folder) / "corpus", splits, Layout(VOCABULARY, 20, layout)))
    assert json.loads(json.dumps(found)) == found
    assert (found["layout"], found["vocabulary"], found["record_words"]) == (layout, VOCABULARY, 20)
    for name, split in splits.items():
        numbers = found["splits"][name]
        lengths = {
            "words_per_record": [len(record) for _, records in split for record in records],
            "records_per_user": [len(records) for _, records in split],
            "words_per_user": [sum(map(len, records)) for _, records in split],
        }
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
            assert numbers[length] == {
                name: np.quantile(values, share, method="inverted_cdf") for name, share in SHARES.items() if values
            }
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


def test_the_most_frequent_words_cover_the_most(tmp_path: Path) -> None:
    """The last 100 of 200 words occur twice and the others once: 100 words cover 200 of 360, 60 of which are OOV."""
    records = [[rank] * (1 + (rank >= 100)) for rank in range(200)] + [[200] * 60]
    found = inspect(write(tmp_path / "corpus", {"train": [("a", records)]}, Layout(204, 60)))["splits"]["train"]
    assert found["coverage"] == {"100": 200 / 360, "all": 300 / 360}
    assert found["most_frequent"] == [{"word": f"w{rank}", "count": 2} for rank in range(100, 110)]
    assert found["words_occurring"] == 200


INSPECT = """
import sys
from pathlib import Path
from flsim.data.corpus import Corpus
from flsim.data.inspect import inspect
assert inspect(Corpus.open(Path(sys.argv[1])))["words"] == int(sys.argv[2])
"""


def test_memory_does_not_grow_with_words_and_records(tmp_path: Path) -> None:
    """50 users, with 80 MB of tokens and 80 MB of records' starts, take less than 40 MB more memory than one user."""
    peaks = []
    for users in (1, 50):
        path = tmp_path / f"corpus{users}"
        vocabulary = Vocabulary(tuple("abcdefgh"), tuple(range(8, 0, -1)))
        records = Records(np.resize(np.arange(1, 9, dtype=np.uint16), 800_000), np.arange(0, 800_001, 4))
        with new_folder(path) as folder, CorpusWriter(folder, vocabulary, Layout(VOCABULARY)) as writer:
            for user in range(users):
                writer.splits["train"].add(str(user), records)
            writer.finish({}, [], {})
        peaks.append(peak_kilobytes(INSPECT, path, Path(str(users * 800_000))))
    assert peaks[1] - peaks[0] < 40_000


def test_a_damaged_corpus_is_refused_in_one_line(make_corpus: MakeCorpus, flsim: Flsim) -> None:
    corpus = make_corpus([[[1, 2], [3]]])
    tokens = corpus.path / "train" / "tokens.u16"
    content = tokens.read_bytes()
    tokens.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    code, out, err = flsim("data", "inspect", corpus.path)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "tokens.u16: changed since the import" in err


def text_of(path: Path, splits: dict[str, list[str]], **manifest: Any) -> str:
    """Return the summary of a corpus as one line; each named user has two records of two words."""
    users = {split: [(name, [[0, 1], [2, 0]]) for name in names] for split, names in splits.items()}
    return " ".join(describe(inspect(write(path, users, Layout(6), **manifest))).split())


def test_the_splits_and_the_lengths(make_corpus: MakeCorpus) -> None:
    """With V = 12, ids 1 to 8 are words and id 9 is OOV."""
    found = inspect(
        make_corpus(train=[[[1, 2], [9]], [[3] * 20]], test=[[[9, 9, 1, 1]], [[1]], [[2], [3]]], vocabulary_size=12)
    )
    rows = [line.split() for line in describe(found).splitlines()]
    assert rows[0] == ["split", "authors", "overlap", "users", "records", "words", "OOV"]
    assert rows[1] == ["train", "2", "2", "3", "23", "4.3%"]
    assert rows[2] == ["heldout", "0", "0", "0", "0", "0"]
    assert rows[3] == ["test", "3", "0", "3", "4", "7", "28.6%"]
    assert ["words", "per", "record", "1", "1", "2", "20", "20"] in rows
    assert "overlap      authors of the split who are also in train\n" in describe(found)
    assert "coverage     of train's words: all 95.7%" in describe(found)
    assert "frequent     w2 w0 w1\n" in describe(found)


def test_authors_in_several_splits_are_reported(tmp_path: Path) -> None:
    safe = text_of(tmp_path / "safe", {"train": ["a#0", "a#1"], "heldout": ["b#0"], "test": ["c#0"]})
    assert "WARNING" not in safe
    dated = text_of(tmp_path / "dated", {"train": ["a#0", "b", "c", "d", "e"], "heldout": ["f"], "test": [*"abcdz"]})
    assert "test 5 4 5 10 20" in dated
    leaky = text_of(tmp_path / "leaky", {"train": ["a#0", "b#0"], "heldout": ["a#1", "c#0"]})
    assert "WARNING 1 held-out authors are train authors too (a): they are members" in leaky
    assert "WARNING no author is held out" in text_of(tmp_path / "none", {"train": ["a"]})


def test_reasons_of_drops_are_written_in_words(tmp_path: Path) -> None:
    dropped = {"users_too_short": 30, "posts_without_owner": 0, "mice_that_ran": 7, "posts_in_latin": 1}
    parameters = {"read": {"users": 40, "posts": 1000}}
    text = text_of(tmp_path / "corpus", {"train": ["a"]}, dropped=dropped, parameters=parameters)
    assert "30 authors 75.0% too short" in text
    assert "1 posts 0.1% in latin" in text
    assert "7 mice that ran" in text
    assert "without owner" not in text


def test_no_line_is_longer_than_80_columns_and_none_steers_the_terminal(tmp_path: Path) -> None:
    """This holds for any text and for large numbers in the summary."""
    dropped = dict.fromkeys(["posts_without_owner", "users_too_short", "words_of_short_users"], 1)
    sources = [{"name": "a", "bytes": 3, "format": "jsonl"}]
    users = {split: [("a", [[0, 1]]), ("b#1", [[1]])] for split in SPLITS}
    corpus = write(tmp_path / "corpus", users, Layout(6), dropped=dropped, sources=sources, notes=["n"], warnings=["w"])
    found = inspect(corpus)
    for text in ("\x1b[31m" * 30, "長い" * 60, "a b\n\r" * 60, "\ud800\0" * 9):

        def extreme(value: Any, text: str = text) -> Any:
            if isinstance(value, dict):
                return {key: extreme(inner) for key, inner in value.items()}
            if isinstance(value, list):
                return [extreme(inner) for inner in value] * 2
            return text if isinstance(value, str) else 10**9 - 1 if isinstance(value, int) else value

        shown = describe(extreme(found) | {"digest": corpus.digest})
        assert max(map(len, shown.split("\n"))) <= 80
        assert all(sign.isprintable() for sign in shown.replace("\n", ""))


def test_the_summary_can_be_shown_on_an_ascii_terminal(tmp_path: Path) -> None:
    text_of(tmp_path / "corpus", {"train": ["a", "ümläut#0"], "test": ["ümläut#1"]}, notes=["日本"])
    command = [sys.executable, "-m", "flsim", "data", "inspect", "corpus"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True, env=environment, text=True)
    assert "note         ??\n" in done.stdout
    assert "?ml?ut" in done.stdout
