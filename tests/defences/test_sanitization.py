"""Log-perplexity differences are what scoring each record alone says, and a secret's is among the largest."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import MakeCorpus
from hypothesis import given
from hypothesis import strategies as st

from flsim.base.rng import stream
from flsim.data.corpus import Corpus
from flsim.data.records import Subset
from flsim.defences import (
    SanitizationHParams,
    halves,
    largest,
    log_perplexity_differences,
    record_log_perplexities,
    sanitize,
)
from flsim.measures.memorization.score import log_perplexity
from flsim.models.architectures import ModelHParams
from flsim.models.cifg import CIFGLanguageModel
from flsim.training.central import CentralHParams, CentralTraining, init, train_central

Users = Callable[..., list[list[list[int]]]]
SMALL = SanitizationHParams(0.1, ModelHParams(6, 8), CentralHParams(2, batch_size=8, optimizer="adam"))


def scores_one_by_one(model: CIFGLanguageModel, corpus: Corpus) -> list[float]:
    """Each record by the attacks' scorer: what follows BOS, EOS where it is short enough."""
    layout, train = corpus.layout, corpus.split("train")
    found = []
    for record in train.records_at(np.arange(train.records)):
        rest = [*record.tolist(), *([layout.eos] if len(record) < layout.record_words else [])]
        found.append(float(log_perplexity(model, torch.tensor([layout.bos]), torch.tensor([rest]))[0]))
    return found


def test_records_are_scored_as_each_alone(make_corpus: MakeCorpus, random_users: Users) -> None:
    """Empty ones, and ones too long for an EOS among them, in any order. Scores are in float32."""
    users = [*random_users(9, 7, 36), [[], list(range(1, 21)), [1]]]
    corpus = make_corpus(users, vocabulary_size=40)
    models = [CIFGLanguageModel(40, ModelHParams(6, 8)).initialize(seed) for seed in (0, 1)]
    positions = stream(0, "test", "positions").permutation(66)
    scores = record_log_perplexities(tuple(models), corpus.split("train"), positions)
    for model, own in zip(models, scores, strict=True):
        np.testing.assert_allclose(own, np.array(scores_one_by_one(model, corpus))[positions], rtol=1e-5)


def test_differences_are_between_models_of_either_half(make_corpus: MakeCorpus, random_users: Users) -> None:
    corpus = make_corpus(random_users(10, 5, 36), vocabulary_size=40)
    train = corpus.split("train")
    scores = []
    for half in halves(train.records, seed=4):
        training = CentralTraining(Subset(train, half), SMALL.training, seed=4)
        ((state, _),) = train_central(init(40, SMALL.model, 4), training, SMALL.training.steps_over(len(half)))
        scores.append(scores_one_by_one(CIFGLanguageModel.from_params(state.params), corpus))
    expected = np.abs(np.array(scores[0]) - np.array(scores[1]))
    assert expected.max() > 0.01
    np.testing.assert_allclose(log_perplexity_differences(train, SMALL, 4), expected, atol=1e-4)


@given(st.integers(2, 50), st.integers(0, 99))
def test_halves_are_even_and_random(records: int, seed: int) -> None:
    first, second = halves(records, seed)
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(records))
    assert len(second) - len(first) in (0, 1)
    assert first.tolist() == sorted(first.tolist())
    assert second.tolist() == sorted(second.tolist())


def test_every_record_is_in_either_half_equally_often() -> None:
    """40 records, 1,000 seeds: counts within five standard deviations of 500; a false alarm in 40,000 or rarer."""
    counts = sum(np.bincount(halves(40, seed)[0], minlength=40) for seed in range(1_000))
    assert np.abs(counts - 500).max() < 5 * 250**0.5


@given(st.data())
def test_the_largest_are_the_first_of_a_stable_sort(data: st.DataObject) -> None:
    values = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=20))
    count = data.draw(st.integers(1, len(values)))
    expected = sorted(range(len(values)), key=lambda index: (-values[index], index))[:count]
    assert np.flatnonzero(largest(np.array(values, float), count)).tolist() == sorted(expected)


def test_secrets_that_occur_once_are_removed(make_corpus: MakeCorpus, tmp_path: Path) -> None:
    """600 records of ten words: ten sentences that everybody writes, and three secrets of random words."""
    rng = stream(0, "test", "secrets")
    sentences = rng.integers(1, 97, (10, 10)).tolist()
    listed = [sentences[index] for index in rng.integers(0, 10, 600)]
    secrets = rng.integers(1, 97, (3, 10)).tolist()
    for place, secret in zip((7, 222, 590), secrets, strict=True):
        listed[place] = secret
    corpus = make_corpus([listed[first : first + 20] for first in range(0, 600, 20)], vocabulary_size=100)
    hparams = SanitizationHParams(
        0.1, ModelHParams(16, 32), CentralHParams(12, batch_size=16, optimizer="adam", learning_rate=0.01)
    )
    made = sanitize(corpus, tmp_path / "made", hparams, seed=0)
    train = Corpus.open(made.path, verify=True).split("train")
    left = [record.tolist() for record in train.records_at(np.arange(train.records))]
    assert len(left) == 540
    assert made.manifest["dropped"] == {"records_sanitized": 60}
    assert not [secret for secret in secrets if secret in left]
    rest = iter(left)
    everything = iter(listed)
    assert all(any(record == other for other in everything) for record in rest)  # in the same order


@pytest.mark.parametrize(("records", "share", "left"), [(2, 0.9, 1), (3, 0.01, 2), (30, 0.29, 21)])
def test_the_share_is_rounded_and_leaves_something(
    make_corpus: MakeCorpus, tmp_path: Path, records: int, share: float, left: int
) -> None:
    corpus = make_corpus([[[1 + record % 8] for record in range(records)]])
    hparams = SanitizationHParams(share, ModelHParams(2, 2), CentralHParams(1))
    assert sanitize(corpus, tmp_path / "made", hparams, 0).split("train").records == left
