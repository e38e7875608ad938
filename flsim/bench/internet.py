"""A day of simulation at internet scale, computed from what one machine measures.

A round of k shards moves these bytes through the server, for a model of P parameters and a cohort of C users:

    out    k x 4 P + 8 C    the model in float32 to each node, and the numbers of the users that it trains
    in     k x 8 P          a sum of updates in float64 from each shard

The model leaves the server at most so often: nodes that have it send it on to others. The server's thread works a + k s
seconds: a once (store the model, step), and s for each shard (send a request; decode a reply and add it to the sum).
Its network takes (out + in) / B seconds at B bytes a second. Transfers go on while the thread works, so the slower of
the two counts. A client process that trains u users a second needs ceil(C / k) / u seconds for its shard, and all work
at the same time:

    T(k) = ceil(C / k) / u + max(a + k s, (out + in) / B)

More shards shorten the first term and lengthen the second. With m = max(s, 12 P / B), the cost of a shard to the
server, and without the ceiling, T is least where C / (k u) = k m: at k* = sqrt(C / (u m)). Beyond k* another machine
makes a round longer.

With branches of b = ceil(sqrt(k)) shards, a client process of each branch adds b sums, all of them at the same time.
It takes c seconds for each, or 8 P / B where its network is slower. The server still reads k small replies, of h
seconds each, and adds ceil(k / b) sums, of g seconds each:

    T'(k) = ceil(C / k) / u + b max(c, 8 P / B) + max(a' + k h + ceil(k / b) g, (out + ceil(k / b) x 8 P) / B)

All rates are measured: s and a from rounds without branches, a', h and g from rounds with them, c from additions.
"""

import math
import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
from scipy.optimize import nnls

from flsim.algorithms.summation import branches, root_branch
from flsim.base.errors import InputError
from flsim.bench.curves import Curve
from flsim.runs.config import SystemHParams
from server.federated.layout import lay_out
from server.pool.client import added

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
        tree_once_seconds: a', those of a round with branches.
        header_seconds: h, seconds of the server's thread for each shard of a branch.
        branch_seconds: g, seconds of the server's thread for each branch.
        added_seconds: c, seconds in which a client process adds the sum of a shard.
    """

    users_per_second: float
    once_seconds: float
    shard_seconds: float
    tree_once_seconds: float
    header_seconds: float
    branch_seconds: float
    added_seconds: float

    def server_seconds(self, shards: int) -> float:
        """Return a + k s, the seconds of the server's thread in a round."""
        return self.once_seconds + shards * self.shard_seconds

    def tree_server_seconds(self, shards: int) -> float:
        """Return a' + k h + ceil(k / b) g, the seconds of the server's thread in a round with branches."""
        return self.tree_once_seconds + shards * self.header_seconds + branches_of(shards) * self.branch_seconds


@dataclass(frozen=True)
class Day:
    """A day of training; see the module for the formulas.

    Attributes:
        bytes_out, bytes_in: bytes that leave and reach the server in a round.
        training_seconds: ceil(C / k) / u.
        server_seconds: a + k s.
        network_seconds: (out + in) / B.
        round_seconds: T(k).
        rounds: rounds in a day.
        passes: how often a day's cohorts count the population.
        most_shards: k*, the number of shards beyond which more shards make a round without branches longer.
        tree_branch: b, shards in a branch.
        tree_bytes_in: bytes that reach the server in a round with branches.
        tree_added_seconds: b max(c, 8 P / B).
        tree_server_seconds: a' + k h + ceil(k / b) g.
        tree_network_seconds: the server's network with branches.
        tree_round_seconds: T'(k).
        tree_rounds: rounds in a day with branches.
    """

    bytes_out: int
    bytes_in: int
    training_seconds: float
    server_seconds: float
    network_seconds: float
    round_seconds: float
    rounds: float
    passes: float
    most_shards: int
    tree_branch: int
    tree_bytes_in: int
    tree_added_seconds: float
    tree_server_seconds: float
    tree_network_seconds: float
    tree_round_seconds: float
    tree_rounds: float


def branches_of(shards: int) -> int:
    """Return ceil(k / b), the number of branches."""
    return len(branches(range(shards), root_branch(shards)))


def day(workload: Workload, rates: Rates) -> Day:
    """Return what a day of a workload takes at these rates, by the formulas of this module."""
    shards, parameters, bandwidth = workload.shards, workload.parameters, workload.bandwidth
    bytes_out = shards * FLOAT32 * parameters + USER * workload.cohort
    bytes_in, tree_bytes_in = (sums * FLOAT64 * parameters for sums in (shards, branches_of(shards)))
    training = math.ceil(workload.cohort / shards) / rates.users_per_second
    server, network = rates.server_seconds(shards), (bytes_out + bytes_in) / bandwidth
    seconds = training + max(server, network)
    of_shard = max(rates.shard_seconds, (FLOAT32 + FLOAT64) * parameters / bandwidth)
    added_seconds = root_branch(shards) * max(rates.added_seconds, FLOAT64 * parameters / bandwidth)
    tree_server, tree_network = rates.tree_server_seconds(shards), (bytes_out + tree_bytes_in) / bandwidth
    tree_seconds = training + added_seconds + max(tree_server, tree_network)
    return Day(
        bytes_out=bytes_out,
        bytes_in=bytes_in,
        training_seconds=training,
        server_seconds=server,
        network_seconds=network,
        round_seconds=seconds,
        rounds=SECONDS / seconds,
        passes=SECONDS / seconds * workload.cohort / workload.population,
        most_shards=max(1, round(math.sqrt(workload.cohort / rates.users_per_second / of_shard))),
        tree_branch=root_branch(shards),
        tree_bytes_in=tree_bytes_in,
        tree_added_seconds=added_seconds,
        tree_server_seconds=tree_server,
        tree_network_seconds=tree_network,
        tree_round_seconds=tree_seconds,
        tree_rounds=SECONDS / tree_seconds,
    )


def measure_added_seconds(parameters: int, parts: int = 8, repeats: int = 9) -> float:
    """Return the seconds in which a client process adds the sum of a shard, with its share of encoding the result.

    Args:
        parameters: parameters of the model.
        parts: sums that are added at a time.
        repeats: additions, of which the median counts.
    """
    held = [{"delta": {"all": np.full(parameters, float(part))}} for part in range(parts)]
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        added(held)
        seconds.append(time.perf_counter() - began)
    return median(seconds) / parts


def rates_of(shards: Curve, users_per_second: float, added_seconds: float) -> Rates:
    """Return rates from a curve against shards: lines through its points of at most 16 shards, by least squares.

    Seconds with branches are fitted to the numbers of shards and of branches at the same time; none is negative.

    Raises:
        InputError: the curve has no two such points.
    """
    few = [index for index, size in enumerate(shards.sizes) if size <= FITTED]
    if len(few) < 2:
        raise InputError(f"rates need two points of at most {FITTED} shards, found {list(shards.sizes)}")
    sizes = np.array([shards.sizes[index] for index in few], dtype=np.float64)
    flat, tree = (
        np.array([shards.values_of(name)[index] for index in few]) for name in ("server_seconds", "tree_server_seconds")
    )
    numbers = np.array([branches_of(int(size)) for size in sizes], dtype=np.float64)
    once = np.ones(len(few))
    (once_seconds, shard_seconds), _ = nnls(np.stack([once, sizes], axis=1), flat)
    (tree_once, header, branch), _ = nnls(np.stack([once, sizes, numbers], axis=1), tree)
    return Rates(
        users_per_second=users_per_second,
        once_seconds=float(once_seconds),
        shard_seconds=float(shard_seconds),
        tree_once_seconds=float(tree_once),
        header_seconds=float(header),
        branch_seconds=float(branch),
        added_seconds=added_seconds,
    )


def report(workload: Workload, rates: Rates, shards: Curve) -> dict[str, Any]:
    """Return a day as JSON, with the server's seconds at 64 shards, predicted and measured.

    It also has the layout of a run with default shares and 8 shards on a machine of 8 GPUs.

    Raises:
        InputError: the curve has no point of 64 shards.
    """
    if HELD_OUT not in shards.sizes:
        raise InputError(f"a day is held against {HELD_OUT} shards, which the curve lacks: {list(shards.sizes)}")
    index = shards.sizes.index(HELD_OUT)
    checks = {
        name: {"shards": HELD_OUT, "predicted_seconds": predicted, "measured_seconds": shards.values_of(name)[index]}
        for name, predicted in (
            ("server_seconds", rates.server_seconds(HELD_OUT)),
            ("tree_server_seconds", rates.tree_server_seconds(HELD_OUT)),
        )
    }
    return {
        "workload": asdict(workload),
        "rates": asdict(rates),
        "checks": {name: check | {"ratio": _ratio(check)} for name, check in checks.items()},
        **asdict(day(workload, rates)),
        "machine_of_8_gpus": asdict(lay_out(SystemHParams(), [GPU_MACHINE], 8, workload.population)),
    }


def _ratio(check: dict[str, float]) -> float | None:
    """Return measured seconds as a multiple of predicted ones; None where none are predicted."""
    return check["measured_seconds"] / check["predicted_seconds"] if check["predicted_seconds"] else None


def describe(reported: dict[str, Any]) -> str:
    """Return a report as text."""
    workload, rates, checks = (reported[name] for name in ("workload", "rates", "checks"))
    lines = [
        f"a day: {workload['population']:,} users, {workload['cohort']:,} in a round, {workload['shards']:,} nodes of "
        f"one client process and one shard, {workload['parameters']:,} parameters, "
        f"{workload['bandwidth'] / 1e9:g} GB/s",
        f"a client process trains {rates['users_per_second']:.3g} users/s, and adds a sum in "
        f"{1e3 * rates['added_seconds']:.3g} ms",
        f"the server's thread takes {rates['once_seconds']:.3g} s a round and {1e3 * rates['shard_seconds']:.3g} ms a "
        f"shard; with branches {rates['tree_once_seconds']:.3g} s, {1e3 * rates['header_seconds']:.3g} ms a shard and "
        f"{1e3 * rates['branch_seconds']:.3g} ms a branch",
    ]
    for name, what in (("server_seconds", "server"), ("tree_server_seconds", "with branches")):
        check = checks[name]
        times = "" if check["ratio"] is None else f" ({check['ratio']:.2f} times)"
        lines.append(
            f"{what}, {check['shards']} shards: predicted {check['predicted_seconds']:.3g} s, measured "
            f"{check['measured_seconds']:.3g} s{times}"
        )
    lines += [
        f"bytes a round: {reported['bytes_out'] / 1e9:.3g} GB out of the server, {reported['bytes_in'] / 1e9:.3g} GB "
        f"into it; with branches of {reported['tree_branch']} shards {reported['tree_bytes_in'] / 1e9:.3g} GB into it",
        f"seconds a round: {reported['training_seconds']:.3g} training, then the larger of "
        f"{reported['server_seconds']:.3g} server and {reported['network_seconds']:.3g} network: "
        f"{reported['round_seconds']:.3g}",
        f"with branches: {reported['training_seconds']:.3g} training, {reported['tree_added_seconds']:.3g} in client "
        f"processes, then the larger of {reported['tree_server_seconds']:.3g} server and "
        f"{reported['tree_network_seconds']:.3g} network: {reported['tree_round_seconds']:.3g}",
        f"a day: {reported['rounds']:,.0f} rounds, {reported['passes']:.3g} times the population; with branches "
        f"{reported['tree_rounds']:,.0f} rounds",
        f"without branches more than {reported['most_shards']:,} shards make a round longer",
    ]
    layout = reported["machine_of_8_gpus"]
    lines.append(
        f"a machine of 8 GPUs: {sum(layout['clients'])} client processes of {layout['client_gpus']:g} GPUs, "
        f"{layout['users_per_shard']:,} users in a shard, {layout['evaluators']} evaluator on "
        f"{layout['evaluator_gpus']:g} of a GPU"
    )
    return "\n".join(lines)
