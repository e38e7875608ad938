"""The bag of words of an update: exact for one step, a certain sign for several steps, rows of embeddings, measures."""

import math

import numpy as np
import pytest
import torch
from populations import InMemory
from scipy.stats import spearmanr
from tiny_bases import GPT2, LLAMA
from training_oracle import train_cohort

from flsim.attacks.reveal.words import CUTOFF, Guess, blind_guess, guess_of, mean_prediction, measures
from flsim.data.vocabulary import Layout
from flsim.models.architectures import ModelHParams, build
from flsim.models.language_model import LoraHParams, Params, TrainableModel
from flsim.training.hparams import LocalHParams
from flsim.training.update import clip_factor, global_norm

VOCABULARY, ETA = 30, 0.1
LAYOUT = Layout(VOCABULARY, 8)
TEXTS = [[[1, 2, 3], [3, 3, 4, 5]], [[6, 7], [2, 8, 9, 10, 11]]]
USERS = InMemory(LAYOUT, TEXTS)
NOTHING = torch.zeros(VOCABULARY, dtype=torch.float64)


def model_of(architecture: str, **settings: object) -> TrainableModel:
    sizes = {"embedding": 8, "units": 12, "heads": 2 if architecture == "transformer" else 4}
    settings |= {} if architecture == "hf" else sizes
    return build(VOCABULARY, ModelHParams(architecture=architecture, **settings)).initialize(0)  # type: ignore[arg-type]


def update_of(model: TrainableModel, user: int, **hparams: object) -> Params:
    """The update of a user in plain PyTorch; a weight of 1 instead of its number of records."""
    total = train_cohort(model, USERS, [user], LocalHParams(learning_rate=ETA, **hparams), 0, 0)  # type: ignore[arg-type]
    return {name: value / total.counts.weight for name, value in total.delta.items()}


def counts_of(user: int) -> np.ndarray:
    counts = np.zeros(VOCABULARY, np.int64)
    for record in TEXTS[user]:
        for token in [*record, LAYOUT.eos]:
            counts[token] += 1
    return counts


@pytest.mark.parametrize("architecture", ["cifg", "lstm", "gru", "transformer", "convolutional"])
def test_one_step_reveals_each_count_exactly(architecture: str) -> None:
    """T (Delta b / eta + p) = n, with the model's own prediction on the user's text."""
    model, counts = model_of(architecture).double(), counts_of(0)
    update = update_of(model, 0, batch_size=2)
    guess = guess_of(model, update, ETA, mean_prediction(model, USERS[0], LAYOUT))
    assert guess is not None
    np.testing.assert_allclose(counts.sum() * guess.scores, counts, atol=1e-5)
    assert (guess.chosen <= (counts > 0)).all()
    assert guess.chosen.sum() == (counts > 0).sum()  # of an untrained model each p is below 1 / T


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_no_number_of_steps_raises_the_bias_of_an_absent_word(optimizer: str) -> None:
    model = model_of("cifg")
    for users in ([0], [1], [0, 1]):
        parts = [update_of(model, user, batch_size=1, epochs=3, optimizer=optimizer) for user in users]
        total = {name: sum((2.0 + place) * part[name] for place, part in enumerate(parts)) for name in parts[0]}
        guess = guess_of(model, total, ETA, NOTHING)  # type: ignore[arg-type]
        assert guess is not None
        assert guess.chosen.any()
        assert (guess.chosen <= (sum(map(counts_of, users)) > 0)).all()


def test_a_clip_changes_nothing_for_an_attacker_who_knows_its_factor() -> None:
    model, predicted = model_of("cifg"), mean_prediction(model_of("cifg"), USERS[1], LAYOUT)
    update = update_of(model, 0, batch_size=1)
    factor = clip_factor(global_norm(update), 0.01)
    assert factor < 1
    plain = guess_of(model, update, 4 * ETA, predicted)
    clipped = guess_of(model, {name: factor * value for name, value in update.items()}, factor * 4 * ETA, predicted)
    assert plain is not None
    assert clipped is not None
    np.testing.assert_allclose(plain.scores, clipped.scores, rtol=1e-9)
    np.testing.assert_array_equal(plain.chosen, clipped.chosen)


def test_of_untied_embeddings_exactly_the_rows_of_input_words_change() -> None:
    model = model_of("hf", config=LLAMA | {"tie_word_embeddings": False})
    guess = guess_of(model, update_of(model, 1, batch_size=1), ETA, NOTHING)
    assert guess is not None
    read = {LAYOUT.bos} | {word for record in TEXTS[1] for word in record}  # the model reads the first position of PAD
    assert set(np.flatnonzero(guess.chosen).tolist()) - {LAYOUT.pad} == read


def test_rows_of_tied_embeddings_are_cut_as_in_breaching() -> None:
    """token_strategy "embedding-norm": log-norms above mean + cutoff x standard deviation, in NumPy."""
    model = model_of("hf", config=GPT2)
    update = update_of(model, 1, batch_size=1)
    (name,) = (name for name, value in model.trainable.items() if value.shape[0] == VOCABULARY)
    norms = np.linalg.norm(update[name].numpy(), axis=1)
    expected = np.log(norms) > np.log(norms).mean() + CUTOFF * np.log(norms).std(ddof=1)
    guess = guess_of(model, update, ETA, NOTHING)
    assert guess is not None
    np.testing.assert_allclose(guess.scores, norms)
    np.testing.assert_array_equal(guess.chosen, expected)
    assert expected.any()


def test_adapters_on_a_frozen_base_have_no_rows_of_words() -> None:
    model = model_of("hf", config=GPT2, lora=LoraHParams(rank=2))
    assert guess_of(model, update_of(model, 0), ETA, NOTHING) is None


def test_measures_are_their_definitions() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        scores, counts = rng.integers(0, 6, 12).astype(float), rng.integers(0, 3, 12)
        chosen, among = rng.random(12) < 0.5, rng.random(12) < 0.8
        found = measures(Guess(scores, chosen), counts, among)
        inside = [place for place in range(12) if among[place]]
        present = {place for place in inside if counts[place]}
        guessed = {place for place in inside if chosen[place]}
        pairs = [
            (scores[one] > scores[other]) + (scores[one] == scores[other]) / 2
            for one in present
            for other in set(inside) - present
        ]
        assert found["auroc"] == pytest.approx(np.mean(pairs) if pairs else math.nan, nan_ok=True)
        for name, group in (("precision", guessed), ("recall", present)):
            assert found[name] == pytest.approx(len(guessed & present) / len(group) if group else math.nan, nan_ok=True)
        spread = np.ptp(scores[among]) * np.ptp(counts[among])
        expected = spearmanr(scores[among], counts[among]).statistic if spread else math.nan
        assert found["spearman"] == pytest.approx(expected, nan_ok=True)


def test_the_blind_guess_has_the_most_frequent_words_and_as_many() -> None:
    guess = blind_guess(np.log(np.array([0.1, 0.4, 0.2, 0.3])), np.array([True, False, False, True]))
    assert guess.chosen.tolist() == [False, True, False, True]
