"""Tests of stacked users on an NVIDIA GPU: compiled Triton kernels, CUDA graphs, memory."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from populations import InMemory
from smoothing import smooth_steps
from stacking import amplification, assert_within, model_of, random_population, relative_error, start_of, train_stacked
from training_oracle import train_cohort

from flsim.data.records import Layout
from flsim.models.architectures import ModelHParams
from flsim.models.language_model import Params
from flsim.training.cohort.engine import CohortEngine, StackedTrainer, capture_stream, products
from flsim.training.update import LocalHParams, Precision

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.version.cuda is None, reason="needs an NVIDIA GPU, of which there is none"
)

LAYOUT, SIZES, USERS = Layout(1_000), ModelHParams(96, 70), 9
OPTIONS: list[dict[str, Any]] = [
    {},
    {"optimizer": "momentum", "momentum": 0.5, "batch_size": 40},
    {"optimizer": "adam", "learning_rate": 2.0, "gradient_clip": 0.25, "proximal": 0.1},
]


def start_on_gpu() -> Params:
    return {name: value.cuda() for name, value in start_of(model_of(0, LAYOUT, SIZES).float()).items()}


def options(precision: Any, **others: Any) -> LocalHParams:
    return LocalHParams(**{"learning_rate": 0.1, "precision": precision, **others})


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
@pytest.mark.parametrize("others", OPTIONS, ids=str)
@smooth_steps()
def test_stacked_users_equal_the_local_engine(precision: Any, others: dict[str, Any]) -> None:
    """Sums equal the local engine's in float64 up to `rounding`, which smooth steps amplify only a little."""
    population, hparams = random_population(USERS, 60, LAYOUT), options(precision, **others)
    model = model_of(0, LAYOUT, SIZES)
    exact = train_cohort(model, population, range(USERS), hparams, 0, 0, 0.5)
    start = {name: value.cuda() for name, value in start_of(model.float()).items()}
    trainer = StackedTrainer(start, hparams, LAYOUT, USERS)
    actual = train_stacked(trainer, start, population, hparams, 0, 0.5)
    assert_within(actual, exact, start, precision, 4, times=amplification(hparams))


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("others", OPTIONS, ids=str)
@smooth_steps()
def test_graphs_change_only_rounding(precision: Any, others: dict[str, Any]) -> None:
    """Graphs round shapes up, which changes sums only by rounding, also for repeated graphs and after larger users."""
    population, larger = random_population(USERS, 30, LAYOUT), random_population(USERS, 80, LAYOUT, seed=1)
    hparams = options(precision, **others)
    start = start_on_gpu()
    plain = StackedTrainer(start, hparams, LAYOUT, USERS, graphs=False)
    graphs = StackedTrainer(start, hparams, LAYOUT, USERS)
    expected = train_stacked(plain, start, population, hparams)
    for others_first in (None, None, larger):
        if others_first is not None:
            train_stacked(graphs, start, others_first, hparams)
        actual = train_stacked(graphs, start, population, hparams)
        assert_within(actual, expected, start, precision, 2, times=2 * amplification(hparams))


def test_all_shapes_are_captured_on_one_stream() -> None:
    """All graphs are captured on one stream, because each further stream would keep a workspace of cuBLAS."""
    hparams = options("float32")
    start = start_on_gpu()
    capture_stream.cache_clear()
    trainer = StackedTrainer(start, hparams, LAYOUT, USERS)
    for records in (80, 50, 20):
        train_stacked(trainer, start, random_population(USERS, records, LAYOUT), hparams)
    about = capture_stream.cache_info()
    assert about.misses == 1
    assert about.hits > 1


def test_a_step_by_position_gives_the_same_bits_each_time() -> None:
    """One trainer twice, and another trainer, give equal bits: no sum depends on the order of programs."""
    population, hparams = random_population(USERS, 60, LAYOUT), options("bf16")
    start = start_on_gpu()
    trainers = [StackedTrainer(start, hparams, LAYOUT, USERS) for _ in range(2)]
    first, *others = [train_stacked(trainer, start, population, hparams) for trainer in (*trainers, trainers[0])]
    for other in others:
        assert other.counts.loss == first.counts.loss
        assert all(torch.equal(value, first.delta[name]) for name, value in other.delta.items())


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@smooth_steps()
def test_weights_that_stay_on_the_chip_change_only_rounding(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three programs share the 70 units of a user. Sums differ only by rounding, and a repetition gives equal bits."""
    from benchmarks.gpu import resident

    monkeypatch.setattr(resident, "UNITS", 32)
    population, hparams, start = random_population(USERS, 60, LAYOUT), options(precision), start_on_gpu()
    trainer = StackedTrainer(start, hparams, LAYOUT, USERS, resident.ResidentPositionKernels(precision))
    first, again = (train_stacked(trainer, start, population, hparams) for _ in range(2))
    expected = train_stacked(StackedTrainer(start, hparams, LAYOUT, USERS), start, population, hparams)
    assert_within(first, expected, start, precision, 4, times=2)
    assert all(torch.equal(value, first.delta[name]) for name, value in again.delta.items())


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_peak_memory_is_at_most_the_estimate(precision: Any) -> None:
    hparams, users = options(precision), 32
    start = start_on_gpu()
    population = InMemory(LAYOUT, [[[1] * LAYOUT.record_words] * hparams.batch_size] * users)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine = CohortEngine(start, LAYOUT, hparams, micro_cohort=users)
    engine.train({name: value.cpu() for name, value in start.items()}, population, range(users), 0, 0)
    fixed, per_user = StackedTrainer.memory(start, hparams, LAYOUT)
    libraries = 128 * 2**20  # for cuBLAS's workspaces and the memory of graphs
    assert torch.cuda.max_memory_allocated() - before <= fixed + users * per_user + libraries


def test_too_large_a_micro_cohort_shrinks(capsys: pytest.CaptureFixture[str]) -> None:
    """A micro-cohort whose weights need twice the GPU's memory becomes smaller, and its sums are correct."""
    hparams = options("float32", batch_size=4)
    start = start_on_gpu()
    weights = sum(value.numel() * value.itemsize for value in start.values())
    engine = CohortEngine(start, LAYOUT, hparams, micro_cohort=2 * torch.cuda.mem_get_info()[1] // weights)
    population = random_population(USERS, 6, LAYOUT)
    actual = engine.train(start, population, range(USERS), 0, 0)
    expected = train_cohort(model_of(0, LAYOUT, SIZES), population, range(USERS), hparams, 0, 0)
    assert relative_error(actual.delta, expected.delta) < 1e-3
    assert "out of memory" in "".join(capsys.readouterr())


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 8, reason="needs a GPU with TF32"
)
def test_a_product_on_a_gpu_has_the_precision_that_was_set() -> None:
    """TF32 keeps 10 bits of a factor's fraction, which rounds 1 + 2^-12 to 1; float32 keeps this factor."""
    ones = torch.ones(128, 128, device="cuda")
    factor = torch.eye(128, device="cuda") * (1 + 2**-12)
    expected: dict[Precision, float] = {"float32": 1 + 2**-12, "tf32": 1.0, "bf16": 1 + 2**-12}
    for precision, value in expected.items():
        with products(precision, ones.device):
            assert torch.equal(ones @ factor, torch.full_like(ones, value))
            torch.get_float32_matmul_precision()


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_a_schedule_changes_the_rate_of_steps_whose_graphs_are_captured(optimizer: str) -> None:
    """Each round equals a round at a constant rate; the second replays the first round's graphs at 2/3 of its rate."""
    population, hparams = random_population(USERS, 60, LAYOUT), options("float32", optimizer=optimizer)
    model = model_of(0, LAYOUT, SIZES)
    start = {name: value.float().cuda() for name, value in start_of(model).items()}
    engine = CohortEngine(start, LAYOUT, replace(hparams, schedule="linear"), rounds=3)
    for round_ in range(3):
        constant = replace(hparams, learning_rate=hparams.learning_rate * (1 - round_ / 3))
        exact = train_cohort(model, population, range(USERS), constant, 0, round_, 0.5)
        actual = engine.train(start, population, range(USERS), 0, round_, 0.5)
        assert_within(actual, exact, start, "float32", 4)
