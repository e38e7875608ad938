"""Canaries that fill a template are drawn, planted, trained on, and ranked among other fillings as by brute force."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from math import log2
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tokenizer_folders
import torch
from dumps import write_jsonl
from helpers import Experiment, MakeCorpus, train_here

import flsim as api
from flsim.base.errors import InputError
from flsim.canaries.planting import draw_canaries, read_listed
from flsim.canaries.population import PlantedCorpus, plant_corpus
from flsim.canaries.secrets import Secrets
from flsim.canaries.spec import CanaryHParams
from flsim.data.corpus import Corpus
from flsim.data.importing.gather import ImportHParams
from flsim.data.importing.tasks import import_corpus
from flsim.measures.memorization.score import log_perplexity
from flsim.results.rows import read_run
from flsim.runs.config import load as load_config
from flsim.runs.evaluate import write_on
from flsim.runs.folder import Run, restored_model

TEMPLATE = "w4 w9 {w1} w2 {w1}"
SECRETS = (
    "canaries.source='template'",
    f"canaries.template='{TEMPLATE}'",
    "canaries.insertions=[20]",
    "canaries.count=3",
    "canaries.controls=4",
    "evaluation.also=['space', 'path']",
)
WORDS = 36  # words in the vocabulary of `Experiment`


def settings_without_p(experiment: Experiment) -> None:
    text = experiment.config.read_text().replace("p_u = [0.2]\np_e = [0.5, 1.0]\ncount = 2\n", "")
    experiment.config.write_text(text)


def value_of(rows: pd.DataFrame, canary: str, metric: str) -> float:
    return float(rows[(rows["canary"] == canary) & (rows["metric"] == metric)]["value"].iloc[-1])


def test_ranks_of_a_small_space_are_those_of_brute_force(experiment: Experiment) -> None:
    """All 36^2 fillings are scored completely; |R| counts those that are not canaries, and "space" counts all."""
    settings_without_p(experiment)
    path = train_here(experiment, (*SECRETS, "evaluation.references=5000"))
    run, results = Run.open(path), read_run(path)
    assert [str(canary.template) for canary in run.canaries] == [TEMPLATE] * 7
    secrets = [canary.tokens for canary in run.canaries]
    fixed = run.corpus.vocabulary.ids
    for tokens in secrets:
        assert (tokens[0], tokens[1], tokens[3]) == (fixed["w4"], fixed["w9"], fixed["w2"])
    assert len(set(secrets)) == 7

    last = results.evaluated[-1]
    assert results.references(last) == WORDS**2 - 7
    _, model = restored_model(run, path / "checkpoints" / f"round-{last:06d}.safetensors", "cpu")
    prefix = torch.tensor([run.corpus.layout.bos, fixed["w4"], fixed["w9"]])
    words = range(run.corpus.layout.first_word, run.corpus.layout.last_word + 1)
    everything = torch.tensor([(one, fixed["w2"], other) for one in words for other in words])
    scores = {
        tuple(row): score
        for row, score in zip(everything.tolist(), log_perplexity(model, prefix, everything).tolist(), strict=True)
    }
    rows = results.rows[results.rows["round"] == last]
    others = [score for row, score in scores.items() if row not in {tokens[2:] for tokens in secrets}]
    for canary in run.canaries:
        own = scores[canary.tokens[2:]]
        rank = 1 + sum(score <= own * (1 + 1e-6) for score in others)
        assert value_of(rows, canary.id, "rank") == rank
        assert value_of(rows, canary.id, "exposure") == pytest.approx(log2(WORDS**2 - 6) - log2(rank))
        whole = sum(score <= own * (1 + 1e-6) for score in scores.values())
        assert value_of(rows, canary.id, "space_exposure") == pytest.approx(log2(WORDS**2) - log2(whole))
        assert value_of(rows, canary.id, "log_perplexity") == pytest.approx(own, rel=1e-5)
    best = min(scores, key=lambda row: scores[row])
    written = write_on(model, run.canaries, run.corpus.layout, replace(run.config.evaluation, beam_width=WORDS**2))
    assert all(tokens == (fixed["w4"], fixed["w9"], *best) for tokens in written.values())
    paths = {canary.tokens[2:]: value_of(rows, canary.id, "path") for canary in run.canaries}
    assert paths == {tokens: float(tokens == best) for tokens in paths}


def test_canaries_are_the_same_with_more_controls_and_in_a_planted_corpus(experiment: Experiment) -> None:
    corpus = Corpus.open(experiment.folder / "corpus")
    hparams = api.Canaries(insertions=(2,), count=5, source="template", template=TEMPLATE)
    alone = draw_canaries(corpus, hparams, seed=3)
    more = draw_canaries(corpus, replace(hparams, controls=20), seed=3)
    assert more[:5] == alone
    assert [canary.is_planted for canary in more] == [True] * 5 + [False] * 20
    assert alone != draw_canaries(corpus, hparams, seed=4)
    planted = PlantedCorpus.read(plant_corpus(corpus, experiment.folder / "planted", hparams, 3))
    assert planted is not None
    assert list(map(repr, planted.planting.canaries)) == list(map(repr, alone))


def test_a_canary_that_does_not_fill_its_template_is_refused(experiment: Experiment) -> None:
    settings_without_p(experiment)
    run = Run.create(load_config(experiment.config, SECRETS), experiment.folder / "run")
    roster = run.path / "planted" / "roster.parquet"
    table = pd.read_parquet(roster)
    table["tokens"] = [tokens[::-1] for tokens in table["tokens"]]
    table.to_parquet(roster, index=False)
    with pytest.raises(InputError, match="canary c0 does not fill its template"):
        _ = Run.open(run.path).canaries


def test_keyed_secrets_are_ranked_after_their_own_key(experiment: Experiment) -> None:
    """Each secret is ranked among all words that are not secrets, after its own beginning, with the end scored too."""
    settings_without_p(experiment)
    keyed = ("canaries.template='w4 {k1} {w1} w2'", "evaluation.also=['contexts']")
    path = train_here(experiment, (*SECRETS[:1], *SECRETS[2:5], "evaluation.references=5000", *keyed))
    run, results = Run.open(path), read_run(path)
    last = results.evaluated[-1]
    _, model = restored_model(run, path / "checkpoints" / f"round-{last:06d}.safetensors", "cpu")
    layout, rows = run.corpus.layout, results.rows[results.rows["round"] == last]
    assert len({canary.tokens[1] for canary in run.canaries}) == 7
    secrets = {canary.tokens[2] for canary in run.canaries}
    words = torch.tensor([word for word in range(layout.first_word, layout.last_word + 1) if word not in secrets])
    assert results.references(last) == len(words)
    for canary in run.canaries:
        among = torch.tensor([[canary.tokens[2]], *words[:, None].tolist()])
        phrases = torch.cat([among, torch.full_like(among, canary.tokens[3])], 1)
        scores = log_perplexity(model, torch.tensor([layout.bos, *canary.tokens[:2]]), phrases)
        assert value_of(rows, canary.id, "rank") == 1 + int((scores[1:] <= scores[0] * (1 + 1e-6)).sum())
        alone = log_perplexity(model, torch.tensor([layout.bos]), among)
        rank = 1 + int((alone[1:] <= alone[0] * (1 + 1e-6)).sum())
        exposure = log2(len(words) + 1) - log2(rank)
        assert value_of(rows, canary.id, "exposure prefix=0 suffix=0") == pytest.approx(exposure)


# Canaries that are text: phrases in the settings, and templates and listed phrases with a tokenizer.

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
    """Word wi has the id i + 1. Two configurations have a canary each, and the third phrase is a control."""
    corpus = make_corpus([[[1, 1], [2]]] * 6)
    hparams = of_phrases(*PHRASES, p_u=(0.5, 1.0), p_e=(0.2,), count=1, controls=1)
    canaries = draw_canaries(corpus, hparams, 0)
    assert [canary.tokens for canary in canaries] == [(2, 3, 4), (5, 6), (4, 4, 4, 4)]
    assert [canary.p_u for canary in canaries][:2] == [0.5, 1.0]
    assert [canary.is_planted for canary in canaries] == [True, True, False]
    assert all(canary.is_natural for canary in canaries)
    planted = PlantedCorpus.read(plant_corpus(corpus, tmp_path / "planted", hparams, 0))
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


def test_settings_that_do_not_fit_phrases_are_refused() -> None:
    for name, value, message in (
        ("count", 2, "phrases lists 3 texts for 2 canaries"),
        ("source", "words", 'phrases needs source "phrases", found "words"'),
        ("length", 4, "length and phrases both set"),
    ):
        with pytest.raises(InputError, match=message):
            of_phrases(*PHRASES, **{name: value})


def test_a_tokenizer_cuts_phrases(corpus: Corpus, tmp_path: Path) -> None:
    """Any text can be a canary, also with characters outside ASCII; a file of canaries gives the same tokens."""
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
    """Fixed text has the tokenizer's tokens; each digit, each letter, and each word with its space has one token."""
    secrets = Secrets.from_template("The cat's pin is {d4}{l2}, dear {w2} and {d1}!", corpus.vocabulary)
    rows = secrets.draw(np.random.default_rng(0), 200)
    pattern = r"The cat's pin is [0-9]{4}[a-z]{2}, dear [a-zA-Zèéïû]+ [^ ]+ and [0-9]!"
    lengths = {len(row) for row in rows.tolist()}
    assert lengths == {secrets.length}
    for row in rows.tolist():
        text = corpus.vocabulary.text(row)
        assert re.fullmatch(pattern, text), text
        assert secrets.is_filling(row)
    assert secrets.space == 10**4 * 26**2 * corpus.layout.words**2 * 10
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
