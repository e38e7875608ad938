"""Benchmark `python -m benchmarks central`: records per second of central training and of a plain PyTorch loop.

Both train the same steps. The benchmark needs only torch and numpy, and generates its records. It also runs as `python
-m benchmarks.central`.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.engine import LAYOUT, DrawnUsers
from flsim.base.errors import RunFailed
from flsim.base.progress import say
from flsim.data.corpus import Split
from flsim.data.records import Records, batch
from flsim.models.architectures import CIFGLanguageModel, ModelHParams
from flsim.models.language_model import Params, TrainableModel
from flsim.training.central import CentralHParams, CentralTraining, init, train_central
from flsim.training.central.training import engine_of
from flsim.training.cohort.kernels import products_for
from flsim.training.update import Precision, State, global_norm

PAPER_STEPS = 37_500_000
# Largest distance of two final models, relative to the change by training; beyond it the sides trained differently.
# Rounding to 11 bits and to 8 moves a gradient by 0.2% and 1.4% (sqrt(12) 2^-11 and sqrt(12) 2^-8, a dozen rounded
# tensors), to float32 by 1e-6.
FAR: dict[Precision, float] = {"float32": 0.01, "tf32": 0.02, "bf16": 0.1}
PLAIN = "plain"
SIDES: dict[str, Precision] = {"ours": "float32", "ours, tf32": "tf32", "ours, bf16": "bf16"}
TURN = {"cpu": 2_048, "cuda": 32_768}  # records; on a GPU 64 steps take little longer than copying their state


@dataclass(frozen=True)
class CentralBenchHParams:
    """Settings of the benchmark.

    Attributes:
        batch_sizes: batch sizes to measure, one after another.
        records: number of records that each side reads in a turn, which determines the number of steps; None for 2,048
            on a CPU and 32,768 on a GPU.
        turns: number of turns of each side. Sides alternate, so that load on the machine affects both; the first turn
            is not counted.
        threads: torch threads on a CPU.
        model: sizes of the model.
        users: number of users of 2,000 words, who have the records.
        precisions: precisions of our training, each of which is a side; the plain loop's is float32.
    """

    batch_sizes: tuple[int, ...] = (32, 256)
    records: int | None = None
    turns: int = 4
    threads: int = 2
    model: ModelHParams = field(default_factory=ModelHParams)
    users: int = 100
    precisions: tuple[Precision, ...] = ("float32",)


def bench_central(hparams: CentralBenchHParams = CentralBenchHParams(), device: str = "cpu") -> dict[str, Any]:
    """Return the result of `measure_central`, after a check that both sides trained the same.

    Raises:
        RunFailed: the final models differ.
    """
    measured = measure_central(hparams, device)
    for size, distances in measured["distance"].items():
        for name, distance in distances.items():
            if not distance < FAR[SIDES[name]]:
                raise RunFailed(
                    f"batch {size}: the plain loop trained a different model: distance {distance:.1%} from {name}"
                )
    return measured


def measure_central(hparams: CentralBenchHParams, device: str) -> dict[str, Any]:
    """Measure central training and the plain loop.

    Returns:
        ``records_per_second`` by batch size and side: "ours" (with reading and packing; in tf32 "ours, tf32", in bf16
        "ours, bf16") and "plain" (with batches made before). By batch size and flsim side: ``ratio``, to the plain
        loop's records per second, and ``distance`` of the final model from the plain loop's, relative to the change by
        training. ``hours_of_the_paper``, of 37.5 million steps at the smallest batch size, by flsim side. ``products``:
        on a CPU, floating-point operations per second of the first flsim side, and of only matrix products of its
        shapes. ``device``, ``threads``.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(hparams.threads)
    try:
        records = drawn(hparams.users)
        measured = {str(size): _measure(records, size, hparams, device) for size in hparams.batch_sizes}
    finally:
        torch.set_num_threads(threads)
    smallest = min(hparams.batch_sizes)
    rates = measured[str(smallest)]["records_per_second"]
    return {
        **{what: {size: row[what] for size, row in measured.items()} for what in next(iter(measured.values()))},
        "hours_of_the_paper": {
            name: PAPER_STEPS * smallest / rate / 3600 for name, rate in rates.items() if name != PLAIN
        },
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "threads": hparams.threads,
        "unit": (
            f"records of {records.words / records.records:.1f} words on average, V = {LAYOUT.vocabulary_size:,}, "
            f"{hparams.model.embedding} x {hparams.model.units} units"
        ),
    }


def describe(measured: dict[str, Any]) -> str:
    """Return the results as text."""
    lines = [f"{measured['unit']}; {measured['device']}, threads: {measured['threads']}"]
    for size, rates in measured["records_per_second"].items():
        for name, ratio in measured["ratio"][size].items():
            lines.append(
                f"batch {size:>4}: {name} {rates[name]:9,.0f} records/s, plain loop {rates[PLAIN]:9,.0f}: "
                f"{ratio:.2f} times"
            )
        if done := measured["products"].get(size):
            lines.append(f"{'':12}{done['training'] / 1e9:.0f} GFLOP/s; only products {done['alone'] / 1e9:.0f}")
    hours = ", ".join(f"{name} {hours:,.1f} hours" for name, hours in measured["hours_of_the_paper"].items())
    return "\n".join([*lines, f"37.5 million steps would take: {hours}"])


def _measure(records: Split, size: int, hparams: CentralBenchHParams, device: str) -> dict[str, Any]:
    say(f"central: batch {size}")
    steps = -(-(hparams.records or TURN["cpu" if device == "cpu" else "cuda"]) // size)
    training = CentralTraining(records, CentralHParams(batch_size=size), 0, device=device)
    first = init(records.layout.vocabulary_size, hparams.model, 0)
    model = CIFGLanguageModel.from_params(first.params).to(device)
    optimizer = torch.optim.SGD(model.parameters(), training.rate(0))
    sides = [_Side(name, training, first) for name, precision in SIDES.items() if precision in hparams.precisions]
    seconds = []
    for turn in range(hparams.turns):
        for side in sides:
            side.train(steps * (turn + 1))
        batches = padded_batches(training, steps * turn, steps * (turn + 1))
        seconds.append(plain_loop(model, optimizer, batches, device))
    times = {**{side.name: side.seconds for side in sides}, PLAIN: seconds}
    rates = {name: size * steps * (hparams.turns - 1) / sum(of_turns[1:]) for name, of_turns in times.items()}
    products = {}
    if device == "cpu":
        done = 6 * _weights(hparams.model) * sides[0].positions / sides[0].seconds[-1]
        products = {
            "training": done,
            "alone": _products_alone(round(sides[0].positions / steps), hparams.model, first.params),
        }
    return {
        "records_per_second": rates,
        "ratio": {side.name: rates[side.name] / rates[PLAIN] for side in sides},
        "distance": {side.name: distance(first, side.state, model) for side in sides},
        "products": products,
    }


class _Side:
    """Training by flsim in one precision, by one engine; its CUDA graphs are captured in the first turn.

    Attributes:
        name: name of the side, in `SIDES`.
        state: the state after the last turn.
        seconds: seconds of each turn.
        positions: number of positions that the last turn predicted.
    """

    def __init__(self, name: str, training: CentralTraining, first: State) -> None:
        self.name, self.state, self.positions = name, first, 0
        self.seconds: list[float] = []
        self._training = replace(training, hparams=replace(training.hparams, precision=SIDES[name]))
        self._engine = engine_of(self._training, first)

    def train(self, until: int) -> None:
        """Train to a step."""
        began = time.perf_counter()
        ((self.state, log),) = train_central(self.state, self._training, until, title=self.name, engine=self._engine)
        self.seconds.append(time.perf_counter() - began)
        self.positions = log.tokens


def drawn(users: int) -> Split:
    """Return all records of the first of `DrawnUsers`, as a split with one user.

    Args:
        users: number of users of 2,000 words.
    """
    parts = [DrawnUsers(users)[user] for user in range(users)]
    tokens = np.concatenate([part.tokens for part in parts])
    offsets = np.cumsum(np.concatenate([[0], *(np.diff(part.offsets) for part in parts)]))
    records = Records(tokens, offsets)
    return Split(LAYOUT, records.tokens, records.offsets, np.array([0, len(records)]), Path())


def padded_batches(training: CentralTraining, first: int, end: int) -> list[tuple[Tensor, Tensor]]:
    """Return the padded batches of the steps, as a plain loop reads them."""
    batches = []
    for step in range(first, end):
        records = training.chunk(step, step + 1).records
        padded = batch(records, np.arange(len(records)), training.records.layout)
        batches.append((torch.from_numpy(padded.inputs), torch.from_numpy(padded.targets)))
    return batches


def plain_loop(
    model: TrainableModel,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[Tensor, Tensor]],
    device: str,
) -> float:
    """Train with a plain loop over padded batches, by PyTorch and its autograd, and return its seconds."""
    began = time.perf_counter()
    for inputs, targets in batches:
        logits = model(inputs.to(device))
        loss = cross_entropy(logits.flatten(0, 1), targets.to(device).flatten(), ignore_index=LAYOUT.pad)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def distance(first: State, ours: State, model: TrainableModel) -> float:
    """Return how far our parameters are from the model's, relative to their change by training."""
    values = {name: value.detach().cpu() for name, value in model.trainable.items()}
    apart = global_norm({name: value - values[name] for name, value in ours.params.items()})
    return apart / global_norm({name: value - first.params[name] for name, value in ours.params.items()})


def _weights(model: ModelHParams) -> int:
    """Return the number of weights by which a position is multiplied: those of the cell, and those of the output."""
    return model.embedding * (2 * 3 * model.units + model.units + LAYOUT.vocabulary_size)


def _products_alone(positions: int, model: ModelHParams, like: Params) -> float:
    """Return floating-point operations per second of the six large products of a step, by the chosen library.

    Args:
        positions: number of positions that the step predicts.
        model: sizes of the model.
        like: parameters of the model; their sizes choose the library.
    """
    outputs, vocabulary = torch.ones(positions, model.embedding), torch.ones(LAYOUT.vocabulary_size, model.embedding)
    gates, weight = torch.ones(positions, 3 * model.units), torch.ones(model.embedding, 3 * model.units)
    logits, read, products = outputs @ vocabulary.T, torch.ones_like(outputs), products_for("float32", like)
    work: tuple[Callable[[], object], ...] = (
        lambda: products.multiply(outputs, vocabulary.T, logits),
        lambda: products.multiply(logits, vocabulary, read),
        lambda: products.add(logits.T, outputs, 1e-9, vocabulary),  # BLAS would skip a multiplication by 0
        lambda: products.multiply(outputs, weight, gates),
        lambda: products.multiply(gates, weight.T, read),
        lambda: products.add(outputs.T, gates, 1e-9, weight),
    )
    operations = 6 * positions * model.embedding * (LAYOUT.vocabulary_size + 3 * model.units)
    best = 0.0
    for _ in range(5):
        began = time.perf_counter()
        for product in work:
            product()
        best = max(best, operations / (time.perf_counter() - began))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--records", type=int, help="that each side reads in a turn (default: 2,048, on a GPU 32,768)")
    parser.add_argument("--precision", nargs="+", choices=get_args(Precision), default=["float32"])
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    hparams = CentralBenchHParams(tuple(chosen.batch), chosen.records, precisions=tuple(chosen.precision))
    measured = bench_central(hparams, chosen.device)
    print(json.dumps(measured, indent=2) if chosen.json else describe(measured))  # noqa: T201


if __name__ == "__main__":
    main()
