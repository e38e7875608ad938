"""Flower's message layer on Ray: a grid whose nodes are shards, served by client processes on all Ray nodes.

Flower's simulation engine never uses a machine that joins, handles few messages at a time, polls every 0.1 s, and loses
the message of a process that hangs. ClientApp, messages, ServerApp and results, bit for bit, are those of Flower's
runtimes (test_flower_runtimes.py).
"""

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import ray
from flwr.app import Context, Error, Message, RecordDict
from ray import ObjectRef
from ray.exceptions import RayError, RayTaskError

from flsim.base.errors import CustomCodeError, RunFailed
from flsim.base.logs import log
from server.cluster.causes import reason_of
from server.cluster.internals import numbered, send_as
from server.cluster.nodes import Nodes
from server.pool.actors import Actor, Actors
from server.pool.client import Client, apart, summed_nodes

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

    A grid that holds arrays returns replies without them, until `server.pool.client.sum_request` requests the sum of
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
            arguments = job.message, self._context(job.node), self._holds, [*job.arrays], *job.arrays.values()
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

    def _context(self, node: int) -> Context:
        config = {"partition-id": node, "num-partitions": self._shards}
        return Context(run_id=RUN, node_id=node, node_config=config, state=RecordDict(), run_config={})

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
