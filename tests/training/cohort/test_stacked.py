"""Tests of stacked users in plain PyTorch: rounding against the local engine, memory, and batches packed ahead."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from populations import InMemory
from smoothing import smooth_steps
from stacking import LAYOUT, amplification, assert_within, model_of, random_population, start_of, train_stacked
from torch_positions import TorchPositionKernels
from training_oracle import train_cohort

from flsim.data.records import Layout
from flsim.models.architectures import ModelHParams
from flsim.training.cohort.engine import GRAPHS, StackedTrainer
from flsim.training.cohort.kernels import Kernels
from flsim.training.update import LocalHParams, prefetched


@pytest.mark.parametrize("kernels", [Kernels(), TorchPositionKernels()], ids=["padded", "by position"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize(("optimizer", "momentum"), [("sgd", 0.0), ("momentum", 0.5)], ids=["sgd", "momentum"])
def test_low_precision_stays_within_its_rounding(
    precision: Any, optimizer: Any, momentum: float, kernels: Kernels
) -> None:
    """The relative error of the summed update, against the float64 oracle, is below the bound of `rounding`."""
    layout = Layout(60)
    model, population = model_of(0, layout, ModelHParams(16, 24)), random_population(4, 100, layout)
    settings: dict[str, Any] = {"optimizer": optimizer, "momentum": momentum, "precision": precision}
    hparams = LocalHParams(learning_rate=0.1, batch_size=16, **settings)
    exact = train_cohort(model, population, range(4), hparams, 0, 0, 1e9)
    start = start_of(model.float())
    trainer = StackedTrainer(start, hparams, layout, 4, kernels)
    actual = train_stacked(trainer, start, population, hparams, clip=1e9)
    assert_within(actual, exact, start, precision, 7)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize(
    "others",
    [
        {},
        {"optimizer": "momentum", "momentum": 0.5, "batch_size": 40},
        {"optimizer": "adam", "learning_rate": 2.0, "gradient_clip": 0.25, "proximal": 0.1},
    ],
    ids=str,
)
@smooth_steps()
def test_shapes_rounded_up_as_for_cuda_graphs_change_only_rounding(precision: Any, others: dict[str, Any]) -> None:
    """Updates with and without rounded shapes differ by at most twice `rounding`; 30 records are at most two steps."""
    layout = Layout(200)
    hparams = LocalHParams(**{"learning_rate": 0.1, "precision": precision, **others})
    population, start = random_population(6, 30, layout), start_of(model_of(0, layout, ModelHParams(16, 24)).float())
    exact, rounded = (StackedTrainer(start, hparams, layout, 6) for _ in range(2))
    rounded._rounding = GRAPHS
    expected, padded = (train_stacked(trainer, start, population, hparams) for trainer in (exact, rounded))
    assert_within(padded, expected, start, precision, 2, times=2 * amplification(hparams))


def held(thing: object) -> int:
    """Return the bytes of all tensors in an object of flsim."""
    if isinstance(thing, torch.Tensor):
        return thing.numel() * thing.element_size()
    if isinstance(thing, dict):
        return sum(map(held, thing.values()))
    return sum(map(held, thing)) if isinstance(thing, list) else held(vars(thing)) if hasattr(thing, "_flat") else 0


@pytest.mark.parametrize("kernels", [Kernels(), TorchPositionKernels()], ids=["padded", "by position"])
@pytest.mark.parametrize(
    "hparams",
    [
        LocalHParams(batch_size=4),
        LocalHParams(batch_size=4, precision="bf16"),
        LocalHParams(batch_size=4, optimizer="adam", precision="bf16"),
        LocalHParams(batch_size=4, optimizer="momentum"),
    ],
    ids=str,
)
def test_the_memory_of_a_micro_cohort_is_as_estimated(hparams: LocalHParams, kernels: Kernels) -> None:
    """For full batches of the longest records, the buffers have the estimated size up to 2%."""
    layout, users = Layout(200, record_words=6), 7
    start = start_of(model_of(0, layout, ModelHParams(16, 24)).float())
    population = InMemory(layout, [[[1] * 6] * 4] * users)
    trainer = StackedTrainer(start, hparams, layout, users, kernels)
    train_stacked(trainer, start, population, hparams)
    own = {name: value for name, value in vars(trainer).items() if name not in ("_like", "_order")}
    own |= vars(trainer._model)
    if own["low"] is own["weights"]:
        own.pop("low")
    fixed, per_user = StackedTrainer.memory(start, hparams, layout, kernels)
    callers = sum(2 * 4 * value.numel() for value in start.values())  # `like`, and the start of the round
    sums = 2 * sum(8 * value.numel() for value in start.values())
    assert 0.98 * (fixed + users * per_user) <= held(own) + callers + sums <= 1.02 * (fixed + users * per_user)


def test_a_micro_cohort_that_does_not_fit_raises_at_once() -> None:
    with pytest.raises(RuntimeError, match="allocate"):
        StackedTrainer(start_of(model_of(0)), LocalHParams(), LAYOUT, 10**13)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ahead"]


@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_prefetched_yields_the_same_items_in_the_same_order(count: int) -> None:
    assert list(prefetched(range(count))) == list(range(count))
    assert not threads()


def test_prefetched_computes_only_the_given_number_of_items_ahead() -> None:
    made, enough = [], threading.Event()

    def items() -> Iterator[int]:
        for number in range(10):
            made.append(number)
            if number == 3:
                enough.set()
            yield number

    iterator = prefetched(items(), depth=2)
    assert next(iterator) == 0
    assert enough.wait(timeout=30)  # after item 0, items 1, 2 and 3 are computed ahead
    assert made == [0, 1, 2, 3]
    assert list(iterator) == list(range(1, 10))


def test_prefetched_raises_an_error_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    iterator = prefetched(items())
    assert next(iterator) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(iterator)
    assert not threads()


def test_the_thread_of_prefetched_ends_if_its_consumer_stops_early() -> None:
    def items() -> Iterator[int]:
        number = 0
        while True:
            yield (number := number + 1)

    iterator = prefetched(items())
    assert next(iterator) == 1
    iterator.close()
    assert not threads()
