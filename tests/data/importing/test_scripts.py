"""Text of any script through the import; and characters outside ASCII, which --ascii removes."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dumps import question, write_dump, write_jsonl
from helpers import Flsim

from flsim.base.errors import InputError
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
    code, _, err = flsim(*command, "--out", tmp_path / "corpus")
    assert code == 0, err
    words = {word for text in TEXTS[:3] + TEXTS[4:] for word in text.lower().replace(",", " ,").split()}
    assert {*Corpus.open(tmp_path / "corpus").vocabulary.words} == words | {*TEXTS[3]}
    code, _, err = flsim(*command, "--ascii", "--out", tmp_path / "ascii")
    assert code == 0, err
    manifest = Corpus.open(tmp_path / "ascii").manifest
    assert manifest["parameters"]["ascii"]


@pytest.mark.parametrize(
    ("text", "why"), [("Привет мир", "no text of any user in 9 posts"), ("Привет, мир.", "no user has words")]
)
def test_text_of_which_nothing_is_left_says_why(tmp_path: Path, text: str, why: str) -> None:
    posts = [(f"user{number}", text) for number in range(9)]
    write_jsonl(tmp_path / "a.jsonl", posts)
    pq.write_table(pa.table({"user": [user for user, _ in posts], "text": [text] * 9}), tmp_path / "a.parquet")
    (tmp_path / "own.py").write_text(f"def read(path):\n    yield from {posts!r}\n")
    for name, form in (("a.jsonl", None), ("a.parquet", None), ("a.jsonl", f"{tmp_path}/own.py:read")):
        with pytest.raises(InputError, match=why) as caught:
            import_corpus([tmp_path / name], tmp_path / "corpus", ImportHParams(9, 6, 50, ascii=True), form)
        assert "--ascii removes all characters outside ASCII" in str(caught.value)
        assert "--words-per-user" not in str(caught.value)
