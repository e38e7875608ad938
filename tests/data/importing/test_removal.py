"""Characters outside ASCII, which `--ascii` removes: an import counts and reports them."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dumps import write_jsonl
from helpers import Flsim
from hypothesis import given
from hypothesis import strategies as st

from flsim.base.errors import InputError
from flsim.data.corpus import Corpus
from flsim.data.importing.gather import ImportHParams
from flsim.data.importing.run import import_corpus
from flsim.data.sentences import removed_characters, sentences

SETTINGS = ("--words-per-user", 10, "--heldout", 0, "--test", 0, "--ascii")
ADVICE = "import without --ascii to keep them"


@pytest.mark.parametrize(
    ("text", "removed"),
    [
        ("plain text, 100%", 0),
        ("naïve", 1),
        ("can’t", 1),
        ("this is мир 5", 3),
        ("no\u00a0break\u2028space", 0),
        ("a zero\u200bwidth space and a soft\u00adhyphen", 0),
        ("see https://example.org/мир now", 0),
        ("😀 smiles", 1),
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
    ("text", "why"), [("Привет мир", "no text of any user in 9 posts"), ("Привет, мир.", "no words")]
)
def test_text_of_which_nothing_is_left_says_why_and_advises_no_zero(tmp_path: Path, text: str, why: str) -> None:
    posts = [(f"user{number}", text) for number in range(9)]
    write_jsonl(tmp_path / "a.jsonl", posts)
    pq.write_table(pa.table({"user": [user for user, _ in posts], "text": [text] * 9}), tmp_path / "a.parquet")
    (tmp_path / "own.py").write_text(f"def read(path):\n    yield from {posts!r}\n")
    for name, form in (("a.jsonl", None), ("a.parquet", None), ("a.jsonl", f"{tmp_path}/own.py:read")):
        with pytest.raises(InputError, match=why) as caught:
            import_corpus([tmp_path / name], tmp_path / "corpus", ImportHParams(9, 6, 50, ascii=True), form)
        assert f"{9 * 9} of its {9 * len(text.replace(' ', ''))} characters are outside ASCII" in str(caught.value)
        assert ADVICE in str(caught.value)
        assert "--words-per-user" not in str(caught.value)


def test_punctuation_alone_has_no_advice_either(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [("one", "... !")])
    with pytest.raises(InputError, match=r"a\.jsonl: no words of any user are left, only punctuation$"):
        import_corpus([tmp_path / "a.jsonl"], tmp_path / "corpus", ImportHParams(9, 6, 50))


def test_lists_of_sentences_keep_all_characters(tmp_path: Path, flsim: Flsim) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [("one", "hello мир naïve can’t")] * 20)
    own = tmp_path / "own.py"
    own.write_text(
        "import json\n\n\ndef read(path):\n    with path.open(encoding='utf-8') as file:\n"
        "        for post in map(json.loads, file):\n            yield post['user'], [post['text']]\n"
    )
    code, out, err = flsim("data", "import", source, "--format", f"{own}:read", *SETTINGS, "--out", tmp_path / "own")
    assert code == 0, err
    assert "ASCII" not in out + err
    assert {"мир", "naïve", "can’t"} <= set(Corpus.open(tmp_path / "own").vocabulary.words)
