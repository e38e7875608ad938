"""Tests that every architecture is trained, resumed, saved and refused as the CIFG of the paper is."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from networks import OTHERS, name_of
from populations import InMemory
from stepping import LAYOUT, batch_of, same, source, tensors

from flsim.algorithms import fedavg
from flsim.algorithms.checkpoint import Provenance, load, save
from flsim.algorithms.rounds import LocalEngine, engine_of
from flsim.base.errors import InputError
from flsim.data.records import Layout, Records, batch
from flsim.models.architectures import ModelHParams, build, restore
from flsim.models.language_model import loss_sum
from flsim.privacy.ledger import PrivacyHParams
from flsim.training.central import CentralHParams, CentralTraining, init, train_central
from flsim.training.central.hparams import private_step, record_gradients
from flsim.training.central.training import train_chunks
from flsim.training.cohort.engine import CohortEngine
from flsim.training.update import LocalHParams, State

RECORDS = [[1, 2, 3, 4], [5, 6, 7], [], [8], [1, 2, 3, 9, 9, 9], [4, 5], [2]]
others = pytest.mark.parametrize("hparams", OTHERS, ids=name_of)
CLIPPED = PrivacyHParams("clip", clip=0.5)
PRIVATE = PrivacyHParams("dp", clip=0.5, noise_multiplier=0.3)


def training_of(hparams: ModelHParams, privacy: PrivacyHParams | None = None, **changes: object) -> CentralTraining:
    settings = CentralHParams(batch_size=3, **changes)  # type: ignore[arg-type]
    return CentralTraining(source(RECORDS), settings, 0, privacy=privacy or PrivacyHParams(), model=hparams)


def trained(state: State, training: CentralTraining, until: int) -> State:
    *_, (reached, _) = train_central(state, training, until)
    return reached


def mean_loss(state: State, hparams: ModelHParams) -> float:
    loss, count = loss_sum(restore(state.params, hparams, LAYOUT.vocabulary_size), *batch_of(RECORDS))
    return loss.item() / count


@others
def test_central_training_lowers_the_loss_and_resumes_to_the_same_bits(hparams: ModelHParams, tmp_path: Path) -> None:
    """25 steps equal 11 steps, a checkpoint and 14 more steps, and lower the loss; dropout changes the first step."""
    training = training_of(hparams, optimizer="adam", learning_rate=0.05, dropout=0.3, steps=25)
    start = init(LAYOUT.vocabulary_size, hparams, 0)
    whole = trained(start, training, 25)
    assert mean_loss(whole, hparams) < 0.9 * mean_loss(start, hparams)
    about = Provenance("c0ffee", "beef", LAYOUT.vocabulary_size, hparams)
    kept, provenance = load(save(tmp_path, trained(start, training, 11), about))
    assert provenance == about
    assert same(trained(kept, training, 25), whole)
    without = replace(training, hparams=replace(training.hparams, dropout=0.0))
    assert not same(trained(start, training, 1), trained(start, without, 1))


@others
def test_record_gradients_and_private_steps(hparams: ModelHParams) -> None:
    """Gradients per record equal plain autograd's. DP-SGD resumes exactly, and its micro-batches do not matter."""
    model = build(LAYOUT.vocabulary_size, hparams).initialize(0).double()
    inputs, targets = batch_of(RECORDS)
    gradients, losses = record_gradients(model, inputs, targets)
    for row in range(len(RECORDS)):
        length = int((targets[row] != 0).sum())
        loss, count = loss_sum(model, inputs[row : row + 1, :length], targets[row : row + 1, :length])
        torch.testing.assert_close(losses[row], loss.detach())
        expected = torch.autograd.grad(loss / count, list(model.parameters()))
        for (name, _), gradient in zip(model.named_parameters(), expected, strict=True):
            torch.testing.assert_close(gradients[name][row], gradient, rtol=1e-9, atol=1e-10)
    training = training_of(hparams, PRIVATE, optimizer="rmsprop", learning_rate=0.01, steps=6)
    start = init(LAYOUT.vocabulary_size, hparams, 0)
    start = replace(start, params={name: value.double() for name, value in start.params.items()})
    whole = trained(start, training, 6)
    assert same(trained(trained(start, training, 2), training, 6), whole)
    assert not same(whole, trained(start, replace(training, privacy=CLIPPED), 6))
    for name, value in tensors(trained(start, replace(training, physical_batch=1), 6)).items():
        torch.testing.assert_close(value, tensors(whole)[name], rtol=1e-8, atol=1e-10)


def test_a_private_step_without_clipping_learns_the_answers_of_prompts() -> None:
    """The targets of prompts are PAD, and the answers follow them; the lot has answers of two and three tokens."""
    layout = Layout(20, record_words=8, prompts=True)
    records = Records(np.array([1, 2, 3, 4, 5, 6, 7, 3, 2, 1], np.uint16), np.array([0, 7, 10]), np.array([5, 1]))
    lot = batch(records, np.arange(2), layout)
    inputs, targets = torch.from_numpy(lot.inputs), torch.from_numpy(lot.targets)
    model = build(layout.vocabulary_size, ModelHParams(4, 4)).initialize(0)
    loss, count = loss_sum(model, inputs, targets)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = private_step(model, optimizer, inputs, targets, clip=1e9, noise_multiplier=0.0, expected=2, seed=0, step=0)
    assert found == pytest.approx((loss.item(), count))


@others
def test_users_train_with_the_engine_that_supports_the_architecture(hparams: ModelHParams) -> None:
    """LSTM and GRU use the cohort engine, others the local engine. One user with one batch is one gradient step."""
    local, state = LocalHParams(batch_size=7, learning_rate=1.0), fedavg.init(LAYOUT.vocabulary_size, hparams, 0)
    engine = engine_of("cohort", build(LAYOUT.vocabulary_size, hparams), LAYOUT, local)
    assert isinstance(engine, CohortEngine if hparams.architecture in {"lstm", "gru"} else LocalEngine)
    users = InMemory(LAYOUT, [RECORDS, RECORDS[:3], []])
    update = engine.train(state.params, users, [0], 0, 0)
    model = build(LAYOUT.vocabulary_size, hparams).initialize(0)
    loss, count = loss_sum(model, *batch_of(RECORDS))
    assert (update.counts.tokens, update.counts.examples) == (count, len(RECORDS))
    expected = torch.autograd.grad(loss / count, list(model.parameters()))
    for (name, _), gradient in zip(model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(
            update.delta[name] / update.counts.weight, -gradient.double(), rtol=1e-4, atol=1e-6, msg=name
        )


def test_only_the_cifg_trains_in_low_precision() -> None:
    hparams = OTHERS[0]
    state, training = init(LAYOUT.vocabulary_size, hparams, 0), training_of(hparams, precision="bf16")
    with pytest.raises(
        InputError, match=r'architecture "lstm" trains in float32; training\.precision "bf16" needs "cifg"'
    ):
        next(train_chunks(state, training, 1))
    model = build(LAYOUT.vocabulary_size, hparams)
    with pytest.raises(InputError, match=r'"lstm" trains in float32; local\.precision .bf16. needs "cifg"'):
        engine_of("cohort", model, LAYOUT, LocalHParams(precision="bf16"))
