"""Both Flower apps on Ray in this process: the one place that starts Ray and Flower's simulation."""

import importlib
import io
import logging
import os
import socket
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from threading import Event

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # what Ray will do anyway, and warns about
os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # what nobody waits for any more

import ray
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from flsim.config import SystemHParams
from flsim.errors import InputError, RunFailed
from flsim.progress import say
from flsim.runs import Run
from server import rounds

EVALUATION_SHARE = 0.05  # of a GPU; below 1 / (GPUs of a node), or Flower would count one client too many


def simulate(run: Run, address: str | None = None) -> None:
    """Train a run on Ray, with a Flower node per shard.

    Ray is initialised here, in the main thread, before Flower: a Ray call in the server's thread would race with
    Flower's own initialisation.

    Args:
        run: the run; it says the number of shards and the resources of a client.
        address: of a Ray cluster that runs already ("auto" finds it); a local one is started where this is None.

    Raises:
        InputError: no cluster at that address, or no node of it can hold a client.
        RunFailed: as `server.rounds.train`.
    """
    _connect(address)
    system = run.config.system
    client_gpus, evaluation_gpus = gpu_shares(system, [node.get("GPU", 0.0) for node in _nodes()])
    resources = {
        "num_cpus": system.cpus_per_client,
        "num_gpus": client_gpus,
        # A client process that dies comes back, and the round asks it again; without this Flower's pool stays poisoned.
        "max_restarts": -1,
    }
    _check_resources(resources)
    stop = Event()
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:  # noqa: ARG001 (Flower's signature)
        rounds.train(grid, run, stop, evaluation_gpus)

    try:
        with warnings.catch_warnings(), redirect_stdout(_RayMessages()):
            warnings.simplefilter("ignore")
            run_simulation(
                server_app,
                importlib.import_module("clients.app").app,
                num_supernodes=system.shards,
                backend_config={"client_resources": resources},
            )
    except KeyboardInterrupt:
        raise RunFailed("interrupted; `flsim run --resume` continues from the newest checkpoint") from None
    finally:
        stop.set()
        ray.shutdown()


def _connect(address: str | None) -> None:
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    options = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address and ":" in address and "://" not in address:
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=5).close()  # Ray itself would try for minutes
        if address is None:  # "local": without it Ray would join any cluster of this machine, a dying one too
            ray.init(address="local", include_dashboard=False, **options)
        else:
            ray.init(address=address, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"--address {address}: no Ray cluster answers there; start one with `ray start --head`"
        ) from error


class _RayMessages(io.TextIOBase):
    """Ray prints its messages on standard output, which is for results: they go to standard error, line by line."""

    def __init__(self) -> None:
        self._line = ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            say(line)
        return len(text)


def gpu_shares(system: SystemHParams, gpus: Sequence[float]) -> tuple[float, float]:
    """GPUs of a client and of the evaluator, on nodes with so many GPUs.

    Flower fills every node with clients by its totals, whatever else runs there. So one client per GPU takes a little
    less than the whole, and the evaluator, which asks for no CPU, finds the rest.
    """
    there_are_some = any(gpus)
    client, evaluation = system.gpus_per_client, system.gpus_for_evaluation
    if evaluation is None:
        evaluation = EVALUATION_SHARE if there_are_some else 0.0
    if client is None:
        client = 1.0 - evaluation if there_are_some and evaluation < 1 else float(there_are_some)
    return client, evaluation


def _nodes() -> list[dict[str, float]]:
    """Total resources of each Ray node that is alive."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _check_resources(client: dict[str, float]) -> None:
    """Raises InputError where Flower's pool would come out empty."""
    fits = any(
        node.get("CPU", 0) >= client["num_cpus"] and node.get("GPU", 0) >= client["num_gpus"] for node in _nodes()
    )
    if not fits:
        ray.shutdown()
        raise InputError(
            f"a client needs {client['num_cpus']:g} CPUs and {client['num_gpus']:g} GPUs; no Ray node has them; lower "
            f"system.cpus_per_client or system.gpus_per_client"
        )
