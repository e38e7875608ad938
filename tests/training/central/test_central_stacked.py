"""The stacked engine, in plain PyTorch, against the autograd one; its states; what is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from smoothing import smooth_steps
from stacking import relative_error, rounding
from stepping import LAYOUT, hparams_strategy, records_strategy, source, start, trained, training_of

from flsim.base.errors import InputError
from flsim.base.rng import stream
from flsim.models.hparams import ModelHParams
from flsim.privacy.mechanism import PrivacyHParams
from flsim.training.central import CentralHParams, CentralTraining, init, train_central
from flsim.training.central.engines import PackedEngine, engine_of
from flsim.training.central.stacked_engine import StackedEngine
from flsim.training.central.task import Engine
from flsim.training.cohort.kernels import TorchKernels
from flsim.training.state import State

RECORDS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 1, 2], [3], [], [5, 5, 5, 5]]


class Padded:
    """PyTorch's kernels, for an engine that takes them for others and so adds units to the model."""

    def __getattr__(self, name: str) -> Any:
        return getattr(TorchKernels(), name)


def stepped(engine: Engine, training: CentralTraining, state: State, *until: int) -> State:
    """The state after chunks that end there."""
    for end in until:
        losses, tokens = engine.train(engine.pack(training.chunk(state.round, end)))
        assert len(losses) == len(tokens) == end - state.round
        state = replace(state, round=end, params=engine.params(), moments=engine.moments())
    return state


def assert_equal(actual: State, expected: State) -> None:
    """In float64, to 1e-10."""
    for name, value in expected.params.items():
        torch.testing.assert_close(actual.params[name], value, rtol=0, atol=1e-10)
    assert actual.moments.keys() == expected.moments.keys()
    for slot, moment in expected.moments.items():
        for name, value in moment.items():
            torch.testing.assert_close(actual.moments[slot][name], value, rtol=0, atol=1e-10)


def assert_same_bits(actual: State, expected: State) -> None:
    assert all(torch.equal(actual.params[name], value) for name, value in expected.params.items())
    assert actual.moments.keys() == expected.moments.keys()
    for slot, moment in expected.moments.items():
        assert all(torch.equal(actual.moments[slot][name], value) for name, value in moment.items())


@settings(max_examples=30)
@given(records_strategy, hparams_strategy, st.booleans())
@smooth_steps()
def test_it_equals_the_autograd_engine(records: list[list[int]], hparams: CentralHParams, padded: bool) -> None:
    """float64, to 1e-10. With more units than the model has, too. Losses are those before each step."""
    training = training_of(records, hparams)
    engine = StackedEngine(training, start(), Padded() if padded else None)
    oracle = engine_of(replace(training, engine="autograd"), start())
    chunk = training.chunk(0, 7)
    (losses, tokens), (expected, counts) = (each.train(each.pack(chunk)) for each in (engine, oracle))
    assert losses == pytest.approx(expected, rel=1e-10)
    assert tokens == counts
    actual, state = (replace(start(), params=e.params(), moments=e.moments()) for e in (engine, oracle))
    assert_equal(actual, state)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "rmsprop"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_resuming_is_exact(optimizer: Any, precision: Any) -> None:
    """From a state after 3 of 7 steps, in chunks of other sizes, a new engine comes to the same bits."""
    hparams = CentralHParams(
        steps=7, batch_size=2, optimizer=optimizer, precision=precision, learning_rate=0.05, dropout=0.3,
        schedule="cosine", warmup=2, weight_decay=0.1,
    )  # fmt: skip
    training = training_of(RECORDS, hparams)
    begin = replace(start(), params={name: value.float() for name, value in start().params.items()})
    whole = stepped(StackedEngine(training, begin), training, begin, 7)
    part = stepped(StackedEngine(training, begin), training, begin, 1, 3)
    assert_same_bits(stepped(StackedEngine(training, part), training, part, 6, 7), whole)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "rmsprop"])
@smooth_steps()
def test_a_checkpoint_goes_from_engine_to_engine(optimizer: Any) -> None:
    """Two steps of one, then two of the other, and the other way round."""
    hparams = CentralHParams(steps=4, batch_size=2, optimizer=optimizer, learning_rate=0.05, gradient_clip=0.3)
    training = training_of(RECORDS, hparams)
    expected = trained(RECORDS, hparams, "autograd", 4)
    for first, second in ((StackedEngine, PackedEngine), (PackedEngine, StackedEngine)):
        part = stepped(first(training, start()), training, start(), 2)
        whole = stepped(second(training, part), training, part, 4)
        assert_equal(whole, expected)


@pytest.mark.parametrize("engine", [StackedEngine, PackedEngine])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_bfloat16_stays_within_its_rounding(engine: Any, optimizer: Any, dropout: float) -> None:
    """The error of what training changed, relative to its norm, is what `rounding` derives."""
    rng = stream(0, "test", "bfloat16")
    records = [rng.integers(1, LAYOUT.last_word, 5, endpoint=True).tolist() for _ in range(60)]
    hparams = CentralHParams(
        steps=7, batch_size=16, optimizer=optimizer, momentum=0.5, learning_rate=0.1, dropout=dropout
    )
    state = init(LAYOUT.vocabulary_size, ModelHParams(16, 24), 0)
    exact_start = replace(state, params={name: value.double() for name, value in state.params.items()})
    ((exact, _),) = train_central(exact_start, training_of(records, hparams, "autograd"), 7)
    low = training_of(records, replace(hparams, precision="bf16"))
    actual = stepped(engine(low, state), low, state, 7)
    change, expected = (
        {name: after.params[name].double() - value for name, value in exact_start.params.items()}
        for after in (actual, exact)
    )
    norm = float(torch.cat([value.flatten() for value in expected.values()]).norm())
    assert 0 < relative_error(change, expected) < rounding("bf16", exact_start.params, norm, 7)


def test_which_engine_a_precision_gets_and_what_is_refused() -> None:
    bf16 = CentralTraining(source(RECORDS), CentralHParams(precision="bf16", batch_size=4), 0)
    assert isinstance(engine_of(bf16, start()), PackedEngine)
    assert isinstance(engine_of(replace(bf16, hparams=CentralHParams()), start()), PackedEngine)
    with pytest.raises(InputError, match='needs engine "fused"'):
        engine_of(replace(bf16, engine="autograd"), start())
    with pytest.raises(InputError, match="without clip or noise"):
        engine_of(replace(bf16, privacy=PrivacyHParams("dp", clip=0.5, noise_multiplier=1.0)), start())
    with pytest.raises(InputError, match="needs an NVIDIA GPU"):
        engine_of(replace(bf16, hparams=CentralHParams(precision="tf32")), start())
