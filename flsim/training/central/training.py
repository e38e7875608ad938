"""Central training as a sequence of steps, each a function of (seed, step) and the state before it."""

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from flsim.base.errors import Diverged, InputError
from flsim.base.progress import progress
from flsim.models.language_model import Params
from flsim.training.central.engines import engine_of
from flsim.training.central.state import Log, init
from flsim.training.central.task import CentralTask, Engine
from flsim.training.cohort.prefetch import ahead
from flsim.training.divergence import refuse_absurd_loss
from flsim.training.state import State

CHUNK = 2_048  # records that are read at once


@dataclass(frozen=True)
class CentralTraining(CentralTask):
    """Central training of records: the settings, and the loop of steps. See `flsim.algorithms.training.Training`."""

    def first_state(self) -> State:
        """The state before the first step. Raises InputError where the settings name no model."""
        if self.model is None:
            raise InputError("the settings of central training name no model; give it `model`")
        return init(self.records.layout.vocabulary_size, self.model, self.seed)

    def states(self, state: State, until: int, is_wanted: Callable[[int], bool] = lambda _: True) -> Iterator[State]:
        """Train to step `until`, and hand out the states that are wanted after so many steps, and the last one."""
        for _, _, reached in train_chunks(state, self, until, is_wanted):
            if reached is not None:
                yield reached


def train_central(
    state: State,
    training: CentralTraining,
    until_step: int,
    stop_at: Callable[[int], bool] = lambda _: False,
    title: str = "training",
) -> Iterator[tuple[State, Log]]:
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
        progress(title, until_step, state.round, unit="steps") as advance,
        closing(train_chunks(state, training, until_step, stop_at)) as chunks,
    ):
        for step, new, reached in chunks:
            log = log.merge(new)
            advance(step, f"loss {new.loss / max(new.tokens, 1):.2f}")
            if reached is not None:
                yield reached, log
                log = Log()


def train_chunks(
    state: State,
    training: CentralTraining,
    until_step: int,
    stop_at: Callable[[int], bool] = lambda _: False,
    engine: Engine | None = None,
) -> Generator[tuple[int, Log, State | None]]:
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
    if state.round >= until_step:
        return
    engine, ledger = engine or engine_of(training, state), state.ledger
    with closing(ahead(_packed(engine, training, state.round, until_step, stop_at))) as chunks:
        for first, counts, packed in chunks:
            losses, tokens = engine.train(packed)
            _refuse_divergence(first, losses, tokens, training.records.layout.vocabulary_size)
            step, log = first + len(counts), Log(sum(losses), sum(tokens), int(counts.sum()))
            ledger = ledger.record(training.released_by(len(counts)))
            reached = None
            if step == until_step or stop_at(step):
                params = engine.params()
                _refuse_non_finite(step, params)
                reached = replace(state, round=step, params=params, moments=engine.moments(), ledger=ledger)
            yield step, log, reached


def _packed(
    engine: Engine, training: CentralTask, first: int, until_step: int, stop_at: Callable[[int], bool]
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
