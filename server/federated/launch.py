"""The launch of a federated run: on a Ray cluster, with client processes on its machines, or in this process."""

from collections.abc import Sequence

import torch

from flsim.base.errors import InputError
from flsim.base.progress import say
from flsim.privacy.sampling import shard_ranges
from flsim.runs.config import SystemHParams
from flsim.runs.folder import Run
from flsim.training.hparams import Precision
from server.cluster.nodes import Nodes
from server.cluster.start import cluster, nodes, say_where
from server.federated import rounds
from server.federated.rounds import with_shards
from server.pool.evaluations import gpu_shares
from server.pool.grid import ClientShare, places, ray_grid
from server.stopping import Stop, stopping

APP = "clients.app:app"  # by name, because server and clients share only messages
ROUNDING = 1e-4  # the smallest share of a GPU in Ray


def simulate(
    run: Run, address: str | None = None, cpus: int | None = None, head: str | None = None, retrain_lost: bool = False
) -> None:
    """Train a run on Ray, with a Flower node per shard; for arguments and errors, see `server.launch.train`."""
    system, stop = run.federated.system, Stop()
    _say_of_canaries(run)
    with cluster(address, cpus, head), stopping(stop):
        client_gpus, _ = client_gpu_shares(system, [node.get("GPU", 0.0) for node in nodes()])
        share = ClientShare(system.cpus_per_client, client_gpus)
        if not any(share.fits(node) for node in nodes()):
            raise InputError(
                f"a client needs {share.cpus:g} CPUs and {share.gpus:g} GPUs; no Ray node has these resources; "
                "lower system.cpus_per_client or system.gpus_per_client"
            )
        run = with_shards(run, sum(share.fits(node) for node in nodes()))
        shards = run.federated.system.known_shards
        say_what_stays_idle(run.name, share, shards, nodes(), cpus)
        shard_ranges(len(run.users), shards)  # raises an error for more shards than users
        evaluation_gpus = gpus_of_evaluators(run.name, system, nodes(), shards)
        refuse_tf32_without_gpu(run.federated.local.precision, client_gpus)
        machines = Nodes(run.path, run.config.data.corpus, is_local=address is None and head is None)
        machines.check()
        say_where(run.path, address is None and head is None)
        with ray_grid(APP, shards, share, machines, run.federated.system.known_branch > 0) as grid:
            rounds.train(grid, run, stop, evaluation_gpus, retrain_lost)


def simulate_in_process(run: Run, retrain_lost: bool = False) -> None:
    """Train like `simulate`, in this process without Ray, one shard after another; evaluations are in between."""
    stop = Stop()
    _say_of_canaries(run)
    with stopping(stop):
        run = with_shards(run, 1)
        asked = run.federated.system.gpus_per_client
        gpus = (1.0 if asked is None else asked) if torch.cuda.is_available() else 0.0
        refuse_tf32_without_gpu(run.federated.local.precision, gpus)
        rounds.train(None, run, stop, gpus, retrain_lost)


def _say_of_canaries(run: Run) -> None:
    """Warn if `max_records` excludes copies, whose canaries look less memorized; print the cost of canary users."""
    cap, audit = run.federated.local.max_records, run.federated.audit
    beyond, trained = (0, 0.0) if cap is None else run.users.copies_beyond(cap)
    if beyond:
        say(
            f"local.max_records = {cap} excludes records, including canaries: of {beyond:,} copies that users "
            f"with more records hold, {trained:,.0f} would be trained on in a round of all users"
        )
    if audit.update_canaries:
        say(f"{run.name}: {audit.cost(len(run.users))}")


def client_gpu_shares(system: SystemHParams, gpus: Sequence[float]) -> tuple[float, float]:
    """Return the GPUs of a client and of an evaluator, on nodes with these numbers of GPUs.

    Clients fill nodes by their totals. A single client per GPU leaves a bit for evaluators, which need no CPU.
    """
    return gpu_shares(system.gpus_per_client, system.gpus_for_evaluation, system.evaluators, any(gpus))


def gpus_of_evaluators(name: str, system: SystemHParams, resources: Sequence[dict[str, float]], shards: int) -> float:
    """Return the GPUs of an evaluator, on nodes with "CPU" and "GPU"; 0 if clients use all and none is required.

    Client processes start as in `server.pool.grid.RayGrid`. InputError if the settings put evaluators on GPUs that
    clients use: evaluators would be requested repeatedly, and fail.
    """
    gpus = [node.get("GPU", 0.0) for node in resources]
    client, evaluator = client_gpu_shares(system, gpus)
    if not evaluator:
        return 0.0
    share = ClientShare(system.cpus_per_client, client)
    clients = places(dict(enumerate(map(share.fits, resources))), shards)
    fitting = sum(int((total - clients.count(node) * client) / evaluator + ROUNDING) for node, total in enumerate(gpus))
    if fitting >= system.evaluators:
        return evaluator
    if system.gpus_for_evaluation is not None:
        raise InputError(
            f"clients of system.gpus_per_client = {client:g} leave GPUs for {fitting} of {system.evaluators} "
            f"evaluators of system.gpus_for_evaluation = {evaluator:g}; lower one of the two, or set "
            f"gpus_for_evaluation to 0 to evaluate on CPUs"
        )
    say(
        f"{name}: clients of system.gpus_per_client = {client:g} use all GPUs, so evaluators run on CPUs; to "
        "evaluate on GPUs, do not set gpus_per_client"
    )
    return 0.0


def refuse_tf32_without_gpu(precision: Precision, client_gpus: float) -> None:
    if precision == "tf32" and not client_gpus:
        raise InputError('local.precision "tf32" needs an NVIDIA GPU, but clients have none; set "float32"')


def say_what_stays_idle(
    name: str, share: ClientShare, shards: int, nodes: Sequence[dict[str, float]], cpus: int | None
) -> None:
    """Print that fewer client processes work than the GPUs, or the requested cores, allow."""
    room = sum(share.fits(node) for node in nodes)
    idle = int(sum(node.get("GPU", 0.0) for node in nodes) - shards * share.gpus) if share.gpus else 0
    if room > shards and (idle >= 1 or cpus is not None):
        gpus = f" {idle} GPU{'s' * (idle > 1)} stay{'s' * (idle == 1)} idle;" if idle >= 1 else ""
        say(
            f"{name}: {room} client processes fit, but only {shards} work at the same time, because "
            f"system.shards = {shards};{gpus} a new run with system.shards = {room} would use all"
        )
