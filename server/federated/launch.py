"""The launch of a federated run on a Ray cluster: client processes on its machines, the rounds in this process."""

from collections.abc import Sequence

import torch

from flsim.base.errors import InputError
from flsim.base.progress import say
from flsim.runs.config import SystemHParams
from flsim.runs.folder import Run
from flsim.runs.measuring import evaluate_checkpoint
from flsim.training.hparams import Precision
from server.cluster.nodes import Nodes
from server.cluster.start import cluster, nodes, say_where
from server.federated import rounds
from server.federated.in_process import InProcessGrid
from server.federated.layout import Layout, client_gpu_shares, lay_out
from server.federated.rounds import with_shards
from server.pool.grid import ClientShare, ray_grid
from server.pool.in_process import EvaluationInProcess
from server.stopping import Stop, stopping

APP = "clients.app:app"  # by name, as server and clients know nothing of each other but messages


def simulate(
    run: Run, address: str | None = None, cpus: int | None = None, head: str | None = None, retrain_lost: bool = False
) -> None:
    """Train a run on Ray, with a Flower node per shard.

    Args:
        run: the run; its settings have the number of shards and the resources of a client.
        address: address of an existing Ray cluster ("auto" searches for one); None starts a local one.
        cpus: cores of the local cluster, or of the head; None for all.
        head: "HOST:PORT" of this machine on which to start a head that others can join, in place of `address`.
        retrain_lost: see `flsim.runs.recovery.recover`.

    Raises:
        InputError: there is no cluster at the address, its machines differ, or none can hold a client.
        Interrupted: a signal ended the run; there is a checkpoint of the last completed round.
        RunFailed: see `server.federated.rounds.train`.
    """
    system, stop = run.federated.system, Stop()
    _warn_of_capped_canaries(run)
    _say_canary_users(run)
    with cluster(address, cpus, head), stopping(stop):
        client_gpus, _ = client_gpu_shares(system, [node.get("GPU", 0.0) for node in nodes()])
        share = ClientShare(system.cpus_per_client, client_gpus)
        _refuse_what_does_not_fit(share)
        run = with_shards(run, sum(share.fits(node) for node in nodes()))
        shards = run.federated.system.known_shards
        say_what_stays_idle(run.name, share, shards, nodes(), cpus)
        evaluation_gpus = gpus_of_evaluators(run.name, system, lay_out(system, nodes(), shards, len(run.users)))
        refuse_tf32_without_gpu(run.federated.local.precision, client_gpus)
        machines = Nodes(run.path, run.config.data.corpus, is_local=address is None and head is None)
        machines.check()
        say_where(run.path, address is None and head is None)
        with ray_grid(APP, shards, share, machines, run.federated.system.known_branch > 0) as grid:
            rounds.train(grid, run, stop, evaluation_gpus, retrain_lost)


def simulate_in_process(run: Run, retrain_lost: bool = False) -> None:
    """Train a run like `simulate`, in this process and without Ray; shards are trained one after another.

    Each checkpoint is evaluated before training goes on. Results are the same. Nothing starts again by itself: where
    the process dies, `--resume` goes on.

    Raises:
        InputError: local.precision is "tf32", and there is no GPU.
        Diverged, Interrupted, RunFailed: see `simulate`.
    """
    stop = Stop()
    _warn_of_capped_canaries(run)
    _say_canary_users(run)
    with stopping(stop):
        run = with_shards(run, 1)
        asked = run.federated.system.gpus_per_client
        has_gpu = torch.cuda.is_available() and asked != 0
        refuse_tf32_without_gpu(run.federated.local.precision, float(has_gpu))
        grid = InProcessGrid(APP, run.federated.system.known_shards)
        rounds.train(grid, run, stop, retrain_lost=retrain_lost, service=EvaluationInProcess(evaluate_checkpoint))


def _warn_of_capped_canaries(run: Run) -> None:
    """Warn where `max_records` leaves copies of canaries out."""
    # A canary that is trained on less often than it was planted looks less memorized.
    cap = run.federated.local.max_records
    if cap is None:
        return
    beyond, kept = run.users.copies_beyond(cap)
    if beyond:
        say(
            f"local.max_records = {cap} leaves out records, canaries too: of {beyond:,} copies that users with more "
            f"records hold, {kept:,.0f} would be trained on in a round of all users"
        )


def _say_canary_users(run: Run) -> None:
    """Say what canary users cost, where there are any; half of them take part where coins decide."""
    audit = run.federated.audit
    if audit.update_canaries:
        say(f"{run.name}: {audit.cost(len(run.users))}")


def gpus_of_evaluators(name: str, system: SystemHParams, layout: Layout) -> float:
    """Return the GPUs of an evaluator; say where clients leave evaluators none, so that they run on CPUs.

    Args:
        name: name of the run.
        system: the settings of processes and their shares.
        layout: the layout of the run.

    Raises:
        InputError: the settings ask for evaluators on GPUs, and clients leave them no room. An evaluator without room
            would be ordered again and again, and its evaluation would fail.
    """
    if layout.evaluators < system.evaluators:
        raise InputError(
            f"clients of system.gpus_per_client = {layout.client_gpus:g} leave GPUs for {layout.evaluators} of "
            f"{system.evaluators} evaluators of system.gpus_for_evaluation = {layout.evaluator_gpus:g}; lower one of "
            f"the two, or set gpus_for_evaluation to 0 to evaluate on CPUs"
        )
    if layout.gpus and not layout.evaluator_gpus and system.gpus_for_evaluation is None:
        say(
            f"{name}: clients of system.gpus_per_client = {layout.client_gpus:g} hold all GPUs, so evaluators run on "
            f"CPUs; leave gpus_per_client unset to evaluate on GPUs"
        )
    return layout.evaluator_gpus


def refuse_tf32_without_gpu(precision: Precision, client_gpus: float) -> None:
    """Raise InputError where the precision is TF32 and clients have no GPU."""
    if precision == "tf32" and not client_gpus:
        raise InputError('local.precision "tf32" needs an NVIDIA GPU, and clients have none here; set "float32"')


def say_what_stays_idle(
    name: str, share: ClientShare, shards: int, nodes: Sequence[dict[str, float]], cpus: int | None
) -> None:
    """Say that fewer client processes work than a person made room for: GPUs, or cores that were asked for.

    Args:
        name: name of the run.
        share: the share of a machine of each process.
        shards: number of shards.
        nodes: resources of the machines.
        cpus: cores that a person asked for; None where nobody did.
    """
    room = sum(share.fits(node) for node in nodes)
    idle = int(sum(node.get("GPU", 0.0) for node in nodes) - shards * share.gpus) if share.gpus else 0
    if room > shards and (idle >= 1 or cpus is not None):
        gpus = f" {idle} GPU{'s' * (idle > 1)} stay{'s' * (idle == 1)} idle;" if idle >= 1 else ""
        say(
            f"{name}: {room} client processes have room, and {shards} work at once, as system.shards = {shards};{gpus} "
            f"a new run with system.shards = {room} would use all"
        )


def _refuse_what_does_not_fit(share: ClientShare) -> None:
    """Raise InputError where no machine can hold a client."""
    if not any(share.fits(node) for node in nodes()):
        raise InputError(
            f"a client needs {share.cpus:g} CPUs and {share.gpus:g} GPUs; no Ray node has them; lower "
            f"system.cpus_per_client or system.gpus_per_client"
        )
