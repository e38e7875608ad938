"""Stacked users on an NVIDIA GPU: Triton's kernels as they are compiled, and CUDA graphs."""

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from helpers import InMemory
from smoothing import amplified, smooth_steps
from stacking import (
    assert_same_counts,
    model_of,
    random_population,
    relative_error,
    rounding,
    start_of,
    train_stacked,
)

from flsim.data.vocabulary import Layout
from flsim.models.hparams import ModelHParams
from flsim.training.cohort.engine import CohortEngine
from flsim.training.cohort.stacked import StackedTrainer, Variant
from flsim.training.hparams import LocalHParams
from flsim.training.local import train_cohort

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.version.cuda is None, reason="needs an NVIDIA GPU, of which there is none"
)

VARIANTS = get_args(Variant)
LAYOUT, SIZES, USERS = Layout(1_000), ModelHParams(96, 70), 9
OPTIONS: list[dict[str, Any]] = [
    {},
    {"optimizer": "momentum", "momentum": 0.5, "batch_size": 40},
    {"optimizer": "adam", "learning_rate": 2.0, "gradient_clip": 0.25, "proximal": 0.1},
]


def options(precision: Any, **others: Any) -> LocalHParams:
    return LocalHParams(**{"learning_rate": 0.1, "precision": precision, **others})


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
@pytest.mark.parametrize("others", OPTIONS, ids=str)
@smooth_steps()
def test_it_equals_the_local_engine(precision: Any, others: dict[str, Any], variant: Variant) -> None:
    """Within the rounding that is derived, of which smooth steps amplify little."""
    population, hparams = random_population(USERS, 60, LAYOUT), options(precision, **others)
    model = model_of(0, LAYOUT, SIZES)
    exact = train_cohort(model, population, range(USERS), hparams, 0, 0, 0.5)
    tolerance = rounding(precision, start_of(model), exact.norms / exact.users, 4)
    start = {name: value.cuda() for name, value in start_of(model.float()).items()}
    trainer = StackedTrainer(start, hparams, LAYOUT, USERS, variant=variant)
    found = train_stacked(trainer, start, population, hparams, 0, 0.5)
    times = amplified(hparams.gradient_clip or 0.0) if hparams.optimizer == "adam" else 1.0
    assert relative_error(found.delta, exact.delta) < tolerance * times
    assert found.loss == pytest.approx(exact.loss, rel=tolerance)
    assert_same_counts(found, exact)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("others", OPTIONS, ids=str)
@smooth_steps()
def test_graphs_change_nothing(precision: Any, others: dict[str, Any], variant: Variant) -> None:
    """Nor does a second time, with graphs that are there already, or larger users in between, which move buffers."""
    population, larger = random_population(USERS, 30, LAYOUT), random_population(USERS, 80, LAYOUT, seed=1)
    hparams = options(precision, **others)
    start = {name: value.cuda() for name, value in start_of(model_of(0, LAYOUT, SIZES).float()).items()}
    plain = StackedTrainer(start, hparams, LAYOUT, USERS, graphs=False, variant=variant)
    graphs = StackedTrainer(start, hparams, LAYOUT, USERS, variant=variant)
    expected = train_stacked(plain, start, population, hparams)
    for others_first in (None, None, larger):
        if others_first is not None:
            train_stacked(graphs, start, others_first, hparams)
        found = train_stacked(graphs, start, population, hparams)
        assert relative_error(found.delta, expected.delta) < 1e-6
        assert found.loss == pytest.approx(expected.loss, rel=1e-6)


def test_a_step_by_position_gives_the_same_bits_each_time() -> None:
    """With graphs and without sums whose order programs choose; one trainer twice, and another one."""
    population, hparams = random_population(USERS, 60, LAYOUT), options("bf16")
    start = {name: value.cuda() for name, value in start_of(model_of(0, LAYOUT, SIZES).float()).items()}
    trainers = [StackedTrainer(start, hparams, LAYOUT, USERS, variant="next") for _ in range(2)]
    first, *others = [train_stacked(trainer, start, population, hparams) for trainer in (*trainers, trainers[0])]
    for other in others:
        assert other.loss == first.loss
        assert all(torch.equal(value, first.delta[name]) for name, value in other.delta.items())


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_it_says_of_memory_holds(variant: Variant) -> None:
    hparams, users = options("bf16"), 32
    start = {name: value.cuda() for name, value in start_of(model_of(0, LAYOUT, SIZES).float()).items()}
    population = InMemory(LAYOUT, [[[1] * LAYOUT.record_words] * hparams.batch_size] * users)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    train_stacked(StackedTrainer(start, hparams, LAYOUT, users, variant=variant), start, population, hparams)
    fixed, each = StackedTrainer.memory(start, hparams, LAYOUT, variant)
    libraries = 128 * 2**20  # cuBLAS's workspaces, and what graphs keep
    assert torch.cuda.max_memory_allocated() - before <= fixed + users * each + libraries


def test_too_large_a_micro_cohort_shrinks(capsys: pytest.CaptureFixture[str]) -> None:
    """Twice as many users as there is memory for."""
    hparams = options("float32", batch_size=4)
    start = {name: value.cuda() for name, value in start_of(model_of(0, LAYOUT, SIZES).float()).items()}
    _, each = StackedTrainer.memory(start, hparams, LAYOUT)
    engine = CohortEngine(start, LAYOUT, hparams, micro_cohort=2 * torch.cuda.mem_get_info()[1] // each)
    population = random_population(USERS, 6, LAYOUT)
    found = engine.train(start, population, range(USERS), 0, 0)
    expected = train_cohort(model_of(0, LAYOUT, SIZES), population, range(USERS), hparams, 0, 0)
    assert relative_error(found.delta, expected.delta) < 1e-3
    assert "out of memory" in "".join(capsys.readouterr())


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_a_schedule_changes_the_rate_of_steps_whose_graphs_are_captured(optimizer: str) -> None:
    """The second round replays the first one's graphs, at a third less."""
    population, hparams = random_population(USERS, 60, LAYOUT), options("float32", optimizer=optimizer)
    model = model_of(0, LAYOUT, SIZES)
    start = {name: value.float().cuda() for name, value in start_of(model).items()}
    engine = CohortEngine(start, LAYOUT, replace(hparams, schedule="linear"), rounds=3)
    for round_ in range(3):
        constant = replace(hparams, learning_rate=hparams.learning_rate * (1 - round_ / 3))
        exact = train_cohort(model, population, range(USERS), constant, 0, round_, 0.5)
        found = engine.train(start, population, range(USERS), 0, round_, 0.5)
        tolerance = rounding("float32", start_of(model), exact.norms / exact.users, 4)
        assert relative_error(found.delta, exact.delta) < tolerance
