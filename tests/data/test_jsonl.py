import json
from collections import Counter
from pathlib import Path

import pytest
from dumps import write_jsonl
from hypothesis import given
from hypothesis import strategies as st

from flsim.data import jsonl
from flsim.data.jsonl import read_jsonl
from flsim.data.posts import CHUNK, Post, Source
from flsim.errors import InputError


def read(path: Path) -> list[Post]:
    dropped: Counter[str] = Counter()
    with Source(path) as source:
        posts = list(read_jsonl(source, dropped))
    assert not dropped
    return posts


@given(st.lists(st.tuples(st.one_of(st.text(), st.integers()), st.text())), st.booleans())
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, posts: list[tuple[str | int, str]], ascii_only: bool
) -> None:
    path = tmp_path_factory.mktemp("jsonl") / "posts.jsonl"
    lines = [json.dumps({"text": text, "user": user, "x": None}, ensure_ascii=ascii_only) for user, text in posts]
    path.write_bytes("\n".join(lines).encode())
    assert read(path) == [Post(str(user), text) for user, text in posts]


def test_lines_longer_than_a_chunk(tmp_path: Path) -> None:
    posts = [("a", "x" * (3 * CHUNK)), ("b", "y"), ("c", "z" * (CHUNK - 30)), ("d", "w" * CHUNK)]
    assert read(write_jsonl(tmp_path / "a.jsonl", posts)) == [Post(user, text) for user, text in posts]


def test_bom_crlf_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"user": 7, "text": "a"}\r\n\r\n   \n{"user": "7", "text": "b"}')
    assert read(path) == [Post("7", "a"), Post("7", "b")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON (Expecting property name"),
        (b"user,text", "not JSON (Expecting value at column 1)"),
        (b'{"user": 1, "text": "a"} x', "not JSON (Extra data at column 26)"),
        (b"[" * 100_000, "not JSON (nested too deeply)"),
        (b'{"user": ' + b"9" * 5_000 + b', "text": "a"}', "not JSON (a number of too many digits)"),
        (b"[1]", "not a JSON object"),
        (b'"a"', "not a JSON object"),
        (b'{"text": "a"}', "no 'user'; expected"),
        (b'{"user": "a"}', "no 'text'; expected"),
        (b'{"user": null, "text": "a"}', "'user' must be a string or a whole number, found null"),
        (b'{"user": true, "text": "a"}', "'user' must be a string or a whole number, found true"),
        (b'{"user": 1.5, "text": "a"}', "'user' must be a string or a whole number, found 1.5"),
        (b'{"user": "\\ud800", "text": "a"}', "'user' holds half of a surrogate pair"),
        (b'{"user": "a", "text": ["' + b"b" * 99 + b'"]}', "'text' must be a string, found [\"bbbb"),
        (b'{"user": "a", "text": "\xff"}', "not UTF-8 (byte 24 of the line)"),
        (b"\xff\xfe{\0", "not UTF-8"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"user": 1, "text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(InputError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: line 3: {message}")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 160


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "LONGEST_LINE", 2**20)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * 2**21)
    with pytest.raises(InputError, match=r"a line of more than 1,048,576 bytes"):
        read(path)
