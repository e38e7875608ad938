"""The common part of this project's Flower grids: Flower's interface for one run, whose nodes are its shards."""

from itertools import count
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid

from flsim.base.errors import CustomCodeError
from server.cluster.internals import numbered, send_as

SERVER = 0  # the node that sends requests
CLIENT_FAILED = 0  # Flower's code of an error without a code of its own
OWN_CODE_FAILED = 1_000  # an error of a user's own code, which another attempt meets again; Flower's codes are below


def log_fields(message: Message) -> dict[str, Any]:
    """Return the round and shard of a message for the log."""
    return {"round": int(message.metadata.group_id or 0), "shard": int(message.metadata.dst_node_id)}


def code_of(error: BaseException | None) -> int:
    """Return the code of the Flower error by which an exception of a client is reported."""
    return OWN_CODE_FAILED if isinstance(error, CustomCodeError) else CLIENT_FAILED


class ShardGrid(Grid):  # type: ignore[misc]  # Flower brings no types
    """Flower nodes 0 to shards - 1, one for each shard.

    Args:
        shards: number of Flower nodes.
        run_id: Flower's number of the run.
    """

    def __init__(self, shards: int, run_id: int = 1) -> None:
        self._shards, self._run_id, self._numbers = shards, run_id, count(1)
        send_as(run=run_id, node=SERVER)

    def set_run(self, run: Any) -> None:
        """Accept Flower's run and ignore it, as a grid is for one run."""

    @property
    def run(self) -> Any:
        """Raise an error, as there is no run of Flower's and no code here asks for it."""
        raise AttributeError("a run of flsim is flsim.runs.folder.Run, not one of Flower's")

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def _numbered(self, message: Message) -> Message:
        return numbered(message, next(self._numbers))

    def _context(self, node: int) -> Context:
        config = {"partition-id": node, "num-partitions": self._shards}
        return Context(run_id=self._run_id, node_id=node, node_config=config, state=RecordDict(), run_config={})
