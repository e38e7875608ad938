"""Flower's own grids with a node per shard: any connected SuperNode may serve any shard."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

from flsim.base.errors import Interrupted, RunFailed
from flsim.base.logs import log
from server.stopping import Stop

DEADLINE = 180.0  # seconds without a SuperNode; one that starts again is accepted when Flower has missed it, after 60
AVOIDED = 60.0  # seconds for which a SuperNode that failed comes last; if it is gone, Flower knows it by then
POLL = 0.2  # seconds


class SuperNodes(Grid):  # type: ignore[misc]  # Flower brings no types
    """Flower nodes 0 to shards - 1, one for each shard.

    As long as the same SuperNodes are connected, a shard's requests go to the same one in all rounds. A second request
    for a shard in a round goes to another one. A SuperNode that joins is used from the next round on; one that leaves
    is replaced by the others.
    """

    def __init__(self, grid: Grid, shards: int, stop: Stop) -> None:
        self._grid, self._shards, self._stop = grid, shards, stop
        self._asked: dict[int, tuple[str, int]] = {}  # last round and SuperNode of each shard
        self._failed: dict[int, float] = {}  # time of the last failure of each SuperNode

    def set_run(self, run: Any) -> None:
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        return self._grid.run

    def create_message(self, *arguments: Any, **options: Any) -> Message:
        return self._grid.create_message(*arguments, **options)

    def get_node_ids(self) -> list[int]:
        """Return all nodes once a SuperNode is connected, none before."""
        return list(range(self._shards)) if self._grid.get_node_ids() else []

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Give each message to a SuperNode; wait until one is connected.

        Raises:
            Interrupted: the run shall end.
            RunFailed: no SuperNode connected in time, or Flower takes no more messages of this run.
        """
        messages, connected = list(messages), self._wait()
        for message in messages:
            metadata = message.metadata
            metadata.dst_node_id = self._choose(connected, metadata.dst_node_id, metadata.group_id)
        with _asked_to_end():
            sent = list(self._grid.push_messages(messages))
        if len(sent) != len(messages) or not all(sent):
            raise RunFailed("Flower does not take messages of this run any more; was it stopped?")
        return sent

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return replies that have come, without waiting; raise Interrupted where the run was stopped."""
        with _asked_to_end():
            return list(self._grid.pull_messages(message_ids))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return list(self._grid.send_and_receive(messages, timeout=timeout))

    def _wait(self) -> list[int]:
        """Return the connected SuperNodes, at least one."""
        until = time.monotonic() + DEADLINE
        while not (connected := sorted(self._grid.get_node_ids())):
            if time.monotonic() > until:
                raise RunFailed(f"no SuperNode for {DEADLINE:g} s; start one, and continue the run with resume=true")
            self._stop.wait(POLL)
            self._stop.check()
        return connected

    def _choose(self, connected: Sequence[int], shard: int, round_: str) -> int:
        """Return the SuperNode for a request, out of the connected ones."""
        now, (before, whom) = time.monotonic(), self._asked.get(shard, ("", 0))
        again = before == round_
        if again:
            self._failed[whom] = now
        good = [node for node in connected if now - self._failed.get(node, -AVOIDED) >= AVOIDED]
        chosen = good[shard % len(good)] if good else min(connected, key=lambda node: self._failed[node])
        if again:
            log.info("shard asked of another SuperNode", extra={"round": int(round_), "shard": shard, "node": chosen})
        self._asked[shard] = round_, chosen
        return chosen


@contextmanager
def _asked_to_end() -> Iterator[None]:
    """Turn the refusal of this run's token, by which a SuperLink tells of `flwr stop`, into Interrupted."""
    try:
        yield
    except httpx.HTTPStatusError as error:
        if error.response.status_code != httpx.codes.UNAUTHORIZED:
            raise
        raise Interrupted from error
