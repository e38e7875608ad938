"""The jobs of client processes, and the arrays that their machines hold."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import Message
from ray import ObjectRef

from server.pool.actors import Actor
from server.pool.flower import about


@dataclass(frozen=True)
class Held:
    """Arrays of a reply that stay on the machine that made them."""

    arrays: ObjectRef
    machine: str | None


@dataclass(eq=False)
class Job:
    """A message, and the arrays that belong to it.

    Attributes:
        message: the request, without its arrays.
        arrays: references to its arrays, by name.
        parts: the held arrays that it asks to add; none for a message to the ClientApp.
        replied: reference to the arrays of the reply, once the message is sent.
    """

    message: Message
    arrays: Mapping[str, ObjectRef]
    parts: Sequence[Held]
    replied: ObjectRef | None = None

    @property
    def id(self) -> str:
        return str(self.message.metadata.message_id)

    @property
    def node(self) -> int:
        return int(self.message.metadata.dst_node_id)

    @property
    def about(self) -> dict[str, Any]:
        """Return the round and shard for the log."""
        return about(self.message)


def nearest(idle: list[Actor[Job]], parts: Sequence[Held]) -> list[Actor[Job]]:
    """Return those of idle processes on the machine that holds most of the arrays."""
    on = Counter(part.machine for part in parts)
    most = max(on[process.machine] for process in idle)
    return [process for process in idle if on[process.machine] == most]
