"""A day at internet scale, by numbers that are computed by hand, and by the bytes of real messages."""

import numpy as np
import pytest
import torch

from flsim.algorithms.rounds import RoundRequest
from flsim.algorithms.summation import ShardReply
from flsim.base.errors import InputError
from flsim.bench.curves import Curve, Quantity
from flsim.bench.internet import Rates, Workload, day, describe, measure_added_seconds, rates_of, report
from flsim.models.architectures import build
from flsim.models.hparams import ModelHParams
from flsim.training.update import UpdateSum
from flsim.wire import Address, encode_reply, encode_requests

# A million parameters, 10^5 users a round on 1,000 machines, each 10 users/s; the server: 1 s a round, 5 ms a shard.
WORKLOAD = Workload(parameters=10**6, bandwidth=6e9)
# With branches 0.5 s a round, 1 ms a shard and 10 ms a branch; a client process adds a sum in 2 ms.
TREE = {"tree_once_seconds": 0.5, "header_seconds": 0.001, "branch_seconds": 0.01, "added_seconds": 0.002}
RATES = Rates(users_per_second=10.0, once_seconds=1.0, shard_seconds=0.005, **TREE)


def test_a_day_by_hand() -> None:
    computed = day(WORKLOAD, RATES)
    assert computed.bytes_out == 1_000 * 4_000_000 + 8 * 100_000
    assert computed.bytes_in == 1_000 * 8_000_000
    assert computed.training_seconds == 10.0  # 100 users at 10 a second
    assert computed.server_seconds == 6.0  # 1 + 1,000 x 0.005
    assert computed.network_seconds == pytest.approx(2.0001, abs=1e-4)  # 12 GB at 6 GB/s
    assert computed.round_seconds == 16.0
    assert computed.rounds == 5_400  # 86,400 / 16
    assert computed.passes == 54  # 5,400 rounds of 10^5 users over 10^7
    assert computed.most_shards == 1_414  # sqrt(10^5 / 10 / 0.005) = sqrt(2,000,000)


def test_a_day_with_branches_by_hand() -> None:
    """31 branches of 32 shards and one of 8, as sqrt(1,000) is 31.6."""
    computed = day(WORKLOAD, RATES)
    assert computed.tree_branch == 32
    assert computed.tree_bytes_in == 32 * 8_000_000
    assert computed.tree_added_seconds == pytest.approx(32 * 0.002)  # 8 MB at 6 GB/s take 1.3 ms
    assert computed.tree_server_seconds == pytest.approx(0.5 + 1_000 * 0.001 + 32 * 0.01)
    assert computed.tree_network_seconds == pytest.approx((4_000_800_000 + 256_000_000) / 6e9)
    assert computed.tree_round_seconds == pytest.approx(10 + 0.064 + 1.82)
    assert computed.tree_rounds == pytest.approx(86_400 / 11.884)
    slow = day(Workload(parameters=10**6, bandwidth=1e8), RATES)
    assert slow.tree_added_seconds == pytest.approx(32 * 0.08)
    assert slow.tree_round_seconds == pytest.approx(10 + 2.56 + 42.568)


def test_a_slow_network_counts_in_place_of_the_server() -> None:
    """At 100 MB/s 12 MB a shard take 0.12 s: sqrt(10^5 / 10 / 0.12) = 288.7."""
    computed = day(Workload(parameters=10**6, bandwidth=1e8), RATES)
    assert computed.network_seconds == pytest.approx(120.008)
    assert computed.round_seconds == pytest.approx(130.008)
    assert computed.most_shards == 289


def test_the_largest_useful_number_of_shards_has_the_shortest_round() -> None:
    """Rounds of fewer and of more shards are longer; the ceiling of users in a shard moves the least a little."""
    rates = Rates(users_per_second=10.0, once_seconds=1.0, shard_seconds=0.02, **TREE)
    most = day(WORKLOAD, rates).most_shards
    assert most == 707

    def seconds(shards: int) -> float:
        return day(Workload(shards=shards, parameters=10**6, bandwidth=6e9), rates).round_seconds

    assert seconds(most) < min(seconds(most // 2), seconds(2 * most))


def test_rates_are_lines_through_few_shards_and_are_held_against_64() -> None:
    """Points to 16 shards lie on 0.5 + 0.01 k, and with m branches on 0.4 + 0.001 k + 0.02 m; the last ones do not."""
    server = Quantity("server_seconds", "server, CPU s", (0.51, 0.52, 0.54, 0.58, 0.66, 1.71), 1)
    branches = (1, 1, 2, 3, 4)  # of 1, 2, 2, 3 and 4 shards
    with_branches = [0.4 + 0.001 * size + 0.02 * count for size, count in zip((1, 2, 4, 8, 16), branches, strict=True)]
    tree = Quantity("tree_server_seconds", "", (*with_branches, 0.936), None)
    curve = Curve("shards", "shards", "", (1, 2, 4, 8, 16, 64), (server, tree))
    rates = rates_of(curve, 10.0, 0.002)
    assert (rates.once_seconds, rates.shard_seconds) == pytest.approx((0.5, 0.01))
    fitted = rates.tree_once_seconds, rates.header_seconds, rates.branch_seconds, rates.added_seconds
    assert fitted == pytest.approx((0.4, 0.001, 0.02, 0.002))
    reported = report(WORKLOAD, rates, curve)
    check = reported["checks"]["server_seconds"]
    assert check == {
        "shards": 64,
        "predicted_seconds": pytest.approx(0.5 + 0.64),
        "measured_seconds": 1.71,
        "ratio": pytest.approx(1.5),
    }
    check = reported["checks"]["tree_server_seconds"]
    assert check["predicted_seconds"] == pytest.approx(0.4 + 0.064 + 8 * 0.02)
    assert check["ratio"] == pytest.approx(1.5)
    assert "server, 64 shards: predicted 1.14 s, measured 1.71 s (1.50 times)" in describe(reported)
    assert "with branches, 64 shards: predicted 0.624 s, measured 0.936 s (1.50 times)" in describe(reported)
    assert "a machine of 8 GPUs: 8 client processes" in describe(reported)
    few = Curve("shards", "shards", "", (16, 32), (Quantity("server_seconds", "", (1.0, 2.0), 1),))
    with pytest.raises(InputError, match="two points of at most 16 shards"):
        rates_of(few, 10.0, 0.002)
    with pytest.raises(InputError, match="held against 64 shards"):
        report(WORKLOAD, rates, few)


def test_additions_take_longer_for_larger_models() -> None:
    small, large = measure_added_seconds(1_000), measure_added_seconds(1_000_000)
    assert 0 < small < large < 1


def test_bytes_are_those_of_real_messages() -> None:
    """All that a message holds beside parameters and users are names, shapes and counts."""
    params = {"one": torch.zeros(300, 400), "two": torch.zeros(5_000)}
    count = sum(value.numel() for value in params.values())
    users = np.arange(1_000)
    (request,) = encode_requests([RoundRequest(0, 0, users, params)], Address("run", "digest"))
    reply = encode_reply(ShardReply(0, 0, UpdateSum.zero(params)))
    about = Workload(cohort=1_000, shards=1, parameters=count)
    computed = day(about, RATES)
    sent = sum(len(array.data) for array in request.array_records["params"].values()) + 8 * len(users)
    received = sum(len(array.data) for array in reply.array_records["delta"].values())
    assert sent == pytest.approx(computed.bytes_out, abs=1_000)
    assert received == pytest.approx(computed.bytes_in, abs=1_000)


def test_the_default_model_is_the_paper_s() -> None:
    network = build(10_000, ModelHParams()).trainable
    assert Workload().parameters == sum(value.numel() for value in network.values())
