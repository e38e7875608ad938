"""Evaluation beside training: a Ray actor that works off a queue of checkpoints, one at a time, in order."""

import os
import time
from collections import deque
from collections.abc import Callable, Sized
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from flsim.errors import Diverged, InputError, RunFailed

RETRIES = 3  # of an evaluation whose process died: more, and one that needs too much memory would go on for ever
NICENESS = 5  # training goes first

Work = Callable[[str], Sized]


class _Evaluator:
    """The actor: applies the work to one checkpoint after another."""

    def __init__(self, work: Work, num_gpus: float) -> None:
        os.nice(NICENESS)
        if not num_gpus:
            torch.set_num_threads(1)
        self._work = work

    def evaluate(self, checkpoint: str) -> int:
        return len(self._work(checkpoint))


class EvaluationService:
    """Evaluates checkpoints while training goes on; the caller never waits before `drain`.

    The actor starts with the first submission. Where its process dies it is started again, and what it was working on
    is done again; so the work must store what it finds, and storing it twice must change nothing.

    The queue is held here, and the actor gets the next checkpoint when a call sees that it has finished one: Ray keeps
    no order among the tasks that it retries on a restarted actor.

    >>> service = EvaluationService(functools.partial(evaluate_checkpoint, run_folder))     # doctest: +SKIP
    >>> service.submit(checkpoint); service.poll(); service.drain(timeout=3600)             # doctest: +SKIP
    """

    def __init__(self, work: Work, num_gpus: float = 0) -> None:
        """Nothing starts yet.

        Args:
            work: takes a checkpoint's path and returns its rows, of which only the number comes back. A function that
                other processes can import, or a `functools.partial` of one.
            num_gpus: GPUs that the actor holds, to be left over by the clients; with 0 it runs on one CPU thread.
        """
        self._work, self._num_gpus = work, num_gpus
        self._actor: Any = None
        self._waiting: deque[Path] = deque()
        self._running: tuple[Path, Any] | None = None

    @property
    def pending(self) -> int:
        """Submissions whose outcome no `poll` or `drain` has seen."""
        return len(self._waiting) + (self._running is not None)

    def submit(self, checkpoint: Path) -> None:
        """Queue a checkpoint; returns at once.

        Raises:
            RunFailed: Ray is not initialised.
        """
        if self._actor is None:
            self._actor = self._start()
        self._waiting.append(checkpoint)
        if self._running is None:
            self._run_next()

    def poll(self) -> int:
        """The number of rows of evaluations that finished since the last look; does not wait.

        Raises:
            Diverged: the model of a checkpoint has values that are not finite.
            RunFailed: an evaluation failed; names the checkpoint and the cause.
        """
        rows = 0
        while self._running is not None and ray.wait([self._running[1]], timeout=0)[0]:
            rows += self._collect(*self._running, None)
        return rows

    def drain(self, timeout: float) -> int:
        """As `poll`, once all evaluations have finished.

        Args:
            timeout: seconds to wait at most, for all of them together.

        Raises:
            Diverged: as `poll`.
            RunFailed: as `poll`, or the time is over.
        """
        deadline = time.monotonic() + timeout
        rows = 0
        while self._running is not None:
            rows += self._collect(*self._running, max(0.0, deadline - time.monotonic()))
        return rows

    def close(self) -> None:
        """Stop the actor, and forget what is pending."""
        if self._actor is not None:
            ray.kill(self._actor)
        self._actor = self._running = None
        self._waiting.clear()

    def _start(self) -> Any:
        if not ray.is_initialized():
            raise RunFailed("evaluation needs Ray, which is not initialised in this process")
        # num_cpus=0: Flower sizes its client pool from all CPUs of the cluster, whatever else holds them. An actor that
        # held one would leave a client of that pool pending for ever.
        options = {"num_cpus": 0, "num_gpus": self._num_gpus, "max_restarts": -1, "max_task_retries": RETRIES}
        return ray.remote(_Evaluator).options(**options).remote(self._work, self._num_gpus)

    def _run_next(self) -> None:
        self._running = None
        if self._waiting:
            checkpoint = self._waiting.popleft()
            self._running = checkpoint, self._actor.evaluate.remote(str(checkpoint))

    def _collect(self, checkpoint: Path, reply: Any, timeout: float | None) -> int:
        """Wait for what is running, then let the next one run, whatever came out."""
        try:
            rows = int(ray.get(reply, timeout=timeout))
        except GetTimeoutError:
            raise RunFailed(f"the evaluation of {checkpoint.name} did not finish in time") from None
        except RayError as error:
            self._run_next()
            cause = error.cause if isinstance(error, RayTaskError) else error
            kind = Diverged if isinstance(cause, Diverged) else RunFailed
            raise kind(f"the evaluation of {checkpoint.name} failed: {_said(cause)}") from error
        self._run_next()
        return rows


def _said(error: BaseException) -> str:
    """One line: what an exception says, and of which type it is unless it is one of ours."""
    text = " ".join(str(error).split())
    return text if isinstance(error, (InputError, RunFailed)) else f"{type(error).__name__}: {text}"
