"""Files of JSON lines, read while somebody writes them."""

from pathlib import Path

import pytest

from flsim.base.files import TAIL, NewLines, last_line, read_lines


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    assert [*read_lines(path)] == []
    path.write_bytes(b'{"round": 1}\n\xff\n{"rou\n3\n{"round": 4}')
    assert [*read_lines(path)] == [{"round": 1}, 3, {"round": 4}]


@pytest.mark.parametrize(
    ("text", "expected"),
    [(b"", None), (b'{"round": 1}\n{"round": 2}\n', {"round": 2}), (b'{"round": 1}\n{"rou', None)],
)
@pytest.mark.parametrize("before", [b"", b"1\n" * TAIL])
def test_the_last_line_is_read_by_itself(tmp_path: Path, text: bytes, expected: object, before: bytes) -> None:
    path = tmp_path / "log.jsonl"
    assert last_line(path) is None
    path.write_bytes(before + text)
    assert last_line(path) == (expected if text or not before else 1)


@pytest.mark.parametrize("length", [TAIL - 2, TAIL - 1, TAIL, TAIL + 1, 2 * TAIL, 2 * TAIL + 1, 5 * TAIL])
@pytest.mark.parametrize("before", [b"", b"1\n", b"1\n" * TAIL])
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_the_last_line_may_be_longer_than_what_is_first_read(
    tmp_path: Path, length: int, before: bytes, end: bytes
) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(before + b'"' + b"a" * (length - 2) + b'"' + end)
    assert last_line(path) == "a" * (length - 2)


def test_each_line_is_taken_once_and_not_before_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines = NewLines(path)
    assert lines.take() == []
    path.write_text('{"round": 1}\n{"rou')
    assert lines.take() == [{"round": 1}]
    with path.open("a") as file:
        file.write('nd": 2}\n')
    assert lines.take() == [{"round": 2}]
    assert lines.take() == []
    replaced = tmp_path / "other"
    replaced.write_text('{"round": 7}\n')
    replaced.replace(path)
    assert lines.take() == [{"round": 7}]
