"""The reader of CSV: real files, as spreadsheets and `csv.writer` write them."""

import csv
import gzip
from pathlib import Path

import pytest
import reading
from helpers import Flsim
from hypothesis import given
from hypothesis import strategies as st

from flsim.base.errors import InputError
from flsim.data.corpus import Corpus
from flsim.data.formats import csv_rows
from flsim.data.formats.posts import Post
from flsim.data.sentences import records

FIELD = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


@given(st.lists(st.tuples(FIELD.filter(str.strip), FIELD.filter(str.strip))), st.sampled_from(["utf-8", "utf-8-sig"]))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, posts: list[tuple[str, str]], encoding: str
) -> None:
    """Commas, quotes and line feeds in fields included, with a byte order mark or without."""
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    with path.open("w", newline="", encoding=encoding) as file:
        csv.writer(file).writerows([("id", "user", "text"), *((7, *post) for post in posts)])
    assert reading.read(path, "csv") == ([Post(user, records(text)) for user, text in posts], {})


def test_posts_without_an_author_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('author,body\r\n,a\r\n\r\n" ",b\r\nc,"d, ""e""\r\nf"\r\n')
    read_posts, dropped = reading.read(path, "csv", columns=("author", "body"))
    assert read_posts == [Post("c", ['d , " e "', "f"])]
    assert dropped == {"posts_without_user": 2}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"author;text\na;b\n", "no column 'user'; its columns, between ',': author;text; name the right one with"),
        (b"user,text,text\na,b,c\n", "no column 'text'; its columns, between ',': user, text, text; name the right"),
        (b"user,text\na,b\nc,d,e\n", "line 3: a row of 3 fields, but the header has 2; put quotes around fields that"),
        (b'user,text\na,"b\n', "line 2: not CSV (unexpected end of data)"),
        (b"user,text\n9007199254740992.0,b\n", "line 2: 'user' is a float too large to be one whole number; write"),
        (b"user,text\na,caf\xe9\n", "not UTF-8; convert the file to UTF-8"),
    ],
)
def test_wrong_files_are_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        reading.read(path, "csv")
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)


def test_a_quote_that_never_ends_does_not_fill_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_rows, "LONGEST_FIELD", 1_000)
    path = tmp_path / "a.csv"
    path.write_text('user,text\na,"' + "b\n" * 5_000)
    with pytest.raises(InputError, match=r"not CSV \(field larger than field limit"):
        reading.read(path, "csv")


@pytest.mark.parametrize("name", ["a.csv", "a.CSV.gz", "posts"])
def test_the_command_reads_csv(tmp_path: Path, flsim: Flsim, name: str) -> None:
    content = b"user,text\n" + b'one,"a b, c d"\n' * 20
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    options = ("--words-per-user", 10, "--heldout", 0, "--test", 0, "--out", tmp_path / "corpus")
    code, out, err = flsim(
        "data", "import", tmp_path / name, *(("--format", "csv") if name == "posts" else ()), *options
    )
    assert code == 0, err
    assert f"{name}, csv, " in out
    assert set(Corpus.open(tmp_path / "corpus").vocabulary.words) == {"a", "b", "c", "d", ","}
