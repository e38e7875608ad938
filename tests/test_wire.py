"""What goes over the wire comes out as it went in."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from flsim.algorithms import fedavg
from flsim.algorithms.summation import RoundRequest, ShardReply
from flsim.algorithms.wire import Address, decode_reply, decode_request, encode_reply, encode_requests
from flsim.models.architectures import ModelHParams
from flsim.training.update import Counts, UpdateSum

PARAMS = fedavg.init(12, ModelHParams(3, 5), seed=0).params
ADDRESS = Address("/runs/a", "c0ffee")


@pytest.mark.parametrize(("users", "clip"), [([], None), ([0], 0.2), ([3, 392_000, 5], 1 / 3)])
def test_a_request_arrives_as_sent(users: list[int], clip: float | None) -> None:
    slots = {"control": {name: value + 1 for name, value in PARAMS.items()}} if users else {}
    sent = RoundRequest(8_000, 7, np.array(users, np.int64), PARAMS, clip, slots, 40)
    got, address = decode_request(encode_requests([sent], ADDRESS)[0])
    assert (got.clip, got.oldest_resumable_round, got.sent.keys()) == (clip, 40, slots.keys())
    for slot, of in slots.items():
        assert all(torch.equal(got.sent[slot][name], value) for name, value in of.items())
    assert (address, got.round, got.shard) == (ADDRESS, sent.round, sent.shard)
    assert got.users.tolist() == users
    assert all(torch.equal(got.params[name], value) for name, value in PARAMS.items())


def test_requests_share_encoded_parameters_but_not_memory() -> None:
    """Each client may write to what it gets; a request with parameters of its own carries those."""
    other = {name: value + 1 for name, value in PARAMS.items()}
    sent = [RoundRequest(0, shard, np.array([shard]), params) for shard, params in enumerate((PARAMS, other, PARAMS))]
    got = [decode_request(content)[0] for content in encode_requests(sent, ADDRESS)]
    assert [request.shard for request in got] == [0, 1, 2]
    for value in got[0].params.values():
        value.fill_(7)
    for request, params in zip(got[1:], (other, PARAMS), strict=True):
        assert all(torch.equal(request.params[name], value) for name, value in params.items())
    assert encode_requests([], ADDRESS) == []


@pytest.mark.parametrize("loss", [1.5, 0.0, float("inf")])
def test_a_reply_arrives_as_sent_in_float64(loss: float) -> None:
    delta = {name: value.double() / 3 for name, value in PARAMS.items()}
    sent = ShardReply(2, 1, UpdateSum(delta, Counts(250.0, 3, loss, 1_999, 1 / 3, 2, 1, 251)), "node/17", 1 / 7)
    got = decode_reply(encode_reply(sent))
    assert (got.round, got.shard, got.worker, got.seconds) == (2, 1, "node/17", 1 / 7)
    assert replace(got.update, delta={}) == replace(sent.update, delta={})
    for count in ("users", "tokens", "clipped", "non_finite", "examples"):
        assert type(getattr(got.update.counts, count)) is int
    for name, value in delta.items():
        assert got.update.delta[name].dtype == torch.float64
        assert torch.equal(got.update.delta[name], value)
