"""How long runs take that a calibration has copies of, each and all together."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flsim.data.corpus import Split
from flsim.planning.calibration import Calibration
from flsim.planning.cost import Cost, Need, Work, fit, most_at_once, run_seconds, saturation, schedule
from flsim.planning.kinds import REFERENCES, kind_of
from flsim.runs.config import Config
from flsim.sweeps.definition import Planned, longest_first

SLOW, QUICK = 0.9, 0.1  # quantiles of what was measured, for the longest and the shortest that it may take
UNSURE = 0.1  # of a time, however alike the measurements are


@dataclass(frozen=True)
class Machine:
    """What trains.

    Attributes:
        cores, gpus: of it.
        busy: share of its cores that others took during the calibration; None without one.
    """

    cores: int
    gpus: int
    busy: float | None = None


@dataclass(frozen=True)
class Time:
    """Seconds.

    Attributes:
        seconds, quickest, slowest: of all.
        runs: name -> of a run.
        at_once: runs at the same time, at most.
        calibration: that the calibration took.
        costs: kind of run -> what was fitted.
    """

    seconds: float
    quickest: float
    slowest: float
    runs: dict[str, float]
    at_once: int
    calibration: float
    costs: dict[str, Cost]


def evaluations_of(config: Config, train: Split) -> tuple[int, int]:
    """How many checkpoints a run's schedule evaluates, and after how many rounds the first."""
    rounds, schedule_ = config.rounds_over(train), config.evaluation
    if schedule_.every_epochs is None:
        return -(-rounds // schedule_.every), min(rounds, schedule_.every)
    per_epoch = config.rounds_per_epoch(train)
    interval = schedule_.every_epochs * per_epoch
    near = (
        {round(k * interval) for k in range(1, math.ceil(rounds / interval) + 1)} if interval >= 1 else range(1, rounds)
    )
    due = sorted({each for each in near if 0 < each < rounds and schedule_.is_due(each, per_epoch)} | {rounds})
    return len(due), due[0]


@dataclass(frozen=True)
class Predictor:
    """Predicts times of runs that a calibration has copies of.

    Attributes:
        calibration: what was measured.
        train: what runs train on.
        machine: that trains.
        need: settings of a run -> what it holds of the machine.
        whole_cluster: runs are trained one after another.
    """

    calibration: Calibration
    train: Split
    machine: Machine
    need: Callable[[Config], Need]
    whole_cluster: bool = False

    def time(self, planned: Sequence[Planned], at_once: int | None = None) -> Time:
        """Of training all these runs, as a sweep does."""
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
        needs = [Need(1) if self.whole_cluster else self.need(each.config) for each in runs]
        seconds = [
            run_seconds(costs[kind_of(each.config)], self._work(each.config), self._saturation(each.config, at_once))
            for each in runs
        ]
        at_once = 1 if self.whole_cluster else at_once
        spans = schedule(seconds, needs, self.machine.cores, self.machine.gpus, at_once)
        whole = self.calibration.before + max((end for _, end in spans), default=0.0) + self.calibration.after
        return whole, dict(zip((each.name for each in runs), seconds, strict=True)), most_at_once(spans)

    def _work(self, config: Config) -> Work:
        evaluations, first_due = evaluations_of(config, self.train)
        references = config.evaluation.references
        weight = references / min(references, REFERENCES)
        return Work(config.rounds_over(self.train), config.round_size, evaluations, first_due, weight)

    def _saturation(self, config: Config, at_once: int | None) -> float:
        need = self.need(config)
        if need.gpus:
            return 1.0  # they take turns on the GPU
        together = 1 if self.whole_cluster else fitting(need, self.machine, at_once)
        processes = min(need.cpus, self.machine.cores)
        return saturation(together, processes, config.system.evaluators, self.machine.cores)


def fitting(need: Need, machine: Machine, at_once: int | None) -> int:
    """How many such runs are trained at once."""
    by_gpus = int(machine.gpus / need.gpus + 1e-9) if need.gpus else machine.cores
    return max(1, min(int(machine.cores // max(need.cpus, 1)), by_gpus, at_once or machine.cores))
