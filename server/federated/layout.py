"""The layout of a federated run on machines: client processes, shards, users and evaluators, computed from settings.

Nothing is started. The numbers of processes are those of `server.pool.grid.RayGrid`, so that a cluster can be checked
before it exists.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from flsim.privacy.sampling import shard_ranges
from flsim.runs.config import SystemHParams
from server.pool.grid import ClientShare, places
from server.pool.shares import gpu_shares

ROUNDING = 1e-4  # of a GPU, the smallest share that Ray counts


@dataclass(frozen=True)
class GPU:
    """A GPU and the processes on it.

    Attributes:
        node: index of its node.
        clients: client processes that hold a share of it.
        evaluators: evaluators that hold a share of it.
        free: the share that no process holds.
    """

    node: int
    clients: int
    evaluators: int
    free: float


@dataclass(frozen=True)
class Layout:
    """Client processes, shards, users and evaluators on nodes.

    Attributes:
        slots: client processes that each node has room for.
        clients: client processes that run on each node: at most one for each shard.
        client_gpus: GPUs of a client process; 0 trains on CPUs.
        shards_per_client: most shards that a client process serves in a round, if all are equally fast.
        users_per_shard: most users that a shard holds.
        evaluators: evaluators that find their share of a GPU; all of them where they evaluate on CPUs.
        evaluator_gpus: GPUs of an evaluator; 0 evaluates on a CPU.
        gpus: all GPUs, node by node.
    """

    slots: tuple[int, ...]
    clients: tuple[int, ...]
    client_gpus: float
    shards_per_client: int
    users_per_shard: int
    evaluators: int
    evaluator_gpus: float
    gpus: tuple[GPU, ...]


def client_gpu_shares(system: SystemHParams, gpus: Sequence[float]) -> tuple[float, float]:
    """Return the GPUs of a client and of an evaluator, on nodes with these numbers of GPUs.

    Nodes are filled with clients by their totals, whatever else runs on them. So one client per GPU takes a little less
    than the whole GPU, and the rest is for the evaluators, which need no CPU.
    """
    return gpu_shares(system.gpus_per_client, system.gpus_for_evaluation, system.evaluators, any(gpus))


def lay_out(system: SystemHParams, resources: Sequence[dict[str, float]], shards: int, population: int) -> Layout:
    """Return the layout of a run.

    Client processes start on the node with most room. Ray chooses among the GPUs of a node, and fills one before the
    next; evaluators take what is left. Where too little is left, and no setting puts evaluators on GPUs, they use CPUs.

    Args:
        system: the settings of processes and their shares.
        resources: "CPU" and "GPU" of each node, as Ray reports them.
        shards: number of shards.
        population: number of training users.

    Raises:
        InputError: there are more shards than users.
    """
    counts = [int(node.get("GPU", 0.0)) for node in resources]
    client, evaluator = client_gpu_shares(system, [float(count) for count in counts])
    share = ClientShare(system.cpus_per_client, client)
    slots = [share.fits(node) for node in resources]
    chosen = places(dict(enumerate(slots)), shards)
    clients = tuple(chosen.count(node) for node in range(len(slots)))
    free = [[1.0] * count for count in counts]
    held = [_take(free[node], client, clients[node])[0] for node in range(len(slots))]
    left = [[*gpus] for gpus in free]
    evaluations, evaluators = _evaluators(left, evaluator, system.evaluators)
    if evaluators < system.evaluators and system.gpus_for_evaluation is None:
        evaluator, left = 0.0, free
        evaluations, evaluators = _evaluators(left, evaluator, system.evaluators)
    return Layout(
        slots=tuple(slots),
        clients=clients,
        client_gpus=client,
        shards_per_client=-(-shards // len(chosen)) if chosen else 0,
        users_per_shard=max(last - first for first, last in shard_ranges(population, shards)),
        evaluators=evaluators if evaluator else system.evaluators,
        evaluator_gpus=evaluator,
        gpus=tuple(
            GPU(node, held[node][index], evaluations[node][index], round(left[node][index], 4))
            for node in range(len(slots))
            for index in range(counts[node])
        ),
    )


def _evaluators(free: list[list[float]], share: float, processes: int) -> tuple[list[list[int]], int]:
    """Give evaluators their shares on the GPUs of all nodes; see `_take` for what is changed and returned."""
    holders, started = list[list[int]](), 0
    for gpus in free:
        on_node, starting = _take(gpus, share, processes - started)
        holders.append(on_node)
        started += starting
    return holders, started


def _take(free: list[float], share: float, processes: int) -> tuple[list[int], int]:
    """Give processes a share of one GPU each, or whole GPUs, and change `free` accordingly.

    Returns:
        For each GPU the number of processes that hold a share of it, and the number of processes that found theirs.
    """
    holders, started = [0] * len(free), 0
    needed = max(1, round(share))  # GPUs of a process
    while share and started < processes:
        fitting = [index for index, left in enumerate(free) if left >= min(share, 1.0) - ROUNDING][:needed]
        if len(fitting) < needed:
            break
        for index in fitting:
            free[index] -= min(share, 1.0)
            holders[index] += 1
        started += 1
    return holders, started
