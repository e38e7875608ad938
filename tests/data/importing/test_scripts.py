"""Text of any script through the import; and characters outside ASCII, which --ascii removes and an import counts."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dumps import question, write_dump, write_jsonl
from helpers import Flsim
from hypothesis import given
from hypothesis import strategies as st

from flsim.base.errors import InputError
from flsim.data.corpus import Corpus
from flsim.data.importing.gather import ImportHParams
from flsim.data.importing.run import import_corpus
from flsim.data.sentences import removed_characters, sentences

ASCII_TEXTS = [
    "Don't split well-known words' ends-, e.g. os.path. Pi is 3.14! Is it?\n"
    "See https://a.b/c?d=1#e. Then_x (y) [z] {w}",
    "The quick brown fox jumps over the lazy dog. It's #1 @home ~ 50% of 2^10 = 1,024 & more; "
    'a/b \\ c | d `e` "f" <g> $5 *h* +i',
    "Smith et al. (2020), cf. fig. 2 vs. www.example.org, really?! Yes...\tNo.\x0b\x0cEnd\x7f\x00",
]
# Computed with the code that removed characters outside ASCII (commit 435bb41).
DIGESTS = {
    "words": "8e18b691f1e841c30925481c3e2dc9366e30100cafcec416b8e8a62f2a018e9c",
    "characters": "c780eac3a3554f5c383aac34c7180a64b8f428e1b7b87661232e15ba795d987e",
}
TEXTS = ["Привет, мир", "naïve café déjà vu", "한국어 문장 입니다 또", "日本の文", "שלום עולם טוב מאוד"]


@pytest.mark.parametrize(
    ("by", "hparams"),
    [
        ("words", ImportHParams(60, 20, 50, heldout=0.2, test=0.2)),
        ("characters", ImportHParams(40, 600, 50, heldout=0.2, test=0.2, by="characters")),
    ],
)
def test_corpora_of_ascii_text_keep_their_digests(tmp_path: Path, by: str, hparams: ImportHParams) -> None:
    posts = [(f"user{n % 12}", ASCII_TEXTS[n % 3] + f" word{n % 7} number{n}.") for n in range(120)]
    source = write_jsonl(tmp_path / "ascii.jsonl", posts)
    assert import_corpus([source], tmp_path / "corpus", hparams).digest == DIGESTS[by]


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet", "stackexchange", "own"])
def test_text_of_any_script_is_in_the_vocabulary(tmp_path: Path, flsim: Flsim, form: str) -> None:
    posts = [(str(user), text) for user, text in enumerate(TEXTS * 3)]
    options: tuple[object, ...] = ()
    match form:
        case "jsonl":
            source = write_jsonl(tmp_path / "a.jsonl", posts)
        case "csv":
            source = tmp_path / "a.csv"
            source.write_text("user,text\n" + "".join(f'{user},"{text}"\n' for user, text in posts), encoding="utf-8")
        case "parquet":
            source = tmp_path / "a.parquet"
            users, texts = zip(*posts, strict=True)
            pq.write_table(pa.table({"user": list(users), "text": list(texts)}), source)
        case "stackexchange":
            source = write_dump(tmp_path / "a.Posts.xml", [question(user, text) for user, text in posts])
        case "own":
            source = write_jsonl(tmp_path / "a.jsonl", posts)
            (tmp_path / "own.py").write_text(f"def read(path):\n    yield from {posts!r}\n", encoding="utf-8")
            options = ("--format", f"{tmp_path}/own.py:read")
    command = ("data", "import", source, *options, "--words-per-user", 1, "--heldout", 0, "--test", 0)
    code, out, err = flsim(*command, "--out", tmp_path / "corpus")
    assert code == 0, err
    assert "ASCII" not in out + err
    words = {word for text in TEXTS[:3] + TEXTS[4:] for word in text.lower().replace(",", " ,").split()}
    assert {*Corpus.open(tmp_path / "corpus").vocabulary.words} == words | {*TEXTS[3]}
    code, _, err = flsim(*command, "--ascii", "--out", tmp_path / "ascii")
    assert "are outside ASCII and were removed" in err
    manifest = Corpus.open(tmp_path / "ascii").manifest
    assert manifest["parameters"]["ascii"]


# Characters outside ASCII, which `--ascii` removes: an import counts and reports them.


SETTINGS = ("--words-per-user", 10, "--heldout", 0, "--test", 0, "--ascii")
ADVICE = "import without --ascii to keep them"


@pytest.mark.parametrize(
    ("text", "removed"),
    [
        ("plain text, 100%", 0),
        ("naïve", 1),
        ("this is мир 5", 3),
        ("no\u00a0break\u2028space", 0),
        ("a zero\u200bwidth space and a soft\u00adhyphen", 0),
        ("see https://example.org/мир now", 0),
    ],
)
def test_removed_characters_are_counted(text: str, removed: int) -> None:
    assert removed_characters(text) == removed


@given(st.text(st.characters(codec="utf-8", categories=["L", "Nd", "P"]), max_size=30))
def test_what_is_neither_removed_nor_kept_is_nothing(text: str) -> None:
    kept = len("".join(word for sentence in sentences(text, ascii=True) for word in sentence))
    assert kept + removed_characters(text) == len(text.lower())


def test_much_removed_text_is_a_warning_of_the_import_and_of_the_corpus(tmp_path: Path, flsim: Flsim) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [("one", "hello world это мир 5")] * 20)
    code, out, err = flsim("data", "import", source, *SETTINGS, "--out", tmp_path / "corpus")
    assert code == 0, err
    assert (
        f"120 of 340 characters (35.3%) are outside ASCII and were removed, which deletes or shortens words; {ADVICE}"
        in err
    )
    for printed in (out, flsim("data", "inspect", tmp_path / "corpus")[1]):
        assert "WARNING      120 of 340 characters (35.3%) are outside ASCII" in printed
    code, _, err = flsim("data", "import", source, *SETTINGS, "--by", "characters", "--out", tmp_path / "characters")
    assert "120 of 340 characters" in err


def test_a_little_removed_text_is_counted_and_leaves_the_corpus_alone(tmp_path: Path, flsim: Flsim) -> None:
    """The digest of a corpus stays that of the text without the characters."""
    posts = [("one", "hello world, this is a longer text of plain words without any accents")] * 20
    source = write_jsonl(tmp_path / "a.jsonl", [*posts, ("one", "naïve")])
    code, out, err = flsim("data", "import", source, *SETTINGS, "--out", tmp_path / "corpus")
    assert code == 0, err
    assert "1 of 1,145 characters (0.1%) are outside ASCII and were removed\n" in err
    assert "WARNING" not in out
    assert Corpus.open(tmp_path / "corpus").manifest["warnings"] == []
    plain = write_jsonl(tmp_path / "b.jsonl", posts)
    assert "ASCII" not in flsim("data", "import", plain, *SETTINGS, "--out", tmp_path / "plain")[2]


@pytest.mark.parametrize(
    ("text", "why"), [("Привет мир", "no text of any user in 9 posts"), ("Привет, мир.", "no user has words")]
)
def test_text_of_which_nothing_is_left_says_why_and_advises_no_zero(tmp_path: Path, text: str, why: str) -> None:
    posts = [(f"user{number}", text) for number in range(9)]
    write_jsonl(tmp_path / "a.jsonl", posts)
    pq.write_table(pa.table({"user": [user for user, _ in posts], "text": [text] * 9}), tmp_path / "a.parquet")
    (tmp_path / "own.py").write_text(f"def read(path):\n    yield from {posts!r}\n")
    for name, form in (("a.jsonl", None), ("a.parquet", None), ("a.jsonl", f"{tmp_path}/own.py:read")):
        with pytest.raises(InputError, match=why) as caught:
            import_corpus([tmp_path / name], tmp_path / "corpus", ImportHParams(9, 6, 50, ascii=True), form)
        assert f"{9 * 9} of {9 * len(text.replace(' ', ''))} characters" in str(caught.value)
        assert ADVICE in str(caught.value)
        assert "--words-per-user" not in str(caught.value)
