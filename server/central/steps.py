"""The steps of a central run, in the training process: checkpoints and log, and news for the driver."""

import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from flsim.algorithms.checkpoint import digest_of
from flsim.base.errors import InputError, Interrupted
from flsim.base.extensions import custom_code_errors
from flsim.runs import roundlog
from flsim.runs.config import CentralSystemHParams
from flsim.runs.folder import Run
from flsim.runs.locks import hold_lock
from flsim.training.central import CentralTraining, Log
from flsim.training.central.training import train_chunks
from flsim.training.state import State
from server.metrics import RoundMetrics
from server.stopping import StopFile

NEWS_EVERY = 0.5  # seconds between two news


class Lost(Exception):  # noqa: N818 (an outcome)
    """A training process was lost; the run can be resumed from its newest checkpoint."""


@dataclass(frozen=True)
class News:
    """Progress of the training process, for the driver.

    Attributes:
        step: number of completed steps.
        loss: nats a position, since the last news.
        saved: whether there is a checkpoint of this step.
        spent: epsilons by the name of the convention, where they were computed.
    """

    step: int
    loss: float | None = None
    saved: bool = False
    spent: dict[str, float] = field(default_factory=dict)


def train(path: Path, gpus: float) -> Generator[News]:
    """Train a run in this process, from its newest checkpoint to its last step.

    Args:
        path: the run's folder.
        gpus: share of a GPU that this process may fill.

    Yields:
        News for the driver.

    Raises:
        InputError: see `opened`; or there is no GPU where the settings ask for one.
        Diverged: values are not finite; the message names the step.
        Interrupted: the driver asked for the end; there is a checkpoint.
        RunFailed: another process trains the run, or a user's own code failed.
    """
    run, stop = Run.open(path), StopFile(path)
    _use(run.central.system, gpus)
    with hold_lock(run), custom_code_errors():
        training, state = opened(run)
        chunks = train_chunks(state, training, run.rounds, run.is_saved_at, ends_early=stop)
        yield from written(run, state, chunks)


def opened(run: Run) -> tuple[CentralTraining, State]:
    """Return a central run's training and the state to continue from; raise InputError where it cannot be trained."""
    return run.central.training_of(run.users, run.rounds), run.latest_state()


def _use(system: CentralSystemHParams, gpus: float) -> None:
    """Restrict this process to its share of the machine; raise InputError if the settings ask for a GPU it lacks."""
    torch.set_num_threads(system.threads)
    if system.device == "cuda":
        if not torch.cuda.is_available():
            raise InputError('system.device is "cuda", but torch finds no GPU on the node that Ray chose')
        torch.cuda.set_per_process_memory_fraction(min(gpus, 1.0))


def written(run: Run, state: State, chunks: Iterable[tuple[int, Log, State | None]]) -> Iterator[News]:
    """Save and log the training from `state` on; every saved state has a line about the steps before it.

    Yields:
        News for the driver.

    Raises:
        Interrupted: training ended before the last step, after a saved state, as the driver asked.
    """
    roundlog.settle(run.path, state.round, run.has_a_line_per_round)
    spent, metrics = run.epsilons(state), RoundMetrics(run)
    yield News(state.round, spent=spent)
    log, unsaid, since = Log(), Log(), state.round
    began = last = time.monotonic()
    for step, new, reached in chunks:
        log, unsaid = log.merge(new), unsaid.merge(new)
        if reached is None and time.monotonic() - last < NEWS_EVERY:
            continue
        evaluated = reached is not None and run.is_evaluated_at(step)
        if reached is not None:
            if evaluated:  # otherwise accounting, which takes about a second, is skipped
                spent = run.epsilons(reached)
            line = run.log_round(
                round=step,
                since=since,
                loss=_mean(log),
                records=log.records,
                record_epsilon=spent if evaluated and spent else None,
                seconds=round(time.monotonic() - began, 3),
                digest=digest_of(reached),
            )
            metrics.report(line)
            run.save(reached)
            log, since = Log(), step
        yield News(step, _mean(unsaid), reached is not None, spent if evaluated else {})
        if reached is not None:
            began = time.monotonic()  # without an evaluation in this process
        unsaid, last = Log(), time.monotonic()
    if since < run.rounds:
        raise Interrupted


def _mean(log: Log) -> float | None:
    return log.loss / log.tokens if log.tokens else None
