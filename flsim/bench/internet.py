"""A day of simulation at internet scale, computed from what one machine measures.

A round of k shards moves these bytes through the server, for a model of P parameters and a cohort of C users:

    out    k x 4 P + 8 C    the model in float32 to each shard, and the numbers of the users that it trains
    in     k x 8 P          a sum of updates in float64 from each shard

The server's thread works a + k s seconds: a once (encode the model, step), and s for each shard (send a request; decode
a reply and add it to the sum). Its network takes (out + in) / B seconds at B bytes a second. Transfers go on while the
thread works, so the slower of the two counts. A client process that trains u users a second needs ceil(C / k) / u
seconds for its shard, and all work at the same time:

    T(k) = ceil(C / k) / u + max(a + k s, (out + in) / B)

More shards shorten the first term and lengthen the second. With m = max(s, 12 P / B), the cost of a shard to the
server, and without the ceiling, T is least where C / (k u) = k m: at k* = sqrt(C / (u m)). Beyond k* another machine
makes a round longer, and sums have to be added in a tree. In a tree of two levels, sqrt(k) processes add up sqrt(k)
shards each, at the same time, and then the server adds up their sqrt(k) sums: a + 2 sqrt(k) m in place of a + k m.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from flsim.base.errors import InputError
from flsim.bench.curves import Curve
from flsim.runs.config import SystemHParams
from server.federated.layout import lay_out

FLOAT32, FLOAT64 = 4, 8  # bytes of a parameter in a request and in a reply
USER = 8  # bytes of a user's number in a request
SECONDS = 86_400  # of a day
FITTED, HELD_OUT = 16, 64  # shards: rates are fitted to at most FITTED, and held against HELD_OUT
GPU_MACHINE = {"CPU": 64.0, "GPU": 8.0}


@dataclass(frozen=True)
class Workload:
    """The training that a day is computed for.

    Attributes:
        population: number of users.
        cohort: C, users in a round.
        shards: k, shards and client processes; one of each on a node.
        parameters: P, parameters of the model.
        bandwidth: B, bytes a second of the server's network, both directions together.
    """

    population: int = 10**7
    cohort: int = 10**5
    shards: int = 10**3
    parameters: int = 1_422_250  # of the paper's network with V = 10,000
    bandwidth: float = 1.25e9  # 10 Gbit/s


@dataclass(frozen=True)
class Rates:
    """Measured speeds.

    Attributes:
        users_per_second: u, users that a client process trains in a second.
        once_seconds: a, seconds of the server's thread in a round, whatever the number of shards.
        shard_seconds: s, further seconds of the server's thread for each shard.
    """

    users_per_second: float
    once_seconds: float
    shard_seconds: float

    def server_seconds(self, shards: int) -> float:
        """Return a + k s, the seconds of the server's thread in a round."""
        return self.once_seconds + shards * self.shard_seconds


@dataclass(frozen=True)
class Day:
    """A day of training; see the module for the formulas.

    Attributes:
        bytes_out, bytes_in: bytes that leave and reach the server in a round.
        reply_bytes: memory of the server for replies. It holds those of a round until they are summed, and meanwhile
            those of the round before.
        training_seconds: ceil(C / k) / u.
        server_seconds: a + k s.
        network_seconds: (out + in) / B.
        round_seconds: T(k).
        rounds: rounds in a day.
        passes: how often a day's cohorts count the population.
        most_shards: k*, the number of shards beyond which a tree of sums is necessary.
        tree_round_seconds: T with a tree of two levels.
    """

    bytes_out: int
    bytes_in: int
    reply_bytes: int
    training_seconds: float
    server_seconds: float
    network_seconds: float
    round_seconds: float
    rounds: float
    passes: float
    most_shards: int
    tree_round_seconds: float


def day(workload: Workload, rates: Rates) -> Day:
    """Return what a day of a workload takes at these rates, by the formulas of this module."""
    shards, parameters = workload.shards, workload.parameters
    bytes_out = shards * FLOAT32 * parameters + USER * workload.cohort
    bytes_in = shards * FLOAT64 * parameters
    training = math.ceil(workload.cohort / shards) / rates.users_per_second
    server, network = rates.server_seconds(shards), (bytes_out + bytes_in) / workload.bandwidth
    seconds = training + max(server, network)
    of_shard = max(rates.shard_seconds, (FLOAT32 + FLOAT64) * parameters / workload.bandwidth)
    rounds = SECONDS / seconds
    return Day(
        bytes_out=bytes_out,
        bytes_in=bytes_in,
        reply_bytes=2 * bytes_in,
        training_seconds=training,
        server_seconds=server,
        network_seconds=network,
        round_seconds=seconds,
        rounds=rounds,
        passes=rounds * workload.cohort / workload.population,
        most_shards=max(1, round(math.sqrt(workload.cohort / rates.users_per_second / of_shard))),
        tree_round_seconds=training + rates.once_seconds + 2 * math.ceil(math.sqrt(shards)) * of_shard,
    )


def rates_of(shards: Curve, users_per_second: float) -> Rates:
    """Return rates from a curve against shards: a line through its points of at most 16 shards, by least squares.

    Raises:
        InputError: the curve has no two such points.
    """
    seconds = shards.values_of("server_seconds")
    points = [(size, value) for size, value in zip(shards.sizes, seconds, strict=True) if size <= FITTED]
    if len(points) < 2:
        raise InputError(f"rates need two points of at most {FITTED} shards, found {list(shards.sizes)}")
    x, y = np.array(points, dtype=np.float64).T
    shard_seconds, once_seconds = np.polyfit(x, y, 1).tolist()
    return Rates(users_per_second, max(0.0, once_seconds), max(0.0, shard_seconds))


def report(workload: Workload, rates: Rates, shards: Curve) -> dict[str, Any]:
    """Return a day as JSON, with the server's seconds at 64 shards, predicted and measured.

    It also has the layout of a run with default shares and 8 shards on a machine of 8 GPUs.

    Raises:
        InputError: the curve has no point of 64 shards.
    """
    if HELD_OUT not in shards.sizes:
        raise InputError(f"a day is held against {HELD_OUT} shards, which the curve lacks: {list(shards.sizes)}")
    measured = shards.values_of("server_seconds")[shards.sizes.index(HELD_OUT)]
    predicted = rates.server_seconds(HELD_OUT)
    check = {"shards": HELD_OUT, "predicted_seconds": predicted, "measured_seconds": measured}
    return {
        "workload": asdict(workload),
        "rates": asdict(rates),
        "server_check": check | {"ratio": measured / predicted},
        **asdict(day(workload, rates)),
        "machine_of_8_gpus": asdict(lay_out(SystemHParams(), [GPU_MACHINE], 8, workload.population)),
    }


def describe(reported: dict[str, Any]) -> str:
    """Return a report as text."""
    workload, rates, check = (reported[name] for name in ("workload", "rates", "server_check"))
    lines = [
        f"a day: {workload['population']:,} users, {workload['cohort']:,} in a round, {workload['shards']:,} nodes of "
        f"one client process and one shard, {workload['parameters']:,} parameters, "
        f"{workload['bandwidth'] / 1e9:g} GB/s",
        f"a client process trains {rates['users_per_second']:.3g} users/s; the server's thread takes "
        f"{rates['once_seconds']:.3g} s a round and {1e3 * rates['shard_seconds']:.3g} ms a shard",
        f"server with {check['shards']} shards: predicted {check['predicted_seconds']:.3g} s, measured "
        f"{check['measured_seconds']:.3g} s ({check['ratio']:.2f} times)",
        f"bytes a round: {reported['bytes_out'] / 1e9:.3g} GB out of the server, {reported['bytes_in'] / 1e9:.3g} GB "
        f"into it; replies take {reported['reply_bytes'] / 1e9:.3g} GB of its memory",
        f"seconds a round: {reported['training_seconds']:.3g} training, then the larger of "
        f"{reported['server_seconds']:.3g} server and {reported['network_seconds']:.3g} network: "
        f"{reported['round_seconds']:.3g}",
        f"a day: {reported['rounds']:,.0f} rounds, {reported['passes']:.3g} times the population",
        f"a tree of sums is necessary above {reported['most_shards']:,} shards; with two levels a round of "
        f"{workload['shards']:,} takes {reported['tree_round_seconds']:.3g} s",
    ]
    layout = reported["machine_of_8_gpus"]
    lines.append(
        f"a machine of 8 GPUs: {sum(layout['clients'])} client processes of {layout['client_gpus']:g} GPUs, "
        f"{layout['users_per_shard']:,} users in a shard, {layout['evaluators']} evaluator on "
        f"{layout['evaluator_gpus']:g} of a GPU"
    )
    return "\n".join(lines)
