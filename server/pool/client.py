"""The client process: a Ray actor that applies Flower's ClientApp to messages, and adds given sums.

Parameters are stored once in Ray's object store for all shards of a round; sums stay on the node that computed them.
"""

import importlib
from collections.abc import Sequence
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

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
        return reply, {name: _decoded(record) for name, record in replied.items()} if holds else replied

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


def _decoded(record: ArrayRecord) -> dict[str, NDArray[Any]]:
    return {name: array.numpy() for name, array in record.items()}
