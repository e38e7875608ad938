"""Corpora by characters: imports against plain Python, the command, a run on one with its canaries, and refusals."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import Experiment, Flsim, train_here
from hypothesis import given, settings
from hypothesis import strategies as st

import flsim as api
from flsim.data.corpus import Corpus
from flsim.data.formats.text import text_format
from flsim.data.importing.gather import ImportHParams
from flsim.data.importing.run import import_corpus
from flsim.data.vocabulary import SPECIAL_TOKENS, Vocabulary
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


@pytest.mark.parametrize("format", [("--format", "text"), ()])
def test_consecutive_lines_are_an_author(tmp_path: Path, flsim: Flsim, format: tuple[str, ...]) -> None:
    """120 lines, 50 an author: 50, 50 and 20 of them; whether the format is named or told from the file's name."""
    (tmp_path / "ptb.txt").write_text("\n".join(TREEBANK))
    options = (*format, "--lines-per-author", 50, "--heldout", 0, "--test", 0)
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
    experiment.config.write_text(
        """
[data]
corpus = "ptb"
[model]
architecture = "lstm"
embedding = 8
units = 12
[canaries]
insertions = [3]
count = 4
length = 9
[training]
kind = "central"
steps = 6
batch_size = 16
[evaluation]
references = 200
"""
    )
    path = train_here(experiment, ())
    run = Run.open(path)
    texts = [run.corpus.vocabulary.text(canary.tokens) for canary in run.canaries]
    assert all(len(text) == 9 for text in texts)
    code, out, _ = flsim("canaries", path)
    assert code == 0
    for text in texts:
        assert text.strip() in out.replace("\\", "")  # Markdown escapes "<"
    rank = api.table(path)
    assert rank["perplexity"].between(1, 1_000).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--by", "bytes"), "'bytes'"),
        (
            ("--lines-per-author", 3, "--format", "jsonl"),
            "--lines-per-author is for plain text, and this is jsonl; remove --lines-per-author, or set --format",
        ),
        (("--lines-per-author", 0, "--format", "text"), "lines_per_author must be at least 1, found 0"),
        (
            ("--by", "characters", "--vocabulary-from", "counts.txt"),
            "this file counts words, but the corpus is by characters",
        ),
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
