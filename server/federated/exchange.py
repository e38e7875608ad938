"""The exchange of a round's requests and replies as Flower messages.

It is not Flower's Strategy, which averages the replies that came; here a missing reply fails the run.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from flwr.app import Message
from flwr.serverapp import Grid

from flsim.algorithms.rounds import RoundRequest, ShardReply
from flsim.base.errors import RunFailed
from flsim.base.logs import log
from flsim.base.progress import say
from flsim.wire import Address, decode_reply, encode_requests
from server.federated.deadline import Deadline
from server.federated.failures import ShardFailed
from server.stopping import Stop

POLL = 0.005  # seconds, at first; Grid.send_and_receive would sleep 0.1
START_POLL = 0.02  # while client processes start, which need the processor
PATIENT_POLL = 0.1  # seconds, where replies take long
NODES_DEADLINE = 600.0  # seconds, as an evaluator has: a machine that is busy with other work starts none for minutes
WORTH_SAYING = 60.0  # seconds without a client until a message says so


@dataclass(frozen=True)
class Exchange:
    """The sender of requests to nodes, which collects their replies.

    Attributes:
        grid: Flower's message layer.
        shards: number of shards; each has a node of the grid.
        address: the run that requests are about.
        deadline: how long to wait for replies; it learns from their durations.
        retries: how often a shard is asked again after an error or the deadline.
        stop: the event that asks the run to end.
    """

    grid: Grid
    shards: int
    address: Address
    deadline: Deadline
    retries: int
    stop: Stop

    def send(self, asked: Sequence[RoundRequest]) -> list[ShardReply]:
        """Send each request to its shard's node and collect all replies, in the requests' order.

        A shard that answers with an error, or not within the attempt's deadline, is asked again, at most `retries`
        times, after 1, 2, 4, ... seconds. Requests wait until a client runs, and deadlines count from then on.

        Raises:
            ShardFailed: a shard failed in every attempt; the message has the last reason.
            RunFailed: no client came back within two minutes or the longest deadline, whichever is longer.
            Interrupted: `stop` was set.
        """
        self.stop.check()
        replies: dict[int, ShardReply] = {}
        failures = self._attempt(asked, self.deadline.of_attempt(0, self.retries), replies)
        for attempt in range(self.retries):
            if not failures:
                break
            for shard, reason in failures.items():
                log.warning("shard asked again", extra={"round": asked[0].round + 1, "shard": shard, "reason": reason})
            self.stop.wait(2**attempt)
            again = [request for request in asked if request.shard in failures]
            failures = self._attempt(again, self.deadline.of_attempt(attempt + 1, self.retries), replies)
        if failures:
            shard, reason = min(failures.items())
            failed = next(request for request in asked if request.shard == shard)
            raise ShardFailed(failed, 1 + self.retries, reason)
        return [replies[request.shard] for request in asked]

    def send_once(self, request: RoundRequest) -> dict[int, str]:
        """Make one attempt at one request; return the reason by shard where it failed, else nothing."""
        return self._attempt([request], self.deadline.patience, {})

    def _attempt(self, asked: Sequence[RoundRequest], seconds: float, replies: dict[int, ShardReply]) -> dict[int, str]:
        """Make one attempt of `seconds` seconds, once clients run, and return the reasons of failed shards.

        The attempt fills `replies`, and tells the deadline how long each reply took.
        """
        nodes = wait_for_nodes(self.grid, self.shards, self.stop, max(self.deadline.patience, NODES_DEADLINE))
        messages = [
            Message(content, nodes[request.shard], "train", group_id=str(request.round + 1))
            for request, content in zip(asked, encode_requests(asked, self.address), strict=True)
        ]
        ids = self.grid.push_messages(messages)
        shard_of = dict(zip(ids, (request.shard for request in asked), strict=True))
        failures: dict[int, str] = {}
        began = time.monotonic()
        while shard_of and (waited := time.monotonic() - began) < seconds:
            self.stop.check()
            for message in self.grid.pull_messages(list(shard_of)):
                shard = shard_of.pop(message.metadata.reply_to_message_id)
                if message.has_error():
                    failures[shard] = message.error.reason or f"Flower error {message.error.code}"
                    continue
                try:
                    replies[shard] = _reply(message, asked[0].round, shard)
                except (KeyError, TypeError, ValueError) as error:
                    failures[shard] = f"its reply cannot be read ({type(error).__name__}: {error})"
                else:
                    self.deadline.saw(waited)
            if shard_of:
                self.stop.wait(min(max(POLL, waited / 100), PATIENT_POLL))
        return failures | dict.fromkeys(shard_of.values(), f"no reply within {seconds:g} s")


def _reply(message: Message, round_: int, shard: int) -> ShardReply:
    """Return the reply in a message; raise ValueError or another error where it does not answer the request."""
    reply = decode_reply(message.content)
    if (reply.round, reply.shard) != (round_, shard):
        raise ValueError(f"it answers round {reply.round + 1}, shard {reply.shard}")
    return reply


def wait_for_nodes(grid: Grid, shards: int, stop: Stop, seconds: float) -> list[int]:
    """Return as many node ids as there are shards, in ascending order; nodes exist while clients run."""
    began, is_told = time.monotonic(), False
    while len(nodes := sorted(grid.get_node_ids())) < shards:
        stop.check()
        waited = time.monotonic() - began
        if waited > seconds:
            raise RunFailed(f"no client for {seconds:g} s; continue the run once there are machines for them")
        if waited > WORTH_SAYING and not is_told:
            say(f"no client process runs; waiting up to {seconds:g} s for one")
            is_told = True
        time.sleep(START_POLL)
    return nodes[:shards]
