"""Tests of the readers of JSON lines, other JSON (arrays, indented objects, LEAF), CSV and plain text."""

import csv
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import reading
from dumps import peak_of_reading, write_jsonl
from helpers import Flsim
from hypothesis import given
from hypothesis import strategies as st
from reading import COLUMNS, parts_of

from flsim.base.errors import InputError
from flsim.data.corpus import Corpus
from flsim.data.formats import rows
from flsim.data.formats import rows as tables_of_rows
from flsim.data.formats.known import format_of
from flsim.data.formats.posts import Post
from flsim.data.formats.rows import CHUNK, text_format
from flsim.data.sentences import records


def read(path: Path) -> list[Post]:
    found, dropped = reading.read(path, "jsonl")
    assert not dropped
    return found


def test_lines_longer_than_a_chunk(tmp_path: Path) -> None:
    posts = [("a", "x" * (3 * CHUNK)), ("b", "y"), ("c", "z" * (CHUNK - 30)), ("d", "w" * CHUNK)]
    assert read(write_jsonl(tmp_path / "a.jsonl", posts)) == [Post(user, [text]) for user, text in posts]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"user": 1, "text": "a"} x', "not JSON (Extra data at column 26)"),
        (b"[" * 100_000, "not JSON (nested too deeply)"),
        (b'{"user": ' + b"9" * 5_000 + b', "text": "a"}', "not JSON (a number with too many digits)"),
        (b"[1]", "not a JSON object"),
        (b'{"user": "a", "text": {"' + b"b" * 99 + b'": 1}}', "'text' must be a string or a list of strings, found {"),
        (b'{"user": "a", "text": "\xff"}', "not UTF-8 (byte 24 of the line)"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, line: bytes, message: str) -> None:
    """The error names line 3, after a byte order mark, a CRLF and a blank line, for parts of any size."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"user": 1, "text": "fine"}\r\n\n' + line + b"\n")
    for size in (1, 2**20):
        with parts_of(size), pytest.raises(InputError) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}: line 3: {message}")
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < len(str(path)) + 160


def test_the_error_of_a_wrong_key_is_short(tmp_path: Path) -> None:
    """The message shows ten of the 20,000 keys, and counts the others."""
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({f"u{number}": ["a text"] for number in range(20_000)}))
    with pytest.raises(InputError, match=r'"u0", .*"u9" and 19,990 others') as caught:
        read(path)
    assert len(str(caught.value)) < len(str(path)) + 300


def test_a_line_too_long_is_dropped_in_bounded_memory(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [("a", "b"), ("a", "x" * 50_000_000), ("c", "d")])
    assert reading.read(path, "jsonl") == ([Post("a", ["b"]), Post("c", ["d"])], {"posts_too_long": 1})
    small = write_jsonl(tmp_path / "small.jsonl", [("a", "b")])
    assert peak_of_reading(path, "jsonl") < peak_of_reading(small, "jsonl") + 40_000


def test_a_file_without_lines_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "LONGEST_LINE", 2**20)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * 2**21)
    with pytest.raises(InputError, match=r"line 1: a line of more than 1,048,576 bytes that is not a JSON object"):
        read(path)


# JSON that is not JSON lines: arrays, indented objects and the layout of LEAF, as programs write them.

Rows = list[tuple[str | int, str]]


def objects(rows: Rows) -> list[dict[str, Any]]:
    return [{"id": {"n": [1, "}"]}, "user": user, "text": text} for user, text in rows]


def leaf(rows: Rows) -> dict[str, Any]:
    """Return the layout that LEAF's `preprocess.sh` writes, with labels, which the reader ignores."""
    data: dict[str, Any] = {}
    for user, text in rows:
        data.setdefault(str(user), {"x": [], "y": []})["x"].append(text)
    sizes = [len(value["x"]) for value in data.values()]
    return {"users": list(data), "num_samples": sizes, "user_data": data}


WRITERS: dict[str, Callable[[Rows], str]] = {
    "array": lambda rows: json.dumps(objects(rows)),
    "array-indented": lambda rows: json.dumps(objects(rows), indent=4),
    "objects-indented": lambda rows: "\n".join(json.dumps(value, indent=2) for value in objects(rows)),
    "pandas": lambda rows: pd.DataFrame(objects(rows)).to_json(orient="records"),
    "leaf": lambda rows: json.dumps(leaf(rows)),
    "leaf-indented": lambda rows: json.dumps(leaf(rows), indent=1),
}
TEXT = st.text(st.characters(exclude_categories=["Cs"])).filter(str.strip)
ROWS = st.lists(st.tuples(st.one_of(TEXT, st.integers(0, 2**60)), TEXT), min_size=1, max_size=6)


@given(ROWS, st.sampled_from(list(WRITERS)))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, rows: Rows, shape: str) -> None:
    path = tmp_path_factory.mktemp("json") / "posts.json"
    path.write_text(WRITERS[shape](rows), encoding="utf-8", newline="")
    expected = [Post(str(user), records(text)) for user, text in rows]
    if shape.startswith("leaf"):  # the layout stores the rows of one user after another
        order = list(dict.fromkeys(str(user) for user, _ in rows))
        expected.sort(key=lambda post: order.index(post.user))
    assert format_of(path, path).name == "json"
    assert reading.read(path, "json") == (expected, {})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"user": 1},\n{"user": 1}]', "object 1: no 'text'; its keys are \"user\"; name the right one with --text"),
        ('[\n{"user": 1, "text": "a"},\n{"user": tru}\n]', "line 3: not JSON (Expecting value)"),
        ('[\n{"user": 1, "text": "a"}\n', "line 3: not JSON (Expecting ',' delimiter)"),
        ('[\n{"user": 1, "text": "a"}]\n x', "line 3: not JSON (Expecting value)"),
        ('[{"a":\n' + "[" * 100_000, "not JSON (nested too deeply)"),
        ('{"users": ["a"],\n"user_data": {"a":\n{"y": []}}}', "'x' of user 'a' is not a list"),
        ('{"users": ["a"],\n"user_data": {"a":\n{"x": [["b"]]}}}', "'x' of user 'a' must be a string or a list"),
    ],
)
def test_faults_are_one_line_with_the_place(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(InputError) as caught:
        reading.read(path, "json")
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)
    path.write_bytes(b'[{"user": 1, "text": "\xff"}]')
    with pytest.raises(InputError, match=r"a\.json: not UTF-8"):
        reading.read(path, "json")


def test_a_file_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "LARGEST", 10)
    (tmp_path / "a.json").write_text('[{"user": 1}]')
    with pytest.raises(InputError, match=r"13 bytes of JSON, but at most 10 are read; write one object per line"):
        reading.read(tmp_path / "a.json", "json")


@pytest.mark.parametrize("format", ["json", "jsonl"])
def test_nested_keys(tmp_path: Path, format: str) -> None:
    """Objects without a key that other objects have, in any part of the file, are dropped as if the key were null."""
    path, good = tmp_path / f"a.{format}", {"author": {"id": 7}, "body": {"text": "a b"}}
    rows = [{"body": good["body"]}, {**good, "author": {}}, good, {**good, "author": None}, {"author": {"id": 7}}, {}]
    path.write_text(json.dumps(rows) if format == "json" else "\n".join(map(json.dumps, rows)))
    dropped = {"posts_without_user": 4, "posts_without_text": 1}
    with parts_of(1):
        assert reading.read(path, format, columns=("author.id", "body.text")) == ([Post("7", ["a b"])], dropped)
        with pytest.raises(InputError, match=r"no 'author\.name'; its keys are .*; name the right one"):
            reading.read(path, format, columns=("author.name", "body.text"))
    (tmp_path / "b.jsonl").write_text('{"author.id": 8, "author": {"id": 7}, "text": "a"}')
    assert reading.read(tmp_path / "b.jsonl", "jsonl", columns=("author.id", "text"))[0] == [Post("8", ["a"])]


# CSV files, as spreadsheets and `csv.writer` write them.


@pytest.mark.parametrize(("name", "delimiter", "options"), [("a.tsv", "\t", ()), ("a.csv", ";", ("--delimiter", ";"))])
def test_other_delimiters(tmp_path: Path, flsim: Flsim, name: str, delimiter: str, options: tuple[str, ...]) -> None:
    source = tmp_path / name
    source.write_text(f"user{delimiter}text\n" + f"a{delimiter}some, words here\n" * 9)
    command = ("data", "import", source, "--words-per-user", 8, "--heldout", 0, "--test", 0, "--out", tmp_path / "c")
    code, _, err = flsim(*command, "--delimiter", "ab")
    assert (code, err) == (2, "flsim: delimiter must be one character, and not a quote or line feed, found 'ab'\n")
    code, _, err = flsim(*command, *options)
    assert code == 0, err
    assert Corpus.open(tmp_path / "c").manifest["parameters"]["read"]["posts"] == 9


FIELD = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


@given(st.lists(st.tuples(FIELD.filter(str.strip), FIELD.filter(str.strip))), st.sampled_from(["utf-8", "utf-8-sig"]))
def test_csv_that_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, posts: list[tuple[str, str]], encoding: str
) -> None:
    """Fields with commas, quotes and line feeds are read as written, with and without a byte order mark."""
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    with path.open("w", newline="", encoding=encoding) as file:
        csv.writer(file).writerows([("id", "user", "text"), *((7, *post) for post in posts)])
    assert reading.read(path, "csv") == ([Post(user, records(text)) for user, text in posts], {})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"author;text\na;b\n", "no column 'user'; its columns, separated by ',', are author;text; name"),
        (b"user,text,text\na,b,c\n", "several columns 'text'; its columns, separated by ',', are user, text, text"),
        (b"user,text\na,b\nc,d,e\n", "line 3: a row of 3 fields, but the header has 2"),
        (b'user,text\na,"b\n', "line 2: not CSV (unexpected end of data)"),
        (b'user,text\na,"' + b"b" * 5_000, "line 2: not CSV (field larger than field limit"),
        (b"user,text\n9007199254740992.0,b\n", "line 2: 'user' is a float too large to be a single integer"),
        (b"user,text\na,caf\xe9\n", "not UTF-8"),
    ],
)
def test_errors_of_wrong_csv_files_are_one_line(
    tmp_path: Path, content: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables_of_rows, "LONGEST_FIELD", 1_000)
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        reading.read(path, "csv")
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)


# Plain text in parts: authors are named after lines of the complete file, and no part is read twice.


@given(
    st.lists(st.sampled_from(["", "a", "b c", "d" * 30, "\r"]), max_size=40),
    st.integers(1, 5),
    st.integers(1, 100),
    st.booleans(),
)
def test_parts_name_the_authors_of_the_whole_file(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], lines_per_author: int, size: int, is_ended: bool
) -> None:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(("\n".join(lines) + "\n" * is_ended).encode())
    form = text_format(lines_per_author)
    whole = [post for part in form.parts(path, path, COLUMNS) for post in form.read(part, Counter())]
    with parts_of(size):
        parts = form.parts(path, path, COLUMNS)
    assert [part.line for part in parts] == [path.read_bytes()[: part.first].count(b"\n") + 1 for part in parts]
    assert [post for part in parts for post in form.read(part, Counter())] == whole
    assert {int(post.user.rpartition(":")[2]) % lines_per_author for post in whole} <= {1 % lines_per_author}


def test_a_part_is_read_without_the_parts_before_it(tmp_path: Path) -> None:
    """A part is read without the bytes before it; otherwise, the time of an import would be quadratic in the length."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"a b c d e f\n" * 100)
    form = text_format(10)
    with parts_of(400):
        *_, last = form.parts(path, path, COLUMNS)
    expected = [*form.read(last, Counter())]
    with path.open("r+b") as file:
        file.write(b"-" * last.first)
    assert [*form.read(last, Counter())] == expected
    assert expected[0].user == f"a.txt:{last.line}"
