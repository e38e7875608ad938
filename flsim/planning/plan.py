"""A plan: all that can be known of runs before they are trained."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flsim.config import Config, FederatedConfig
from flsim.data.corpus import Split
from flsim.evaluation.evaluate import EvaluationHParams
from flsim.planning.calibration import REFERENCES, Calibration, kind_of, size_of
from flsim.planning.cost import Cost, Need, Work, fit, most_at_once, run_seconds, saturation, schedule
from flsim.planning.disk import run_bytes
from flsim.planning.scale import Scale, Users
from flsim.planning.watching import Watch
from flsim.privacy.ledger import Ledger
from flsim.privacy.table import report
from flsim.results import power
from flsim.sweeps.definition import Planned

SLOW, QUICK = 0.9, 0.1  # quantiles of what was measured, for the longest and the shortest that it may take
UNSURE = 0.1  # of a time, however alike the measurements are


@dataclass(frozen=True)
class Machine:
    """What trains.

    Attributes:
        cores, gpus: of it.
        busy: share of its cores that others used before the calibration; None without one.
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


@dataclass(frozen=True)
class Memory:
    """Bytes, at the peak.

    Attributes:
        total: of all processes together.
        run: of one run's.
        rest: of what belongs to no run.
        of_run: kind of process -> of one run's.
    """

    total: int
    run: int
    rest: int
    of_run: dict[str, int]


@dataclass(frozen=True)
class Disk:
    """Bytes.

    Attributes:
        total: when all is over.
        checkpoints, planted, rest: of all runs, as of `flsim.planning.disk.DiskUse`.
        corpus: that the sweep makes; 0 where it is there.
        meanwhile: more, while training goes on.
        kept: number of checkpoints.
    """

    total: int
    checkpoints: int
    planted: int
    rest: int
    corpus: int
    meanwhile: int
    kept: int


@dataclass(frozen=True)
class Privacy:
    """Of runs that release equally much.

    Attributes:
        name: of the first one's row.
        unit: "user" or "record".
        delta: that epsilon is for.
        epsilons: convention -> epsilon; None where it cannot be computed, or is infinite.
    """

    name: str
    unit: str
    delta: float
    epsilons: dict[str, float | None]


@dataclass(frozen=True)
class Power:
    """What a comparison of two of the runs, such as twins, finds.

    Attributes:
        canaries, seeds: of a run, and of runs.
        most_bits: exposure of a canary that is memorized entirely.
        bits: the least mean difference in exposure that is found with 80% power; None where none is.
        counts: the least difference in share memorized (RS) that is; None likewise.
        effect: a difference in exposure, bits.
        found: power to find it.
        canaries_needed, seeds_needed: to find it with 80% power; None where a million are not enough.
    """

    canaries: int
    seeds: int
    most_bits: float
    bits: float | None
    counts: float | None
    effect: float
    found: float
    canaries_needed: int | None
    seeds_needed: int | None


@dataclass(frozen=True)
class Against:
    """A session of a finished sweep beside what is predicted of it.

    Attributes:
        runs: that it trained.
        seconds, memory: recorded; memory in bytes, None where nobody looked.
        predicted_seconds, predicted_memory: of the same runs.
    """

    runs: int
    seconds: float
    predicted_seconds: float
    memory: int | None
    predicted_memory: int


@dataclass(frozen=True)
class Plan:
    """All of it. None is what was not asked for, or does not apply."""

    name: str
    tier: str | None
    machine: Machine
    scale: Scale
    published: Scale | None
    source: str | None
    disk: Disk
    privacy: tuple[Privacy, ...]
    power: Power
    time: Time | None = None
    memory: Memory | None = None
    against: tuple[Against, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


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


def in_order(planned: Sequence[Planned], train: Split) -> list[Planned]:
    """As `server.sweep.sweep` starts them: those of most epochs first."""

    def epochs(run: Planned) -> float:
        return run.config.rounds_over(train) / run.config.rounds_per_epoch(train)

    return sorted(planned, key=epochs, reverse=True)


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
        runs = in_order(planned, self.train)
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
        return Work(config.rounds_over(self.train), size_of(config), evaluations, first_due, weight)

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


def memory_of(watch: Watch) -> Memory:
    return Memory(watch.peak, watch.run, watch.rest, watch.of_run)


def disk_of(runs: Sequence[Planned], users: Users, train: Split, at_once: int, corpus: int) -> Disk:
    """Of all runs.

    Args:
        runs: all.
        users, train: who is trained on.
        at_once: runs at the same time.
        corpus: bytes of the corpus, where the sweep makes it.
    """
    uses, kept = [], 0
    for each in runs:
        evaluations, _ = evaluations_of(each.config, train)
        kept += evaluations
        rounds = each.config.rounds_over(train)
        uses.append(run_bytes(each.config, users.users, users.records, users.vocabulary, rounds, evaluations))
    checkpoints, planted, rest = (
        sum(getattr(use, name) for use in uses) for name in ("checkpoints", "planted", "rest")
    )
    meanwhile = sum(sorted((use.newest for use in uses), reverse=True)[:at_once])
    return Disk(checkpoints + planted + rest + corpus, checkpoints, planted, rest, corpus, meanwhile, kept)


def privacy_of(
    planned: Sequence[Planned], names: Callable[[Planned], str], users: Users, train: Split
) -> list[Privacy]:
    """Epsilon of runs with noise, under every convention for their sampler; once where runs release the same."""
    found: dict[Any, Privacy] = {}
    for each in planned:
        config = each.config
        if config.privacy.mechanism != "dp":
            continue
        population = users.users if config.unit == "user" else users.records
        entry, delta = config.planned(population, config.rounds_over(train)), config.privacy.delta_for(population)
        if (entry, delta) not in found:
            lines = [(line.convention.name, line.epsilon) for line in report(Ledger((entry,)), delta)]
            epsilons = {name: value if value is not None and math.isfinite(value) else None for name, value in lines}
            found[entry, delta] = Privacy(names(each), config.unit, delta, epsilons)
    return list(found.values())


def power_of(canaries: int, seeds: int, evaluation: EvaluationHParams, effect: float) -> Power:
    """What a comparison finds, by `flsim.results.power`."""
    return Power(
        canaries,
        seeds,
        math.log2(evaluation.references + 1),
        _finite(power.detectable_exposure(canaries, seeds)),
        _finite(power.detectable_counts(canaries)),
        effect,
        power.power_of_exposure(effect, canaries, seeds),
        power.canaries_for(effect, seeds),
        power.seeds_for(effect, canaries),
    )


def against(
    sessions: Iterable[Mapping[str, Any]], planned: Sequence[Planned], predictor: Predictor, memory: Memory
) -> list[Against]:
    """Sessions that trained nothing but these runs beside what is predicted of them."""
    by_name, found = {each.name: each for each in planned}, []
    for session in sessions:
        names = [*session["trained"], *session["failed"]]
        if names and all(name in by_name for name in names):
            time = predictor.time([by_name[name] for name in names], session["at_once"])
            recorded = session["peak_memory"]
            found.append(Against(len(names), session["seconds"], time.seconds, recorded, memory.total))
    return found


def is_on_gpu(config: Config, machine: Machine) -> bool:
    """Whether a federated run's clients train on a GPU here."""
    return isinstance(config, FederatedConfig) and machine.gpus > 0 and config.system.gpus_per_client != 0


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
