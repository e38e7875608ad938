"""Processes of Ray that train and evaluate: the client process, the pool, evaluations, and Flower's grid."""

import importlib
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Generic, TypeVar

import ray
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from ray import ObjectRef
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flsim.base.errors import CustomCodeError, Diverged, RunFailed, is_out_of_memory
from flsim.base.logs import log
from flsim.base.progress import say
from flsim.base.settings import Count, Natural, NotNegative, Seconds, settings
from flsim.results.rows import Evaluation, Outcome, log_evaluation
from flsim.training.update import threads
from server.cluster.causes import reason_of
from server.cluster.internals import numbered, send_as
from server.cluster.start import Nodes

# The client process: a Ray actor that applies Flower's ClientApp to messages, and adds given sums.
#
# Parameters are stored once in Ray's object store for all shards of a round; sums stay on the node that computed them.

SUM = "query.sum"  # type of the message that requests the sum of stored arrays, which does not reach a ClientApp

Arrays = dict[str, ArrayRecord]
Values = dict[str, dict[str, NDArray[Any]]]  # by record and name; processes of a node read them without a copy


def sum_request(nodes: list[int], round_: str) -> Message:
    """Return the message that requests the sum of the stored arrays of nodes, in this order, e.g. of a branch."""
    return Message(RecordDict({"sum": ConfigRecord({"nodes": nodes})}), nodes[0], SUM, group_id=round_)


def summed_nodes(message: Message) -> list[int]:
    """Return the nodes whose arrays a message requests to add; empty for other messages."""
    return list(message.content.config_records["sum"]["nodes"]) if message.metadata.message_type == SUM else []


def apart(content: RecordDict) -> tuple[RecordDict, Arrays]:
    """Return a message's content without its arrays, and the arrays."""
    arrays = dict(content.array_records)
    return RecordDict({name: record for name, record in content.items() if name not in arrays}), arrays


class Client:
    """The actor, which processes one message after another."""

    def __init__(self, app: str) -> None:
        module, _, name = app.partition(":")
        self._app: ClientApp = getattr(importlib.import_module(module), name)

    def ready(self) -> None:
        """Return once the process runs."""

    def run(
        self, message: Message, context: Context, holds: bool, names: list[str], *arrays: ArrayRecord
    ) -> tuple[Message, Arrays | Values]:
        """Apply the app to a message with these arrays; return the reply without its arrays, and the arrays.

        If it `holds`, the arrays of the reply are for `sum`, not for a message.
        """
        for name, record in zip(names, arrays, strict=True):
            message.content[name] = record
        reply = self._app(message, context)
        if reply.has_error():
            return reply, {}
        reply.content, replied = apart(reply.content)
        if holds:
            return reply, {name: {key: one.numpy() for key, one in record.items()} for name, record in replied.items()}
        return reply, replied

    def sum(self, message: Message, *parts: Values) -> tuple[Message, Arrays]:
        """Add arrays in the order of `parts`; return an empty reply, and the sums."""
        return Message(RecordDict(), reply_to=message), added(parts)


def added(parts: Sequence[Values]) -> Arrays:
    """Return the sums of arrays, added in the order of `parts`."""
    first, *others = parts
    sums: Arrays = {}
    for record, arrays in first.items():
        totals = {name: value.copy() for name, value in arrays.items()}  # arrays in Ray's store are read-only
        for other in others:
            for name, total in totals.items():
                total += other[record][name]
        sums[record] = ArrayRecord({name: Array(total) for name, total in totals.items()})
    return sums


# A pool of Ray actors that can die at any moment; its owner assigns jobs, sets deadlines, and repeats jobs.

Item = TypeVar("Item")
Key = TypeVar("Key")


@dataclass(eq=False)
class Actor(Generic[Item]):
    handle: Any
    machine: str | None  # id of the Ray node that it is bound to
    ready: Any  # reference to a reply that comes once its process runs
    is_ready: bool = False  # whether the reply of `ready` has come
    job: Item | None = None
    reply: Any = None  # reference to the job's result
    since: float = 0.0  # `time.monotonic` when it got the job


class Actors(list[Actor[Item]], Generic[Item]):
    """The actors that were started and have not ended; no method waits."""

    def start(self, kind: type, *arguments: Any, machine: str | None = None, **options: Any) -> Actor[Item]:
        """Start an actor of a class with a method `ready`, which returns None, on a Ray node if `machine` is its id."""
        # Restarts and retries of Ray are off: it does not keep the order of retried tasks, and does not report them.
        options |= {"max_restarts": 0, "max_task_retries": 0}
        if machine is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(machine, soft=False)
        handle = ray.remote(kind).options(**options).remote(*arguments)
        self.append(Actor(handle, machine, handle.ready.remote()))
        return self[-1]

    def started(self) -> Iterator[tuple[Actor[Item], RayError | None]]:
        """Yield actors that have become ready, and, with an error, actors that never will."""
        for actor, error in _outcomes({actor.ready: actor for actor in self if not actor.is_ready}):
            actor.is_ready = error is None
            yield actor, error

    def idle(self) -> list[Actor[Item]]:
        return [actor for actor in self if actor.is_ready and actor.job is None]

    def busy(self) -> list[tuple[Actor[Item], Item]]:
        """Return actors that have a job, ready or not, and their jobs."""
        return [(actor, actor.job) for actor in self if actor.job is not None]

    def send(self, actor: Actor[Item], job: Item, method: str, *arguments: Any, values: int = 1) -> Any:
        """Give a job to an actor by calling a method; of two `values`, return the reference to the second."""
        references = getattr(actor.handle, method).options(num_returns=values).remote(*arguments)
        actor.reply, apart = references if values == 2 else (references, None)
        actor.job, actor.since = job, time.monotonic()
        return apart

    def ended(self) -> Iterator[tuple[Actor[Item], Item, Any]]:
        """Yield jobs that ended, with the result, the RayTaskError of a living actor, or the RayError of a dead one."""
        for (actor, job), outcome in _outcomes({actor.reply: (actor, job) for actor, job in self.busy()}):
            actor.job = None
            yield actor, job, outcome

    def end(self, actor: Actor[Item]) -> None:
        ray.kill(actor.handle)
        self.remove(actor)

    def close(self) -> None:
        for actor in [*self]:
            self.end(actor)


def _outcomes(pending: Mapping[Any, Key]) -> Iterator[tuple[Key, Any]]:
    """Yield keys with finished references, and the value or a RayError."""
    if not pending:
        return
    for reference in ray.wait([*pending], num_returns=len(pending), timeout=0, fetch_local=False)[0]:
        try:
            outcome = ray.get(reference)
        except RayError as error:
            outcome = error
        yield pending[reference], outcome


# Evaluation during training: Ray actors that process a queue of checkpoints of a run.
#
# A checkpoint is on disk before it is submitted, and its rows are on disk, atomically, after its evaluation. Therefore
# `Run.unevaluated` finds missing work after any failure, and a repeated evaluation has no effect.

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

    The queue advances in `submit`, `poll` and `drain`.
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

    def submit(self, checkpoint: Path) -> None:
        """Queue a checkpoint, unless it is queued or running; RunFailed without Ray."""
        self._advance()
        if checkpoint not in [job.checkpoint for job in self._jobs()]:
            self._waiting.append(_Job(checkpoint))
            self._dispatch()

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
            self._end(job, "stored", *outcome)
        elif not isinstance(outcome, RayTaskError) or is_out_of_memory(outcome.cause or outcome):
            is_of_share = isinstance(outcome, RayTaskError) and 0 < self._hparams.num_gpus < 1
            what_to_do = "; raise system.gpus_for_evaluation" if is_of_share else ""
            self._lose(actor, job, reason_of(outcome) + what_to_do)
        else:
            diverged = isinstance(outcome.cause, Diverged)
            self._end_now(actor, job, "diverged" if diverged else "failed", reason_of(outcome))

    def _lose(self, actor: Actor[_Job], job: _Job, reason: str) -> None:
        """Replace a dead or useless process; repeat its job, or record a failure."""
        self._pool.end(actor)
        if job.attempt > self._hparams.retries:
            tries = f" {job.attempt} times, last with" if job.attempt > 1 else ""
            self._end_now(actor, job, "failed", f"it failed{tries}: {reason}")
            return
        self._end_now(actor, job, "retried", reason)
        message = f"{self._run.name}: the evaluation of {job.checkpoint.name} is tried again: {reason}"
        say(message, file=job.checkpoint.name, attempt=job.attempt)
        self._waiting.append(replace(job, attempt=job.attempt + 1))

    def _end_now(self, actor: Actor[_Job], job: _Job, outcome: Outcome, reason: str) -> None:
        self._end(job, outcome, time.monotonic() - actor.since, time.time(), reason)

    def _end(self, job: _Job, outcome: Outcome, seconds: float, ended: float, reason: str | None = None) -> None:
        name = job.checkpoint.name
        evaluation = Evaluation(name, outcome, job.attempt, round(seconds, 3), round(ended, 3), reason)
        log_evaluation(self._run, evaluation)
        if outcome != "retried":
            self._ended.append(evaluation)


class EvaluationInProcess(EvaluationService):
    """A service without Ray, which evaluates a checkpoint when it is submitted; a failure is an outcome."""

    def submit(self, checkpoint: Path) -> None:
        began, reason = time.monotonic(), None
        outcome: Outcome = "stored"
        try:
            with threads(1):  # as in evaluators, which gives the same bits
                self._work(self._run, checkpoint)
        except Diverged as error:
            outcome, reason = "diverged", str(error)
        except Exception as error:  # training continues after any error
            outcome, reason = "failed", str(error) or repr(error)
        self._end(_Job(checkpoint), outcome, time.monotonic() - began, time.time(), reason)


# Flower's message layer on Ray: a grid whose nodes are shards, served by client processes on all Ray nodes.
#
# Flower's simulation engine never uses a machine that joins, handles few messages at a time, polls every 0.1 s, and
# loses the message of a process that hangs. ClientApp, messages, ServerApp and results, bit for bit, are those of
# Flower's runtimes (test_flower_runtimes.py).


RUN, SERVER = 1, 0  # the only run of a grid, and the node that sends requests
CLIENT_FAILED = 0  # Flower's code for an error that has no code
OWN_CODE_FAILED = 1_000  # code for an error of custom code, which would occur again; Flower's codes are smaller


def log_fields(message: Message) -> dict[str, Any]:
    """Return the round and shard of a message for the log."""
    return {"round": int(message.metadata.group_id or 0), "shard": int(message.metadata.dst_node_id)}


LOOK = 1.0  # seconds between two checks of the machines
PATIENCE = 20.0  # seconds in which all processes start after the first
PULLED = 4  # replies with arrays that a call returns
STARTS = 5  # number of consecutive processes that end during their start before the run fails

Machine = TypeVar("Machine")


@dataclass(frozen=True)
class ClientShare:
    """The share of a machine that a client process uses."""

    cpus: int
    gpus: float = 0.0

    def fits(self, resources: dict[str, float]) -> int:
        of_cpus = int(resources.get("CPU", 0.0) / self.cpus)
        if not self.gpus:
            return of_cpus
        gpus = resources.get("GPU", 0.0)  # a share is of a single GPU
        return min(of_cpus, int(gpus) * int(1 / self.gpus) if self.gpus < 1 else int(gpus / self.gpus))


def places(room: Mapping[Machine, int], processes: int) -> list[Machine]:
    """Return the machines on which processes start, most free resources first; fewer if `room` runs out."""
    free, machines = dict(room), list[Machine]()
    while len(machines) < processes and any(count > 0 for count in free.values()):
        machine = max(free, key=lambda id_: free[id_])
        free[machine] -= 1
        machines.append(machine)
    return machines


@dataclass(frozen=True)
class RemoteArrays:
    arrays: ObjectRef
    machine: str | None


@dataclass(eq=False)
class Job:
    message: Message
    arrays: Mapping[str, ObjectRef]  # references to its arrays, by name
    parts: Sequence[RemoteArrays]  # the stored arrays that it requests to add; none for a message to the ClientApp
    replied: ObjectRef | None = None  # reference to the arrays of the reply, after the message is sent

    @property
    def id(self) -> str:
        return str(self.message.metadata.message_id)

    @property
    def node(self) -> int:
        return int(self.message.metadata.dst_node_id)


def nearest(idle: list[Actor[Job]], parts: Sequence[RemoteArrays]) -> Actor[Job]:
    """Return an idle process on the machine that stores most of the parts."""
    on = Counter(part.machine for part in parts)
    return max(idle, key=lambda process: on[process.machine])


class RayGrid:
    """Flower nodes 0 to shards - 1, one for each shard, and the processes that serve them.

    There are as many processes as fit on the machines, and no more than shards. A message goes to an idle process. A
    process that dies is replaced, and its message is answered with an error. Messages of a machine that leaves go to
    others; a machine that joins is used from the next check on. A newer message to a node replaces an unanswered one,
    whose process hangs, and is killed.

    A grid that holds arrays returns replies without them, until `server.pool.grid.sum_request` requests the sum of
    those of several nodes. A newer message to a node drops its stored arrays. The grid advances when messages are
    pushed or pulled, in the caller's thread.
    """

    def __init__(self, app: str, shards: int, share: ClientShare, machines: Nodes, holds: bool = False) -> None:
        """Prepare the grid for Flower's `app`, ``module:attribute``, which processes import; none starts yet."""
        self._shards, self._numbers = shards, count(1)
        send_as(run=RUN, node=SERVER)
        self._app, self._share, self._machines, self._holds = app, share, machines, holds
        self._processes = Actors[Job]()
        self._waiting: deque[Job] = deque()
        self._replies: dict[str, tuple[Job, Message]] = {}
        self._held: dict[int, RemoteArrays] = {}
        self._patient_until: float | None = None
        self._looked, self._failed_starts = -LOOK, 0

    def get_node_ids(self) -> list[int]:
        """Return all nodes while processes run, otherwise none.

        The first call waits for all processes that fit, but only briefly after one runs.
        """
        self._advance()
        ready = [process.is_ready for process in self._processes]
        if not any(ready):
            return []
        now = time.monotonic()
        self._patient_until = self._patient_until or now + PATIENCE
        if not all(ready) and now < self._patient_until:
            return []
        self._patient_until = now
        return list(range(self._shards))

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Assign messages to processes, or queue them, without waiting; shared arrays are stored in Ray once."""
        messages, stored = list(messages), dict[int, ObjectRef]()
        jobs = [self._job(message, stored) for message in messages]
        self._withdraw({job.node for job in jobs})
        for job in jobs:
            if job.parts:
                self._waiting.appendleft(job)  # sums are first, because they free memory
            else:
                self._held.pop(job.node, None)
                self._waiting.append(job)
        self._advance()
        return [job.id for job in jobs]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return each received reply once, without waiting; at most `PULLED` with arrays, to limit memory here."""
        self._advance()
        ready = [id_ for id_ in message_ids if id_ in self._replies]
        later = {id_ for id_ in ready if self._replies[id_][0].replied is not None} - {*ready[:PULLED]}
        return [self._fetched(*self._replies.pop(id_)) for id_ in ready if id_ not in later]

    def close(self) -> None:
        for process in [*self._processes]:
            self._end(process)
        self._waiting.clear()

    def _advance(self) -> None:
        """Follow the machines, process finished work, and assign queued messages."""
        if time.monotonic() - self._looked >= LOOK:
            self._look()
            self._looked = time.monotonic()
        for process, error in self._processes.started():
            self._see_start(process, error)
        for process, message, outcome in self._processes.ended():
            self._conclude(process, message, outcome)
        self._dispatch()

    def _look(self) -> None:
        """Start and end processes so that they follow the machines."""
        room = {machine["NodeID"]: self._share.fits(machine["Resources"]) for machine in self._machines.usable()}
        for process in [process for process in self._processes if process.machine not in room]:
            if process.job is not None:
                fields = log_fields(process.job.message) | {"machine": process.machine, "failure": "machine left"}
                log.warning("machine left", extra=fields)
                self._waiting.appendleft(process.job)
            self._end(process)
        for process in self._processes:
            room[process.machine] -= 1
        for machine in places(room, self._shards - len(self._processes)):
            cpus, gpus = self._share.cpus, self._share.gpus
            self._processes.start(Client, self._app, machine=machine, num_cpus=cpus, num_gpus=gpus)

    def _see_start(self, process: Actor[Job], error: RayError | None) -> None:
        if error is None:
            self._failed_starts = 0
            log.info("client process started", extra=self._room(process))
            return
        self._end(process)
        self._failed_starts += 1
        fields = {"machine": process.machine, "failure": "client did not start", "reason": reason_of(error)}
        log.warning("client process did not start", extra=fields)
        if self._failed_starts >= STARTS:
            raise RunFailed(f"client processes do not start; the last error: {reason_of(error)}") from error

    def _conclude(self, process: Actor[Job], job: Job, reply: Message | RayError) -> None:
        """Store a reply, or an error if there will be no reply."""
        if isinstance(reply, RayError):
            lives = isinstance(reply, RayTaskError)
            fields = {"reason": reason_of(reply), "failure": "client raised" if lives else "client died"}
            log.warning("client failed", extra=log_fields(job.message) | {"machine": process.machine} | fields)
            if not lives:
                self._end(process)
            is_own_code = lives and isinstance(reply.cause, CustomCodeError)
            error = Error(OWN_CODE_FAILED if is_own_code else CLIENT_FAILED, fields["reason"])
            reply, job.replied = Message(error, reply_to=job.message), None
        elif self._holds and not job.parts and job.replied is not None:
            self._held[job.node], job.replied = RemoteArrays(job.replied, process.machine), None
        for node in summed_nodes(job.message):
            self._held.pop(node, None)
        self._replies[job.id] = job, reply

    def _fetched(self, job: Job, reply: Message) -> Message:
        """Return a reply with its arrays, or with an error if they were lost with their machine."""
        if job.replied is None or reply.has_error():
            return reply
        try:
            for name, record in ray.get(job.replied).items():
                reply.content[name] = record
        except RayError as error:
            reason = reason_of(error)
            log.warning("reply lost", extra=log_fields(job.message) | {"failure": "machine left", "reason": reason})
            return Message(Error(CLIENT_FAILED, reason), reply_to=job.message)
        return reply

    def _dispatch(self) -> None:
        for _ in range(len(self._waiting)):
            if not (idle := self._processes.idle()):
                return
            job = self._waiting.popleft()
            if job.parts:
                parts = [part.arrays for part in job.parts]
                job.replied = self._processes.send(nearest(idle, job.parts), job, "sum", job.message, *parts, values=2)
                continue
            config = {"partition-id": job.node, "num-partitions": self._shards}
            context = Context(run_id=RUN, node_id=job.node, node_config=config, state=RecordDict(), run_config={})
            arguments = job.message, context, self._holds, [*job.arrays], *job.arrays.values()
            job.replied = self._processes.send(idle[0], job, "run", *arguments, values=2)

    def _job(self, message: Message, stored: dict[int, ObjectRef]) -> Job:
        """Return a message as a job, with its arrays in Ray's object store, unless they are `stored` already."""
        message = numbered(message, next(self._numbers))
        message.content, arrays = apart(message.content)
        for record in arrays.values():
            if id(record) not in stored:
                stored[id(record)] = ray.put(record)
        references = {name: stored[id(record)] for name, record in arrays.items()}
        return Job(message, references, [self._held[node] for node in summed_nodes(message)])

    def _withdraw(self, nodes: set[int]) -> None:
        """Drop earlier messages to nodes; a process that still works on one of them hangs, and is killed."""
        self._waiting = deque(job for job in self._waiting if job.node not in nodes)
        self._replies = {id_: (job, reply) for id_, (job, reply) in self._replies.items() if job.node not in nodes}
        for process, job in self._processes.busy():
            if job.node in nodes:
                fields = log_fields(job.message) | {"machine": process.machine, "failure": "client hung"}
                log.warning("the client process ended without a reply", extra=fields)
                self._end(process)

    def _end(self, process: Actor[Job]) -> None:
        self._processes.end(process)
        self._looked = -LOOK  # so that another process replaces it immediately
        log.info("client process ended", extra=self._room(process))

    def _room(self, process: Actor[Job]) -> dict[str, Any]:
        """Return fields for the log: the process' machine, and the numbers of ready processes and of their machines."""
        ready = [other.machine for other in self._processes if other.is_ready]
        return {"machine": process.machine, "processes": len(ready), "machines": len(set(ready))}


def ray_grid(app: str, shards: int, share: ClientShare, machines: Nodes, holds: bool = False) -> closing[RayGrid]:
    return closing(RayGrid(app, shards, share, machines, holds))
