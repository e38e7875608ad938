"""Both Flower apps on Ray in this process: the one place that starts Flower's simulation."""

import importlib
import logging
import warnings
from collections.abc import Sequence
from threading import Event

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from flsim.config import SystemHParams
from flsim.errors import InputError
from flsim.progress import say
from flsim.runs import Run
from flsim.train.hparams import Precision
from server import rounds
from server.cluster import cluster, nodes

# Of a GPU, for all evaluators; below 1 / (GPUs of a node), or Flower would count one client too many.
EVALUATION_SHARE = 0.05


def simulate(run: Run, address: str | None = None, cpus: int | None = None) -> None:
    """Train a run on Ray, with a Flower node per shard.

    Ray is initialised here, in the main thread, before Flower: a Ray call in the server's thread would race with
    Flower's own initialisation.

    Args:
        run: the run; it says the number of shards and the resources of a client.
        address: of a Ray cluster that runs already ("auto" finds it); a local one is started where this is None.
        cpus: cores of the local one; all where this is None.

    Raises:
        InputError: no cluster at that address, or no node of it can hold a client.
        RunFailed: as `server.rounds.train`.
    """
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    system, stop = run.federated.system, Event()
    _say_what_a_cap_leaves_out(run)
    server_app = ServerApp()
    with cluster(address, cpus):
        client_gpus, evaluation_gpus = gpu_shares(system, [node.get("GPU", 0.0) for node in nodes()])
        resources = {
            "num_cpus": system.cpus_per_client,
            "num_gpus": client_gpus,
            # A client process that dies comes back, and the round asks it again; without this Flower's pool stays
            # poisoned.
            "max_restarts": -1,
        }
        _check_resources(resources)
        refuse_tf32_without_gpu(run.federated.local.precision, client_gpus)

        @server_app.main()
        def main(grid: Grid, context: Context) -> None:  # noqa: ARG001 (Flower's signature)
            rounds.train(grid, run, stop, evaluation_gpus)

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run_simulation(
                    server_app,
                    importlib.import_module("clients.app").app,
                    num_supernodes=system.shards,
                    backend_config={"client_resources": resources},
                )
        finally:
            stop.set()


def _say_what_a_cap_leaves_out(run: Run) -> None:
    """No cap drops a canary silently: one that is trained on less often than it was planted looks less memorized."""
    cap = run.federated.local.max_records
    if cap is None:
        return
    beyond, kept = run.users.copies_beyond(cap)
    if beyond:
        say(
            f"local.max_records = {cap} leaves out records, canaries too: of {beyond:,} copies that users with more "
            f"records hold, {kept:,.0f} would be trained on in a round of all users"
        )


def gpu_shares(system: SystemHParams, gpus: Sequence[float]) -> tuple[float, float]:
    """GPUs of a client and of an evaluator, on nodes with so many GPUs.

    Flower fills every node with clients by its totals, whatever else runs there. So one client per GPU takes a little
    less than the whole, and the evaluators, which ask for no CPU, find the rest.
    """
    there_are_some = any(gpus)
    client, evaluation = system.gpus_per_client, system.gpus_for_evaluation
    if evaluation is None:
        evaluation = EVALUATION_SHARE / system.evaluators if there_are_some else 0.0
    if client is None:
        left = 1.0 - evaluation * system.evaluators
        client = left if there_are_some and left > 0 else float(there_are_some)
    return client, evaluation


def refuse_tf32_without_gpu(precision: Precision, client_gpus: float) -> None:
    """Raises InputError where clients could not train."""
    if precision == "tf32" and not client_gpus:
        raise InputError('local.precision "tf32" needs an NVIDIA GPU, and clients have none here; set "float32"')


def _check_resources(client: dict[str, float]) -> None:
    """Raises InputError where Flower's pool would come out empty."""
    fits = any(
        node.get("CPU", 0) >= client["num_cpus"] and node.get("GPU", 0) >= client["num_gpus"] for node in nodes()
    )
    if not fits:
        raise InputError(
            f"a client needs {client['num_cpus']:g} CPUs and {client['num_gpus']:g} GPUs; no Ray node has them; lower "
            f"system.cpus_per_client or system.gpus_per_client"
        )
