"""Evaluation during training: Ray actors that process a bounded queue of checkpoints of a run.

A checkpoint is on disk before it is submitted, and its rows are on disk, atomically, after its evaluation. Therefore
`Run.unevaluated` finds missing work after any failure, and a repeated evaluation has no effect.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import ray
import torch
from ray.exceptions import RayError, RayTaskError

from flsim.base.errors import Diverged, RunFailed, is_out_of_memory
from flsim.base.progress import say
from flsim.base.settings import Count, Natural, NotNegative, Seconds, settings
from flsim.results.store import Evaluation, Outcome, log_evaluation
from flsim.training.local import threads
from server.cluster.causes import reason_of
from server.pool.actors import Actor, Actors

NICENESS = 5  # training has priority: with the 15 of all processes of Ray, this gives 19, the lowest priority in Linux
# Deadline in seconds for the start of a process in the first attempt, which doubles in each further attempt. Ray can
# lose a request to start a process, but a busy machine, or a GPU in use, also takes longer.
START_DEADLINE = 120.0
EVALUATION_LOOK = 1.0  # seconds between two checks of deadlines while no evaluation ends

EVALUATION_SHARE = 0.05  # share of a GPU for all evaluators; the rest is for training
MEMORY = 2**30  # bytes of a GPU that a process can use for any share, enough for two million references
Work = Callable[[Path, Path], object]


@settings
class ServiceHParams:
    evaluators: Count = 1  # number of processes
    num_gpus: NotNegative = 0.0  # GPUs of each process, which clients must leave free; with 0, one CPU thread
    queue: Count = 100  # largest number of checkpoints in the service, with outcomes that were not returned
    deadline: Seconds = 6 * 3600.0  # for an attempt; a process that takes longer is killed
    retries: Natural = 3  # further attempts at a checkpoint whose process died, was killed, or ran out of memory


def gpu_shares(training: float | None, evaluation: float | None, evaluators: int, has_gpu: bool) -> tuple[float, float]:
    """Return the GPUs of a training process and of an evaluator from the settings; by default all fill one GPU."""
    if evaluation is None:
        evaluation = EVALUATION_SHARE / evaluators if has_gpu else 0.0
    if training is None:
        rest = 1.0 - evaluation * evaluators
        training = rest if has_gpu and rest > 0 else float(has_gpu)
    return training, evaluation


class _Evaluator:
    """The actor, which applies the work to one checkpoint after another."""

    def __init__(self, work: Work, num_gpus: float) -> None:
        os.nice(NICENESS)
        if num_gpus:
            limit_memory(num_gpus)
        else:
            torch.set_num_threads(1)
        self._work = work

    def ready(self) -> None:
        """Return once the process runs."""

    def evaluate(self, run: Path, checkpoint: Path, _ready: None) -> tuple[float, float]:
        """Return the seconds of the work, and its time of end."""
        began = time.monotonic()
        self._work(run, checkpoint)
        return time.monotonic() - began, time.time()


def limit_memory(num_gpus: float) -> None:
    """Keep torch in this process to its share of GPU memory, which Ray does not enforce and clients on it need."""
    if torch.cuda.is_available():  # otherwise the work raises the error about the missing GPU
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, max(num_gpus, MEMORY / whole)))


@dataclass(frozen=True)
class _Job:
    checkpoint: Path
    attempt: int = 1


class EvaluationService:
    """A service that evaluates checkpoints of a run during training; only `drain` waits.

    A process that dies, hangs, or runs out of memory is replaced, and its checkpoint is tried again, after the others.
    After its retries, the failure is its outcome. Every attempt has a line in the run's evaluations.jsonl.

    If the queue is full, `submit` returns False and drops the checkpoint, which must be submitted again later, so
    training does not wait and memory does not grow. The queue advances in `submit`, `poll` and `drain`.
    """

    def __init__(self, run: Path, work: Work, hparams: ServiceHParams | None = None) -> None:
        """Prepare the service of `work`, which other processes import, on a run and a checkpoint; none starts yet."""
        self._run, self._work, self._hparams = run, work, hparams or ServiceHParams()
        self._pool = Actors[_Job]()
        self._waiting: deque[_Job] = deque()
        self._ended: list[Evaluation] = []  # outcomes, until `poll` or `drain` returns them

    @property
    def pending(self) -> int:
        """Return the number of submissions whose outcomes were not returned by `poll` or `drain`."""
        return len(self._jobs()) + len(self._ended)

    def submit(self, checkpoint: Path) -> bool:
        """Queue a checkpoint, unless it is queued or running; return whether there is space. RunFailed without Ray."""
        self._advance()
        if checkpoint in [job.checkpoint for job in self._jobs()]:
            return True
        if self.pending >= self._hparams.queue:
            return False
        self._waiting.append(_Job(checkpoint))
        self._dispatch()
        return True

    def poll(self) -> list[Evaluation]:
        """Return the outcomes of evaluations that ended since the last call, in that order; does not wait."""
        if self._jobs():
            self._advance()
        ended, self._ended = self._ended, []
        return ended

    def drain(self, timeout: float = math.inf) -> list[Evaluation]:
        """Wait, at most `timeout` seconds, until nothing is pending, and return outcomes like `poll`."""
        until = time.monotonic() + timeout
        ended = self.poll()
        while self.pending and (seconds := until - time.monotonic()) > 0:
            if replies := [actor.reply for actor, _ in self._pool.busy()]:
                ray.wait(replies, timeout=min(EVALUATION_LOOK, seconds))
            ended += self.poll()
        return ended

    def close(self) -> None:
        self._pool.close()
        self._waiting.clear()
        self._ended.clear()

    def _jobs(self) -> list[_Job]:
        """Return the jobs, queued or in work."""
        return [*self._waiting, *(job for _, job in self._pool.busy())]

    def _advance(self) -> None:
        """Process ended and late evaluations, and assign queued jobs."""
        if not ray.is_initialized():  # a call into Ray would start another Ray
            raise RunFailed("evaluation needs Ray, which is not initialised in this process")
        for actor, job, outcome in self._pool.ended():
            self._conclude(actor, job, outcome)
        for actor, error in self._pool.started():
            if error is None:
                actor.since = time.monotonic()  # the deadline of its job counts from now
        for actor, job in self._pool.busy():
            if late := self._late(actor, job):
                self._lose(actor, job, late)
        self._dispatch()

    def _dispatch(self) -> None:
        """Assign queued jobs to idle processes, and start the allowed number of processes."""
        while self._waiting and (self._pool.idle() or len(self._pool) < self._hparams.evaluators):
            actor = next(iter(self._pool.idle()), None) or self._start()
            job = self._waiting.popleft()
            # The reply of `ready` is an argument, so work begins only after this process knows that the actor runs.
            # Otherwise an actor that hangs in between would have the deadline of a start.
            self._pool.send(actor, job, "evaluate", self._run, job.checkpoint, actor.ready)

    def _start(self) -> Actor[_Job]:
        # num_cpus=0: the number of client processes is computed from all CPUs of a machine (`RayGrid`, and Flower's
        # simulation), so a client whose CPU is used by an evaluator would wait forever.
        gpus = self._hparams.num_gpus
        return self._pool.start(_Evaluator, self._work, gpus, num_cpus=0, num_gpus=gpus)

    def _late(self, actor: Actor[_Job], job: _Job) -> str | None:
        """Return the reason that an attempt takes too long; None if it does not."""
        if actor.is_ready:
            limit, what, hint = self._hparams.deadline, "no result", ""
        else:
            limit, what = START_DEADLINE * 2 ** (job.attempt - 1), "no process started"
            hint = "; check that its share of the GPUs is free" if self._hparams.num_gpus else ""
        return f"{what} within {limit:g} s{hint}" if time.monotonic() - actor.since > limit else None

    def _conclude(self, actor: Actor[_Job], job: _Job, outcome: tuple[float, float] | RayError) -> None:
        if not isinstance(outcome, RayError):
            self._end(actor, job, "stored", took=outcome)
        elif not isinstance(outcome, RayTaskError) or is_out_of_memory(outcome.cause or outcome):
            is_of_share = isinstance(outcome, RayTaskError) and 0 < self._hparams.num_gpus < 1
            what_to_do = "; raise system.gpus_for_evaluation" if is_of_share else ""
            self._lose(actor, job, reason_of(outcome) + what_to_do)
        else:
            self._end(actor, job, "diverged" if isinstance(outcome.cause, Diverged) else "failed", reason_of(outcome))

    def _lose(self, actor: Actor[_Job], job: _Job, reason: str) -> None:
        """Replace a dead or useless process; repeat its job, or record a failure."""
        self._pool.end(actor)
        if job.attempt > self._hparams.retries:
            tries = f" {job.attempt} times, last with" if job.attempt > 1 else ""
            self._end(actor, job, "failed", f"it failed{tries}: {reason}")
            return
        self._end(actor, job, "retried", reason)
        message = f"{self._run.name}: the evaluation of {job.checkpoint.name} is tried again: {reason}"
        say(message, file=job.checkpoint.name, attempt=job.attempt)
        self._waiting.append(replace(job, attempt=job.attempt + 1))

    def _end(
        self,
        actor: Actor[_Job],
        job: _Job,
        outcome: Outcome,
        reason: str | None = None,
        took: tuple[float, float] | None = None,
    ) -> None:
        seconds, ended = took or (time.monotonic() - actor.since, time.time())
        name, seconds, ended = job.checkpoint.name, round(seconds, 3), round(ended, 3)
        evaluation = Evaluation(name, outcome, job.attempt, seconds, ended, reason)
        log_evaluation(self._run, evaluation)
        if outcome != "retried":
            self._ended.append(evaluation)


class EvaluationInProcess:
    """A service like `EvaluationService`, without Ray, which evaluates a checkpoint when it is submitted."""

    def __init__(self, run: Path, work: Work) -> None:
        self._run, self._work = run, work
        self._ended: list[Evaluation] = []

    @property
    def pending(self) -> int:
        """Return the number of submissions whose outcomes were not returned by `poll` or `drain`."""
        return len(self._ended)

    def submit(self, checkpoint: Path) -> bool:
        """Evaluate a checkpoint, and return True; a failure is an outcome."""
        began = time.monotonic()
        outcome: Outcome = "stored"
        reason = None
        try:
            with threads(1):  # as in evaluators, which gives the same bits
                self._work(self._run, checkpoint)
        except Diverged as error:
            outcome, reason = "diverged", str(error)
        except Exception as error:  # training continues after any error
            outcome, reason = "failed", str(error) or repr(error)
        seconds = round(time.monotonic() - began, 3)
        evaluation = Evaluation(checkpoint.name, outcome, 1, seconds, round(time.time(), 3), reason)
        log_evaluation(self._run, evaluation)
        self._ended.append(evaluation)
        return True

    def poll(self) -> list[Evaluation]:
        """Return the outcomes since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def drain(self, timeout: float = math.inf) -> list[Evaluation]:  # noqa: ARG002 (nothing is waited for)
        """Return outcomes like `poll`."""
        return self.poll()

    def close(self) -> None:
        self._ended.clear()
