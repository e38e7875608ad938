"""Benchmark of the cost of syncing everything to the disk: training with syncs, and with syncs that do nothing.

Each run trains in one process, so that a round is as short as possible and syncs cost the largest share of it. Runs
with and without syncs alternate, so that other work on the machine disturbs both.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, cast

from flsim.base.errors import at_least_one
from flsim.base.progress import say
from flsim.canaries.spec import CanaryHParams
from flsim.data.synthetic import SyntheticHParams, make_synthetic
from flsim.models.hparams import ModelHParams
from flsim.runs.config import (
    CentralConfig,
    CentralSystemHParams,
    CentralTrainingHParams,
    Config,
    DataHParams,
    FederatedConfig,
    SystemHParams,
    TrainingHParams,
)
from flsim.runs.folder import Run
from flsim.training.threads import threads
from server.central import steps
from server.federated import rounds
from server.supervision import Evaluations

SMALL, PAPER = ModelHParams(embedding=32, units=128), ModelHParams()
UNIT = "a round of 4 users with 100 words each, of central training a step of 16 records; V = 10,000"


@dataclass(frozen=True)
class DurabilityHParams:
    """Settings of the benchmark.

    Attributes:
        rounds: number of rounds of each run; of steps in central training.
        pairs: number of runs with and without syncs, for each figure.
        checkpoint_every: rounds between two checkpoints; several values are compared.
        models: sizes of the models, by name.
        vocabulary_size: V.
    """

    rounds: int = 10
    pairs: int = 3
    checkpoint_every: Sequence[int] = (1, 10)
    models: dict[str, ModelHParams] = field(default_factory=lambda: {"small": SMALL, "paper": PAPER})
    vocabulary_size: int = 10_000

    def __post_init__(self) -> None:
        at_least_one(rounds=self.rounds, pairs=self.pairs)


def bench_durability(hparams: DurabilityHParams = DurabilityHParams()) -> dict[str, Any]:
    """Train each kind of run with and without syncs, in pairs.

    Returns:
        ``figures``, each with ``training``, ``model``, ``checkpoint_every``, the medians of ``seconds`` of a round with
        syncs and of ``ratio`` to a round without; ``syncs`` per round, and the median ``seconds_in_syncs``; the
        ``unit`` of work.
    """
    figures = []
    with tempfile.TemporaryDirectory(prefix="flsim-bench-") as name:
        users = SyntheticHParams(users=20, words_per_user=100, vocabulary_size=hparams.vocabulary_size, test_users=1)
        corpus = make_synthetic(Path(name) / "corpus", users, seed=0).path
        for training in ("federated", "central"):
            for model, sizes in hparams.models.items():
                for every in hparams.checkpoint_every:
                    say(f"{training}, {model}, a checkpoint every {every}")
                    settings = _settings(training, corpus, sizes, hparams.rounds, every)
                    with tempfile.TemporaryDirectory(dir=name) as runs:
                        figure = _compare(settings, Path(runs), hparams)
                    figures.append({"training": training, "model": model, "checkpoint_every": every, **figure})
    return {"figures": figures, "unit": UNIT}


def describe(measured: dict[str, Any]) -> str:
    """Return the results as text."""
    lines = [f"unit: {measured['unit']}"]
    for figure in measured["figures"]:
        lines.append(
            f"{figure['training']:<10} {figure['model']:<6} checkpoint every {figure['checkpoint_every']:>2}: "
            f"{1000 * figure['seconds']:7.1f} ms a round, {1000 * figure['seconds_in_syncs']:5.1f} ms in "
            f"{figure['syncs']:.1f} syncs, {figure['ratio']:.2f} times one without"
        )
    return "\n".join(lines)


def _compare(settings: Config, folder: Path, hparams: DurabilityHParams) -> dict[str, float]:
    seconds: dict[bool, list[float]] = {True: [], False: []}
    spent, syncs = list[float](), 0
    _train(settings, folder / "warm-up")
    for pair in range(hparams.pairs):
        for is_synced in (True, False) if pair % 2 else (False, True):
            with _syncs(is_synced) as waits:
                took = _train(settings, folder / f"run-{pair}-{is_synced}", waits)
            seconds[is_synced].append(took / hparams.rounds)
            if is_synced:
                spent.append(sum(waits) / hparams.rounds)
                syncs = len(waits)
    return {
        "seconds": median(seconds[True]),
        "ratio": median(with_ / without for with_, without in zip(seconds[True], seconds[False], strict=True)),
        "seconds_in_syncs": median(spent),
        "syncs": syncs / hparams.rounds,
    }


@contextmanager
def _syncs(are_done: bool) -> Iterator[list[float]]:
    """Replace `os.fsync` in the block by a timed version, or by one that does nothing, and yield the calls' seconds."""
    sync, waits = os.fsync, list[float]()

    def timed(descriptor: Any) -> None:
        began = time.perf_counter()
        if are_done:
            sync(descriptor)
        waits.append(time.perf_counter() - began)

    os.fsync = timed  # type: ignore[assignment]
    try:
        yield waits
    finally:
        os.fsync = sync


def _settings(training: str, corpus: Path, model: ModelHParams, rounds: int, every: int) -> Config:
    data, canaries = DataHParams(corpus), CanaryHParams(p_u=(0.1,), p_e=(0.1,), count=1)
    if training == "federated":
        return FederatedConfig(
            data,
            canaries=canaries,
            model=model,
            training=TrainingHParams(rounds=rounds, cohort=4),
            system=SystemHParams(shards=1, checkpoint_every=every, tracking=()),
        )
    return CentralConfig(
        data,
        canaries=canaries,
        model=model,
        training=CentralTrainingHParams(steps=rounds, batch_size=16, learning_rate=0.1),
        system=CentralSystemHParams(checkpoint_every=every, tracking=()),
    )


class _NoEvaluations:
    """Substitute for `server.supervision.Evaluations` that evaluates no checkpoint."""

    complaint = None

    def submit(self, path: Path) -> None:
        """Ignore the checkpoint."""

    def poll(self) -> None:
        """Return at once, because no evaluation runs."""


def _train(settings: Config, path: Path, waits: list[float] | None = None) -> float:
    """Train all rounds of a new run, and return their seconds, with the files that a run writes."""
    run = Run.create(settings, path)
    if waits is not None:
        waits.clear()  # the folder is made once
    began = time.perf_counter()
    if isinstance(settings, FederatedConfig):
        _train_rounds(run)
    else:
        for news in steps.train(run.path, 0.0):
            if news.saved:
                run.mark("running")  # as the driver does
    return time.perf_counter() - began


def _train_rounds(run: Run) -> None:
    send = run.federated.training_of(run.users, run.rounds).send_in_process()
    with threads(1):
        state = run.latest_state()
        rounds.train_rounds(run, state, send, cast(Evaluations, _NoEvaluations()))
