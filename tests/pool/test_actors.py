"""The pool itself, on a real, local Ray: what becomes of actors that live, raise, die, or never start."""

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from server.pool.actors import Actor, Actors

pytestmark = pytest.mark.usefixtures("local_ray")
TIMEOUT = 60.0  # seconds


class Worker:
    """Fails where it is told to."""

    def __init__(self, starts: bool = True) -> None:
        if not starts:
            os._exit(1)

    def ready(self) -> None:
        """Return once the process runs."""

    def work(self, what: str, *_: Any) -> str:
        if what == "raises":
            raise KeyError(what)
        if what == "dies":
            os._exit(1)
        return what.upper()


@pytest.fixture
def pool() -> Iterator[Actors[str]]:
    pool = Actors[str]()
    yield pool
    pool.close()
    assert not pool


def until_started(pool: Actors[str]) -> list[tuple[Actor[str], RayError | None]]:
    deadline = time.monotonic() + TIMEOUT
    while not (started := list(pool.started())):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return started


def result(pool: Actors[str], actor: Actor[str]) -> Any:
    assert ray.wait([actor.reply], timeout=TIMEOUT)[0]
    [(one, job, outcome)] = pool.ended()
    assert (one, one.job, job) == (actor, None, "job")
    return outcome


def test_an_actor_is_ready_then_busy_then_idle(pool: Actors[str]) -> None:
    actor = pool.start(Worker, num_cpus=0)
    assert (pool.idle(), pool.busy()) == ([], [])
    pool.send(actor, "job", "work", "a")
    assert (pool.idle(), pool.busy()) == ([], [(actor, "job")])
    assert result(pool, actor) == "A"
    assert until_started(pool) == [(actor, None)]
    assert (list(pool.started()), list(pool.ended()), pool.idle(), pool.busy()) == ([], [], [actor], [])


def test_an_actor_that_raises_lives_and_one_that_dies_does_not_start_again(pool: Actors[str]) -> None:
    actor = pool.start(Worker, num_cpus=0)
    for _ in range(2):
        pool.send(actor, "job", "work", "raises")
        error = result(pool, actor)
        assert isinstance(error, RayTaskError)
        assert isinstance(error.cause, KeyError)
    for what in ("dies", "a"):
        pool.send(actor, "job", "work", what)
        assert isinstance(result(pool, actor), RayActorError)


@pytest.mark.parametrize("waits", [False, True])
def test_the_job_of_an_actor_that_never_starts_ends_as_of_one_that_died(pool: Actors[str], waits: bool) -> None:
    """Also where the job waits for the reply that will never be."""
    actor = pool.start(Worker, False, num_cpus=0)
    pool.send(actor, "job", "work", "a", *([actor.ready] if waits else []))
    assert isinstance(result(pool, actor), RayActorError)
    [(one, error)] = until_started(pool)
    assert one is actor
    assert isinstance(error, RayActorError)
    assert pool.idle() == []


def test_an_actor_is_bound_to_its_machine(pool: Actors[str]) -> None:
    """It waits for no other one where there is no such machine."""
    node = ray.get_runtime_context().get_node_id()
    lost = pool.start(Worker, machine="1" * len(node), num_cpus=0)
    [(one, error)] = until_started(pool)
    assert one is lost
    assert error is not None
    bound = pool.start(Worker, machine=node, num_cpus=0)
    pool.end(lost)
    assert until_started(pool) == [(bound, None)]
    assert (bound.machine, pool.idle()) == (node, [bound])


def test_an_actor_that_is_ended_leaves_no_job(pool: Actors[str]) -> None:
    actor, other = pool.start(Worker, num_cpus=0), pool.start(Worker, num_cpus=0)
    for each in (actor, other):
        pool.send(each, "job", "work", "a")
    pool.end(actor)
    assert pool.busy() == [(other, "job")]
    assert result(pool, other) == "A"
    with pytest.raises(RayActorError):
        ray.get(actor.handle.ready.remote(), timeout=TIMEOUT)
