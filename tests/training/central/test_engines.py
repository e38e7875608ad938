"""The fused engine equals the autograd one, whatever is asked for; what dropout, decay and the schedule do."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from smoothing import smooth_steps
from stepping import LAYOUT, hparams_strategy, records_strategy, source, start, trained

from flsim.base.errors import InputError
from flsim.canaries.planting import Overlay
from flsim.canaries.population import Population, Twin, _reordered
from flsim.models.cifg import CIFGLanguageModel
from flsim.training.central import CentralHParams
from flsim.training.central.records import factors
from flsim.training.central.task import EngineName


@settings(max_examples=30)
@given(records=records_strategy, hparams=hparams_strategy)
@smooth_steps()
def test_fused_is_autograd(records: list[list[int]], hparams: CentralHParams) -> None:
    """float64, to 1e-10."""
    fused, oracle = trained(records, hparams, "fused"), trained(records, hparams, "autograd")
    for name, value in oracle.params.items():
        torch.testing.assert_close(fused.params[name], value, rtol=0, atol=1e-10)
    assert fused.moments.keys() == oracle.moments.keys()


@pytest.mark.parametrize("engine", ["fused", "autograd"])
def test_the_gradient_is_clipped_before_the_decay(engine: EngineName) -> None:
    """A step of plain SGD: w - rate (g min(1, C / ||g||) + lambda w), g by plain torch."""
    records, rate, bound, decay = [[1, 2, 3], [4, 5]], 0.5, 1e-3, 0.1
    hparams = CentralHParams(steps=1, learning_rate=rate, gradient_clip=bound, weight_decay=decay)
    state = trained(records, hparams, engine, until=1)
    model = CIFGLanguageModel.from_params(start().params)
    inputs = torch.tensor([[11 - 1, 1, 2, 3], [10, 4, 5, 0]])
    assert (LAYOUT.bos, LAYOUT.eos, LAYOUT.pad) == (10, 11, 0)
    targets = torch.tensor([[1, 2, 3, 11], [4, 5, 11, 0]])
    loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=0)
    torch.autograd.backward(loss)
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
    assert norm > 10 * bound
    for name, value in start().params.items():
        expected = value - rate * (gradients[name] * bound / norm + decay * value)
        torch.testing.assert_close(state.params[name], expected, rtol=0, atol=1e-12)


def test_dropout_is_a_function_of_seed_and_step_and_has_mean_one() -> None:
    """4 x 10^5 factors of 0 or 1 / 0.7: the mean lies within 5 of its standard deviations but for 6 in 10^7 seeds."""
    drawn = factors(0.3, 0, 5, 50, 20, 200)
    assert drawn.shape == (2, 50, 20, 200)
    np.testing.assert_array_equal(np.unique(drawn), np.array([0, 1 / 0.7], np.float32))
    assert abs(drawn.mean() - 1) < 5 * math.sqrt(0.3 / 0.7 / drawn.size)
    np.testing.assert_array_equal(drawn, factors(0.3, 0, 5, 50, 20, 200))
    for other in (factors(0.3, 1, 5, 50, 20, 200), factors(0.3, 0, 6, 50, 20, 200)):
        assert not np.array_equal(drawn, other)


def test_rates() -> None:
    """By hand: sqrt(64 / 32) times 0.1; two steps of warm-up; then a line, or half a cosine, to 0 at step 10."""
    at = CentralHParams(learning_rate=0.1, batch_size=64, tuned_at=32)
    base = 0.1 * math.sqrt(2)
    assert [at.rate(step, 10) for step in (0, 9)] == pytest.approx([base, base])
    line = replace(at, schedule="linear", warmup=2)
    assert [line.rate(step, 10) for step in (0, 1, 2, 6, 10)] == pytest.approx([base / 2, base, base, base / 2, 0])
    cosine = replace(line, schedule="cosine")
    expected = [base, base * (1 + math.sqrt(0.5)) / 2, base / 2, 0]
    assert [cosine.rate(step, 10) for step in (2, 4, 6, 10)] == pytest.approx(expected)


def test_budgets() -> None:
    """100 records of 1,000 words at batch 8: 13 steps an epoch."""
    assert CentralHParams(batch_size=8, epochs=2).steps_over(100, 1_000) == 26
    assert CentralHParams(batch_size=8, epochs=0.5).steps_over(100, 1_000) == 7
    assert CentralHParams(batch_size=8, steps=5).steps_over(100) == 5
    assert CentralHParams(batch_size=8, words=3_000).steps_over(100, 1_000) == 39
    assert CentralHParams(batch_size=8, words=1).steps_over(100, 1_000) == 1
    with pytest.raises(InputError, match=r"training\.words needs records with words"):
        CentralHParams(words=3_000).steps_over(100, 0)
    with pytest.raises(InputError, match="steps and words both set how long"):
        CentralHParams(words=3_000, steps=5)


@settings(max_examples=30)
@given(records=records_strategy, data=st.data())
def test_records_at_positions_in_both_partitions(records: list[list[int]], data: st.DataObject) -> None:
    """Of a population with canaries, and of its twin: what its users hold at those places, in the order asked for."""
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
