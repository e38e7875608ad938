"""A plan: everything that can be computed about runs before they are trained."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flsim.data.corpus import Split
from flsim.evaluation.evaluate import EvaluationHParams
from flsim.planning.amounts import Amount
from flsim.planning.disk import run_bytes
from flsim.planning.monitor import Watch
from flsim.planning.predicting import Machine, Predictor, Time, checkpoints_of, evaluations_of
from flsim.planning.proof import Provable
from flsim.planning.scale import Scale, trained_on
from flsim.privacy.ledger import Ledger
from flsim.privacy.table import report
from flsim.results import power
from flsim.sweeps.definition import Planned


@dataclass(frozen=True)
class Memory:
    """Peak memory, in bytes.

    Attributes:
        total: all processes together.
        run: the processes of one run.
        rest: processes that belong to no run.
        of_run: one run's processes of a kind, by kind of process.
    """

    total: int
    run: int
    rest: int
    of_run: dict[str, int]


@dataclass(frozen=True)
class Disk:
    """Disk space, in bytes.

    Attributes:
        total: after all runs.
        checkpoints, planted, rest: of all runs, as in `flsim.planning.disk.DiskUse`.
        corpus: of the corpus that the sweep makes; 0 if the corpus exists.
        meanwhile: additional space during training.
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
    """The privacy of runs that release equally much.

    Attributes:
        name: name of the first run's row.
        unit: "user" or "record".
        delta: the delta of epsilon.
        epsilons: epsilon by convention; None if it cannot be computed, or is infinite.
    """

    name: str
    unit: str
    delta: float
    epsilons: dict[str, float | None]


@dataclass(frozen=True)
class Power:
    """The power of a comparison of two runs, such as twins, with the correction that the plan's table makes.

    Attributes:
        tests: number of comparisons that a table of the plan corrects for, by Holm.
        canaries, seeds: number of canaries of a run, and number of seeds.
        most_bits: exposure of a completely memorized canary.
        bits: the least mean difference in exposure that is detected with 80% power; None if there is none.
        counts: the least such difference in share memorized (RS); None likewise.
        effect: a difference in exposure, bits.
        found: power to detect `effect`.
        canaries_needed, seeds_needed: numbers that detect `effect` with 80% power; None if a million are not enough.
    """

    tests: int
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
    """A session of a finished sweep beside its prediction.

    Attributes:
        runs: number of runs that it trained.
        seconds, memory: recorded values; memory in bytes. None if a value was not recorded.
        predicted_seconds, predicted_memory: predictions for the same runs.
    """

    runs: int
    seconds: float | None
    predicted_seconds: float
    memory: int | None
    predicted_memory: int


@dataclass(frozen=True)
class Plan:
    """A whole plan; None stands for parts that were not requested or do not apply."""

    name: str
    tier: str | None
    machine: Machine
    scale: Scale
    published: Scale | None
    source: str | None
    disk: Disk
    privacy: tuple[Privacy, ...]
    power: Power | None
    time: Time | None = None
    memory: Memory | None = None
    against: tuple[Against, ...] = ()
    amounts: tuple[Amount, ...] = ()
    published_amounts: tuple[Amount, ...] | None = None
    provable: tuple[Provable, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        return asdict(self)


def memory_of(watch: Watch) -> Memory:
    """Return the peak memory that a calibration measured."""
    return Memory(watch.peak, watch.run, watch.rest, watch.of_run)


def disk_of(runs: Sequence[Planned], train: Split, at_once: int, corpus: int) -> Disk:
    """Return the disk space of all runs.

    Args:
        runs: all runs.
        train: the training users.
        at_once: number of runs at the same time.
        corpus: bytes of the corpus, if the sweep makes it.
    """
    uses, kept, vocabulary = [], 0, train.layout.vocabulary_size
    for run in runs:
        split = trained_on(run.config, train)
        evaluations, _ = evaluations_of(run.config, split)
        kept += (checkpoints := checkpoints_of(run.config, split))
        rounds = run.config.rounds_over(split)
        uses.append(run_bytes(run.config, len(split), split.records, vocabulary, rounds, evaluations, checkpoints))
    stay, planted, rest = (sum(getattr(use, name) for use in uses) for name in ("checkpoints", "planted", "rest"))
    meanwhile = sum(sorted((use.newest for use in uses), reverse=True)[:at_once])
    return Disk(stay + planted + rest + corpus, stay, planted, rest, corpus, meanwhile, kept)


def privacy_of(planned: Sequence[Planned], names: Callable[[Planned], str], train: Split) -> list[Privacy]:
    """Return epsilon of runs with noise, under every convention for their sampler; once for equal releases."""
    by_release: dict[Any, Privacy] = {}
    for run in planned:
        config = run.config
        if config.privacy.mechanism != "dp":
            continue
        split = trained_on(config, train)
        population = config.protected(split)
        entry, delta = config.planned(population, config.rounds_over(split)), config.privacy.delta_for(population)
        if (entry, delta) not in by_release:
            lines = [(line.convention.name, line.epsilon) for line in report(Ledger((entry,)), delta)]
            epsilons = {name: value if value is not None and math.isfinite(value) else None for name, value in lines}
            by_release[entry, delta] = Privacy(names(run), config.unit, delta, epsilons)
    return list(by_release.values())


def comparisons_of(planned: Sequence[Planned], names: Callable[[Planned], str]) -> int:
    """Return the number of comparisons of a plan's table: rows that have runs of both worlds; at least 1.

    Args:
        planned: the runs.
        names: returns the name of a run's row, without its world.
    """
    worlds: dict[str, set[str | None]] = {}
    for run in planned:
        worlds.setdefault(names(run), set()).add(run.config.world)
    return max(1, sum({"iid", "non-iid"} <= of_row for of_row in worlds.values()))


def power_of(canaries: int, seeds: int, evaluation: EvaluationHParams, effect: float, tests: int = 1) -> Power | None:
    """Return the power of a comparison, by `flsim.results.power`; None without canaries.

    Holm's correction for k comparisons finds each with p <= alpha / k, whatever the others are.
    So the power is a lower bound of the comparison's power in the table.

    Args:
        canaries, seeds: number of canaries of a run, and number of seeds.
        evaluation: settings of the evaluations.
        effect: a difference in exposure, bits.
        tests: k.
    """
    if not canaries:
        return None
    alpha = power.ALPHA / tests
    return Power(
        tests,
        canaries,
        seeds,
        math.log2(evaluation.references + 1),
        _finite(power.detectable_exposure(canaries, seeds, alpha=alpha)),
        _finite(power.detectable_counts(canaries, alpha=alpha)),
        effect,
        power.power_of_exposure(effect, canaries, seeds, alpha=alpha),
        power.canaries_for(effect, seeds, alpha=alpha),
        power.seeds_for(effect, canaries, alpha=alpha),
    )


def against(
    sessions: Iterable[Mapping[str, Any]], planned: Sequence[Planned], predictor: Predictor, memory: Memory
) -> list[Against]:
    """Return sessions that trained only these runs, beside their predictions."""
    comparisons = []
    for session in sessions:
        names = {*(session.get("trained") or ()), *(session.get("failed") or ())}
        of_session = [run for run in planned if run.name in names]  # in the order in which a sweep takes them
        if names and len(of_session) == len(names):
            time = predictor.time(of_session, session.get("at_once"))
            recorded = session.get("seconds"), session.get("peak_memory")
            comparisons.append(Against(len(names), recorded[0], time.seconds, recorded[1], memory.total))
    return comparisons


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
