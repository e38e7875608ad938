"""Time and memory of runs: a short run of each configuration is trained and measured, and its times are multiplied.

    time of a run = start + rounds x measured round + evaluations x measured evaluation

A short run has three parts, each a round, or `STEPS` steps of central training. It is evaluated after the second and
the third part. The second part gives the time of a round, because the first one includes start-up. The second
evaluation gives the time of an evaluation, because the first one includes the start of the evaluator. The start is
the remaining time of the short run, from the start of its process to its end.

Training is assumed to wait for evaluations. If evaluators have separate cores, runs end earlier.
"""

import os
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from itertools import cycle, islice
from pathlib import Path

from flsim.base.errors import RunFailed
from flsim.base.machine import PeakMemory
from flsim.base.progress import progress
from flsim.data.corpus import Split
from flsim.planning.scale import cell, duration, evaluations_of, number, row_name, size, trained_on, with_unit
from flsim.results.run_file import read_evaluations
from flsim.runs import roundlog
from flsim.runs.config import Config, dump
from flsim.runs.sweeps.definition import Planned
from server.launch import share
from server.sweep import Job, train_all

STEPS = 20  # steps of central training in a part of a short run: a single step is too short to be measured
PARTS, EVALUATIONS = 3, 2  # of a short run
# Settings that do not change the time of a round or of an evaluation. Rows that differ only in these settings are
# measured once.
SAME_TIME = {
    *("data.shadow", "canaries.arm", "local.learning_rate", "training.learning_rate", "training.server_learning_rate"),
    *("privacy.clip", "privacy.noise_multiplier", "privacy.delta"),
}
MEMORY_EVERY = 1.0  # seconds between two measurements of memory
TRIES = 50  # to remove a folder that processes which are about to end may still write to
NOTE = (
    "Time = start + rounds x round + evaluations x evaluation. Each configuration was measured by a short run of three "
    f"rounds, or of 3 x {STEPS} steps of central training, with two evaluations: Round is the second round, Evaluation "
    "the second evaluation, Start all other time of the short run. At once: runs that this machine trains at the same "
    "time. With several runs at once the time of all runs is the sum of time / runs at once, and at least the longest "
    "run."
)


@dataclass(frozen=True)
class Machine:
    """The machine that trains: its numbers of cores and GPUs."""

    cores: int
    gpus: int

    def runs_at_once(self, config: Config, at_once: int | None = None) -> int:
        """Return how many runs of a configuration fit on the machine, at most `at_once`."""
        cpus, gpus = share(config, [{"CPU": self.cores, "GPU": self.gpus}])
        by_gpus = int(self.gpus / gpus + 1e-9) if gpus else self.cores  # shares of GPUs are fractions
        return max(1, min(int(self.cores // max(cpus, 1)), by_gpus, at_once or self.cores))


@dataclass(frozen=True)
class Cost:
    """Measured times of a configuration, in seconds; `start` includes the end of the process."""

    start: float
    round: float
    evaluation: float


@dataclass(frozen=True)
class Measurement:
    """The measurement of short runs: memory, and what their times depend on."""

    memory: int = cell("Peak memory of all processes, measured", size)
    at_once: int = cell("Runs at once during the measurement", with_unit("{:,}", "runs"))
    overhead: float = cell("Start and end of the cluster, measured", duration)
    seconds: float = cell("Duration of the measurement", duration)
    load: float = cell("Load before the measurement", with_unit("{:.1f}", "processes"))


@dataclass(frozen=True)
class RunTime:
    """The predicted time of runs of one configuration and length."""

    name: str = cell("Configuration", is_number=False)
    runs: int = cell("Runs", number)
    at_once: int = cell("At once", number)
    start: float = cell("Start", duration)
    rounds: int = cell("Rounds", number)
    round: float = cell("Round", duration)
    evaluations: int = cell("Eval.", number)
    evaluation: float = cell("Evaluation", duration)
    seconds: float = cell("Time", duration, NOTE)


@dataclass(frozen=True)
class Time:
    """The predicted time of all runs, in seconds."""

    seconds: float = cell("Time of all runs, as many at once as fit", duration)
    at_once: int = cell("Largest number of runs at once", with_unit("{:,}", "runs"))
    one_by_one: float = cell("Time of all runs, one after another", duration)
    longest: float = cell("Time of the longest run", duration)


def short_run(config: Config) -> Config:
    """Return the settings of a short run: three parts, evaluated after the second and the third one."""
    part = 1 if config.has_a_line_per_round else STEPS
    tracking = tuple(tracker for tracker in config.system.tracking if tracker == "tensorboard")
    system = replace(config.system, tracking=tracking)
    if not config.has_a_line_per_round:
        system = replace(system, checkpoint_every=part)
    evaluation = replace(config.evaluation, every=(PARTS - 1) * part, every_epochs=None)
    canaries = config.canaries  # windows and injections become fractions of training: a short run has fewer rounds
    if canaries.injections:
        last = max(1.0, *canaries.injections) / 0.8  # an injection has a round after it
        canaries = replace(canaries, injections=tuple(at / last for at in canaries.injections))
    else:
        last = max(1.0, *(end for _, end in canaries.windows))
        canaries = replace(canaries, windows=tuple((begin / last, end / last) for begin, end in canaries.windows))
    return replace(config.lasting(PARTS * part), canaries=canaries, evaluation=evaluation, system=system)


def configuration_of(run: Planned) -> str:
    """Return the name of a configuration, whose runs have equally long rounds and evaluations."""
    return row_name(run, without=SAME_TIME)


def measure(
    planned: Sequence[Planned], machine: Machine, at_once: int | None = None, whole_cluster: bool = False
) -> tuple[dict[str, Cost], Measurement]:
    """Return the times of each configuration, by name, and how short runs were measured.

    They are trained in a temporary folder, which is removed in any case. There are at least as many short runs as the
    sweep trains at the same time, so that the times include the competition between runs. With `whole_cluster`, runs
    are trained one after another. Raises RunFailed if a short run failed.
    """
    configs = {configuration_of(run): run.config for run in planned}
    slots = 1 if whole_cluster else max(machine.runs_at_once(config, at_once) for config in configs.values())
    slots = min(slots, len(planned))
    load, began = os.getloadavg()[0], time.time()
    with scratch() as folder:
        jobs, names = [], {}
        for index, name in enumerate(islice(cycle(configs), max(len(configs), slots))):
            short, config = f"short{index}", short_run(configs[name])
            dump(config, folder / f"{short}.toml")
            jobs.append(Job(short, config, folder / f"{short}.toml", folder / short, folder / f"{short}.log"))
            names[short] = name
        costs, seconds = dict[str, list[Cost]](), list[float]()
        title = f"measuring {PARTS} rounds and {EVALUATIONS} evaluations of each configuration"
        with progress(title, len(jobs), unit="runs") as advance, PeakMemory(os.getpid(), MEMORY_EVERY) as memory:
            for job in train_all(jobs, None, at_once, whole_cluster):
                if job.failure:
                    raise RunFailed(f"the measurement failed, therefore nothing is predicted: {job.failure}")
                seconds.append(job.seconds)
                costs.setdefault(names[job.name], []).append(cost_of(folder / job.name, job.seconds))
                advance(len(seconds))
        total = time.time() - began
    medians = {
        name: Cost(*(statistics.median(values) for values in zip(*map(astuple, observed), strict=True)))
        for name, observed in costs.items()
    }
    return medians, Measurement(memory.total, slots, max(0.0, total - sum(seconds) / slots), total, load)


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a folder that is removed after the block, even if processes that are about to end still write to it."""
    folder = Path(tempfile.mkdtemp(prefix="flsim-plan-"))
    try:
        yield folder
    finally:
        for _ in range(TRIES):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(0.1)


def cost_of(run: Path, seconds: float) -> Cost:
    """Return the times of a short run of so many seconds from its logs; raise RunFailed if these lack any."""
    lines = roundlog.read(run)
    stored = [attempt for attempt in read_evaluations(run) if attempt.outcome == "stored"]
    if len(lines) != PARTS or len(stored) != EVALUATIONS:
        raise RunFailed(
            f"the measurement failed, therefore nothing is predicted: a short run has {len(lines)} lines of rounds and "
            f"{len(stored)} evaluations; look for what it lacks with `flsim run`, or use --no-calibration"
        )
    rounds = lines[-1]["round"]
    round_ = lines[1]["seconds"] / (lines[1]["round"] - lines[0]["round"])
    evaluation = max(stored, key=lambda attempt: attempt.ended).seconds
    return Cost(max(0.0, seconds - rounds * round_ - EVALUATIONS * evaluation), round_, evaluation)


def times_of(
    planned: Sequence[Planned],
    costs: Mapping[str, Cost],
    train: Split,
    machine: Machine,
    at_once: int | None = None,
    whole_cluster: bool = False,
) -> tuple[RunTime, ...]:
    """Return the times of runs by configuration and length, the longest first."""
    rows = Counter[RunTime]()
    for run in planned:
        users, cost = trained_on(run.config, train), costs[name := configuration_of(run)]
        rounds, evaluations = run.config.rounds_over(users), evaluations_of(run.config, users)
        slots = 1 if whole_cluster else machine.runs_at_once(run.config, at_once)
        seconds = cost.start + rounds * cost.round + evaluations * cost.evaluation
        parts = (cost.start, rounds, cost.round, evaluations, cost.evaluation)
        rows[RunTime(name, 0, slots, *parts, seconds)] += 1
    counted = [replace(row, runs=runs) for row, runs in rows.items()]
    return tuple(sorted(counted, key=lambda row: -row.seconds))


def time_of(times: Sequence[RunTime], overhead: float) -> Time:
    """Return the time of all runs: the sum of time / runs at once, but at least the longest run, and the overhead."""
    longest, runs = max(row.seconds for row in times), sum(row.runs for row in times)
    return Time(
        seconds=overhead + max(longest, sum(row.runs * row.seconds / row.at_once for row in times)),
        at_once=min(runs, max(row.at_once for row in times)),
        one_by_one=sum(row.runs * row.seconds for row in times),
        longest=longest,
    )
