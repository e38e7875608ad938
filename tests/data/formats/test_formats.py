"""Tests of formats: detection from content, equal rules for authors and texts, Parquet, and word counts."""

import csv
import io
import json
import os
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import reading
from hypothesis import given
from hypothesis import strategies as st
from reading import read

from flsim.base.errors import InputError
from flsim.base.files import file_digest
from flsim.data.formats import posts
from flsim.data.formats.known import FORMATS, format_of, reader_of
from flsim.data.formats.posts import Part, Post, Reading, WrongFieldError, posts_of
from flsim.data.formats.rows import read_word_count
from flsim.data.records import Vocabulary

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("name", "content", "format"),
    [
        ("a", b"PAR1...", "parquet"),
        ("a", b"SQLite format 3\0...", "tff-sqlite"),
        ("a", b"\x89HDF\r\n\x1a\n...", "tff-hdf5"),
        ("a.json", b" \n<posts>", "stackexchange"),
        ("a.xml", b'\xef\xbb\xbf{"user": 1}', "jsonl"),
        ("a.txt", b" aer banknote", "text"),
        ("a.csv", b"user,text\n", "csv"),
        ("a.tsv", b"user\ttext\n", "csv"),
        ("a", b' [\n{"user": 1}]', "json"),
        ("a.txt", b"[deleted] is text", "text"),
        ("a.jsonl", b'{\n"user": 1}', "json"),
        ("a.json", b'{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": []}}}', "json"),
        ("a.json", b'{"users": 3, "text": "a"}', "jsonl"),
    ],
)
def test_content_decides_the_format_and_not_the_name(tmp_path: Path, name: str, content: bytes, format: str) -> None:
    (tmp_path / "scratch").write_bytes(content)
    assert format_of(tmp_path / "scratch", Path(name)) is FORMATS[format]


def test_an_unknown_format_is_refused_with_its_first_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("user text\n")
    with pytest.raises(InputError, match=r"a\.log: begins with b'user text\\n', which is not a known format"):
        format_of(tmp_path / "a.log", tmp_path / "a.log")


IMPORTS = """
import sys
from flsim.cli import main
for name in ("a.jsonl", "a.h5"):
    options = ["--words-per-user=6", "--vocabulary=5", "--test=0", "--out", f"{name}.c"]
    sys.argv = ["flsim", "data", "import", name, *options]
    try:
        main()
    except SystemExit as end:
        print("ended", end.code or 0)
"""


def test_without_h5py_only_hdf5_files_are_refused(tmp_path: Path) -> None:
    """A fake h5py, which cannot be imported, hides the installed h5py, also in the processes that read a file."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "h5py.py").write_text("raise ModuleNotFoundError('hidden')\n")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_group("examples")
    (tmp_path / "a.jsonl").write_text("".join(f'{{"user": "{user}", "text": "a b c d e f"}}\n' for user in range(4)))
    environment = {**os.environ, "PYTHONPATH": f"{hidden}:{ROOT}"}
    command = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert [line for line in done.stdout.splitlines() if line.startswith("ended")] == ["ended 0", "ended 2"]
    message = "flsim: a.h5: HDF5 files need h5py, the extra 'hdf5', which is not installed; pip install h5py"
    assert done.stderr.splitlines()[-1] == message
    assert not (tmp_path / "a.h5.c").exists()


# All formats read the same table: null and blank fields are dropped, and the float 2.0 is read as the integer 2.

HALF = "\ud83d"  # the first half of a surrogate pair
Rows = list[tuple[Any, Any]]


def jsonl(folder: Path, rows: Rows) -> tuple[list[Post], Counter[str]]:
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps({"user": user, "text": text}) + "\n" for user, text in rows))
    return reading.read(path, "jsonl")


def parquet(folder: Path, rows: Rows) -> tuple[list[Post], Counter[str]]:
    path = folder / "a.parquet"
    pd.DataFrame(rows, columns=["user", "text"]).to_parquet(path)
    return reading.read(path, "parquet")


def csv_rows(folder: Path, rows: Rows) -> tuple[list[Post], Counter[str]]:
    path = folder / "a.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("user", "text"), *rows])
    return reading.read(path, "csv")


def own(folder: Path, rows: Rows) -> tuple[list[Post], Counter[str]]:
    path = folder / "own.py"
    path.write_text(f"from math import nan\n\ndef read(path):\n    yield from {rows!r}\n")
    dropped: Counter[str] = Counter()
    return list(reader_of(f"{path}:read").read(Part(path, path, 0, 1), dropped)), dropped


READERS: dict[str, Callable[[Path, Rows], tuple[list[Post], Counter[str]]]] = {
    "jsonl": jsonl,
    "parquet": parquet,
    "csv": csv_rows,
    "own": own,
}


@pytest.mark.parametrize("form", READERS)
def test_null_and_blank_authors_and_texts(tmp_path: Path, form: str) -> None:
    rows: Rows = [("a", "b"), (None, "x"), ("", "x"), (" \t", "x"), ("a", None), ("a", ""), ("a", " \n"), (None, None)]
    assert READERS[form](tmp_path, rows) == ([Post("a", ["b"])], {"posts_without_user": 4, "posts_without_text": 3})


@pytest.mark.parametrize("form", READERS)
def test_a_column_of_authors_that_a_null_made_floats(tmp_path: Path, form: str) -> None:
    rows: Rows = [(2.0, "a"), (float("nan") if form != "csv" else None, "b"), (10.0, "c")]
    assert READERS[form](tmp_path, rows) == ([Post("2", ["a"]), Post("10", ["c"])], {"posts_without_user": 1})


@pytest.mark.parametrize("form", ["jsonl", "parquet", "own"])
@pytest.mark.parametrize(("user", "why"), [(2.5, "must be a string or an integer"), (2.0**53, "a float too large")])
def test_other_numbers_are_refused(tmp_path: Path, form: str, user: float, why: str) -> None:
    with pytest.raises(InputError, match=why):
        READERS[form](tmp_path, [(user, "a")])


@pytest.mark.parametrize("form", ["jsonl", "own"])
def test_half_of_a_surrogate_pair_is_treated_alike_in_author_and_text(tmp_path: Path, form: str) -> None:
    rows: Rows = [("a", "b"), ("a" + HALF, "b"), ("a", "b" + HALF)]
    assert READERS[form](tmp_path, rows) == ([Post("a", ["b"])], {"posts_not_utf8": 2})


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_lists_of_texts_of_a_user(tmp_path: Path, form: str) -> None:
    """A text may be a list, as a group-by on the author produces; each item is split like any plain text."""
    rows: Rows = [("a", ["B, c. D", None, "", "e"]), ("f", []), (None, ["x", "y"])]
    posts = [Post("a", ["b , c .", "d"]), Post("a", ["e"])]
    assert READERS[form](tmp_path, rows) == (posts, {"posts_without_user": 2, "posts_without_text": 3})


@pytest.mark.parametrize("text", [3, True, {"a": "b"}, [["a"]], ["a", 3]])
def test_other_texts_are_refused(text: Any) -> None:
    with pytest.raises(WrongFieldError, match="must be a string or a list of strings"):
        list(posts_of("a", text, Counter(), Reading()))


FORMAT = "parquet"


def write(path: Path, row_group_size: int = 2, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return path


STRINGS = (pa.string(), pa.large_string(), pa.string_view())


@pytest.mark.parametrize("kind", [*STRINGS, pa.int8(), pa.uint64(), "dictionary"], ids=str)
def test_kinds_of_columns(tmp_path: Path, kind: Any) -> None:
    users, texts = pa.array([7, 8, 7]), pa.array(["A b. C", "d", ""], kind if kind in STRINGS else pa.string())
    if kind == "dictionary":
        users, texts = users.dictionary_encode(), texts.dictionary_encode()
    elif kind in STRINGS:
        users = pa.array(["7", "8", "7"], kind)
    else:
        users = users.cast(kind)
    path = write(tmp_path / "a.parquet", user=users, text=texts, other=[1, 2, 3])
    assert read(path, FORMAT)[0] == [Post("7", ["a b .", "c"]), Post("8", ["d"])]


def test_nulls_and_long_texts_are_dropped(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.parquet", user=["a", None, None, "b", "c"], text=["x", "x", None, None, "y" * 20_000_000]
    )
    found, dropped = read(path, FORMAT)
    assert found == [Post("a", ["x"])]
    assert dropped == {"posts_without_user": 2, "posts_without_text": 1, "posts_too_long": 1}


def test_columns_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", author=["a"], body=["b"], n=[0.5])
    assert read(path, FORMAT, columns=("author", "body"))[0] == [Post("a", ["b"])]
    with pytest.raises(InputError, match=r"a\.parquet: no column 'user'; its columns are author, body, n"):
        read(path, FORMAT)
    with pytest.raises(InputError, match=r"column 'n' must be a string or an integer, found 0\.5"):
        read(path, FORMAT, columns=("n", "body"))
    with pytest.raises(InputError, match=r"column 'n' must be a string or a list of strings, found 0\.5"):
        read(path, FORMAT, columns=("author", "n"))


def test_row_groups_make_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet", row_group_size=10, user=[str(n) for n in range(95)], text=["a"] * 95)
    for size, parts in ((1, 10), (10, 10), (11, 5), (30, 4), (1_000, 1)):
        monkeypatch.setattr(posts, "PART_RECORDS", size)
        assert len(FORMATS[FORMAT].parts(path, path, ("user", "text"))) == parts
        assert [post.user for post in read(path, FORMAT)[0]] == [str(n) for n in range(95)]
    nothing = pa.array([], pa.string())
    assert read(write(tmp_path / "b.parquet", user=nothing, text=nothing), FORMAT) == ([], {})


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    raw = pa.array([b"\xff"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 1, raw.buffers())
    with pytest.raises(InputError, match=r"a\.parquet: cannot be read as Parquet \('utf-8' codec"):
        read(write(tmp_path / "a.parquet", user=["a"], text=text), FORMAT)


def test_truncated_parquet_files_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", user=["a"], text=["b"])
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(InputError, match=r"a\.parquet: cannot be read as Parquet \(.*\); check that it is complete"):
        read(path, FORMAT)


TEXT = b".\t342309\nthe\t341937\n<URL> 300\ncaf\xc3\xa9\t300\nto\t2\n"
WORDS = Vocabulary((".", "the", "<URL>", "café", "to"), (342_309, 341_937, 300, 300, 2))


def archive(path: Path, content: bytes, name: str = "stackoverflow.word_count") -> Path:
    with tarfile.open(path, "w:bz2") as file:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        file.addfile(folder)
        member = tarfile.TarInfo(name)
        member.size = len(content)
        file.addfile(member, io.BytesIO(content))
    return path


def test_text_and_archive_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(TEXT)
    packed = archive(tmp_path / "a.tar.bz2", TEXT, "../../stackoverflow.word_count")
    for path in (tmp_path / "text", packed):
        assert read_word_count(path, 9) == (WORDS, file_digest(path)) == read_word_count(path, 10_000, fit=True)
        assert read_word_count(path, 6)[0] == Vocabulary(WORDS.words[:2], WORDS.counts[:2])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.tar.bz2", "text"]  # nothing is unpacked


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "ends after 0 words, but a vocabulary of 6 has 2; give --vocabulary 4 or less"),
        (b"a\t2\n", "ends after 1 words, but a vocabulary of 6 has 2; give --vocabulary 5 or less"),
        (b"a\t2\nb\n", "cannot be read as lines of a word and its count"),
        (b"a\t2\nb\t-1\n", "counts must be 0 or more"),
        (b"a\t2\n\xff\t1\n", "cannot be read as lines of a word and its count"),
        (b"a\t2\n" + b"b" * 2**17 + b"\t1", "cannot be read as lines of a word and its count"),
        (b"a\t2\nb\t3\n", "the largest first; sort the lines by count"),
        (b"a\t2\na\t1\n", "'a' occurs twice"),
    ],
)
def test_errors_of_wrong_word_counts_are_one_line(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "a").write_bytes(text)
    for path in (tmp_path / "a", archive(tmp_path / "a.tar.bz2", text)):
        with pytest.raises(InputError, match=rf"{path.name}: .*{message}") as caught:
            read_word_count(path, 6)
        assert "\n" not in str(caught.value)


def test_archives_that_cannot_be_read(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar.bz2", TEXT * 1_000)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"a\.tar\.bz2: cannot be read as lines"):
        read_word_count(path, 6)
    path.write_bytes(b"BZh9" + b"x" * 100)
    with pytest.raises(InputError, match="cannot be read as lines"):
        read_word_count(path, 6)
    with tarfile.open(path, "w:bz2"):
        pass
    with pytest.raises(InputError, match="the archive has no file"):
        read_word_count(path, 6)


@given(st.binary(max_size=60), st.integers(0, 200))
def test_any_bytes_are_words_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes, cut: int) -> None:
    folder = tmp_path_factory.mktemp("words")
    (folder / "a").write_bytes(content)
    packed = archive(folder / "b", TEXT).read_bytes()
    (folder / "b").write_bytes(packed[:cut] + content + packed[cut + len(content) :])
    for name in "ab":
        try:
            vocabulary, _ = read_word_count(folder / name, 6)
        except InputError:
            continue
        assert len(vocabulary.words) == 2
