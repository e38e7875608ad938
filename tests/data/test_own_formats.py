"""Tests of custom readers: files as a person would write them, run by the real commands."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from dumps import folder_bytes, write_jsonl
from helpers import Flsim

from flsim.base.files import file_digest
from flsim.data.corpus import Corpus
from flsim.data.importing.gather import ImportHParams
from flsim.data.importing.tasks import import_corpus

POSTS: list[tuple[str | int, str]] = [(number % 9, f"A b c word{number % 4} d e, f? a b.") for number in range(90)]
HPARAMS = ImportHParams(vocabulary_size=9, words_per_user=30, record_words=6, heldout=0.2, test=0.2)

READERS = """
import json
from flsim.data.formats import rows
from flsim.data.formats.posts import Format

def lines(path):
    with path.open() as file:
        for line in file:
            post = json.loads(line)
            yield post["user"], post["text"]

in_parts = Format("in_parts", rows.jsonl_parts, rows.read_jsonl)

def fails(path):
    yield "a", "b c."
    raise KeyError("author")

def nothing(path):
    return 3

def nobody(path):
    yield None, "text"

def where(path):
    yield "a", "text", "dev"

def pairs(path):
    yield "a", [("b", "c")]

def truth(path):
    yield True, "text"

constant = 7
"""


@pytest.fixture
def readers(tmp_path: Path) -> Path:
    path = tmp_path / "code" / "my_format.py"
    path.parent.mkdir()
    path.write_text(READERS)
    return path


def without_formats(corpus: Corpus) -> dict[str, Any]:
    """Return all files of a corpus, without the formats of sources in the manifest."""
    files: dict[str, Any] = folder_bytes(corpus.path)
    manifest = json.loads(files.pop("manifest.json"))
    for source in manifest["sources"]:
        del source["format"]
        source.pop("format_sha256", None)
    return files | {"manifest": manifest}


def test_a_reader_of_lines_of_json_makes_the_corpus_of_the_built_in_one(readers: Path, tmp_path: Path) -> None:
    """The corpora are equal byte for byte, also with several processes and for a compressed source."""
    source = tmp_path / "posts.jsonl.gz"
    source.write_bytes(gzip.compress(write_jsonl(tmp_path / "posts.jsonl", POSTS).read_bytes(), mtime=0))
    built_in = import_corpus([source], tmp_path / "built-in", HPARAMS, "jsonl")
    for name, workers in (("lines", 2), ("in_parts", 1)):
        own = import_corpus([source], tmp_path / name, HPARAMS, f"{readers}:{name}", workers=workers)
        assert without_formats(own) == without_formats(built_in)
        (about,) = own.manifest["sources"]
        assert about["format"] == f"my_format.py:{name}"
        assert about["format_sha256"] == file_digest(readers)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fails", "{source}: {file}:16: KeyError: 'author'"),
        ("nothing", "{source}: {code}:nothing: returned int; yield (user, text) or (user, text, split), where"),
        ("nobody", "{source}: no text of any user in 1 posts"),
        ("truth", "{source}: {file}:31: yielded the user True, which must be a string or an integer; yield (user,"),
        ("where", "{source}: {file}:25: yielded the split 'dev'; a split is one of train, heldout, test"),
        ("pairs", "{source}: {file}:28: yielded the text [('b', 'c')]; yield (user, text)"),
        ("constant", "{code}:constant: found int, not a function of a path or a Format of flsim"),
        ("missing", "{code}: the file does not define missing; correct the name of the format"),
    ],
)
def test_errors_of_readers_are_one_line_with_file_and_line(
    readers: Path, tmp_path: Path, flsim: Flsim, name: str, message: str
) -> None:
    source = write_jsonl(tmp_path / "posts.txt", POSTS)
    code, _, err = flsim("data", "import", source, "--format", f"{readers}:{name}", "--out", tmp_path / "corpus")
    assert code == 2
    line = re.sub(r"\S*/(my_format.py:\d)", r"\1", err.splitlines()[-1])  # equal files of other tests share one path
    assert line.startswith("flsim: " + message.format(source=source, code=readers, file=readers.name)), err
    assert not list(tmp_path.glob("*corpus*"))


def test_the_readers_of_the_documentation_make_corpora(tmp_path: Path, flsim: Flsim) -> None:
    text = (Path(__file__).parents[2] / "docs" / "corpora.md").read_text(encoding="utf-8")
    code = tmp_path / "my_corpus.py"
    code.write_text(text.split("```python\n")[1].split("```")[0])
    source = tmp_path / "letters.csv"
    source.write_text("".join(f'{user},"A letter, {number} of many."\n' for user in "ab" for number in range(40)))
    settings = ("--words-per-user", "90", "--heldout", "0", "--test", "0")
    for path, name, users in ((source, "letters", 4), (code, "counting", 600)):
        exit_code, _, err = flsim(
            "data", "import", path, "--format", f"{code}:{name}", *settings, "--out", tmp_path / name
        )
        assert exit_code == 0, err
        assert len(Corpus.open(tmp_path / name).split("train")) == users
