"""Central training as a sequence of steps; each is a function of (seed, step) and the state before it."""

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from flsim.base.errors import Diverged, InputError
from flsim.base.progress import progress
from flsim.training.central.engines import engine_of
from flsim.training.central.task import CentralTask, Engine, Log, init
from flsim.training.local import prefetched
from flsim.training.state import State, refuse_absurd_loss

CHUNK = 2_048  # number of records to read together
NOT_FINITE = "{} not finite; most likely learning_rate is too high"


@dataclass(frozen=True)
class CentralTraining(CentralTask):
    """The settings of central training and the loop of steps; a `flsim.training.state.Training`."""

    def first_state(self) -> State:
        """Return the state before the first step; raise InputError if the settings name no model."""
        if self.model is None:
            raise InputError("the settings of central training have no model; pass `model`")
        return init(self.records.layout.vocabulary_size, self.model, self.seed)

    def states(self, state: State, until: int, is_wanted: Callable[[int], bool] = lambda _: True) -> Iterator[State]:
        """Train to step `until`; yield the last state, and each state whose step satisfies `is_wanted`."""
        for _, _, reached in train_chunks(state, self, until, is_wanted):
            if reached is not None:
                yield reached


def train_central(
    state: State,
    training: CentralTraining,
    until_step: int,
    stop_at: Callable[[int], bool] = lambda _: False,
    title: str = "training",
    engine: Engine | None = None,
) -> Iterator[tuple[State, Log]]:
    """Train, and yield states on the CPU, with the log since the previous one; leaving the loop ends training.

    The state after step `until_step` is always yielded, others if `stop_at` is true for their step. Raises Diverged.
    """
    log = Log()
    with (
        progress(title, until_step, state.round, unit="steps") as advance,
        closing(train_chunks(state, training, until_step, stop_at, engine)) as chunks,
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
    ends_early: Callable[[], bool] = lambda: False,
) -> Generator[tuple[int, Log, State | None]]:
    """Train like `train_central`, without display, and also yield between states: step, log, and None or the state.

    `stop_at` is a function of the number of steps only. `ends_early` is called once after each chunk of steps, while a
    thread packs the next records. Diverged, with the step, if values are not finite, or a loss is implausibly large.
    """
    if state.round >= until_step:
        return
    engine, ledger = engine or engine_of(training, state), state.ledger
    with closing(prefetched(_packed(engine, training, state.round, until_step, stop_at))) as chunks:
        for first, counts, packed in chunks:
            losses, tokens = engine.train(packed)
            _refuse_divergence(first, losses, tokens, training.records.layout.vocabulary_size)
            step, log = first + len(counts), Log(sum(losses), sum(tokens), int(counts.sum()))
            ledger = ledger.record(training.released_by(len(counts)))
            reached, is_end = None, ends_early() or step == until_step
            if is_end or stop_at(step):
                params = engine.params()
                if not all(bool(value.isfinite().all()) for value in params.values()):
                    raise Diverged(f"step {step}: {NOT_FINITE.format('values that are')}")
                reached = replace(state, round=step, params=params, moments=engine.moments(), ledger=ledger)
            yield step, log, reached
            if is_end:
                return


def _packed(
    engine: Engine, training: CentralTask, first: int, until_step: int, stop_at: Callable[[int], bool]
) -> Iterator[tuple[int, Any, Any]]:
    """Yield chunks as (first step, records of each step, packed chunk); a chunk ends when a state is yielded."""
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
            raise Diverged(f"step {step}: {NOT_FINITE.format('a loss that is')}")
        refuse_absurd_loss(f"step {step}", loss, count, vocabulary_size, "learning_rate")
