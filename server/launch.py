"""Train a run on Ray, whatever its kind: the one place of the server that tells kinds of training apart."""

from collections.abc import Sequence

from flsim.runs.config import CentralConfig, Config, FederatedConfig
from flsim.runs.folder import Run
from server.central import launch as central
from server.federated import launch as federated


def train(
    run: Run, address: str | None = None, cpus: int | None = None, head: str | None = None, retrain_lost: bool = False
) -> None:
    """Train a run from its newest checkpoint to its end on a Ray cluster, and wait for its evaluations.

    Args:
        run: the run; its status, checkpoints, rows and log are kept up to date.
        address: of a Ray cluster that runs already ("auto" finds it); a local one is started where this is None.
        cpus: cores of the local one, or of the head; all where this is None.
        head: "HOST:PORT" of this machine, where a head is started that others can join; in place of `address`.
        retrain_lost: as of `flsim.runs.recovery.recover`.

    Raises:
        InputError: no cluster at that address, or none that the training fits on.
        Diverged: values are not finite; names the round and the last good checkpoint.
        Interrupted: by a signal; there is a checkpoint.
        RunFailed: training or an evaluation failed.
    """
    launch = central if isinstance(run.config, CentralConfig) else federated
    launch.simulate(run, address, cpus, head, retrain_lost)


def share(config: Config, of: Sequence[dict[str, float]]) -> tuple[int, float]:
    """CPU cores and GPUs that a run holds, of nodes with such resources; its evaluators' GPUs are counted."""
    system = config.system
    if isinstance(config, FederatedConfig):
        training, evaluation = federated.gpu_shares(config.system, [node.get("GPU", 0.0) for node in of])
        processes, cpus = config.system.shards, config.system.cpus_per_client
    elif isinstance(config, CentralConfig):
        training, evaluation = central.gpu_shares(config.system)
        processes, cpus = config.system.workers, config.system.threads
    gpus = processes * training + system.evaluators * evaluation
    return processes * cpus, round(gpus, 4) if gpus <= 1 else float(-(-gpus // 1))
