"""The launch of a run, the only module of the server that distinguishes kinds of training."""

from collections.abc import Sequence

from flsim.base.errors import InputError
from flsim.runs.config import CentralConfig, Config, FederatedConfig
from flsim.runs.folder import Run
from server import central
from server.federated import launch as federated


def train(
    run: Run,
    address: str | None = None,
    cpus: int | None = None,
    head: str | None = None,
    retrain_lost: bool = False,
    in_process: bool = False,
) -> None:
    """Train a run from its newest checkpoint to its end on a Ray cluster, or in this process; wait for evaluations.

    `address`, `cpus` and `head` are as for `server.cluster.start.cluster`. The run's status, checkpoints, rows and log
    are kept up to date. Raises InputError if the training cannot begin there; Diverged with the last good checkpoint;
    Interrupted by a signal, after a checkpoint; RunFailed if training or an evaluation failed.
    """
    launch = central if isinstance(run.config, CentralConfig) else federated
    if in_process:
        if address or head or cpus:
            raise InputError("--in-process does not use Ray; remove --address, --head and --cpus")
        launch.simulate_in_process(run, retrain_lost)
        return
    launch.simulate(run, address, cpus, head, retrain_lost)


def share(config: Config, resources: Sequence[dict[str, float]]) -> tuple[int, float]:
    """Return the CPU cores and GPUs that a run uses on nodes with these resources, with its evaluators' GPUs."""
    system = config.system
    if isinstance(config, FederatedConfig):
        training, evaluation = federated.client_gpu_shares(config.system, [node.get("GPU", 0.0) for node in resources])
        processes, cpus = config.system.known_shards, config.system.cpus_per_client
    elif isinstance(config, CentralConfig):
        training, evaluation = central.process_gpu_shares(config.system)
        processes, cpus = 1, config.system.threads
    gpus = processes * training + system.evaluators * evaluation
    return processes * cpus, round(gpus, 4) if gpus <= 1 else float(-(-gpus // 1))


def needs_no_ray(config: Config, gpus: float) -> bool:
    """Return whether a sweep trains a run with this number of GPUs in one process, which also evaluates it."""
    return config.system.is_one_process and not gpus


def refuse_what_does_not_fit(name: str, config: Config, machines: Sequence[dict[str, float]]) -> None:
    """Raise InputError if no machine, given as Ray resources by name, has the CPUs and GPUs that a run needs."""
    cpus, gpus = share(config, machines)
    if not any(node.get("CPU", 0) >= cpus and node.get("GPU", 0) >= gpus for node in machines):
        without = (
            "--set system.gpus_per_client=0"
            if isinstance(config, FederatedConfig)
            else "--set system.device=cpu --set system.gpus=0"
        )
        raise InputError(
            f"run {name} needs {cpus} CPUs and {gpus:g} GPUs, but no Ray node has these resources; lower the settings"
            + (f", or train on CPUs: {without}" if gpus else "")
        )
