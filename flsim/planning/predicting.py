"""Prediction of the duration of runs, of each run and of all, from a calibration."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flsim.data.corpus import Split
from flsim.planning.calibration import Calibration
from flsim.planning.cost import Cost, Need, Work, fit, most_at_once, run_seconds, saturation, schedule
from flsim.planning.kinds import canaries_of, is_in_process, kind_of
from flsim.planning.scale import trained_on
from flsim.runs.config import Config
from flsim.runs.config.arms import shared_rounds
from flsim.runs.config.base import whole_rounds
from flsim.sweeps.definition import Planned, longest_first

SLOW, QUICK = 0.9, 0.1  # quantiles of what was measured, for the longest and the shortest that it may take
UNSURE = 0.1  # of a time, however alike the measurements are


@dataclass(frozen=True)
class Machine:
    """The machine that trains.

    Attributes:
        cores, gpus: its cores and GPUs.
        busy: share of its cores that others took during the calibration; None without one.
    """

    cores: int
    gpus: int
    busy: float | None = None


@dataclass(frozen=True)
class Time:
    """The predicted duration of runs, in seconds.

    Attributes:
        seconds, quickest, slowest: of all runs together.
        runs: duration of each run, by name.
        at_once: largest number of runs at the same time.
        calibration: duration of the calibration.
        costs: fitted cost of each kind of run.
    """

    seconds: float
    quickest: float
    slowest: float
    runs: dict[str, float]
    at_once: int
    calibration: float
    costs: dict[str, Cost]


def evaluations_of(config: Config, train: Split) -> tuple[int, int]:
    """Return the number of a run's evaluations, and the number of rounds before the first."""
    rounds, schedule_ = config.rounds_over(train), config.evaluation
    if schedule_.every_epochs is None:
        return -(-rounds // schedule_.every), min(rounds, schedule_.every)
    per_epoch = config.rounds_per_epoch(train)
    interval = schedule_.every_epochs * per_epoch
    intervals = range(1, math.ceil(rounds / interval) + 1)
    near = {whole_rounds(k * interval) for k in intervals} if interval >= 1 else range(1, rounds)
    due = sorted({round_ for round_ in near if 0 < round_ < rounds and schedule_.is_due(round_, per_epoch)} | {rounds})
    return len(due), due[0]


def checkpoints_of(config: Config, train: Split) -> int:
    """Return the number of checkpoints that a run keeps: evaluated ones, and the one its other arm begins with."""
    rounds, per_epoch = config.rounds_over(train), config.rounds_per_epoch(train)
    evaluations, _ = evaluations_of(config, train)
    parting = shared_rounds(config, rounds)
    return evaluations + (0 < parting < rounds and not config.evaluation.is_due(parting, per_epoch))


@dataclass(frozen=True)
class Predictor:
    """Predictor of the duration of runs that a calibration has copies of.

    Attributes:
        calibration: the measurements.
        train: the training users.
        machine: the machine that trains.
        need: function of a run's settings that returns what it holds of the machine.
        whole_cluster: whether runs are trained one after another.
    """

    calibration: Calibration
    train: Split
    machine: Machine
    need: Callable[[Config], Need]
    whole_cluster: bool = False

    def time(self, planned: Sequence[Planned], at_once: int | None = None) -> Time:
        """Return the duration of training all these runs, as a sweep does."""
        middle, runs, most = self._seconds(planned, at_once)
        quickest, slowest = (self._seconds(planned, at_once, quantile)[0] for quantile in (QUICK, SLOW))
        return Time(
            middle,
            min(quickest, middle * (1 - UNSURE)),
            max(slowest, middle * (1 + UNSURE)),
            runs,
            most,
            self.calibration.seconds,
            self._costs(),
        )

    def _costs(self, quantile: float | None = None) -> dict[str, Cost]:
        return {kind: fit(observed, quantile) for kind, observed in self.calibration.observed.items()}

    def _seconds(
        self, planned: Sequence[Planned], at_once: int | None, quantile: float | None = None
    ) -> tuple[float, dict[str, float], int]:
        costs = self._costs(quantile)
        runs = longest_first(planned, self.train)
        needs = [Need(1) if self.whole_cluster else self.need(run.config) for run in runs]
        seconds = [
            run_seconds(costs[kind_of(run.config)], self._work(run.config), self._saturation(run.config, at_once))
            for run in runs
        ]
        at_once = 1 if self.whole_cluster else at_once
        spans = schedule(seconds, needs, self.machine.cores, self.machine.gpus, at_once)
        whole = self.calibration.before + max((end for _, end in spans), default=0.0) + self.calibration.after
        return whole, dict(zip((run.name for run in runs), seconds, strict=True)), most_at_once(spans)

    def _work(self, config: Config) -> Work:
        train = trained_on(config, self.train)
        evaluations, first_due = evaluations_of(config, train)
        rounds, references = config.rounds_over(train), config.evaluation.references
        return Work(rounds, config.round_size, evaluations, first_due, canaries_of(config), references)

    def _saturation(self, config: Config, at_once: int | None) -> float:
        need = self.need(config)
        if need.gpus or is_in_process(config, need, self.whole_cluster):
            return 1.0  # training and evaluation take turns on the GPU, or in the process
        runs = 1 if self.whole_cluster else fitting(need, self.machine, at_once)
        processes = min(need.cpus, self.machine.cores)
        return saturation(runs, processes, config.system.evaluators, self.machine.cores)


def fitting(need: Need, machine: Machine, at_once: int | None) -> int:
    """Return how many runs with this need are trained at once."""
    by_gpus = int(machine.gpus / need.gpus + 1e-9) if need.gpus else machine.cores
    return max(1, min(int(machine.cores // max(need.cpus, 1)), by_gpus, at_once or machine.cores))
