import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flsim.base.errors import InputError
from flsim.base.files import file_digest
from flsim.data.formats.text import read_word_count
from flsim.data.vocabulary import Vocabulary

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
        (b"", "line 0: ends after 0 words, but a vocabulary of 6 has 2; give --vocabulary 4 or less"),
        (b"a\t2\n", "line 1: ends after 1 words, but a vocabulary of 6 has 2; give --vocabulary 5 or less"),
        (b"a\t2\nb\n", r"line 2: expected a word and a count, found b'b\\n'"),
        (b"a\t2\nb\t-1\n", "line 2: expected a count, found '-1'"),
        (b"a\t2\n\xff\t1\n", r"line 2: expected a word and a count, found b'\\xff"),
        (b"a\t2\n" + b"b" * 2**17 + b"\t1", "line 2: expected a word and a count"),
        (b"a\t2\nb\t3\n", "line 2: a count of 3 after 2; sort by count, largest first"),
        (b"a\t2\na\t1\n", "line 2: 'a' occurs twice"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "a").write_bytes(text)
    for path in (tmp_path / "a", archive(tmp_path / "a.tar.bz2", text)):
        with pytest.raises(InputError, match=rf"{path.name}: {message}") as caught:
            read_word_count(path, 6)
        assert "\n" not in str(caught.value)


def test_archives_that_cannot_be_read(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar.bz2", TEXT * 1_000)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"a\.tar\.bz2: (cannot be read as word counts|line)"):
        read_word_count(path, 6)
    path.write_bytes(b"BZh9" + b"x" * 100)
    with pytest.raises(InputError, match="cannot be read as word counts"):
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
