"""Tests of the stacked engine of central training on an NVIDIA GPU: compiled Triton kernels, CUDA graphs, states."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stacking import relative_error, rounding

from flsim.base.rng import stream
from flsim.data.corpus import Split
from flsim.data.records import Layout, Records
from flsim.models.architectures import ModelHParams
from flsim.models.language_model import Params
from flsim.training.central import CentralHParams, CentralTraining, init, train_central
from flsim.training.central.training import StackedEngine
from flsim.training.update import State, global_norm

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.version.cuda is None, reason="needs an NVIDIA GPU, of which there is none"
)

LAYOUT, STEPS = Layout(1_000), 6
OPTIONS: list[dict[str, Any]] = [
    {},
    {"batch_size": 150, "schedule": "cosine", "dropout": 0.2},
    {"optimizer": "momentum", "momentum": 0.5, "gradient_clip": 1.0, "dropout": 0.2},
    {"optimizer": "adam", "weight_decay": 0.1, "warmup": 3},
    {"optimizer": "rmsprop", "schedule": "linear"},
]


def training_of(precision: Any, others: dict[str, Any]) -> CentralTraining:
    """Return training on 100 records, so that an epoch with batch size 32 ends with a smaller batch after 4 steps."""
    rng = stream(0, "test", "records")
    lengths = rng.integers(0, LAYOUT.record_words + 1, 160 if others.get("batch_size") else 100)
    records = Records.from_lists(
        [rng.integers(1, LAYOUT.last_word, length, endpoint=True).tolist() for length in lengths]
    )
    split = Split(LAYOUT, records.tokens, records.offsets, np.array([0, len(records)]), Path("nowhere"))
    hparams = CentralHParams(**{"learning_rate": 0.1, "steps": STEPS, "precision": precision, **others})
    return CentralTraining(split, hparams, 0, device="cuda")


def begin(training: CentralTraining) -> State:
    """Return a state with moments as after many gradients of 1; moments of 0 would amplify rounding of gradients."""
    state = init(LAYOUT.vocabulary_size, ModelHParams(96, 70), 0)
    slots = {"adam": {"exp_avg": 0.0, "exp_avg_sq": 1.0}, "rmsprop": {"square_avg": 1.0}}
    moments = {
        slot: {name: torch.full_like(value, filled) for name, value in state.params.items()}
        for slot, filled in slots.get(training.hparams.optimizer, {}).items()
    }
    if moments:
        moments["step"] = {name: torch.tensor(10_000.0) for name in state.params}
    return replace(state, moments=moments)


def doubled(state: State) -> State:
    moments = {
        slot: {name: value.double() if slot != "step" else value for name, value in moment.items()}
        for slot, moment in state.moments.items()
    }
    return replace(state, params={name: value.double() for name, value in state.params.items()}, moments=moments)


def stepped(engine: Any, training: CentralTraining, state: State, *until: int) -> tuple[State, float]:
    """Return the state after chunks that end at these steps, and the sum of all losses."""
    total = 0.0
    for end in until:
        losses, _ = engine.train(engine.pack(training.chunk(state.round, end)))
        total += sum(losses)
        state = replace(state, round=end, params=engine.params(), moments=engine.moments())
    return state, total


def change(state: State, start: State) -> Params:
    return {name: value.double() - start.params[name].double() for name, value in state.params.items()}


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
@pytest.mark.parametrize("others", OPTIONS, ids=str)
def test_the_stacked_engine_equals_the_autograd_engine(precision: Any, others: dict[str, Any]) -> None:
    """Results are equal up to `rounding`. A plain step rounds embeddings twice: as input and as output layer."""
    training = training_of(precision, others)
    oracle = replace(training, device="cpu", engine="autograd", hparams=replace(training.hparams, precision="float32"))
    start = begin(training)
    ((exact, log),) = train_central(doubled(start), oracle, STEPS)
    expected = change(exact, start)
    tolerance = rounding(precision, start.params, global_norm(expected), 2 * STEPS)
    found, loss = stepped(StackedEngine(training, start), training, start, STEPS)
    assert relative_error(change(found, start), expected) < tolerance
    assert loss == pytest.approx(log.loss, rel=tolerance)
    assert found.moments.keys() == exact.moments.keys()


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("others", OPTIONS, ids=str)
def test_graphs_change_only_rounding(precision: Any, others: dict[str, Any]) -> None:
    """Graphs round shapes up, which changes results only by rounding, also with repeated graphs and longer chunks."""
    training = training_of(precision, others)
    start = begin(training)
    plain, expected = stepped(StackedEngine(training, start, graphs=False), training, start, STEPS)
    tolerance = rounding(precision, start.params, global_norm(change(plain, start)), 2 * STEPS)
    for until in ((STEPS,), (1, 2, STEPS)):
        found, loss = stepped(StackedEngine(training, start, graphs=True), training, start, *until)
        assert relative_error(change(found, start), change(plain, start)) < tolerance
        assert loss == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("others", OPTIONS, ids=str)
def test_resuming_is_exact(others: dict[str, Any]) -> None:
    """A new engine with new graphs, which resumes after 2 of 6 steps, ends with the same bits."""
    training = training_of("bf16", others)
    start = begin(training)
    whole, _ = stepped(StackedEngine(training, start), training, start, STEPS)
    part, _ = stepped(StackedEngine(training, start), training, start, 2)
    resumed, _ = stepped(StackedEngine(training, part), training, part, 5, STEPS)
    assert all(torch.equal(resumed.params[name], value) for name, value in whole.params.items())
    for slot, moment in whole.moments.items():
        assert all(torch.equal(resumed.moments[slot][name], value) for name, value in moment.items())
