"""Plain text in parts: authors are named by the lines of the whole file, of which no part is read twice."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reading import COLUMNS, parts_of

from flsim.data.formats.text import text_format


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
    """Each part read the file from its beginning to count lines, so that an import took the square of its length."""
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
