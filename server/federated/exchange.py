"""The exchange of a round's requests and replies as Flower messages, and the causes of its failures.

It is not a Strategy of Flower, which averages the received replies, because a missing reply must fail the run.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce

from flwr.app import Message
from flwr.serverapp import Grid

from flsim.algorithms.summation import BranchReply, Reply, RoundRequest, ShardReply, branches
from flsim.algorithms.wire import Address, decode_delta, decode_reply, encode_requests
from flsim.base.errors import InputError, RunFailed
from flsim.base.logs import log
from flsim.base.progress import say
from flsim.runs.folder import Run
from flsim.training.update import UpdateSum
from server.pool.client import sum_request
from server.pool.grid import OWN_CODE_FAILED
from server.stopping import Stop

FIRST = 3600.0  # seconds before the first reply to this process
# smallest deadline in seconds: another process on the machine, or a slow disk, is no reason for a second request
FLOOR = 60.0
FACTOR = 10.0  # multiple of the longest reply so far


class Deadline:
    """The deadline of replies in seconds, counted from their request.

    Without a fixed number, it is ten times the longest reply of this process, at least a minute, and at most an hour or
    twice that reply: a client that hangs in a round of a second costs a minute. It doubles with each attempt, and the
    last one lasts an hour, because a machine can become more than ten times slower, which must not fail a run.
    """

    def __init__(self, fixed: float | None) -> None:
        self._fixed, self._longest = fixed, 0.0

    @property
    def patience(self) -> float:
        """Return the seconds after which the run gives up; no attempt is longer."""
        return max(FIRST, 2 * self._longest) if self._fixed is None else self._fixed

    def of_attempt(self, attempt: int, retries: int) -> float:
        """Return the seconds of an attempt; attempt 0 is the first, and `retries` the last."""
        if self._fixed is not None or not self._longest or attempt == retries:
            return self.patience
        return min(2.0**attempt * max(FLOOR, FACTOR * self._longest), self.patience)

    def saw(self, seconds: float) -> None:
        self._longest = max(self._longest, seconds)


POLL = 0.005  # seconds between polls at first; Grid.send_and_receive would sleep 0.1
START_POLL = 0.02  # seconds between polls during the start of client processes, which need the processor
PATIENT_POLL = 0.1  # seconds between polls for slow replies
NODES_DEADLINE = 600.0  # seconds for the start of a client, as for an evaluator: a busy machine needs minutes
WORTH_SAYING = 60.0  # seconds without a client until a message is printed


class ShardFailed(RunFailed):
    """A failure of a shard in all attempts, or once in custom code, which would fail again."""


@dataclass(frozen=True)
class Exchange:
    """The sender of requests to nodes, which collects their replies."""

    grid: Grid
    shards: int
    # number of consecutive shards that a client process adds; 0 for all. It is used only with a grid that holds arrays.
    branch: int
    address: Address
    deadline: Deadline
    retries: int  # number of repeated requests to a shard after an error or the deadline
    stop: Stop

    def send(self, asked: Sequence[RoundRequest]) -> Iterator[Reply]:
        """Send each request to the node of its shard, and yield replies of shards or of branches in order of arrival.

        A shard that answers with an error, or not within the attempt's deadline, gets the request again, at most
        `retries` times, after 1, 2, 4, ... seconds; if the sum of a branch fails, all its shards do. Requests wait
        until a client runs, at most two minutes or the longest deadline (RunFailed). ShardFailed if a shard failed in
        every attempt, or at once in custom code; Interrupted if `stop` was set.
        """
        self.stop.check()
        exchanged = _RoundExchange(asked, self.branch)
        yield from self._attempt(asked, partial(self.deadline.of_attempt, 0, self.retries), exchanged)
        for attempt in range(self.retries):
            if not exchanged.failures or exchanged.is_own_code:
                break
            for shard, reason in exchanged.failures.items():
                log.warning("shard asked again", extra={"round": asked[0].round + 1, "shard": shard, "reason": reason})
            self.stop.wait(2**attempt)
            again = [request for request in asked if request.shard in exchanged.failures]
            limit = partial(self.deadline.of_attempt, attempt + 1, self.retries)
            yield from self._attempt(again, limit, exchanged)
        if exchanged.failures:
            shard, reason = min(exchanged.failures.items())
            how = "failed with" if exchanged.is_own_code else f"failed {1 + self.retries} times, last with"
            raise ShardFailed(f"round {asked[0].round + 1}: shard {shard} {how}: {reason}")

    def _attempt(
        self, asked: Sequence[RoundRequest], limit: Callable[[], float], exchanged: "_RoundExchange"
    ) -> Iterator[Reply]:
        """Make one attempt after clients run, and yield replies; set `exchanged.failures`, and record their durations.

        `limit` returns the seconds that a message has, which become fewer for sums if replies of shards were fast.
        """
        nodes = wait_for_nodes(self.grid, self.shards, self.stop, max(self.deadline.patience, NODES_DEADLINE))
        messages = [
            Message(content, nodes[request.shard], "train", group_id=str(request.round + 1))
            for request, content in zip(asked, encode_requests(asked, self.address), strict=True)
        ]
        ids = self.grid.push_messages(messages)
        del messages  # the parameters in them
        last, seconds = time.monotonic(), limit()
        pending = {id_: _Pending((request.shard,), last, seconds) for id_, request in zip(ids, asked, strict=True)}
        exchanged.failures = {}
        while pending:
            self.stop.check()
            replies = self.grid.pull_messages([*pending])
            is_idle = not replies
            while replies:
                message = replies.pop(0)
                its = pending.pop(message.metadata.reply_to_message_id)
                if message.has_error():
                    exchanged.fail(its, message.error.reason or f"Flower error {message.error.code}")
                    if message.error.code == OWN_CODE_FAILED:
                        exchanged.failures = {shard: exchanged.failures[shard] for shard in its.shards}
                        exchanged.is_own_code = True
                        return
                    continue
                try:
                    reply = exchanged.read(message, its)
                except (KeyError, TypeError, ValueError) as error:
                    exchanged.fail(its, f"its reply cannot be read ({type(error).__name__}: {error})")
                    continue
                if its.branch is None:
                    self.deadline.saw(time.monotonic() - its.since)
                if reply is not None:
                    yield reply
                elif (branch := exchanged.held_branch(its.shards[0])) is not None:
                    shards = tuple(exchanged.branches[branch])
                    round_ = str(asked[0].round + 1)
                    (id_,) = self.grid.push_messages([sum_request([nodes[shard] for shard in shards], round_)])
                    pending[id_] = _Pending(shards, time.monotonic(), limit(), branch)
            now = time.monotonic()
            if not is_idle:  # replies that arrived in time may not be fetched yet
                last = now
                continue
            for id_, late in [(id_, its) for id_, its in pending.items() if now - its.since >= its.seconds]:
                exchanged.fail(late, f"no reply within {late.seconds:g} s")
                del pending[id_]
            if pending:
                self.stop.wait(min(max(POLL, (now - last) / 100), PATIENT_POLL))


@dataclass(frozen=True)
class _Pending:
    """A message without an answer, for one shard or for the sum of a branch."""

    shards: tuple[int, ...]  # the shards to which the request is sent again if it fails
    since: float  # `time.monotonic` when it was sent
    seconds: float
    branch: int | None = None  # the branch whose sum it requests; None for a request to a shard


class _RoundExchange:
    """The state of the exchange of a round."""

    def __init__(self, asked: Sequence[RoundRequest], branch: int) -> None:
        self.branches = branches([request.shard for request in asked], branch)  # the requests' shards by branch
        self.failures: dict[int, str] = {}  # the reason for each shard of which the last attempt failed
        self.is_own_code = False  # whether the last failure is an error of custom code
        self._round = asked[0].round if asked else 0
        self._held: dict[int, ShardReply] = {}  # without their sums, which are in client processes

    def fail(self, pending: _Pending, reason: str) -> None:
        """Record the failure of a message; if the sum of a branch failed, the sums of its shards are useless."""
        if pending.branch is not None:
            reason = f"the sum of its branch failed: {reason}"
        for shard in pending.shards:
            self.failures[shard] = reason
            self._held.pop(shard, None)

    def read(self, message: Message, pending: _Pending) -> Reply | None:
        """Return the reply in a message, None for a shard in a branch; ValueError, KeyError, TypeError if wrong."""
        if pending.branch is not None:
            counts = reduce(UpdateSum.merge, [self._held[shard].update for shard in pending.shards])
            update = replace(counts, delta=decode_delta(message.content))
            work = [work for shard in pending.shards for work in self._held.pop(shard).work]
            return BranchReply(pending.branch, update, tuple(work))
        reply = decode_reply(message.content)
        if (reply.round, (reply.shard,)) != (self._round, pending.shards):
            raise ValueError(f"it answers round {reply.round + 1}, shard {reply.shard}")
        if reply.update.delta:
            return reply
        self._held[reply.shard] = reply
        return None

    def held_branch(self, shard: int) -> int | None:
        """Return the branch of a shard if the sums of all its shards are in client processes; otherwise None."""
        branch, shards = next((branch, shards) for branch, shards in self.branches.items() if shard in shards)
        return branch if all(shard in self._held for shard in shards) else None


def wait_for_nodes(grid: Grid, shards: int, stop: Stop, seconds: float) -> list[int]:
    """Return a node id for each shard, in ascending order; nodes exist while clients run."""
    began, is_told = time.monotonic(), False
    while len(nodes := sorted(grid.get_node_ids())) < shards:
        stop.check()
        waited = time.monotonic() - began
        if waited > seconds:
            raise RunFailed(
                f"no client was available for {seconds:g} s; continue the run with --resume when the cluster has "
                "free machines"
            )
        if waited > WORTH_SAYING and not is_told:
            say(f"Waiting up to {seconds:g} s for the first client process to start.")
            is_told = True
        time.sleep(START_POLL)
    return nodes[:shards]


def explain(run: Run, failed: ShardFailed) -> RunFailed:
    """Return the error to raise for a shard that keeps failing: with its cause if a file of the run is damaged."""
    try:
        run.verify()
    except InputError as error:
        file, _, _ = str(error).partition(": ")
        return RunFailed(str(failed) if f"{file}: " in str(failed) else f"{failed}; {error}")
    return failed
