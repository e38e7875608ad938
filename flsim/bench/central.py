"""Benchmark `flsim bench central`: records per second of central training, beside a plain PyTorch loop.

Both train the same steps. The benchmark needs only torch, numpy and rich, and draws its records itself. It also runs as
`python -m flsim.bench.central`.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from flsim.base.errors import RunFailed
from flsim.base.progress import say
from flsim.bench.engine import LAYOUT, DrawnUsers
from flsim.data.corpus import Split
from flsim.data.records import Records, batch
from flsim.models.cifg import CIFGLanguageModel
from flsim.models.hparams import ModelHParams
from flsim.training.central import CentralHParams, CentralTraining, init, train_central
from flsim.training.clip import global_norm
from flsim.training.state import State

PAPER_STEPS = 37_500_000
FAR = 0.01  # of what training changed: beyond it two sides have not done the same


@dataclass(frozen=True)
class CentralBenchHParams:
    """Settings of the benchmark.

    Attributes:
        batch_sizes: batch sizes to measure, one after another.
        records: records that each side reads in a turn, which sets the number of steps.
        turns: number of turns of each side. Sides alternate, so that a noisy machine disturbs both; the first turn is
            left out.
        threads: torch threads on a CPU.
        model: sizes of the model.
        users: number of users of 2,000 words, who have the records.
    """

    batch_sizes: tuple[int, ...] = (32, 256)
    records: int = 2_048
    turns: int = 4
    threads: int = 2
    model: ModelHParams = field(default_factory=ModelHParams)
    users: int = 100


def bench_central(hparams: CentralBenchHParams = CentralBenchHParams(), device: str = "cpu") -> dict[str, Any]:
    """Measure central training and the plain loop.

    Returns:
        ``records_per_second`` by batch size, of "ours" (with reading and packing) and of "plain" (with batches made
        before); their ``ratio``; ``distance`` of their final models, relative to the change by training;
        ``hours_of_the_paper``, of 37.5 million steps at the smallest batch size; ``products``: on a CPU, floating-point
        operations per second of our training, and of matrix products of its shapes alone; ``device``, ``threads``.

    Raises:
        RunFailed: the final models differ.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(hparams.threads)
    try:
        records = _drawn(hparams.users)
        measured = {str(size): _measure(records, size, hparams, device) for size in hparams.batch_sizes}
    finally:
        torch.set_num_threads(threads)
    smallest = measured[str(min(hparams.batch_sizes))]["records_per_second"]["ours"] / min(hparams.batch_sizes)
    return {
        **{what: {size: row[what] for size, row in measured.items()} for what in next(iter(measured.values()))},
        "hours_of_the_paper": PAPER_STEPS / smallest / 3600,
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
        lines.append(
            f"batch {size:>4}: {rates['ours']:9,.0f} records/s, plain loop {rates['plain']:9,.0f}: "
            f"{measured['ratio'][size]:.2f} times"
        )
        if done := measured["products"].get(size):
            lines.append(f"{'':12}{done['training'] / 1e9:.0f} GFLOP/s; products alone {done['alone'] / 1e9:.0f}")
    return "\n".join([*lines, f"37.5 million steps would take {measured['hours_of_the_paper']:,.1f} hours"])


def _measure(records: Split, size: int, hparams: CentralBenchHParams, device: str) -> dict[str, Any]:
    say(f"central: batch {size}")
    steps = -(-hparams.records // size)
    training = CentralTraining(records, CentralHParams(batch_size=size), 0, device=device)
    ours = init(records.layout.vocabulary_size, hparams.model, 0)
    first, model = ours, CIFGLanguageModel.from_params(ours.params).to(device)
    optimizer = torch.optim.SGD(model.parameters(), training.rate(0))
    seconds: dict[str, list[float]] = {"ours": [], "plain": []}
    positions = 0
    for turn in range(hparams.turns):
        began = time.perf_counter()
        ((ours, log),) = train_central(ours, training, steps * (turn + 1), title=f"batch {size}")
        seconds["ours"].append(time.perf_counter() - began)
        batches = _batches(training, steps * turn, steps * (turn + 1))
        seconds["plain"].append(_plain_loop(model, optimizer, batches, device))
        positions = log.tokens if turn == hparams.turns - 1 else positions
    distance = _distance(first, ours, model)
    if not distance < FAR:
        raise RunFailed(f"batch {size}: the plain loop came to another model: {distance:.1%} of the way off")
    rates = {name: size * steps * (hparams.turns - 1) / sum(times[1:]) for name, times in seconds.items()}
    products = {}
    if device == "cpu":
        per_step = positions / steps
        done = 6 * _weights(hparams.model) * positions / seconds["ours"][-1]
        products = {"training": done, "alone": _products_alone(round(per_step), hparams.model)}
    return {
        "records_per_second": rates,
        "ratio": rates["ours"] / rates["plain"],
        "distance": distance,
        "products": products,
    }


def _drawn(users: int) -> Split:
    """Return all records of some users, as a split with one user."""
    parts = [DrawnUsers(users)[user] for user in range(users)]
    tokens = np.concatenate([part.tokens for part in parts])
    offsets = np.cumsum(np.concatenate([[0], *(np.diff(part.offsets) for part in parts)]))
    records = Records(tokens, offsets)
    return Split(LAYOUT, records.tokens, records.offsets, np.array([0, len(records)]), Path())


def _batches(training: CentralTraining, first: int, end: int) -> list[tuple[Tensor, Tensor]]:
    """Return the padded batches of the steps, as a plain loop reads them."""
    batches = []
    for step in range(first, end):
        records = training.chunk(step, step + 1).records
        padded = batch(records, np.arange(len(records)), LAYOUT)
        batches.append((torch.from_numpy(padded.inputs), torch.from_numpy(padded.targets)))
    return batches


def _plain_loop(
    model: CIFGLanguageModel,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[Tensor, Tensor]],
    device: str,
) -> float:
    """Train with a plain loop, and return its seconds."""
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


def _distance(first: State, ours: State, model: CIFGLanguageModel) -> float:
    theirs = {name: value.detach().cpu() for name, value in model.named_parameters()}
    apart = global_norm({name: value - theirs[name] for name, value in ours.params.items()})
    return apart / global_norm({name: value - first.params[name] for name, value in ours.params.items()})


def _weights(model: ModelHParams) -> int:
    """Return the number of weights that a position is multiplied by: the cell's, and the output's."""
    return model.embedding * (2 * 3 * model.units + model.units + LAYOUT.vocabulary_size)


def _products_alone(positions: int, model: ModelHParams) -> float:
    """Return floating-point operations per second of the six large products of a step over some positions."""
    outputs, vocabulary = torch.ones(positions, model.embedding), torch.ones(LAYOUT.vocabulary_size, model.embedding)
    gates, weight = torch.ones(positions, 3 * model.units), torch.ones(model.embedding, 3 * model.units)
    logits = outputs @ vocabulary.T
    work: tuple[Callable[[], Tensor], ...] = (
        lambda: torch.mm(outputs, vocabulary.T, out=logits),
        lambda: logits @ vocabulary,
        lambda: vocabulary.addmm_(logits.T, outputs, alpha=1e-9),  # BLAS would skip a product times 0
        lambda: torch.mm(outputs, weight, out=gates),
        lambda: gates @ weight.T,
        lambda: weight.addmm_(outputs.T, gates, alpha=1e-9),
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
    parser.add_argument("--records", type=int, default=2_048, help="that each side reads in a turn")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    hparams = replace(CentralBenchHParams(), batch_sizes=tuple(chosen.batch), records=chosen.records)
    measured = bench_central(hparams, chosen.device)
    print(json.dumps(measured, indent=2) if chosen.json else describe(measured))  # noqa: T201


if __name__ == "__main__":
    main()
