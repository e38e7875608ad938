"""Central training as a sequence of steps, each a function of (seed, step) and the state before it."""

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flsim.central.engines import Chunk, Engine, EngineName, engine_of
from flsim.central.hparams import CentralHParams
from flsim.central.state import CentralState, Log
from flsim.data.records import RecordSource
from flsim.errors import Diverged, InputError, at_least_one
from flsim.model.hparams import Architecture, ModelHParams
from flsim.model.language_model import Params
from flsim.privacy.ledger import Entry
from flsim.privacy.mechanism import PrivacyHParams
from flsim.progress import progress
from flsim.train.cohort.ahead import ahead
from flsim.train.divergence import refuse_absurd_loss
from flsim.train.records import Order, poisson_lot, positions_at

CHUNK = 2_048  # records that are read at once


@dataclass(frozen=True)
class CentralTraining:
    """What training needs besides the state.

    Attributes:
        records: of all users.
        hparams: training.
        seed: the experiment's; batches, lots, dropout and noise are functions of (seed, step).
        order: "iid" permutes all records anew each epoch; "sequence" goes user by user, each epoch the same way.
        privacy: mechanism "none" is plain training; "clip" and "dp" are DP-SGD, a record in the place of a user.
        steps: of the whole training, at whose end a schedule ends; None for what hparams.epochs or hparams.steps say.
        device: of torch, where training is.
        engine: see `flsim.central.engines.engine_of`.
        physical_batch: under DP-SGD, records whose gradients are in memory at a time.
        model: of the states that it trains; None for a CIFG of whatever sizes.

    Raises:
        InputError: there are no records, or what DP-SGD over records cannot do is asked for.
    """

    records: RecordSource
    hparams: CentralHParams
    seed: int
    order: Order = "iid"
    privacy: PrivacyHParams = field(default_factory=PrivacyHParams)
    steps: int | None = None
    device: str = "cpu"
    engine: EngineName = "fused"
    physical_batch: int = 8
    model: ModelHParams | None = None

    def __post_init__(self) -> None:
        at_least_one(physical_batch=self.physical_batch)
        if not self.records.records:
            raise InputError("there are no training records; import a corpus whose train split has users")
        if self.privacy.mechanism == "none":
            return
        if self.order == "sequence":
            raise InputError('order "sequence" has no privacy accounting; with clip or noise use order "iid"')
        if self.privacy.target_quantile is not None:
            raise InputError("target_quantile adapts the clip of users' updates; central training has a fixed clip")
        for name in ("gradient_clip", "dropout"):
            if getattr(self.hparams, name):
                raise InputError(f"{name} is not for DP-SGD, which clips each record's gradient; remove it")
        poisson_lot(0, self.records.records, self.hparams.batch_size, self.seed)

    @property
    def architecture(self) -> Architecture:
        return "cifg" if self.model is None else self.model.architecture

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 0."""
        return self.hparams.rate(step, self.steps or self.hparams.steps_over(self.records.records))

    def chunk(self, first: int, end: int) -> Chunk:
        """What the steps from `first` on, from 0, and before `end` read."""
        size, records = self.hparams.batch_size, self.records.records
        if self.privacy.mechanism == "none":
            chosen = [positions_at(step, records, size, self.order, self.seed) for step in range(first, end)]
        else:
            chosen = [poisson_lot(step, records, size, self.seed) for step in range(first, end)]
        return Chunk(first, self.records.records_at(np.concatenate(chosen)), np.array([len(each) for each in chosen]))

    def released_by(self, steps: int) -> Entry:
        """Without noise there is no bound, however records were drawn; no entry would say that nothing was released."""
        records, size = self.records.records, self.hparams.batch_size
        if self.privacy.mechanism == "none":
            return Entry("fixed-size", records, min(size, records), noise_multiplier=0.0, rounds=steps)
        return Entry("poisson", records, size, self.privacy.noise_multiplier, rounds=steps)


def train_central(
    state: CentralState,
    training: CentralTraining,
    until_step: int,
    stop_at: Callable[[int], bool] = lambda _: False,
    title: str = "training",
) -> Iterator[tuple[CentralState, Log]]:
    """Train, and hand out the state where it is asked for: save or evaluate it there, or leave the loop.

    Args:
        state: where to go on from; it stays as it is.
        training: what to do.
        until_step: the last step.
        stop_at: whether to hand out the state after that many steps; the last one always is.
        title: of the progress that is shown.

    Yields:
        The state, on the CPU, and the log of the steps since the one before.

    Raises:
        Diverged: as `train_chunks`.
    """
    log = Log()
    with (
        progress(title, until_step, state.step, unit="steps") as advance,
        closing(train_chunks(state, training, until_step, stop_at)) as chunks,
    ):
        for step, new, reached in chunks:
            log = log.merge(new)
            advance(step, f"loss {new.loss / max(new.tokens, 1):.2f}")
            if reached is not None:
                yield reached, log
                log = Log()


def train_chunks(
    state: CentralState,
    training: CentralTraining,
    until_step: int,
    stop_at: Callable[[int], bool] = lambda _: False,
    engine: Engine | None = None,
) -> Generator[tuple[int, Log, CentralState | None]]:
    """As `train_central`, without a word; what happens in between is handed out too.

    Records are read and packed ahead, in a thread of their own.

    Args:
        state, training, until_step, stop_at: as there.
        engine: one that holds the state; by default the one that the training asks for.

    Yields:
        The number of completed steps, the log of those since the one before, and where it is asked for the state.

    Raises:
        Diverged: a loss or the parameters of a state are not finite, or a loss is absurd; names the step.
    """
    if state.step >= until_step:
        return
    engine, ledger = engine or engine_of(training, state), state.ledger
    with closing(ahead(_packed(engine, training, state.step, until_step, stop_at))) as chunks:
        for first, counts, packed in chunks:
            losses, tokens = engine.train(packed)
            _refuse_divergence(first, losses, tokens, training.records.layout.vocabulary_size)
            step, log = first + len(counts), Log(sum(losses), sum(tokens), int(counts.sum()))
            ledger = ledger.record(training.released_by(len(counts)))
            reached = None
            if step == until_step or stop_at(step):
                params = engine.params()
                _refuse_non_finite(step, params)
                reached = replace(state, step=step, params=params, moments=engine.moments(), ledger=ledger)
            yield step, log, reached


def _packed(
    engine: Engine, training: CentralTraining, first: int, until_step: int, stop_at: Callable[[int], bool]
) -> Iterator[tuple[int, Any, Any]]:
    """Chunks as (first step, records of each step, what the engine takes); one ends wherever a state is asked for."""
    at_once = max(1, CHUNK // training.hparams.batch_size)
    while first < until_step:
        end = first + 1
        while end < min(first + at_once, until_step) and not stop_at(end):
            end += 1
        chunk = training.chunk(first, end)
        yield first, chunk.counts, engine.pack(chunk)
        first = end


def _refuse_divergence(first: int, losses: Any, tokens: Any, vocabulary_size: int) -> None:
    for step, (loss, count) in enumerate(zip(losses, tokens, strict=True), start=first + 1):
        if not math.isfinite(loss):
            raise Diverged(f"step {step}: a loss that is not finite; most likely learning_rate is too high")
        refuse_absurd_loss(f"step {step}", loss, count, vocabulary_size, "learning_rate")


def _refuse_non_finite(step: int, params: Params) -> None:
    if not all(bool(value.isfinite().all()) for value in params.values()):
        raise Diverged(f"step {step}: values that are not finite; most likely learning_rate is too high")
