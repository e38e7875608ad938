"""The sides of `python -m benchmarks training`, each over all rounds of the same run."""

import math
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import pad

from benchmarks.peers.model import PlainLSTM
from benchmarks.peers.work import PAD, Result, UserData, Work
from flsim.algorithms.fedavg import Round
from flsim.algorithms.rounds import EngineName
from flsim.base.errors import RunFailed
from flsim.base.rng import stream
from flsim.data.records import batch
from flsim.runs.folder import Run
from flsim.training.update import State, epoch_orders, threads

ROOT = Path(__file__).parents[1]


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


def plain_work_of(work: Work, run: Run) -> Work:
    """Return the same work as in the examples of other platforms: with a plain LSTM over records of equal length."""
    sizes, layout = run.config.model, run.users.layout
    rng, bound = stream(0, "bench plain"), 1 / math.sqrt(sizes.units)  # as torch's LSTM initializes its weights
    start = {
        name: torch.from_numpy(rng.uniform(-bound, bound, value.shape)).float()
        for name, value in PlainLSTM(layout.vocabulary_size, sizes.embedding, sizes.units).state_dict().items()
    }

    def padded(part: torch.Tensor) -> torch.Tensor:
        return pad(part, (0, layout.record_words - part.shape[1]), value=PAD)

    rounds = [[(padded(inputs), padded(targets)) for inputs, targets in users] for users in work.rounds]
    return replace(work, start=start, rounds=rounds)


def train_with_engines(sides: Mapping[str, tuple[Run, EngineName]]) -> dict[str, Result]:
    """Train all rounds of runs on one thread; they alternate, so that load on the machine affects all of them.

    Args:
        sides: for each name, the run, and the engine that trains it. All runs have the same number of rounds.
    """
    under_way, states, seconds = dict[str, Iterator[Round]](), dict[str, State](), dict[str, list[float]]()
    for name, (run, engine) in sides.items():
        training = replace(run.federated.training_of(run.users, run.rounds), shards=1, engine=engine)
        under_way[name] = training.rounds(training.first_state(), run.rounds, training.send_in_process())
    with threads(1):
        for _ in range(min(run.rounds for run, _ in sides.values())):
            for name, rounds in under_way.items():
                began = time.perf_counter()
                states[name] = next(rounds).state
                seconds.setdefault(name, []).append(time.perf_counter() - began)
    return {name: Result(states[name].params, seconds[name]) for name in sides}


def train_with_peer(name: str, work: Path, processors: int, python: Sequence[str]) -> Result:
    """Train all rounds of the work in a file with another platform, in a separate process.

    Raises:
        RunFailed: the platform failed; the message has the last lines of its output.
    """
    result = work.with_name(f"{work.name} {name}")
    arguments = ["-m", "benchmarks.peers", name, work, result, str(processors)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*python, *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode or not result.exists():
        raise RunFailed("\n".join([f"{name} failed; the end of its output:", *done.stdout.splitlines()[-20:]]))
    return Result.load(result)
