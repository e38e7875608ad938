"""Evaluation beside training: a pool of Ray actors that work off a bounded queue of checkpoints, of one run or several.

A checkpoint is on disk before it is submitted, and its rows are there once it is evaluated, whole. So whatever dies,
nothing is lost that cannot be found again (`Run.unevaluated`), and what is done twice changes nothing.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import RLock
from typing import Any

import ray
import torch
from ray.exceptions import RayError, RayTaskError

from flsim.base.errors import Diverged, InputError, RunFailed, at_least_one, is_out_of_memory
from flsim.base.progress import say
from flsim.results.evaluations import Evaluation, Outcome, log_evaluation
from server.cluster.causes import death, said

NICENESS = 5  # training goes first: with the 15 of any process of Ray it makes 19, the lowest priority there is
START_DEADLINE = 600.0  # seconds until a new process runs: it may have to wait for its share of a GPU
LOOK = 1.0  # seconds between two looks at the clock while nothing ends

Work = Callable[[Path, Path], object]


@dataclass(frozen=True)
class ServiceHParams:
    """How checkpoints are worked off.

    Attributes:
        evaluators: processes.
        num_gpus: GPUs that each of them holds, to be left over by the clients; may be a fraction. With 0 each runs on
            one CPU thread.
        queue: checkpoints of a run that the service holds at most, those included whose outcome was not asked for yet.
        deadline: seconds for an attempt; who takes longer is killed.
        retries: of a checkpoint whose process died, was killed, or ran out of memory.
    """

    evaluators: int = 1
    num_gpus: float = 0.0
    queue: int = 100
    deadline: float = 6 * 3600.0
    retries: int = 3

    def __post_init__(self) -> None:
        at_least_one(evaluators=self.evaluators, queue=self.queue)
        if not self.deadline > 0:
            raise InputError(f"deadline must be above 0 seconds, found {self.deadline}")
        if self.retries < 0 or self.num_gpus < 0:
            raise InputError(f"retries and num_gpus must not be negative, found {self.retries} and {self.num_gpus}")


class _Evaluator:
    """The actor: applies the work to one checkpoint after another."""

    def __init__(self, work: Work, num_gpus: float) -> None:
        os.nice(NICENESS)
        if not num_gpus:
            torch.set_num_threads(1)
        self._work, self._spent = work, 0.0

    def ready(self) -> None:
        """Return once the process runs."""

    def evaluate(self, run: Path, checkpoint: Path) -> tuple[float, float, float]:
        """Seconds it took, when it ended, and seconds of the processor since the one before, or since it started."""
        began = time.monotonic()
        self._work(run, checkpoint)
        spent, self._spent = self._spent, time.process_time()
        return time.monotonic() - began, time.time(), self._spent - spent


@dataclass(frozen=True)
class _Job:
    run: Path
    checkpoint: Path
    attempt: int = 1


@dataclass
class _Process:
    """An evaluator, and what it works on."""

    actor: Any
    ready: Any
    is_ready: bool = False
    job: _Job | None = None
    reply: Any = None
    since: float = field(default_factory=time.monotonic)


class EvaluationService:
    """Evaluates checkpoints of any number of runs while they train. Nobody waits, but in `drain`.

    Processes start with the first submissions. One that dies, that hangs, or that runs out of memory is replaced, and
    its checkpoint is tried again, after the others of its run that wait; when its retries are spent, that is its
    outcome, and the next one's turn. Every attempt that ends has a line in its run's evaluations.jsonl.

    The queue is bounded for each run. Where it is full, `submit` says no and forgets the checkpoint, which is to be
    submitted again when there is room: training neither waits nor piles anything up. Runs take turns.

    The queue is held here, in the caller's process, and moves on when `submit`, `poll` or `drain` looks. It may be used
    from several threads.

    >>> service = EvaluationService(evaluate_checkpoint, ServiceHParams(num_gpus=0.05))     # doctest: +SKIP
    >>> service.submit(run, checkpoint); service.poll(run); service.drain(run)              # doctest: +SKIP
    """

    def __init__(self, work: Work, hparams: ServiceHParams = ServiceHParams()) -> None:
        """Nothing starts yet.

        Args:
            work: takes the paths of a run and of a checkpoint, and stores what it finds, so that storing it twice
                changes nothing. A function that other processes can import, or a `functools.partial` of one. Where it
                raises `Diverged` the model is not finite; anything else that it raises is a failure.
            hparams: how many at a time, how long, how often.
        """
        self._work, self._hparams = work, hparams
        self._pool: list[_Process] = []
        self._waiting: dict[Path, deque[_Job]] = {}  # by run, in the order of their turns
        self._ended: dict[Path, list[Evaluation]] = {}  # by run, until it asks
        self._lock = RLock()

    def pending(self, run: Path) -> int:
        """Submissions of a run whose outcome no `poll` or `drain` has returned."""
        with self._lock:
            return len(self._jobs(run)) + len(self._ended.get(run, ()))

    def submit(self, run: Path, checkpoint: Path) -> bool:
        """Queue a checkpoint; returns at once. One that is in the queue, or being evaluated, is there once.

        Returns:
            Whether there was room.

        Raises:
            RunFailed: Ray is not initialised.
        """
        with self._lock:
            self._advance()
            if checkpoint in [job.checkpoint for job in self._jobs(run)]:
                return True
            if self.pending(run) >= self._hparams.queue:
                return False
            self._wait(_Job(run, checkpoint))
            self._dispatch()
            return True

    def poll(self, run: Path) -> list[Evaluation]:
        """Outcomes of a run's evaluations that ended since the last look, in that order; does not wait."""
        with self._lock:
            if self._jobs(run):
                self._advance()
            return self._ended.pop(run, [])

    def drain(self, run: Path, timeout: float = math.inf) -> list[Evaluation]:
        """As `poll`, once nothing of the run is pending.

        Args:
            timeout: seconds to wait at most; what is `pending` then goes on.
        """
        until = time.monotonic() + timeout
        ended = self.poll(run)
        while self.pending(run) and (left := until - time.monotonic()) > 0:
            with self._lock:
                replies = [process.reply for process in self._pool if process.job]
            if replies:  # several runs may share the pool: any reply moves the queue on
                ray.wait(replies, timeout=min(LOOK, left))
            ended += self.poll(run)
        return ended

    def forget(self, run: Path) -> None:
        """End what of a run is being evaluated, and forget what is pending; other runs go on."""
        with self._lock:
            for process in [process for process in self._pool if process.job and process.job.run == run]:
                ray.kill(process.actor)
                self._pool.remove(process)
            self._waiting.pop(run, None)
            self._ended.pop(run, None)

    def close(self) -> None:
        """End all processes, and forget what is pending."""
        with self._lock:
            for process in self._pool:
                ray.kill(process.actor)
            self._pool.clear()
            self._waiting.clear()
            self._ended.clear()

    def _jobs(self, run: Path) -> list[_Job]:
        """What of a run waits or is being evaluated."""
        evaluated = [process.job for process in self._pool if process.job and process.job.run == run]
        return [*self._waiting.get(run, ()), *evaluated]

    def _wait(self, job: _Job) -> None:
        self._waiting.setdefault(job.run, deque()).append(job)

    def _advance(self) -> None:
        """See what ended or takes too long, and hand out what waits."""
        _refuse_without_ray()
        for process, job in [(process, process.job) for process in self._pool if process.job]:
            if ray.wait([process.reply], timeout=0)[0]:
                self._conclude(process, job)
            elif late := self._late(process):
                self._lose(process, job, late)
        self._dispatch()

    def _dispatch(self) -> None:
        """Give idle processes what waits, and start as many as there may be; the runs take turns."""
        while self._waiting:
            process = next((process for process in self._pool if process.job is None), None)
            if process is None and len(self._pool) == self._hparams.evaluators:
                return
            if process is None:
                process = self._start()
                self._pool.append(process)
            run = next(iter(self._waiting))
            jobs = self._waiting.pop(run)
            process.job, process.since = jobs.popleft(), time.monotonic()
            process.reply = process.actor.evaluate.remote(process.job.run, process.job.checkpoint)
            if jobs:
                self._waiting[run] = jobs  # at the end

    def _start(self) -> _Process:
        _refuse_without_ray()
        # num_cpus=0: client processes are counted by all the CPUs of a machine (`RayGrid`, and Flower's simulation),
        # and one for which an evaluator held a CPU would wait for ever. Ray restarts and retries nothing: it keeps no
        # order among the tasks that it retries, and would not report them.
        options = {"num_cpus": 0, "num_gpus": self._hparams.num_gpus, "max_restarts": 0, "max_task_retries": 0}
        actor = ray.remote(_Evaluator).options(**options).remote(self._work, self._hparams.num_gpus)
        return _Process(actor, actor.ready.remote())

    def _late(self, process: _Process) -> str | None:
        """What to say of an attempt that takes too long."""
        now = time.monotonic()
        if not process.is_ready and ray.wait([process.ready], timeout=0)[0]:
            process.is_ready, process.since = True, now  # its own time begins now
        if process.is_ready:
            limit, what = self._hparams.deadline, "no result within {:g} s"
        else:
            limit, what = START_DEADLINE, "no process for it within {:g} s; is its share of the GPUs left over?"
        return what.format(limit) if now - process.since > limit else None

    def _conclude(self, process: _Process, job: _Job) -> None:
        """An attempt ended, one way or another."""
        try:
            took = ray.get(process.reply)
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) and error.cause else error
            if not isinstance(error, RayTaskError):
                self._lose(process, job, death(error))
            elif is_out_of_memory(cause):
                self._lose(process, job, said(cause))
            else:
                self._end(process, job, "diverged" if isinstance(cause, Diverged) else "failed", said(cause))
        else:
            self._end(process, job, "stored", took=took)

    def _lose(self, process: _Process, job: _Job, reason: str) -> None:
        """The process is gone, or is no good any more."""
        ray.kill(process.actor)
        self._pool.remove(process)
        if job.attempt > self._hparams.retries:
            tries = f" {job.attempt} times, last with" if job.attempt > 1 else ""
            self._end(process, job, "failed", f"it failed{tries}: {reason}")
            return
        self._end(process, job, "retried", reason)
        said = f"{job.run.name}: the evaluation of {job.checkpoint.name} is tried again: {reason}"
        say(said, file=job.checkpoint.name, attempt=job.attempt)
        self._wait(replace(job, attempt=job.attempt + 1))

    def _end(
        self,
        process: _Process,
        job: _Job,
        outcome: Outcome,
        reason: str | None = None,
        took: tuple[float, float, float] | None = None,
    ) -> None:
        process.job = None
        seconds, ended, cpu = took or (time.monotonic() - process.since, time.time(), None)
        about = Evaluation(job.checkpoint.name, outcome, job.attempt, round(seconds, 3), round(ended, 3), cpu, reason)
        log_evaluation(job.run, about)
        if outcome != "retried":
            self._ended.setdefault(job.run, []).append(about)


def _refuse_without_ray() -> None:
    if not ray.is_initialized():  # a call into Ray would start another one by itself
        raise RunFailed("evaluation needs Ray, which is not initialised in this process")
