"""A user's own reader and maker: files as a person would write them, through the real commands."""

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
from flsim.data.importing.run import import_corpus
from flsim.data.making import make_corpus
from flsim.data.synthetic import SyntheticHParams, make_synthetic

POSTS: list[tuple[str | int, str]] = [(number % 9, f"A b c word{number % 4} d e, f? a b.") for number in range(90)]
HPARAMS = ImportHParams(vocabulary_size=9, words_per_user=30, record_words=6, heldout=0.2, test=0.2)

READERS = '''
import json
from flsim.data.formats import jsonl
from flsim.data.formats.posts import Format

def lines(path):
    with path.open() as file:
        for line in file:
            post = json.loads(line)
            yield post["user"], post["text"]

def sentences(path):
    """The first two lines of a user, as tokens; the rest as text."""
    for number, (user, text) in enumerate(lines(path)):
        yield (user, text) if number > 20 else (str(user), text.lower().replace(",", " ,").replace("?", " ?\\n"))

in_parts = Format("in_parts", jsonl.jsonl_parts, jsonl.read_jsonl)

def fails(path):
    yield "a", "b c."
    raise KeyError("author")

def nothing(path):
    return 3

def three(path):
    yield 3

def nobody(path):
    yield None, "text"

def where(path):
    yield "a", "text", "dev"

def pairs(path):
    yield "a", [("b", "c")]

def half(path):
    yield "a", "b \\ud800"

def empty(path):
    yield " ", "text"

def truth(path):
    yield True, "text"

constant = 7
'''


@pytest.fixture
def readers(tmp_path: Path) -> Path:
    path = tmp_path / "code" / "my_format.py"
    path.parent.mkdir()
    path.write_text(READERS)
    return path


def without_formats(corpus: Corpus) -> dict[str, Any]:
    """All bytes of a corpus, but what its manifest says of the sources' formats."""
    files: dict[str, Any] = folder_bytes(corpus.path)
    manifest = json.loads(files.pop("manifest.json"))
    for source in manifest["sources"]:
        del source["format"]
        source.pop("format_sha256", None)
    return files | {"manifest": manifest}


@pytest.mark.parametrize("name", ["lines", "in_parts"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_reader_of_lines_of_json_makes_the_corpus_of_the_built_in_one(
    readers: Path, tmp_path: Path, name: str, workers: int
) -> None:
    """Byte for byte, in other processes as well, and of a compressed source."""
    plain = write_jsonl(tmp_path / "posts.jsonl", POSTS)
    packed = tmp_path / "posts.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes(), mtime=0))
    for source in (plain, packed):
        out = tmp_path / source.suffix
        built_in = import_corpus([source], out / "built-in", HPARAMS, "jsonl")
        own = import_corpus([source], out / "own", HPARAMS, f"{readers}:{name}", workers=workers)
        assert without_formats(own) == without_formats(built_in)
        (about,) = own.manifest["sources"]
        assert about["format"] == f"my_format.py:{name}"
        assert about["format_sha256"] == file_digest(readers)


def _last_line(err: str, code: Path) -> str:
    """The message, without folders before the name and line of the user's file.

    A file is executed once per process and content, so that its frames may name the copy of an earlier test.
    """
    return re.sub(rf"\S*/({re.escape(code.name)}:\d)", r"\1", err.splitlines()[-1].removeprefix("flsim: "))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fails", "{source}: {file}:21: KeyError: 'author'"),
        ("nothing", "{source}: {code}:nothing: returned int; yield (user, text) or (user, text, split), where"),
        ("nobody", "{source}: no text of any user in 1 posts"),
        ("truth", "{source}: {file}:45: yielded the user True, which must be a string or an integer; yield (user,"),
        ("where", "{source}: {file}:33: yielded the split 'dev'; a split is one of train, heldout, test"),
        ("pairs", "{source}: {file}:36: yielded the text [('b', 'c')]; yield (user, text)"),
        ("constant", "{code}:constant: found int, not a function of a path or a Format of flsim"),
        ("missing", "{code}: the file does not define missing; correct the name of the format"),
    ],
)
def test_what_is_wrong_is_one_line_that_names_file_and_line(
    readers: Path, tmp_path: Path, flsim: Flsim, name: str, message: str
) -> None:
    source = write_jsonl(tmp_path / "posts.txt", POSTS)
    code, _, err = flsim("data", "import", source, "--format", f"{readers}:{name}", "--out", tmp_path / "corpus")
    assert code == 2
    assert _last_line(err, readers).startswith(message.format(source=source, code=readers, file=readers.name)), err
    assert not list(tmp_path.glob("*corpus*"))


MAKERS = '''
def letters(seed, users=12, words=40):
    """A user's letters repeat; words are a function of (seed, user)."""
    for user in range(users):
        text = [f"{chr(97 + (user + seed) % 26)}{(user * word + seed) % 5} ." for word in range(words)]
        yield f"user{user}", text

def with_splits():
    for split in ("train", "heldout", "test"):
        for user in range(3):
            yield user, ["a b c", "  b \\t c  ", ""], split

def in_pieces(seed):
    for text in ("a b. c d.", "e f."):
        yield "both", text
        yield "one", text[:4]

def fails(seed):
    yield "a", ["b"]
    raise ValueError(f"seed {seed}")
'''


@pytest.fixture
def makers(tmp_path: Path) -> Path:
    path = tmp_path / "my_corpus.py"
    path.write_text(MAKERS)
    return path


def words_of(corpus: Corpus, split: str = "train") -> dict[str, list[str]]:
    users = corpus.split(split)
    return {
        name: [" ".join(corpus.vocabulary.decode(record.tolist())) for record in users[user]]
        for user, name in enumerate(users.names)
    }


def test_a_maker_s_users_stay_as_they_are(makers: Path, tmp_path: Path) -> None:
    writing = {"vocabulary_size": 7}
    corpus = make_corpus(f"{makers}:with_splits", tmp_path / "corpus", writing=writing)
    for split in ("train", "heldout", "test"):
        assert words_of(corpus, split) == {str(user): ["a b c", "b c"] for user in range(3)}
    assert dict(zip(corpus.vocabulary.words, corpus.vocabulary.counts, strict=True)) == {"b": 6, "c": 6, "a": 3}
    pieces = make_corpus(f"{makers}:in_pieces", tmp_path / "pieces", writing=writing | {"test": 0.0, "heldout": 0.0})
    assert words_of(pieces).keys() == {"both", "one"}
    assert len(words_of(pieces)["both"]) == 3


def test_a_corpus_is_a_function_of_code_seed_and_options(makers: Path, tmp_path: Path) -> None:
    def made(name: str, seed: int, **options: int) -> dict[str, bytes]:
        writing = {"vocabulary_size": 9, "test": 0.2}
        return folder_bytes(make_corpus(f"{makers}:letters", tmp_path / name, seed, options, writing).path)

    first = made("first", 1)
    assert made("again", 1) == first
    assert made("same", 1, users=12) != first  # the manifest says which options were set
    for name, files in (("seed", made("seed", 2)), ("users", made("users", 1, users=13))):
        assert files["train/tokens.u16"] != first["train/tokens.u16"], name
    manifest = json.loads(first["manifest.json"])
    assert manifest["sources"] == [
        {
            "name": "my_corpus.py",
            "format": "my_corpus.py:letters",
            "bytes": makers.stat().st_size,
            "sha256": file_digest(makers),
            "options": {},
        }
    ]
    assert manifest["parameters"]["seed"] == 1


def test_users_are_cut_as_those_of_an_import(makers: Path, tmp_path: Path) -> None:
    """The same sentences from a file: equal but for what the manifest says of the source."""
    writing = {"vocabulary_size": 9, "words_per_user": 15, "heldout": 0.2, "test": 0.2}
    made = make_corpus(f"{makers}:letters", tmp_path / "made", 3, {"users": 30}, writing)
    namespace: dict[str, Any] = {}
    exec(MAKERS, namespace)
    posts = [(user, "\n".join(text)) for user, text in namespace["letters"](3, users=30)]
    source = write_jsonl(tmp_path / "posts.jsonl", posts)
    read = import_corpus([source], tmp_path / "read", ImportHParams(**writing, seed=3))  # type: ignore[arg-type]
    ours, theirs = without_formats(made), without_formats(read)
    assert len(made.split("train")) > 30
    for files in (ours, theirs):
        del files["manifest"]["sources"]
    assert ours == theirs


def test_the_synthetic_corpus_comes_through_the_same_door(tmp_path: Path, flsim: Flsim) -> None:
    expected = make_synthetic(tmp_path / "expected", SyntheticHParams(users=9, topics=3, vocabulary_size=90), seed=4)
    options = ("--seed", "4", "--set", "users=9", "--set", "topics=3", "--vocabulary", "90")
    code, _, err = flsim("data", "make", "synthetic", "--out", tmp_path / "made", *options)
    assert code == 0, err
    assert folder_bytes(tmp_path / "made") == folder_bytes(expected.path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{code}:fails",), "{file}:20: ValueError: seed 0"),
        (("{code}:letters", "--set", "user=9"), "{code}:letters(seed, users=12, words=40): got an unexpected keyword"),
        (
            ("{code}:letters", "--vocabulary", "10000"),
            "{code}: a vocabulary of 10,000 was requested, but the corpus has",
        ),
        (("nowhere.py:letters",), "nowhere.py: no such file"),
        (("synthetic", "--set", "user=9"), "synthetic: unknown option user; did you mean users?"),
        (("synthetic", "--set", "users=many"), "synthetic: users must be an integer, found 'many'"),
        (("synthetic", "--set", "users=0"), "synthetic: users must be at least 1, found 0"),
        (("synthetic", "--heldout", "0.5"), "synthetic: unknown option heldout; did you mean heldout_users?"),
    ],
)
def test_what_is_wrong_with_a_maker_is_one_line(
    makers: Path, tmp_path: Path, flsim: Flsim, arguments: tuple[str, ...], message: str
) -> None:
    given = (argument.format(code=makers) for argument in arguments)
    code, _, err = flsim("data", "make", *given, "--out", tmp_path / "corpus")
    assert code == 2
    assert _last_line(err, makers).startswith(message.format(code=makers, file=makers.name)), err
    assert not list(tmp_path.glob("*corpus")) + list(tmp_path.glob(".*corpus*"))


def test_the_document_s_reader_and_maker(tmp_path: Path, flsim: Flsim) -> None:
    text = (Path(__file__).parents[2] / "docs" / "corpora.md").read_text(encoding="utf-8")
    code = tmp_path / "my_corpus.py"
    code.write_text(text.split("```python\n")[1].split("```")[0])
    source = tmp_path / "letters.csv"
    source.write_text("".join(f'{user},"A letter, {number} of many."\n' for user in "ab" for number in range(40)))
    settings = ("--words-per-user", "100", "--heldout", "0", "--test", "0", "--vocabulary", "12")
    exit_code, _, err = flsim(
        "data", "import", source, "--format", f"{code}:letters", *settings, "--out", tmp_path / "c"
    )
    assert exit_code == 0, err
    assert len(Corpus.open(tmp_path / "c").split("train")) == 4
    command = ("--seed", "1", "--set", "users=30", "--vocabulary", "40", "--out", tmp_path / "made")
    exit_code, _, err = flsim("data", "make", f"{code}:counting", *command)
    assert exit_code == 0, err
    assert sum(len(Corpus.open(tmp_path / "made").split(split)) for split in ("train", "heldout", "test")) == 30
