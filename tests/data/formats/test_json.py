"""JSON that is not lines: arrays, indented objects and the layout of LEAF, as programs write them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import reading
from dumps import peak_kilobytes
from helpers import Flsim
from hypothesis import given
from hypothesis import strategies as st

from flsim.base.errors import InputError
from flsim.data.corpus import Corpus
from flsim.data.formats import json_values, posts
from flsim.data.formats.known import format_of
from flsim.data.formats.posts import Post
from flsim.data.sentences import records

Rows = list[tuple[str | int, str]]


def objects(rows: Rows) -> list[dict[str, Any]]:
    return [{"id": {"n": [1, "}"]}, "user": user, "text": text} for user, text in rows]


def leaf(rows: Rows) -> dict[str, Any]:
    """The layout that LEAF's `preprocess.sh` writes, with labels that are not read."""
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


@given(ROWS, st.sampled_from(list(WRITERS)), st.integers(1, 30))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, rows: Rows, shape: str, chunk: int) -> None:
    """Wherever a chunk of the file ends."""
    path = tmp_path_factory.mktemp("json") / "posts.json"
    path.write_text(WRITERS[shape](rows), encoding="utf-8", newline="")
    expected = [Post(str(user), records(text)) for user, text in rows]
    if shape.startswith("leaf"):  # user by user
        order = list(dict.fromkeys(str(user) for user, _ in rows))
        expected.sort(key=lambda post: order.index(post.user))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_values, "CHUNK", chunk)
        assert format_of(path, path).name == "json"
        assert reading.read(path, "json") == (expected, {})


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        ('[\n{"user": 1},\n{"user": 1}\n]', 2, "no 'text'; its keys: \"user\"; name the right one with --text-column"),
        ('[\n{"text": "a"}\n]', 2, "no 'user'; its keys: \"text\"; name the right one with --user-column"),
        ('[\n{"user": 1, "text": "a"},\n{"user": tru}\n]', 3, "not JSON (Expecting value)"),
        ('[\n{"user": 1, "text": "a"}\n{"user": 1}\n]', 3, "not JSON (expected ',', found '{')"),
        ('[\n{"user": 1, "text": "a"},\n', 3, "not JSON (Expecting value)"),
        ('[\n{"user": 1, "text": "a"}\n', 3, "not JSON (expected ',', found the end)"),
        ('[\n{"user": 1, "text": "a', 2, "not JSON (Unterminated string starting at)"),
        ('[\n{"user": 1, "text": "a"}]\n x', 3, "not JSON (expected the end, found 'x')"),
        ("[\n1]", 2, "not a JSON object; expected {"),
        ('[{"a":\n' + "[" * 100_000, 1, "not JSON (nested too deeply)"),
        ('[{"user": true, "text": "a"}]', 1, "'user' must be a string or a whole number, found true"),
        ('{"users": ["a"],\n"user_data": {"a":\n{"y": []}}}', 3, "user 'a' has no list 'x', which LEAF's layout has"),
        (
            '{"users": ["a"],\n"user_data": {"a":\n{"x": [["b"]]}}}',
            3,
            "'x' of user 'a' must be a string or a list of strings; write a reader: --format my_reader.py:NAME",
        ),
        ('{"users": ["a"],\n"user_data": {"a":\n{"x": ["b"]}', 3, "not JSON (expected ',', found the end)"),
        ('{"users": ["a"],\n"user_data": {1', 2, "not JSON (expected a key in double quotes)"),
    ],
)
def test_faults_are_one_line_with_the_place(tmp_path: Path, content: str, line: int, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(InputError) as caught:
        reading.read(path, "json")
    assert str(caught.value).startswith(f"{path}: line {line}: {message}")
    assert "\n" not in str(caught.value)


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"user": 1, "text": "\xff"}]')
    with pytest.raises(InputError, match=r"a\.json: not UTF-8; convert the file to UTF-8"):
        reading.read(path, "json")


def test_an_object_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_values, "LARGEST", 2**17)
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"user": 1, "text": "a"}, {"user": 1, "text": "b" * 2**19}], indent=1))
    with pytest.raises(InputError, match=r"line 6: a value over 131,072 characters"):
        reading.read(path, "json")


READ = """
import sys
from collections import Counter
from pathlib import Path
from flsim.data.formats.known import FORMATS, format_of
path = Path(sys.argv[1])
format = format_of(path, path)
for part in format.parts(path, path, ("user", "text")):
    sum(1 for _ in format.read(part, Counter()))
"""


@pytest.mark.parametrize("shape", ["array", pytest.param("leaf", marks=pytest.mark.nightly)])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, shape: str) -> None:
    def peak(posts: int) -> int:
        path = tmp_path / f"{posts}.json"
        path.write_text(WRITERS[shape]([(user // 10, "word " * 400) for user in range(posts)]))
        return peak_kilobytes(READ, path)

    assert peak(20_000) < peak(500) + 8_000  # 40 MB and 1 MB


@pytest.mark.parametrize(("key", "user"), [("user", "a"), ("author.id", {"id": "a"})])
def test_objects_without_a_key_that_others_have_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, user: object
) -> None:
    """Whichever part they are in, like objects in which the key has a null."""
    name = key.partition(".")[0]
    good = {name: user, "text": "x"}
    rows = [{"text": "x"}, {name: {}, "text": "x"} if name == "author" else {"text": "y"}, good, {name: user}, {}]
    monkeypatch.setattr(posts, "PART_BYTES", 1)
    for format, content in (("json", json.dumps(rows)), ("jsonl", "\n".join(map(json.dumps, rows)))):
        path = tmp_path / f"a.{format}"
        path.write_text(content)
        dropped = {"posts_without_user": 3, "posts_without_text": 1}
        assert reading.read(path, format, columns=(key, "text")) == ([Post("a", ["x"])], dropped)


def test_nested_keys(tmp_path: Path) -> None:
    posts = [{"author": {"id": 7}, "body": {"text": "a b"}}, {"author": None, "body": {"text": "c"}}]
    for name, content in (("json", json.dumps(posts)), ("jsonl", "\n".join(map(json.dumps, posts)))):
        path = tmp_path / f"a.{name}"
        path.write_text(content)
        columns = ("author.id", "body.text")
        assert reading.read(path, name, columns=columns) == ([Post("7", ["a b"])], {"posts_without_user": 1})
        with pytest.raises(InputError, match=r"no 'author\.name'; its keys: \"author\", \"body\"; name the right one"):
            reading.read(path, name, columns=("author.name", "body.text"))
    (tmp_path / "b.jsonl").write_text('{"author.id": 8, "author": {"id": 7}, "text": "a"}')
    assert reading.read(tmp_path / "b.jsonl", "jsonl", columns=("author.id", "text"))[0] == [Post("8", ["a"])]


def test_all_shapes_make_the_corpus_of_json_lines(tmp_path: Path, flsim: Flsim) -> None:
    rows: Rows = [(user, f"some words here {number % 3}") for user in range(6) for number in range(10)]
    contents = {shape: write(rows) for shape, write in WRITERS.items()}
    contents["lines"] = "\n".join(json.dumps(value) for value in objects(rows))
    tokens = set()
    for shape, content in contents.items():
        source = tmp_path / f"{shape}.json"
        source.write_text(content)
        code, out, err = flsim("data", "import", source, "--words-per-user", 8, "--out", tmp_path / shape)
        assert code == 0, err
        assert f"{shape}.json, {'jsonl' if shape == 'lines' else 'json'}, " in out
        tokens.add((Corpus.open(tmp_path / shape).path / "train" / "tokens.u16").read_bytes())
    assert len(tokens) == 1


@pytest.mark.parametrize(
    ("name", "delimiter", "options"),
    [
        ("a.tsv", "\t", ()),
        ("a.csv", "\t", ("--delimiter", "tab")),
        ("a.csv", ";", ("--delimiter", ";")),
        ("a.csv", "|", ("--delimiter", "|")),
    ],
)
def test_csv_with_other_delimiters(
    tmp_path: Path, flsim: Flsim, name: str, delimiter: str, options: tuple[str, ...]
) -> None:
    rows = ["user", "text"], *(["a", f"some, words here {number}"] for number in range(9))
    source = tmp_path / name
    source.write_text("".join(f"{delimiter.join(row)}\n" for row in rows))
    settings = ("--words-per-user", 8, "--heldout", 0, "--test", 0, "--out", tmp_path / "corpus")
    code, _, err = flsim("data", "import", source, *options, *settings)
    assert code == 0, err
    assert Corpus.open(tmp_path / "corpus").manifest["parameters"]["read"]["posts"] == 9


def test_wrong_delimiters_are_one_line(tmp_path: Path, flsim: Flsim) -> None:
    source = tmp_path / "a.csv"
    source.write_text("user;text\na;b\n")
    code, _, err = flsim("data", "import", source, "--delimiter", "ab", "--out", tmp_path / "corpus")
    assert (code, err) == (2, "flsim: delimiter must be one character, and no quote or line feed, found 'ab'\n")
    code, _, err = flsim("data", "import", source, "--out", tmp_path / "corpus")
    assert code == 2
    assert "no column 'user'; its columns, between ',': user;text; name the right one with --user-column, or set" in err
