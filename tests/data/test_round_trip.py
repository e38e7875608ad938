"""What is written in a format is read from it: the same users in the same order with the same words, in any parts."""

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reading import Sentence, by_user, check_post, parts_of, read, sentences

from benchmarks import writers
from flsim.data.formats.known import FORMATS, format_of
from flsim.data.sentences import records

SPLITS = st.sampled_from(["train", "heldout", "test"])
NO_NUL = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
PLAIN = st.characters(exclude_categories=["Cc", "Cs", "Cn"])

ANY_USER = st.one_of(st.text(), st.sampled_from(["../../etc/passwd", "a\0b", "x" * 10_000, "", "00000010", "\n", "-1"]))
AUTHOR = ANY_USER.filter(str.strip)  # of formats that refuse or drop posts without an author
GROUP = st.text(NO_NUL.filter(lambda character: character != "/"), min_size=1).filter(lambda name: name != ".")


def examples(user: st.SearchStrategy[str], text: st.SearchStrategy[str]) -> st.SearchStrategy[list[Sentence]]:
    return st.lists(st.tuples(user, SPLITS, text), max_size=12)


def written(rows: list[Sentence]) -> list[tuple[str, str, str]]:
    return [(str(split), user, text) for user, split, text in rows]


def kept(rows: list[Sentence]) -> list[Sentence]:
    """Tokens are split at white space only; what has none is dropped."""
    return [(user, split, " ".join(text.split())) for user, split, text in rows if text.split()]


def round_trip(
    folder: Path,
    name: str,
    write: Callable[[Path], None],
    expected: list[Sentence],
    part: int,
    format: str,
) -> None:
    path = folder / str(next(NUMBERS)) / name  # listings of HDF5 files are kept, by path and time
    path.parent.mkdir()
    write(path)
    assert format_of(path, path) is FORMATS[format]
    with parts_of(part):
        found, dropped = read(path, format)
    for post in found:
        check_post(post)
    assert sentences(found) == expected
    assert not [reason for reason in dropped if reason not in ("records_without_words", "posts_without_text")]


NUMBERS = count()
PART = st.sampled_from([1, 3, 1_000, 2**26])
relaxed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)


@relaxed
@given(examples(ANY_USER, st.text()), PART)
def test_tff_sqlite(tmp_path: Path, rows: list[Sentence], part: int) -> None:
    write = lambda path: writers.write_tff_sqlite(path, written(rows))  # noqa: E731
    round_trip(tmp_path, "so.sqlite", write, kept(rows), part, "tff-sqlite")


@relaxed
@given(examples(GROUP, st.text(NO_NUL)), PART, SPLITS, st.booleans())
def test_tff_hdf5(tmp_path: Path, rows: list[Sentence], part: int, split: str, fixed: bool) -> None:
    rows = by_user([(user, split, text) for user, _, text in rows])
    name = f"stackoverflow_{split.replace('heldout', 'held_out')}.h5"
    write = lambda path: writers.write_tff_hdf5(path, written(rows), fixed)  # noqa: E731
    round_trip(tmp_path, name, write, kept(rows), part, "tff-hdf5")


@relaxed
@given(examples(AUTHOR, st.text()), PART, st.integers(1, 5))
def test_parquet(tmp_path: Path, rows: list[Sentence], part: int, group: int) -> None:
    def write(path: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writers, "ROW_GROUP", group)
            writers.write_parquet(path, written(rows))

    round_trip(tmp_path, "so.parquet", write, tokenised(rows), part, "parquet")


@relaxed
@given(examples(AUTHOR, st.text()), PART)
def test_jsonl(tmp_path: Path, rows: list[Sentence], part: int) -> None:
    write = lambda path: writers.write_jsonl(path, written(rows))  # noqa: E731
    round_trip(tmp_path, "so.jsonl", write, tokenised(rows), part, "jsonl")


@relaxed
@given(examples(st.text(PLAIN, min_size=1).filter(lambda user: user != "-1"), st.text(PLAIN)), PART)
def test_stackexchange(tmp_path: Path, rows: list[Sentence], part: int) -> None:
    rows = [*rows, ("1", "train", "end")]
    write = lambda path: writers.write_stackexchange(path, written(rows))  # noqa: E731
    expected = [(f"so/{user}", split, text) for user, split, text in tokenised(rows)]
    round_trip(tmp_path, "so.Posts.xml", write, expected, part, "stackexchange")


def tokenised(rows: list[Sentence]) -> list[Sentence]:
    """Formats of plain text have no splits, and their text goes through `flsim.data.sentences`."""
    return [(user, None, sentence) for user, _, text in rows for sentence in records(text)]
