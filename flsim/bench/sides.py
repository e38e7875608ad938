"""The sides of `flsim bench training`, each over all rounds of the same run: our engines, and other platforms."""

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from flsim.base.errors import RunFailed
from flsim.base.rng import stream
from flsim.bench.peers.work import Result, UserData, Work
from flsim.data.records import batch
from flsim.runs.folder import Run
from flsim.training.batches import epoch_orders
from flsim.training.engines import EngineName
from flsim.training.state import State
from flsim.training.threads import threads

ROOT = Path(__file__).parents[2]


def work_of(run: Run) -> Work:
    """Return all rounds of a run in which all users train, in the form for other platforms."""
    config, state = run.federated, run.training().first_state()

    def data(round_: int, user: int) -> UserData:
        records = run.users[user]
        order = np.concatenate(epoch_orders(len(records), config.local, stream(config.seed, "local", round_, user)))
        padded = batch(records, order, run.users.layout)
        return torch.from_numpy(padded.inputs), torch.from_numpy(padded.targets)

    rounds = [[data(round_, user) for user in range(len(run.users))] for round_ in range(config.training.rounds)]
    return Work(state.params, rounds, config.local.batch_size, config.local.learning_rate)


def train_with_engines(run: Run, names: Sequence[EngineName]) -> dict[str, Result]:
    """Train all rounds of a run on one thread; engines alternate, so that a noisy machine disturbs all."""
    training, rounds = replace(run.federated.training_of(run.users, run.rounds), shards=1), run.rounds
    sides = {name: replace(training, engine=name) for name in names}
    under_way = {name: side.rounds(side.first_state(), rounds, side.send_in_process()) for name, side in sides.items()}
    states, seconds = dict[str, State](), dict[str, list[float]]()
    with threads(1):
        for _ in range(rounds):
            for name, side in under_way.items():
                began = time.perf_counter()
                states[name] = next(side).state
                seconds.setdefault(name, []).append(time.perf_counter() - began)
    return {name: Result(states[name].params, seconds[name]) for name in names}


def train_with_peer(name: str, folder: Path, processors: int, python: Sequence[str]) -> Result:
    """Train all rounds of the work in `folder` with another platform, in a process of its own.

    Raises:
        RunFailed: the platform failed; the message has the last lines of its output.
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
