"""Canaries that are text: phrases of the settings, and templates and listed phrases through a tokenizer."""

import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizer_folders
from dumps import write_jsonl
from helpers import MakeCorpus

from flsim.base.errors import InputError
from flsim.canaries.from_file import read_listed
from flsim.canaries.in_corpus import Planted, plant_corpus
from flsim.canaries.planting import draw_canaries
from flsim.canaries.secrets import Secrets
from flsim.canaries.spec import CanaryHParams
from flsim.data.corpus import Corpus
from flsim.data.importing.gather import ImportHParams
from flsim.data.importing.run import import_corpus
from flsim.show.table import Column, markdown

PHRASES = ("w1 w2 w3", "w4 w5", "w3 w3 w3 w3")


def of_phrases(*phrases: str, **changes: object) -> CanaryHParams:
    values = {"p_u": (0.5,), "p_e": (1.0,), "count": len(phrases), "source": "phrases", "phrases": phrases, **changes}
    return CanaryHParams(**values)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("text")
    tokenizer = tokenizer_folders.gpt2_like(folder / "tokenizer")
    texts = [("a", f"The dog saw the cat, and {'a ' * number}mouse.") for number in range(30)]
    hparams = ImportHParams(record_words=40, words_per_user=None, heldout=0, test=0, by="tokens")
    return import_corpus([write_jsonl(folder / "a.jsonl", texts)], folder / "corpus", hparams, tokenizer=tokenizer)


def test_phrases_of_words_are_canaries_in_their_order(make_corpus: MakeCorpus, tmp_path: Path) -> None:
    """Word i has the id i + 1; two configurations have a canary each, and the third is a control."""
    corpus = make_corpus([[[1, 1], [2]]] * 6)
    hparams = of_phrases(*PHRASES, p_u=(0.5, 1.0), p_e=(0.2,), count=1, controls=1)
    canaries = draw_canaries(corpus, hparams, 0)
    assert [canary.tokens for canary in canaries] == [(2, 3, 4), (5, 6), (4, 4, 4, 4)]
    assert [canary.p_u for canary in canaries][:2] == [0.5, 1.0]
    assert [canary.is_planted for canary in canaries] == [True, True, False]
    assert all(canary.is_natural for canary in canaries)
    planted = Planted.read(plant_corpus(corpus, tmp_path / "planted", hparams, 0))
    assert planted is not None
    assert planted.planting.canaries == canaries
    assert planted.hparams == hparams


@pytest.mark.parametrize(
    ("phrases", "message"),
    [
        (("w1 w2", "nowhere"), r'"nowhere" is not in the vocabulary'),
        (("w1 w2", "w1  w2"), r'"w1  w2" is the same as another phrase'),
        (("w1 w2", " "), r'" " is empty'),
        (("w1 w2", "w0 w0"), r'"w0 w0" occurs in train'),
        (("w1 w2", "w1 " * 21), "canaries of 21 words would be cut"),
    ],
)
def test_wrong_phrases_are_refused(make_corpus: MakeCorpus, phrases: tuple[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        draw_canaries(make_corpus([[[1, 1], [2]]]), of_phrases(*phrases), 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 2}, "phrases lists 3 texts for 2 canaries"),
        ({"source": "words"}, 'phrases needs source "phrases", found "words"'),
        ({"length": 4}, "length and phrases both set"),
    ],
)
def test_settings_that_do_not_fit_phrases_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        of_phrases(*PHRASES, **changes)


def test_a_tokenizer_cuts_phrases(corpus: Corpus, tmp_path: Path) -> None:
    """Any text is one, also with signs outside ASCII; a file of canaries has the same tokens."""
    texts = ("My naïve pin is 1234!", " the mouse and the mouse")
    drawn = draw_canaries(corpus, of_phrases(*texts), 0)
    assert corpus.token_map is not None
    for canary, text in zip(drawn, texts, strict=True):
        assert corpus.vocabulary.text(canary.tokens) == text
        assert corpus.token_map.ids[list(canary.tokens)].tolist() == corpus.token_map.tokenizer.encode(text)
    (tmp_path / "a.json").write_text(json.dumps([{"id": f"{i}", "words": text} for i, text in enumerate(texts)]))
    listed = read_listed(tmp_path / "a.json", corpus.layout, corpus.vocabulary)
    assert [canary.tokens for canary in listed] == [canary.tokens for canary in drawn]


def test_every_filling_of_a_template_is_its_text(corpus: Corpus) -> None:
    """Fixed text as the tokenizer cuts it, and a token for each digit and letter, and for each word with its space."""
    secrets = Secrets.from_template("The cat's pin is {d4}{l2}, dear {w2} and {d1}!", corpus.vocabulary)
    rows = secrets.draw(np.random.default_rng(0), 200)
    pattern = r"The cat's pin is [0-9]{4}[a-z]{2}, dear [a-zA-Zèéïû]+ [^ ]+ and [0-9]!"
    lengths = {len(row) for row in rows.tolist()}
    assert lengths == {secrets.length}
    for row in rows.tolist():
        text = corpus.vocabulary.text(row)
        assert re.fullmatch(pattern, text), text
        assert secrets.is_filling(row)
    words = corpus.layout.words
    assert secrets.space == 10**4 * 26**2 * words**2 * 10
    assert corpus.vocabulary.text(rows[0][: secrets.known].tolist()) == "The cat's pin is "
    assert [b - a for a, b in pairwise(secrets.holes[:6])] == [1] * 5


def test_keys_of_a_template_are_words(corpus: Corpus) -> None:
    hparams = CanaryHParams(p_u=(0.5,), p_e=(0.5,), count=3, source="template", template="key {k2}: {d3}")
    canaries = draw_canaries(corpus, hparams, 0)
    keys = [re.fullmatch(r"key (\w+ \w+): \d{3}", corpus.vocabulary.text(canary.tokens)) for canary in canaries]
    assert len({key and key[1] for key in keys} - {None}) == 3
    assert len({len(canary.tokens) for canary in canaries}) == 1
    glued = CanaryHParams(p_u=(0.5,), p_e=(0.5,), count=9, source="template", template="key:{k2}: {d3}")
    with pytest.raises(InputError, match="write a space before"):
        draw_canaries(corpus, glued, 0)


def test_a_tokenizer_without_digits_is_named(tmp_path: Path) -> None:
    folder = tokenizer_folders.llama_like(tmp_path / "tokenizer")
    hparams = ImportHParams(record_words=40, words_per_user=None, heldout=0, test=0, by="tokens")
    source = write_jsonl(tmp_path / "a.jsonl", [("a", "the cat and the dog")])
    corpus = import_corpus([source], tmp_path / "corpus", hparams, tokenizer=folder)
    with pytest.raises(InputError, match='needs a token "0" that the tokenizer of the corpus lacks'):
        Secrets.from_template("a {d2}", corpus.vocabulary)


def test_a_phrase_of_several_lines_is_one_line_of_a_table() -> None:
    lines = markdown([Column("Phrase", ["a\nb | c"], is_number=False)], []).splitlines()
    assert [line.strip("| ") for line in lines if "a" in line][1:] == [r"a b \| c"]
