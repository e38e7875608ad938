"""A pool of Ray actors that can die at any moment; its owner assigns jobs, sets deadlines, and repeats jobs."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

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
