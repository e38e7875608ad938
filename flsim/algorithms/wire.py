"""Codec between Flower messages and the requests and replies of a round; no other module of flsim imports Flower."""

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flsim.algorithms.summation import RoundRequest, ShardReply
from flsim.models.language_model import Params
from flsim.training.update import Counts, UpdateSum, by_slot, flat

COUNTS = [field.name for field in fields(Counts)]


@dataclass(frozen=True)
class Address:
    """The run to which a request belongs: its folder, as a node sees it, and the digest of its configuration."""

    run: str
    config: str


def encode_requests(requests: Iterable[RoundRequest], address: Address) -> list[RecordDict]:
    """Encode the requests of a run as messages, in the same order; shared parameters are encoded once."""
    requests = list(requests)
    distinct = {id(request.params): request.params for request in requests}
    arrays = {key: _arrays(params) for key, params in distinct.items()}
    sent = {id(request.sent): _arrays(flat(request.sent)) for request in requests}
    contents = []
    for request in requests:
        record = {
            "run": address.run,
            "config": address.config,
            "round": request.round,
            "shard": request.shard,
            "users": [int(user) for user in request.users],
            "clip": [] if request.clip is None else [request.clip],
            "oldest_resumable_round": request.oldest_resumable_round,
        }
        named = {"params": arrays[id(request.params)], "sent": sent[id(request.sent)]}
        contents.append(RecordDict({**named, "request": ConfigRecord(record)}))
    return contents


def decode_request(content: RecordDict) -> tuple[RoundRequest, Address]:
    """Return the request of a message, and the address of its run."""
    record = content.config_records["request"]
    request = RoundRequest(
        round=int(record["round"]),
        shard=int(record["shard"]),
        users=np.array(record["users"], np.int64),
        params=_params(content.array_records["params"]),
        clip=next(iter(record["clip"]), None),
        sent=by_slot(_params(content.array_records["sent"])),
        oldest_resumable_round=int(record["oldest_resumable_round"]),
    )
    return request, Address(str(record["run"]), str(record["config"]))


def encode_reply(reply: ShardReply) -> RecordDict:
    counts = {name: getattr(reply.update.counts, name) for name in COUNTS}
    return RecordDict(
        {
            "delta": _arrays(reply.update.delta),
            "counts": MetricRecord({"round": reply.round, "shard": reply.shard, **counts}),
            "origin": ConfigRecord({"worker": reply.worker, "seconds": reply.seconds}),
        }
    )


def decode_reply(content: RecordDict) -> ShardReply:
    """Decode the reply of a shard; `delta` is empty if the message came without its arrays."""
    counts = content.metric_records["counts"]
    update = UpdateSum(decode_delta(content), Counts(**{name: counts[name] for name in COUNTS}))
    origin = content.config_records["origin"]
    worker, seconds = str(origin["worker"]), float(origin["seconds"])
    return ShardReply(int(counts["round"]), int(counts["shard"]), update, worker, seconds)


def decode_delta(content: RecordDict) -> Params:
    """Decode the sum of updates in a reply; empty if the message came without its arrays."""
    arrays = content.array_records.get("delta")
    return {} if arrays is None else _params(arrays)


def _arrays(params: Params) -> ArrayRecord:
    return ArrayRecord({name: Array(value.detach().cpu().numpy()) for name, value in params.items()})


def _params(arrays: ArrayRecord) -> Params:
    """Return the parameters of a message as writable tensors; decoding copies them out of the message."""
    return {name: torch.from_numpy(array.numpy()) for name, array in arrays.items()}
