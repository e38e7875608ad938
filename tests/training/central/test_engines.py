"""Tests that fused engines equal the autograd engine for random settings, that states resume, and of refusals."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import CIFG, RECURRENT
from smoothing import smooth_steps
from stacking import relative_error, rounding
from stepping import LAYOUT, batch_of, hparams_strategy, records_strategy, same, source, start, trained, training_of
from torch_positions import WideKernels

from flsim.base.errors import InputError
from flsim.base.rng import stream
from flsim.canaries.planting import Overlay
from flsim.canaries.population import Population, Twin, _reordered
from flsim.models.architectures import CIFGLanguageModel, ModelHParams
from flsim.privacy.ledger import PrivacyHParams
from flsim.training.central import CentralHParams, CentralTraining, init, train_central
from flsim.training.central.hparams import factors
from flsim.training.central.training import CentralEngine, EngineName, PackedEngine, StackedEngine, engine_of
from flsim.training.cohort.kernels import Kernels
from flsim.training.update import State

RECORDS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 1, 2], [3], [], [5, 5, 5, 5]]
optimizers = pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "rmsprop"])


def stepped(engine: CentralEngine, training: CentralTraining, state: State, *until: int) -> State:
    """Return the state after chunks that end at these steps."""
    for end in until:
        losses, tokens = engine.train(engine.pack(training.chunk(state.round, end)))
        assert len(losses) == len(tokens) == end - state.round
        state = replace(state, round=end, params=engine.params(), moments=engine.moments())
    return state


def assert_equal(actual: State, expected: State) -> None:
    """Check that parameters and moments of two float64 states are equal up to 1e-10."""
    for name, value in expected.params.items():
        torch.testing.assert_close(actual.params[name], value, rtol=0, atol=1e-10)
    assert actual.moments.keys() == expected.moments.keys()
    for slot, moment in expected.moments.items():
        for name, value in moment.items():
            torch.testing.assert_close(actual.moments[slot][name], value, rtol=0, atol=1e-10)


@settings(max_examples=40)
@given(
    records_strategy, hparams_strategy, st.sampled_from((CIFG, *RECURRENT)), st.sampled_from((Kernels(), WideKernels()))
)
@smooth_steps()
def test_fused_engines_equal_the_autograd_engine(
    records: list[list[int]], hparams: CentralHParams, model: ModelHParams, kernels: Kernels
) -> None:
    """Losses before each step, parameters and moments are equal in float64 up to 1e-10, also with padded units."""
    training = replace(training_of(records, hparams), model=model)
    begin, chunk = start(model), training.chunk(0, 7)
    oracle = engine_of(replace(training, engine="autograd"), begin)
    engines: list[CentralEngine] = [engine_of(training, begin)]
    assert isinstance(engines[0], PackedEngine)
    if model == CIFG:
        engines.append(StackedEngine(training, begin, kernels))
    expected, counts = oracle.train(oracle.pack(chunk))
    for engine in engines:
        losses, tokens = engine.train(engine.pack(chunk))
        assert losses == pytest.approx(expected, rel=1e-10)
        assert tokens == counts
        actual, state = (replace(begin, params=e.params(), moments=e.moments()) for e in (engine, oracle))
        assert_equal(actual, state)


@pytest.mark.parametrize("engine", ["fused", "autograd"])
def test_the_gradient_is_clipped_before_the_decay(engine: EngineName) -> None:
    """A step of SGD gives w - rate (g min(1, C / ||g||) + lambda w), with the gradient g from plain torch."""
    records, rate, bound, decay = [[1, 2, 3], [4, 5]], 0.5, 1e-3, 0.1
    hparams = CentralHParams(steps=1, learning_rate=rate, gradient_clip=bound, weight_decay=decay)
    state = trained(records, hparams, engine, until=1)
    model = CIFGLanguageModel.from_params(start().params)
    inputs, targets = batch_of(records)
    loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=0)
    torch.autograd.backward(loss)
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
    assert norm > 10 * bound
    for name, value in start().params.items():
        expected = value - rate * (gradients[name] * bound / norm + decay * value)
        torch.testing.assert_close(state.params[name], expected, rtol=0, atol=1e-12)


def test_dropout_is_a_function_of_seed_and_step_and_has_mean_one() -> None:
    """The mean of 4 x 10^5 factors of 0 or 1 / 0.7 is within 5 standard errors of 1, except for 6 in 10^7 seeds."""
    drawn = factors(0.3, 0, 5, 50, 20, 200)
    assert drawn.shape == (2, 50, 20, 200)
    np.testing.assert_array_equal(np.unique(drawn), np.array([0, 1 / 0.7], np.float32))
    assert abs(drawn.mean() - 1) < 5 * math.sqrt(0.3 / 0.7 / drawn.size)
    np.testing.assert_array_equal(drawn, factors(0.3, 0, 5, 50, 20, 200))
    for other in (factors(0.3, 1, 5, 50, 20, 200), factors(0.3, 0, 6, 50, 20, 200)):
        assert not np.array_equal(drawn, other)


def test_the_number_of_steps_and_the_rate_follow_from_the_batch_size() -> None:
    """100 records with 1,000 words have 13 steps per epoch at batch size 8. Rates scale with the root of batch size."""
    assert CentralHParams(batch_size=8, epochs=2).steps_over(100, 1_000) == 26
    assert CentralHParams(batch_size=8, epochs=0.5).steps_over(100, 1_000) == 7
    assert CentralHParams(batch_size=8, steps=5).steps_over(100) == 5
    assert CentralHParams(batch_size=8, words=3_000).steps_over(100, 1_000) == 39
    assert CentralHParams(batch_size=8, words=1).steps_over(100, 1_000) == 1
    with pytest.raises(InputError, match=r"training\.words needs records with words"):
        CentralHParams(words=3_000).steps_over(100, 0)
    with pytest.raises(InputError, match="steps and words both set how long"):
        CentralHParams(words=3_000, steps=5)
    tuned = CentralHParams(learning_rate=0.1, batch_size=64, tuned_at=32)
    assert [tuned.rate(step, 10) for step in (0, 9)] == pytest.approx([0.1 * math.sqrt(2)] * 2)


@settings(max_examples=30)
@given(records=records_strategy, data=st.data())
def test_records_at_positions_in_both_partitions(records: list[list[int]], data: st.DataObject) -> None:
    """`records_at` returns the users' records at any positions, for a population with canaries and its IID twin."""
    bounds = sorted(data.draw(st.lists(st.integers(0, len(records)), max_size=3)))
    split = replace(source(records), user_offsets=np.array([0, *bounds, len(records)]))
    planted = data.draw(st.lists(st.integers(0, len(records) - 1), unique=True).map(sorted))
    overlay = Overlay(np.array(planted, np.int64), np.arange(len(planted), dtype=np.uint16) % 2)
    phrases = (np.array([9, 9], np.uint16), np.array([8, 8, 8], np.uint16))
    population = Population(split, phrases, overlay)
    order = np.array(data.draw(st.permutations(range(len(records)))), np.uint32)
    twin = Population(split, phrases, _reordered(overlay, order), Twin(order, split.user_offsets))
    for partition in (population, twin):
        in_order = [record.tolist() for user in range(len(partition)) for record in partition[user]]
        positions = data.draw(st.lists(st.integers(0, len(records) - 1), max_size=12))
        found = partition.records_at(np.array(positions, np.int64))
        assert [record.tolist() for record in found] == [in_order[position] for position in positions]


@optimizers
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_resuming_is_exact(optimizer: Any, precision: Any) -> None:
    """A new stacked engine that resumes after 3 of 7 steps, with other chunk sizes, ends with the same bits."""
    hparams = CentralHParams(
        steps=7, batch_size=2, optimizer=optimizer, precision=precision, learning_rate=0.05, dropout=0.3,
        schedule="cosine", warmup=2, weight_decay=0.1,
    )  # fmt: skip
    training = training_of(RECORDS, hparams)
    begin = replace(start(), params={name: value.float() for name, value in start().params.items()})
    whole = stepped(StackedEngine(training, begin), training, begin, 7)
    part = stepped(StackedEngine(training, begin), training, begin, 1, 3)
    assert same(stepped(StackedEngine(training, part), training, part, 6, 7), whole)


@optimizers
@smooth_steps()
def test_a_checkpoint_goes_from_engine_to_engine(optimizer: Any) -> None:
    """Two steps of the stacked and two of the packed engine, in either order, equal four of the autograd engine."""
    hparams = CentralHParams(steps=4, batch_size=2, optimizer=optimizer, learning_rate=0.05, gradient_clip=0.3)
    training = training_of(RECORDS, hparams)
    expected = trained(RECORDS, hparams, "autograd", 4)
    for first, second in ((StackedEngine, PackedEngine), (PackedEngine, StackedEngine)):
        part = stepped(first(training, start()), training, start(), 2)
        assert_equal(stepped(second(training, part), training, part, 4), expected)


@pytest.mark.parametrize("engine", [StackedEngine, PackedEngine])
@pytest.mark.parametrize(("optimizer", "momentum", "dropout"), [("sgd", 0.0, 0.3), ("momentum", 0.5, 0.0)])
def test_bfloat16_stays_within_its_rounding(engine: Any, optimizer: Any, momentum: float, dropout: float) -> None:
    """The relative error of the change of parameters in 7 steps is below the bound of `rounding`, against float64."""
    rng = stream(0, "test", "bfloat16")
    records = [rng.integers(1, LAYOUT.last_word, 5, endpoint=True).tolist() for _ in range(60)]
    hparams = CentralHParams(
        steps=7, batch_size=16, optimizer=optimizer, momentum=momentum, learning_rate=0.1, dropout=dropout
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


def test_float32_and_bfloat16_use_the_packed_engine_and_other_choices_are_refused() -> None:
    bf16 = CentralTraining(source(RECORDS), CentralHParams(precision="bf16", batch_size=4), 0)
    assert isinstance(engine_of(bf16, start()), PackedEngine)
    assert isinstance(engine_of(replace(bf16, hparams=CentralHParams()), start()), PackedEngine)
    for change, message in (
        ({"engine": "autograd"}, 'needs engine "fused"'),
        ({"privacy": PrivacyHParams("dp", clip=0.5, noise_multiplier=1.0)}, "without clip or noise"),
        ({"hparams": CentralHParams(precision="tf32")}, "needs an NVIDIA GPU"),
    ):
        with pytest.raises(InputError, match=message):
            engine_of(replace(bf16, **change), start())
