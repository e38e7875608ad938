"""The launch of a run, the only module of the server that distinguishes kinds of training, and `flsim verify`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flsim.algorithms import checkpoint
from flsim.algorithms.checkpoint import digest_of
from flsim.base.errors import InputError
from flsim.base.progress import progress
from flsim.runs import roundlog
from flsim.runs.config import CentralConfig, Config, FederatedConfig
from flsim.runs.folder import Run
from flsim.training.update import State
from server import central
from server.federated import rounds as federated


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


# The verification of a run: repeated training of rounds, without Ray and Flower, and comparison with the log.


@dataclass(frozen=True)
class Verification:
    """The result of repeated training."""

    round: int
    start: int  # round of the checkpoint that training started from; 0 for none
    logged: str  # digest of the state after the round, in the log of the run
    # digest of the state after the round, trained again; if a round differs, that of the first different round
    found: str
    differs: int | None  # the first round after `start` whose digests differ; None if all are equal


def verify(run: Run, round_: int | None = None, device: str = "cpu") -> Verification:
    """Train from the newest checkpoint before a round, by default the last, and compare the digests of the states.

    On the same kind of processor, or GPU, all are equal, bit for bit. Rounds are from 1, in central training steps with
    a line in the log. The device is that of the run's clients; central training uses its setting. InputError if the
    round was not logged, or without a digest; Diverged if training diverged.
    """
    logged = {line["round"]: str(line["digest"]) for line in roundlog.read(run.path) if "digest" in line}
    if round_ is None and logged:
        round_ = max(logged)
    if round_ is None or round_ not in logged:
        what = "this run" if round_ is None else f"round {round_:,}"
        near = sorted(sorted(logged, key=lambda known: abs(known - (round_ or 0)))[:4])
        known = ", ".join(f"{one:,}" for one in near)
        if logged and len(logged) == max(logged) - min(logged) + 1:
            known = f"{min(logged):,} to {max(logged):,}"
        known = f"it logged {known}" if logged else "it has logged none with a digest"
        raise InputError(f"{run.path}: cannot verify {what}; {known}")
    run.verify()
    state = _state_before(run, round_)
    start, differs, digest = state.round, None, ""
    torch.set_num_threads(run.config.system.training_threads)
    again = run.training(device if run.config.unit == "user" else None).states(state, round_, logged.__contains__)
    with progress(f"{run.name}: verifying", round_, start=start) as advance:
        for state in again:
            digest = digest_of(state)
            advance(state.round)
            if digest != logged.get(state.round, digest):
                differs = state.round
            if differs:
                break
    return Verification(round_, start, logged[differs or round_], digest, differs)


def _state_before(run: Run, round_: int) -> State:
    """Return the state of the newest valid checkpoint with fewer rounds; the first state if there is none."""
    for path in reversed(checkpoint.all_in(run.path / "checkpoints")):
        if checkpoint.round_of(path) < round_:
            try:
                return run.load(path)
            except InputError:
                continue
    return run.training().first_state()
