"""Curves of the cost of a round, through the path of `flsim run`: against cohort, population, shards and Ray nodes."""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from flsim.algorithms.summation import root_branch
from flsim.base.files import new_folder
from flsim.base.memory import PeakMemory
from flsim.base.progress import say
from flsim.base.rng import stream
from flsim.bench.curves import Curve, Quantity
from flsim.bench.ray_nodes import ray_nodes
from flsim.bench.rounds import BenchHParams, settings_over, train
from flsim.data.corpus import CorpusWriter
from flsim.data.synthetic import SyntheticHParams, make_synthetic
from flsim.data.vocabulary import Layout, Vocabulary
from flsim.models.hparams import ModelHParams
from flsim.runs.config import SystemHParams
from flsim.runs.folder import Run

PROCESSORS = len(os.sched_getaffinity(0))
MEMORY_EVERY = 0.5  # seconds; a sample takes milliseconds for each process, which rounds are not to wait for
TICKS = os.sysconf("SC_CLK_TCK")  # of a second, in which Linux counts CPU time
WRITE_USERS = 2**18  # users of a tiny corpus that are drawn and written together
SMALL = ModelHParams(embedding=32, units=64)
COHORT = BenchHParams(users=4_096, words=100, rounds=4, vocabulary_size=1_000, model=SMALL)
POPULATION = replace(COHORT, words=10, rounds=9)  # its `users` are replaced by each size
SERVER = BenchHParams(users=64, words=20, rounds=6)  # a step or two a user: what is left of a round is the server's
NODES_SHARDS = 16
TITLES = {
    "round_seconds": ("round, s", 1.0),
    "cpu_seconds": ("round, CPU s", 1.0),
    "overhead_seconds": ("overhead, s", 1.0),
    "server_seconds": ("server, CPU s", 1.0),
    "tree_round_seconds": ("round with branches, s", 1.0),
    "tree_server_seconds": ("server with branches, CPU s", 1.0),
    "own_memory_bytes": ("own memory, MB", 1e-6),
}
# Costs without an expected exponent.
UNKNOWN: dict[str, float | None] = dict.fromkeys(("round_seconds", "cpu_seconds", "overhead_seconds"))
Costs = dict[str, float]


class _TimedRun(Run):
    """A run whose log also has CPU seconds of each round: of the server's thread, and of all processes."""

    @cached_property
    def _ends(self) -> list[tuple[float, float]]:
        return [(time.thread_time(), cpu_seconds(os.getpid()))]

    def log_round(self, **values: Any) -> None:
        end, before = (time.thread_time(), cpu_seconds(os.getpid())), self._ends[-1]
        super().log_round(**values, server_seconds=end[0] - before[0], cpu_seconds=end[1] - before[1])
        self._ends.append((time.thread_time(), end[1]))


def cpu_seconds(process: int) -> float:
    """Return the CPU seconds that a process and its descendants have taken so far; 0 for one that has ended."""
    with suppress(OSError):
        folder = Path("/proc") / str(process)
        fields = (folder / "stat").read_text().rpartition(")")[2].split()  # the name before may hold spaces
        children = [child for task in (folder / "task").iterdir() for child in (task / "children").read_text().split()]
        return (int(fields[11]) + int(fields[12])) / TICKS + sum(cpu_seconds(int(child)) for child in children)
    return 0.0


def cohort_curve(sizes: Sequence[int], hparams: BenchHParams = COHORT) -> Curve:
    """Measure a round against its number of users, which are drawn from a fixed population.

    By design the seconds are linear. Memory is constant, since only the sum of updates is kept.
    """
    hparams = replace(hparams, users=max(hparams.users, *sizes))

    def measure(folder: Path, size: int) -> Costs:
        corpus = shared_corpus(folder.parent / "corpus", hparams)
        return measure_rounds(folder, corpus, hparams, size, PROCESSORS)

    about = f"{hparams.users:,} users of {hparams.words} words, {_model(hparams)}, {PROCESSORS} shards"
    return _curve(
        "cohort", "users in a round", about, sizes, measure, round_seconds=1, cpu_seconds=1, own_memory_bytes=0
    )


def population_curve(sizes: Sequence[int], hparams: BenchHParams = POPULATION, cohort: int = 256) -> Curve:
    """Measure a round of a fixed cohort against the number of users that it is drawn from; by design it is constant."""

    def measure(folder: Path, size: int) -> Costs:
        folder.mkdir()
        make_tiny(folder / "corpus", size, hparams)
        return measure_rounds(folder / "run", folder / "corpus", replace(hparams, users=size), cohort, PROCESSORS)

    about = f"a cohort of {cohort} users of one record of {hparams.words} words, {_model(hparams)}, {PROCESSORS} shards"
    return _curve("population", "users", about, sizes, measure, round_seconds=0, cpu_seconds=0, own_memory_bytes=0)


def shards_curve(sizes: Sequence[int], hparams: BenchHParams = SERVER) -> Curve:
    """Measure a round of a fixed cohort against the number of shards.

    By design the server's seconds are linear without branches: each shard is asked, and answers with a sum. The
    overhead is what a round takes beyond the training of its busiest client process. Each size is measured a second
    time with branches of its square root, whose sums client processes add.
    """
    hparams = replace(hparams, users=max(hparams.users, *sizes))

    def measure(folder: Path, size: int) -> Costs:
        corpus = shared_corpus(folder.parent / "corpus", hparams)
        flat = measure_rounds(folder, corpus, hparams, hparams.users, size, branch=0)
        beside, branch = folder.with_name(f"{folder.name}-tree"), root_branch(size)
        tree = measure_rounds(beside, corpus, hparams, hparams.users, size, branch=branch)
        return flat | {f"tree_{name}": tree[name] for name in ("round_seconds", "server_seconds")}

    about = f"a cohort of {hparams.users} users of {hparams.words} words, {_model(hparams)}, {PROCESSORS} processors"
    expected = UNKNOWN | {"server_seconds": 1, "tree_round_seconds": None, "tree_server_seconds": None}
    return _curve("shards", "shards", about, sizes, measure, **expected, own_memory_bytes=None)


def nodes_curve(sizes: Sequence[int], hparams: BenchHParams = SERVER, shards: int = NODES_SHARDS) -> Curve:
    """Measure a round of fixed cohort and shards against the number of Ray nodes, which share this machine.

    By design the server's seconds depend on shards and not on nodes. Training cannot become faster where there are more
    nodes than processors, and memory grows by a client process and Ray's own processes for each node.
    """
    hparams = replace(hparams, users=max(hparams.users, shards))

    def measure(folder: Path, size: int) -> Costs:
        corpus = shared_corpus(folder.parent / "corpus", hparams)
        with ray_nodes(size) as address:
            return measure_rounds(folder, corpus, hparams, hparams.users, shards, address)

    users = f"a cohort of {hparams.users} users of {hparams.words} words"
    about = f"{shards} shards, {users}, {_model(hparams)}, one CPU a node"
    return _curve("nodes", "Ray nodes", about, sizes, measure, **UNKNOWN, server_seconds=0, own_memory_bytes=None)


def measure_rounds(
    folder: Path,
    corpus: Path,
    hparams: BenchHParams,
    cohort: int,
    shards: int,
    address: str | None = None,
    branch: int | None = None,
) -> Costs:
    """Train a new run as `flsim run` does, and return its costs by name, as in `TITLES`.

    Args:
        folder: the new run's folder.
        corpus: folder of the corpus.
        hparams: the measured training; the first round, which starts processes, is left out.
        cohort: number of users in each round.
        shards: number of shards.
        address: address of a Ray cluster; None starts one on this machine.
        branch: number of shards in a branch; None for the default of runs.

    Returns:
        Medians over rounds of seconds, of which CPU seconds depend least on other work of the machine; and the peak of
        the anonymous memory of all processes, with Ray's own.
    """
    settings = settings_over(corpus, hparams, cohort, SystemHParams(shards=shards, branch=branch, tracking=()))
    run = _TimedRun.create(settings, folder)
    with PeakMemory(os.getpid(), MEMORY_EVERY) as peak:
        rounds = train(run, address)[1:]
    logged = {"round_seconds": "seconds", "overhead_seconds": "overhead"}
    names = ("round_seconds", "cpu_seconds", "overhead_seconds", "server_seconds")
    costs = {name: float(median(line[logged.get(name, name)] for line in rounds)) for name in names}
    return costs | {"own_memory_bytes": float(peak.anonymous)}


def make_tiny(folder: Path, users: int, hparams: BenchHParams) -> None:
    """Write a corpus of users of one record each, of uniform words, in a few seconds for a million users.

    `make_synthetic` draws each user by itself, which takes minutes for a million.
    """
    layout = Layout(hparams.vocabulary_size)
    words, rng = hparams.words, stream(0, "tiny users")
    names = tuple(f"w{word}" for word in range(layout.words))
    vocabulary = Vocabulary(names, (1,) * layout.words, layout.name)
    with new_folder(folder) as partial, CorpusWriter(partial, vocabulary, layout) as writer:
        for split, first, last in _parts(users):
            size = last - first
            tokens = rng.integers(layout.first_word, layout.last_word, size * words, endpoint=True)
            writer.splits[split].extend(
                [f"{split}{user}" for user in range(first, last)],
                tokens.astype(layout.token_type),
                np.full(size, words),
                np.ones(size, np.int64),
            )
        writer.finish(dropped={}, sources=[], parameters={"tiny users": users})


def _parts(users: int) -> list[tuple[str, int, int]]:
    """Return ranges of train users that are written together, and one test user."""
    starts = range(0, users, WRITE_USERS)
    return [*(("train", first, min(first + WRITE_USERS, users)) for first in starts), ("test", 0, 1)]


def _curve(
    name: str,
    axis: str,
    about: str,
    sizes: Sequence[int],
    measure: Callable[[Path, int], Costs],
    **expected: float | None,
) -> Curve:
    """Measure all sizes in a temporary folder, each in a new folder of its own within it."""
    with tempfile.TemporaryDirectory(prefix="flsim-bench-") as folder:
        costs = []
        for size in sizes:
            say(f"curve {name}: {axis} = {size:,}")
            costs.append(measure(Path(folder) / str(size), size))
    quantities = []
    for key, exponent in expected.items():
        title, scale = TITLES[key]
        quantities.append(Quantity(key, title, tuple(cost[key] for cost in costs), exponent, scale))
    return Curve(name, axis, about, tuple(sizes), tuple(quantities))


def shared_corpus(corpus: Path, hparams: BenchHParams) -> Path:
    """Return a synthetic corpus of the settings' users, which is made only for the first size of a curve."""
    if not corpus.exists():
        users = SyntheticHParams(
            users=hparams.users, words_per_user=hparams.words, vocabulary_size=hparams.vocabulary_size, test_users=1
        )
        make_synthetic(corpus, users, seed=0)
    return corpus


def _model(hparams: BenchHParams) -> str:
    sizes = f"V = {hparams.vocabulary_size:,}, embedding {hparams.model.embedding}, {hparams.model.units} units"
    return f"{hparams.model.architecture} ({sizes})"
