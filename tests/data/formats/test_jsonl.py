import json
from pathlib import Path

import pytest
import reading
from dumps import peak_kilobytes, write_jsonl
from hypothesis import given
from hypothesis import strategies as st

from flsim.base.errors import InputError
from flsim.data.formats import jsonl, posts
from flsim.data.formats.jsonl import CHUNK
from flsim.data.formats.known import FORMATS
from flsim.data.formats.posts import Post
from flsim.data.sentences import records


def read(path: Path) -> list[Post]:
    found, dropped = reading.read(path, "jsonl")
    assert not dropped
    return found


@given(
    st.lists(st.tuples(st.one_of(st.text().filter(str.strip), st.integers()), st.text().filter(str.strip))),
    st.booleans(),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, posts: list[tuple[str | int, str]], ascii_only: bool
) -> None:
    path = tmp_path_factory.mktemp("jsonl") / "posts.jsonl"
    lines = [json.dumps({"text": text, "user": user, "x": None}, ensure_ascii=ascii_only) for user, text in posts]
    path.write_bytes("\n".join(lines).encode())
    assert read(path) == [Post(str(user), records(text)) for user, text in posts]


def test_lines_longer_than_a_chunk(tmp_path: Path) -> None:
    posts = [("a", "x" * (3 * CHUNK)), ("b", "y"), ("c", "z" * (CHUNK - 30)), ("d", "w" * CHUNK)]
    assert read(write_jsonl(tmp_path / "a.jsonl", posts)) == [Post(user, [text]) for user, text in posts]


def test_bom_crlf_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"user": 7, "text": "a"}\r\n\r\n   \n{"user": "7", "text": "b"}')
    assert read(path) == [Post("7", ["a"]), Post("7", ["b"])]


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
        (b'{"user": true, "text": "a"}', "'user' must be a string or a whole number, found true"),
        (b'{"user": 1.5, "text": "a"}', "'user' must be a string or a whole number, found 1.5"),
        (
            b'{"user": "a", "text": {"' + b"b" * 99 + b'": 1}}',
            "'text' must be a string or a list of strings, found {\"bbbb",
        ),
        (b'{"user": "a", "text": ["b", 3]}', "'text' must be a string or a list of strings, found [\"b\", 3]"),
        (
            b'{"user": 1e300, "text": "b"}',
            "'user' is a float too large to be one whole number; write authors as strings",
        ),
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


def test_wrong_lines_of_later_parts_are_named_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [("a", "b")] * 10)
    path.write_bytes(path.read_bytes() + b"[]\n")
    for size in (1, 30, 100, 2**20):
        monkeypatch.setattr(posts, "PART_BYTES", size)
        with pytest.raises(InputError, match=r"a\.jsonl: line 11: not a JSON object"):
            read(path)


@given(
    st.lists(st.sampled_from(["", " ", "\r", '{"user": "a", "text": "b"}', '{"user": "c", "text": "d"}  '])), st.data()
)
def test_parts_end_after_line_feeds(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("jsonl") / "a.jsonl"
    content = "\n".join(lines).encode()
    path.write_bytes(content)
    whole = read(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(posts, "PART_BYTES", data.draw(st.integers(1, 100)))
        parts = FORMATS["jsonl"].parts(path, path, ("user", "text"))
        assert b"".join(content[part.first : part.last] for part in parts) == content
        assert all(content[: part.first].endswith(b"\n") for part in parts[1:])
        assert read(path) == whole


def test_other_keys(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"author": 7, "body": "a", "user": null}\n')
    assert reading.read(path, "jsonl", columns=("author", "body"))[0] == [Post("7", ["a"])]
    path.write_text('{"author": 7}\n')
    with pytest.raises(InputError, match=r"line 1: no 'body'; its keys: \"author\"; name the right one with --text"):
        reading.read(path, "jsonl", columns=("author", "body"))


def test_the_error_of_a_wrong_key_is_short_and_knows_leaf(tmp_path: Path) -> None:
    """20,000 keys: ten are shown, and the others counted."""
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({f"u{number}": ["a text"] for number in range(20_000)}))
    with pytest.raises(InputError, match=r'"u0", .*"u9" and 19,990 others; if they are users, .*"user_data"') as caught:
        read(path)
    assert len(str(caught.value)) < len(str(path)) + 300


def test_a_line_too_long_is_dropped_in_bounded_memory(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [("a", "b"), ("a", "x" * 50_000_000), ("c", "d")])
    assert reading.read(path, "jsonl") == ([Post("a", ["b"]), Post("c", ["d"])], {"posts_too_long": 1})
    small = write_jsonl(tmp_path / "small.jsonl", [("a", "b")])
    assert peak_kilobytes(READ, path) < peak_kilobytes(READ, small) + 40_000


READ = """
import sys
from collections import Counter
from pathlib import Path
from flsim.data.formats.known import FORMATS
path, format = Path(sys.argv[1]), FORMATS["jsonl"]
for part in format.parts(path, path, ("user", "text")):
    sum(1 for _ in format.read(part, Counter()))
"""


def test_a_file_without_lines_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "LONGEST_LINE", 2**20)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * 2**21)
    with pytest.raises(InputError, match=r"line 1: a line of more than 1,048,576 bytes that is no JSON object"):
        read(path)
