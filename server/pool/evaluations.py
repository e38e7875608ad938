"""Evaluation beside training: a pool of Ray actors that work off a bounded queue of checkpoints, of one run or several.

A checkpoint is on disk before it is submitted, and its rows are there once it is evaluated, whole. So whatever dies,
nothing is lost that cannot be found again (`Run.unevaluated`), and what is done twice changes nothing.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from threading import RLock

import ray
import torch
from ray.exceptions import RayError, RayTaskError

from flsim.base.errors import Diverged, InputError, RunFailed, at_least_one, is_out_of_memory
from flsim.base.progress import say
from flsim.results.evaluations import Evaluation, Outcome, log_evaluation
from server.cluster.causes import reason_of
from server.pool.actors import Actor, Actors

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

    def evaluate(self, run: Path, checkpoint: Path, _ready: None) -> tuple[float, float, float]:
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
        self._pool = Actors[_Job]()
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
                replies = [actor.reply for actor, _ in self._pool.busy()]
            if replies:  # several runs may share the pool: any reply moves the queue on
                ray.wait(replies, timeout=min(LOOK, left))
            ended += self.poll(run)
        return ended

    def forget(self, run: Path) -> None:
        """End what of a run is being evaluated, and forget what is pending; other runs go on."""
        with self._lock:
            for actor, job in self._pool.busy():
                if job.run == run:
                    self._pool.end(actor)
            self._waiting.pop(run, None)
            self._ended.pop(run, None)

    def close(self) -> None:
        """End all processes, and forget what is pending."""
        with self._lock:
            self._pool.close()
            self._waiting.clear()
            self._ended.clear()

    def _jobs(self, run: Path) -> list[_Job]:
        """What of a run waits or is being evaluated."""
        return [*self._waiting.get(run, ()), *(job for _, job in self._pool.busy() if job.run == run)]

    def _wait(self, job: _Job) -> None:
        self._waiting.setdefault(job.run, deque()).append(job)

    def _advance(self) -> None:
        """See what ended or takes too long, and hand out what waits."""
        _refuse_without_ray()
        for actor, job, outcome in self._pool.ended():
            self._conclude(actor, job, outcome)
        for actor, error in self._pool.started():
            if error is None:
                actor.since = time.monotonic()  # the time of its job begins now
        for actor, job in self._pool.busy():
            if late := self._late(actor):
                self._lose(actor, job, late)
        self._dispatch()

    def _dispatch(self) -> None:
        """Give idle processes what waits, and start as many as there may be; the runs take turns."""
        while self._waiting:
            if not self._pool.idle() and len(self._pool) == self._hparams.evaluators:
                return
            actor = next(iter(self._pool.idle()), None) or self._start()
            run = next(iter(self._waiting))
            jobs = self._waiting.pop(run)
            job = jobs.popleft()
            # The reply of `ready` is an argument, so that no work begins before this process can know that the actor
            # runs: an actor that froze in between would have the time in which processes start.
            self._pool.send(actor, job, "evaluate", job.run, job.checkpoint, actor.ready)
            if jobs:
                self._waiting[run] = jobs  # at the end

    def _start(self) -> Actor[_Job]:
        # num_cpus=0: client processes are counted by all the CPUs of a machine (`RayGrid`, and Flower's simulation),
        # and one for which an evaluator held a CPU would wait for ever.
        gpus = self._hparams.num_gpus
        return self._pool.start(_Evaluator, self._work, gpus, num_cpus=0, num_gpus=gpus)

    def _late(self, actor: Actor[_Job]) -> str | None:
        """What to say of an attempt that takes too long."""
        if actor.is_ready:
            limit, what = self._hparams.deadline, "no result within {:g} s"
        else:
            limit, what = (
                START_DEADLINE,
                "no process started for it within {:g} s; check that its share of the GPUs is free",
            )
        return what.format(limit) if time.monotonic() - actor.since > limit else None

    def _conclude(self, actor: Actor[_Job], job: _Job, outcome: tuple[float, float, float] | RayError) -> None:
        """An attempt ended, one way or another."""
        if not isinstance(outcome, RayError):
            self._end(actor, job, "stored", took=outcome)
        elif not isinstance(outcome, RayTaskError) or is_out_of_memory(outcome.cause or outcome):
            self._lose(actor, job, reason_of(outcome))
        else:
            self._end(actor, job, "diverged" if isinstance(outcome.cause, Diverged) else "failed", reason_of(outcome))

    def _lose(self, actor: Actor[_Job], job: _Job, reason: str) -> None:
        """The process is gone, or is no good any more."""
        self._pool.end(actor)
        if job.attempt > self._hparams.retries:
            tries = f" {job.attempt} times, last with" if job.attempt > 1 else ""
            self._end(actor, job, "failed", f"it failed{tries}: {reason}")
            return
        self._end(actor, job, "retried", reason)
        said = f"{job.run.name}: the evaluation of {job.checkpoint.name} is tried again: {reason}"
        say(said, file=job.checkpoint.name, attempt=job.attempt)
        self._wait(replace(job, attempt=job.attempt + 1))

    def _end(
        self,
        actor: Actor[_Job],
        job: _Job,
        outcome: Outcome,
        reason: str | None = None,
        took: tuple[float, float, float] | None = None,
    ) -> None:
        seconds, ended, cpu = took or (time.monotonic() - actor.since, time.time(), None)
        about = Evaluation(job.checkpoint.name, outcome, job.attempt, round(seconds, 3), round(ended, 3), cpu, reason)
        log_evaluation(job.run, about)
        if outcome != "retried":
            self._ended.setdefault(job.run, []).append(about)


def _refuse_without_ray() -> None:
    if not ray.is_initialized():  # a call into Ray would start another one by itself
        raise RunFailed("evaluation needs Ray, which is not initialised in this process")
