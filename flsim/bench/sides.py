"""What `flsim bench training` compares, each over all rounds of the same run: our engines, and other platforms."""

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from flsim.algorithms import checkpoint, fedavg
from flsim.base.errors import RunFailed
from flsim.base.rng import stream
from flsim.bench.peers.work import Result, UserData, Work
from flsim.data.records import batch
from flsim.runs.folder import Run
from flsim.training.batches import epoch_orders
from flsim.training.engines import EngineName, engine_of
from flsim.training.state import State

ROOT = Path(__file__).parents[2]


def work_of(run: Run) -> Work:
    """All rounds of a run in which all users train, as other platforms get them."""
    config, state = run.federated, _start(run)

    def data(round_: int, user: int) -> UserData:
        records = run.users[user]
        order = np.concatenate(epoch_orders(len(records), config.local, stream(config.seed, "local", round_, user)))
        padded = batch(records, order, run.users.layout)
        return torch.from_numpy(padded.inputs), torch.from_numpy(padded.targets)

    rounds = [[data(round_, user) for user in range(len(run.users))] for round_ in range(config.training.rounds)]
    return Work(state.params, rounds, config.local.batch_size, config.local.learning_rate)


def train_with_engines(run: Run, names: Sequence[EngineName]) -> dict[str, Result]:
    """All rounds of a run on one thread; engines take turns, so that a noisy machine is as noisy for all."""
    config, users, state = run.federated, run.users, _start(run)
    engines = {name: engine_of(name, checkpoint.model_of(run.provenance), users.layout, config.local) for name in names}
    states: dict[str, State] = dict.fromkeys(names, state)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for round_ in range(config.training.rounds):
        for name, engine in engines.items():
            began = time.perf_counter()
            total = engine.train(states[name].params, users, range(len(users)), config.seed, round_)
            seconds[name].append(time.perf_counter() - began)
            states[name] = fedavg.apply(
                states[name],
                total,
                config.training,
                config.privacy,
                config.seed,
                len(users),
                users.layout.vocabulary_size,
            )
    torch.set_num_threads(threads)
    return {name: Result(states[name].params, seconds[name]) for name in names}


def train_with_peer(name: str, folder: Path, processors: int, python: Sequence[str]) -> Result:
    """All rounds of the work in `folder`, by another platform in a process of its own.

    Raises:
        RunFailed: it failed, with the last lines that it said.
    """
    arguments = ["-m", "flsim.bench.peers", name, folder / "work", folder / name, str(processors)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*python, *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode or not (folder / name).exists():
        raise RunFailed("\n".join([f"{name} failed; it said last:", *done.stdout.splitlines()[-20:]]))
    return Result.load(folder / name)


def _start(run: Run) -> State:
    config = run.federated
    vocabulary_size = run.corpus.layout.vocabulary_size
    return fedavg.init(vocabulary_size, config.model, config.seed, config.training, config.privacy)
