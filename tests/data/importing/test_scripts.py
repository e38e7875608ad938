"""Text of any script through the import, and ASCII text, whose corpora keep their digests."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dumps import question, write_dump, write_jsonl
from helpers import Flsim

from flsim.data.corpus import Corpus
from flsim.data.importing.gather import ImportHParams
from flsim.data.importing.run import import_corpus

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
SETTINGS = ("--words-per-user", 4, "--heldout", 0, "--test", 0)


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


@pytest.mark.parametrize(
    "text", ["Привет, мир", "naïve café déjà vu", "한국어 문장 입니다 또", "日本の文", "שלום עולם טוב מאוד"]
)
@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet", "stackexchange", "own"])
def test_text_of_any_script_is_in_the_vocabulary(tmp_path: Path, flsim: Flsim, form: str, text: str) -> None:
    posts = [(str(user), text) for user in range(3) for _ in range(5)]
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
    code, out, err = flsim("data", "import", source, *options, *SETTINGS, "--out", tmp_path / "corpus")
    assert code == 0, err
    assert "ASCII" not in out + err
    words = text.lower().replace(",", " ,").split() if text != "日本の文" else list(text)
    assert sorted(Corpus.open(tmp_path / "corpus").vocabulary.words) == sorted(words)
    code, _, err = flsim("data", "import", source, *options, *SETTINGS, "--ascii", "--out", tmp_path / "ascii")
    assert "are outside ASCII and were removed" in err


def test_ascii_is_in_the_manifest_only_where_it_was_asked_for(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [("one", "naïve words")] * 5)
    for ascii in (False, True):
        out = tmp_path / str(ascii)
        import_corpus([source], out, ImportHParams(6, 6, 3, heldout=0, test=0, ascii=ascii))
        parameters = json.loads((out / "manifest.json").read_text())["parameters"]
        assert parameters.get("ascii", False) is ascii
        assert ("naïve" if not ascii else "nave") in Corpus.open(out).vocabulary.words
