"""Tests of corpora by characters: imports against plain Python, the command, a run with canaries, and refusals."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from dumps import question, write_dump, write_jsonl
from helpers import CENTRAL, Experiment, Flsim, train_here
from hypothesis import given, settings
from hypothesis import strategies as st

import flsim as api
from flsim.base.errors import InputError
from flsim.data.corpus import Corpus
from flsim.data.formats.rows import text_format
from flsim.data.importing.gather import ImportHParams
from flsim.data.importing.tasks import import_corpus
from flsim.data.records import SPECIAL_TOKENS, Vocabulary
from flsim.runs.folder import Run

WHOLE = ImportHParams(words_per_user=None, heldout=0, test=0, record_words=600, by="characters")
TREEBANK = [
    f" mr. {name} said <unk> sold N shares in {year} " for name in ("vinken", "ross") for year in range(1930, 1990)
]


def texts_of(corpus: Corpus) -> Counter[str]:
    train = corpus.split("train")
    return Counter(corpus.vocabulary.text(record.tolist()) for user in range(len(train)) for record in train[user])


@settings(max_examples=15, deadline=None)
@given(lines=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"), max_size=20)))
def test_lines_come_back_and_characters_are_counted(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> None:
    folder = tmp_path_factory.mktemp("lines")
    (folder / "a.txt").write_text("\n".join(["begin", *lines]), newline="")
    kept = [" ".join(line.split()) for line in ["begin", *lines] if line.split()]
    kept[0] = kept[0].removeprefix("\ufeff")
    counts = Counter("".join(kept))
    hparams = replace(WHOLE, vocabulary_size=len(counts) + SPECIAL_TOKENS)
    corpus = import_corpus([folder / "a.txt"], folder / "corpus", hparams, "text")
    assert texts_of(corpus) == Counter(kept)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    assert list(zip(corpus.vocabulary.words, corpus.vocabulary.counts, strict=True)) == ranked
    assert Vocabulary.read(corpus.path / "vocabulary.tsv", by="characters") == corpus.vocabulary


def test_consecutive_lines_are_an_author(tmp_path: Path, flsim: Flsim) -> None:
    """120 lines with 50 lines per author make three authors, of 50, 50 and 20 lines."""
    (tmp_path / "ptb.txt").write_text("\n".join(TREEBANK))
    options = ("--lines-per-author", 50, "--heldout", 0, "--test", 0)
    command = ("data", "import", tmp_path / "ptb.txt", "--by", "characters", "--out", tmp_path / "ptb")
    code, _, err = flsim(*command, *options, "--words-per-user", 500)
    assert code == 0, err
    corpus = api.open_corpus(tmp_path / "ptb")
    assert len(corpus.split("train")) >= 3
    assert set(texts_of(corpus)) <= {line.strip() for line in TREEBANK}
    code, out, _ = flsim("data", "inspect", tmp_path / "ptb")
    assert code == 0
    assert "each word here is a character of the text" in " ".join(out.split())
    code, out, _ = flsim("data", "inspect", tmp_path / "ptb", "--json")
    assert json.loads(out)["by"] == "characters"


def test_a_run_by_characters(experiment: Experiment, flsim: Flsim) -> None:
    (experiment.folder / "ptb.txt").write_text("\n".join(TREEBANK))
    hparams = ImportHParams(vocabulary_size=30, by="characters", words_per_user=200, record_words=60, test=0.2)
    import_corpus(
        [experiment.folder / "ptb.txt"], experiment.folder / "ptb", hparams, text_format(10), fit_vocabulary=True
    )
    experiment.config.write_text(CENTRAL.replace('"corpus"', '"ptb"'))
    settings = ("canaries.length=9", "training.steps=6", "training.batch_size=16", "model.architecture='lstm'")
    path = train_here(experiment, settings)
    run = Run.open(path)
    texts = [run.corpus.vocabulary.text(canary.tokens) for canary in run.canaries]
    assert all(len(text) == 9 for text in texts)
    code, out, _ = flsim("canaries", path)
    assert code == 0
    for text in texts:
        assert text.strip() in out.replace("\\", "")  # Markdown escapes "<"
    assert api.table(path)["perplexity"].between(1, 1_000).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--by", "bytes"), "'bytes'"),
        (("--lines-per-author", 3, "--format", "jsonl"), "--lines-per-author is for text, and this is jsonl"),
        (("--lines-per-author", 0), "lines_per_author must be at least 1, found 0"),
        (("--delimiter", ";"), "--delimiter is for csv, and this is text"),
        (("--seed", -1), "seed must be at least 0, found -1"),
        (("--by", "characters", "--vocabulary-from", "counts.txt"), "counts words, but the corpus is by characters"),
        (("--by", "characters", "--words-per-user", 90_000), "no user has 90,000 characters; the longest"),
    ],
)
def test_refusals_are_one_line(tmp_path: Path, flsim: Flsim, options: tuple[object, ...], message: str) -> None:
    (tmp_path / "a.txt").write_text("\n".join(TREEBANK))
    (tmp_path / "counts.txt").write_text("a 3\n")
    code, _, err = flsim("data", "import", tmp_path / "a.txt", "--out", tmp_path / "corpus", *options)
    assert code == 2
    assert message in " ".join(err.replace("│", " ").split())
    assert not (tmp_path / "corpus").exists()


# Imports of text of any script, and removal of characters outside ASCII with --ascii.

ASCII_TEXTS = [
    "Don't split well-known words' ends-, e.g. os.path. Pi is 3.14! Is it?\n"
    "See https://a.b/c?d=1#e. Then_x (y) [z] {w}",
    "The quick brown fox jumps over the lazy dog. It's #1 @home ~ 50% of 2^10 = 1,024 & more; "
    'a/b \\ c | d `e` "f" <g> $5 *h* +i',
    "Smith et al. (2020), cf. fig. 2 vs. www.example.org, really?! Yes...\tNo.\x0b\x0cEnd\x7f\x00",
]
# The code that removed characters outside ASCII (commit 435bb41) computed these digests.
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


def test_text_of_any_script_is_in_the_vocabulary(tmp_path: Path, flsim: Flsim) -> None:
    posts = [(str(user), text) for user, text in enumerate(TEXTS * 3)]
    source = write_dump(tmp_path / "a.Posts.xml", [question(user, text) for user, text in posts])
    command = ("data", "import", source, "--words-per-user", 1, "--heldout", 0, "--test", 0)
    code, _, err = flsim(*command, "--out", tmp_path / "corpus")
    assert code == 0, err
    words = {word for text in TEXTS[:3] + TEXTS[4:] for word in text.lower().replace(",", " ,").split()}
    assert {*Corpus.open(tmp_path / "corpus").vocabulary.words} == words | {*TEXTS[3]}
    code, _, err = flsim(*command, "--ascii", "--out", tmp_path / "ascii")
    assert code == 0, err
    assert Corpus.open(tmp_path / "ascii").manifest["parameters"]["ascii"]


@pytest.mark.parametrize(
    ("text", "why"), [("Привет мир", "no text of any user in 9 posts"), ("Привет, мир.", "no user has words")]
)
def test_errors_for_text_without_ascii_give_the_reason(tmp_path: Path, text: str, why: str) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [(f"user{number}", text) for number in range(9)])
    with pytest.raises(InputError, match=why):
        import_corpus([source], tmp_path / "corpus", ImportHParams(9, 6, 50, ascii=True))
