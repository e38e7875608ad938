"""The written-out gradients of LSTM and GRU networks equal autograd's, in federated and in central training."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import random_network
from populations import InMemory
from smoothing import smooth_steps
from stacking import assert_same_counts
from stepping import LAYOUT, records_strategy, source
from stepping import hparams_strategy as central_strategy
from strategies import hparams_strategy as local_strategy
from strategies import users_strategy
from training_oracle import train_cohort

from flsim.algorithms.rounds import engine_of
from flsim.data.records import Records, batch
from flsim.models.hparams import ModelHParams
from flsim.models.language_model import loss_sum
from flsim.training.central import CentralHParams, CentralTraining, init, train_central
from flsim.training.central.task import EngineName
from flsim.training.cohort.engine import CohortEngine
from flsim.training.cohort.gradient import packed_batches, packed_model
from flsim.training.cohort.steps import lay_out
from flsim.training.hparams import LocalHParams
from flsim.training.state import State

networks = st.builds(
    ModelHParams,
    embedding=st.just(3),
    units=st.sampled_from((3, 5)),  # without and with a projection
    architecture=st.sampled_from(("lstm", "gru")),
    layers=st.integers(1, 3),
)


@settings(max_examples=40)
@given(hparams=networks, records=records_strategy, seed=st.integers(0, 100), dropout=st.booleans())
def test_the_gradient_is_that_of_autograd(
    hparams: ModelHParams, records: list[list[int]], seed: int, dropout: bool
) -> None:
    """One batch of unequal records, with random weights and biases. float64, to 1e-12 of the largest value."""
    model, rng = random_network(hparams, seed, layout=LAYOUT), np.random.default_rng(seed)
    read, rows = Records.from_lists(records), np.arange(len(records))
    padded, steps = batch(read, rows, LAYOUT), lay_out(read, LAYOUT, rows, np.zeros(len(rows), np.int64), 1)
    (packed,) = packed_batches(steps)
    kept = None
    if dropout:
        kept = torch.from_numpy(rng.integers(0, 3, (2, *padded.inputs.shape, 3)).astype(float))
        longest_first = np.argsort(-(padded.targets != LAYOUT.pad).sum(1), kind="stable")
        places = longest_first[steps.row], steps.time
        packed = replace(packed, dropout_mask=(kept[0][places], kept[1][places]))
    loss, count = loss_sum(model, torch.from_numpy(padded.inputs), torch.from_numpy(padded.targets), dropout_mask=kept)
    expected = torch.autograd.grad(loss / count, list(model.trainable.values()))
    start = {name: value.detach() for name, value in model.trainable.items()}
    written_out = packed_model(start)
    written_out.load(start)
    for _ in range(2):  # the second time meets the buffers of the first
        summed, gradient = written_out.gradient(packed)
        assert summed == pytest.approx(loss.item(), rel=1e-12)
        for name, value in zip(model.trainable, expected, strict=True):
            torch.testing.assert_close(gradient[name], value, rtol=0, atol=1e-12 * max(1.0, float(value.abs().max())))


@settings(max_examples=20)
@given(
    hparams=networks,
    users=users_strategy,
    local=local_strategy,
    clip=st.none() | st.floats(0.01, 2.0),
    seed=st.integers(0, 100),
)
@smooth_steps()
def test_users_train_as_by_the_local_engine(
    hparams: ModelHParams, users: list[list[list[int]]], local: LocalHParams, clip: float | None, seed: int
) -> None:
    """Sums of updates in float64, to 1e-10; counts exactly."""
    model, population = random_network(hparams, seed, 0.5, LAYOUT), InMemory(LAYOUT, users)
    engine = engine_of("cohort", model, LAYOUT, local)
    assert isinstance(engine, CohortEngine)
    start = {name: value.detach().clone() for name, value in model.trainable.items()}
    total = engine.train(start, population, range(len(users)), seed, 0, clip)
    expected = train_cohort(model, population, range(len(users)), local, seed, 0, clip)
    largest = max(1.0, *(float(value.abs().max()) for value in expected.delta.values()))
    for name, value in expected.delta.items():
        torch.testing.assert_close(total.delta[name], value, rtol=0, atol=1e-10 * largest)
    assert_same_counts(total, expected)


def centrally(hparams: ModelHParams, records: list[list[int]], training: CentralHParams, engine: EngineName) -> State:
    start = init(LAYOUT.vocabulary_size, hparams, 0)
    start = replace(start, params={name: value.double() for name, value in start.params.items()})
    task = CentralTraining(source(records), training, 0, engine=engine, model=hparams)
    *_, (reached, _) = train_central(start, task, 7)
    return reached


@settings(max_examples=20)
@given(hparams=networks, records=records_strategy, training=central_strategy)
@smooth_steps()
def test_central_training_is_that_of_autograd(
    hparams: ModelHParams, records: list[list[int]], training: CentralHParams
) -> None:
    """All optimizers, with dropout, decay and clips. float64, to 1e-10."""
    fused, oracle = (centrally(hparams, records, training, engine) for engine in ("fused", "autograd"))
    for name, value in oracle.params.items():
        torch.testing.assert_close(fused.params[name], value, rtol=0, atol=1e-10)
    assert fused.moments.keys() == oracle.moments.keys()
