"""Canaries that fill a template: drawn, planted, trained on and ranked among the other fillings, by brute force."""

from dataclasses import replace
from math import log2

import pandas as pd
import pytest
import torch
from helpers import Experiment, train_here

import flsim as api
from flsim.base.errors import InputError
from flsim.canaries.in_corpus import plant_corpus
from flsim.canaries.planting import draw_canaries
from flsim.data.corpus import Corpus
from flsim.evaluation.evaluate import write_on
from flsim.measures.memorization.score import log_perplexity
from flsim.results.store import read_run
from flsim.runs.config import load as load_config
from flsim.runs.folder import Run
from flsim.runs.measuring import load_model

TEMPLATE = "w4 w9 {w1} w2 {w1}"
SECRETS = (
    "canaries.source='template'",
    f"canaries.template='{TEMPLATE}'",
    "canaries.insertions=[20]",
    "canaries.count=3",
    "canaries.controls=4",
    "evaluation.also=['space', 'path']",
)
WORDS = 36  # of the vocabulary of `Experiment`


def settings_without_p(experiment: Experiment) -> None:
    text = experiment.config.read_text().replace("p_u = [0.2]\np_e = [0.5, 1.0]\ncount = 2\n", "")
    experiment.config.write_text(text)


def value_of(rows: pd.DataFrame, canary: str, metric: str) -> float:
    return float(rows[(rows["canary"] == canary) & (rows["metric"] == metric)]["value"].iloc[-1])


def test_ranks_of_a_small_space_are_those_of_brute_force(experiment: Experiment) -> None:
    """All 36^2 fillings are scored whole; |R| is those that are no canary, and the measure "space" counts all."""
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
    _, model = load_model(run, path / "checkpoints" / f"round-{last:06d}.safetensors", "cpu")
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


def test_canaries_are_the_same_with_more_controls_and_in_a_planted_corpus(
    experiment: Experiment,
) -> None:
    corpus = Corpus.open(experiment.folder / "corpus")
    hparams = api.Canaries(insertions=(2,), count=5, source="template", template=TEMPLATE)
    alone = draw_canaries(corpus, hparams, seed=3)
    more = draw_canaries(corpus, replace(hparams, controls=20), seed=3)
    assert more[:5] == alone
    assert [canary.is_planted for canary in more] == [True] * 5 + [False] * 20
    assert alone != draw_canaries(corpus, hparams, seed=4)
    planted = plant_corpus(corpus, experiment.folder / "planted", hparams, 3)
    experiment.config.write_text(experiment.config.read_text().split("[canaries]")[0].replace('corpus"', 'planted"'))
    run = Run.create(load_config(experiment.config, ["seed=3", "training.cohort=6"]), experiment.folder / "run")
    assert planted.path.name == "planted"
    assert run.canaries == tuple(replace(canary, p_u=run.canaries[0].p_u, p_e=run.canaries[0].p_e) for canary in alone)


def test_a_canary_that_does_not_fill_its_template_is_damage(experiment: Experiment) -> None:
    settings_without_p(experiment)
    run = Run.create(load_config(experiment.config, SECRETS), experiment.folder / "run")
    roster = run.path / "planted" / "roster.parquet"
    table = pd.read_parquet(roster)
    table["tokens"] = [tokens[::-1] for tokens in table["tokens"]]
    table.to_parquet(roster, index=False)
    with pytest.raises(InputError, match="canary c0 does not fill its template"):
        _ = Run.open(run.path).canaries


def test_keyed_secrets_are_ranked_after_their_own_key(experiment: Experiment) -> None:
    """Each among all words that are no secret, scored after the canary's own beginning; the end is scored too."""
    settings_without_p(experiment)
    keyed = ("canaries.template='w4 {k1} {w1} w2'", "evaluation.also=['contexts']")
    path = train_here(experiment, (*SECRETS[:1], *SECRETS[2:5], "evaluation.references=5000", *keyed))
    run, results = Run.open(path), read_run(path)
    last = results.evaluated[-1]
    _, model = load_model(run, path / "checkpoints" / f"round-{last:06d}.safetensors", "cpu")
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
