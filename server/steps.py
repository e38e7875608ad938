"""The steps of a central run, in the process that trains: what it writes, and what it tells the driver."""

import fcntl
import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from flsim.central import CentralState, CentralTraining, Log
from flsim.central.training import train_chunks
from flsim.config import CentralSystemHParams
from flsim.errors import InputError, RunFailed
from flsim.runs import Run

NEWS_EVERY = 0.5  # seconds
LOCK = ".training"  # in the run's folder: the node and the process that train it
LOCK_DEADLINE = 60.0  # seconds in which a process that trained the run before has to end


class Lost(Exception):  # noqa: N818 (an outcome)
    """A process of the training is gone; the run can go on from its newest checkpoint."""


@dataclass(frozen=True)
class News:
    """What the driver is told.

    Attributes:
        step: number of completed steps.
        loss: nats a position, since the news before.
        saved: whether there is a checkpoint of that step.
        spent: epsilons by the name of the convention, where they were computed.
    """

    step: int
    loss: float | None = None
    saved: bool = False
    spent: dict[str, float] = field(default_factory=dict)


def train(path: Path, gpus: float) -> Iterator[News]:
    """Train a run in this process, from its newest checkpoint to its last step.

    Args:
        path: the run's folder.
        gpus: share of a GPU that this process may fill.

    Raises:
        InputError: as `opened`, or no GPU where there should be one.
        Diverged: values that are not finite; names the step.
        RunFailed: another process trains the run.
    """
    run = Run.open(path)
    use(run.central.system, gpus)
    with alone(run):
        training, state = opened(run)
        yield from written(run, state, train_chunks(state, training, run.rounds, run.is_saved_at))


def opened(run: Run) -> tuple[CentralTraining, CentralState]:
    """What a central run trains, and where it goes on from. Raises InputError where it cannot."""
    training, state = run.central_training(), run.latest_state()
    if not isinstance(state, CentralState):
        raise InputError(f"{run.path}: its newest checkpoint is of federated training; start a new run")
    return training, state


def use(system: CentralSystemHParams, gpus: float) -> None:
    """Keep to a process' share of the machine."""
    torch.set_num_threads(system.threads)
    if system.device == "cuda":
        if not torch.cuda.is_available():
            raise InputError('system.device is "cuda", but torch finds no GPU on the node that Ray chose')
        torch.cuda.set_per_process_memory_fraction(min(gpus, 1.0))


@contextmanager
def alone(run: Run) -> Iterator[None]:
    """Nobody else trains the run in the block: a process whose driver died may live for a moment, and still write.

    Raises:
        RunFailed: someone does, and goes on.
    """
    with (run.path / LOCK).open("a+") as file:
        until = time.monotonic() + LOCK_DEADLINE
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    file.seek(0)
                    raise RunFailed(f"{run.path}: is trained by {file.read()}; end that process first") from None
                time.sleep(0.1)
                continue
            except OSError:
                pass  # a filesystem without locks
            break
        file.truncate(0)
        file.write(f"{socket.gethostname()}/{os.getpid()}")
        file.flush()
        yield


def written(run: Run, state: CentralState, chunks: Iterable[tuple[int, Log, CentralState | None]]) -> Iterator[News]:
    """Save and log what is trained from `state` on; every state that is saved has a line about the steps before it."""
    run.forget_rounds_after(state.step)
    spent = run.epsilons(state)
    yield News(state.step, spent=spent)
    log, unsaid = Log(), Log()
    began = last = time.monotonic()
    for step, new, reached in chunks:
        log, unsaid = log.merge(new), unsaid.merge(new)
        if reached is None and time.monotonic() - last < NEWS_EVERY:
            continue
        evaluated = reached is not None and run.is_evaluated_at(step)
        if reached is not None:
            if evaluated:  # accounting takes a second or so
                spent = run.epsilons(reached)
            now = time.monotonic()
            run.log_round(
                round=step,
                loss=_mean(log),
                records=log.records,
                record_epsilon=spent if evaluated and spent else None,
                seconds=round(now - began, 3),
            )
            run.save(reached)
            log, began = Log(), now
        yield News(step, _mean(unsaid), reached is not None, spent if evaluated else {})
        unsaid, last = Log(), time.monotonic()


def _mean(log: Log) -> float | None:
    return log.loss / log.tokens if log.tokens else None
