"""Flower's message layer within this process: a Flower Grid whose nodes this process serves, without Ray."""

import time
from collections import deque
from collections.abc import Iterable
from itertools import count

from flwr.app import Error, Message

from flsim.base.logs import log
from server.cluster.causes import one_line
from server.pool.client import app_named
from server.pool.flower import ShardGrid, about, code_of

RUNS = count(1)  # Flower's numbers of this process' runs


class InProcessGrid(ShardGrid):
    """A grid that answers one message at each call of `pull_messages`, in the order in which they were pushed.

    ClientApp and messages are those of `server.pool.grid.RayGrid`, and so are results, bit for bit.

    Args:
        app: Flower's ClientApp as ``module:attribute``.
        shards: number of Flower nodes.
    """

    def __init__(self, app: str, shards: int) -> None:
        super().__init__(shards, run_id=next(RUNS))
        self._app = app_named(app)
        self._waiting = deque[Message]()

    def get_node_ids(self) -> list[int]:
        """Return all nodes."""
        return list(range(self._shards))

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Queue messages. A newer message to a node replaces an unanswered one."""
        pushed = [self._numbered(message) for message in messages]
        nodes = {message.metadata.dst_node_id for message in pushed}
        earlier = [message for message in self._waiting if message.metadata.dst_node_id not in nodes]
        self._waiting = deque([*earlier, *pushed])
        return [message.metadata.message_id for message in pushed]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Answer the first of these messages that waits, and return its reply; nothing where none waits."""
        # One at a time: the sums of many shards need not fit into memory at once, and a signal waits for one shard.
        asked = {*message_ids}
        message = next((message for message in self._waiting if message.metadata.message_id in asked), None)
        if message is None:
            return []
        self._waiting.remove(message)
        return [self._reply(message)]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Answer messages until `timeout` seconds are over, and return the replies."""
        until, left = time.monotonic() + (float("inf") if timeout is None else timeout), self.push_messages(messages)
        replies: list[Message] = []
        while len(replies) < len(left) and time.monotonic() < until:
            replies += self.pull_messages(left)
        return replies

    def _reply(self, message: Message) -> Message:
        """Return the app's reply, or an error with its reason, as a client process would."""
        try:
            return self._app(message, self._context(message.metadata.dst_node_id))
        except Exception as error:  # whatever it is, the shard is asked again, and then it fails the run
            reason = one_line(error)
            log.warning("client failed", extra=about(message) | {"failure": "client raised", "reason": reason})
            return Message(Error(code_of(error), reason), reply_to=message)
