"""A plan: all that can be known of runs before they are trained."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flsim.data.corpus import Split
from flsim.evaluation.evaluate import EvaluationHParams
from flsim.planning.disk import run_bytes
from flsim.planning.monitor import Watch
from flsim.planning.predicting import Machine, Predictor, Time, evaluations_of
from flsim.planning.scale import Scale, Users
from flsim.privacy.ledger import Ledger
from flsim.privacy.table import report
from flsim.results import power
from flsim.sweeps.definition import Planned


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
    found = []
    for session in sessions:
        names = {*session["trained"], *session["failed"]}
        of_session = [each for each in planned if each.name in names]  # in the order in which a sweep takes them
        if names and len(of_session) == len(names):
            time = predictor.time(of_session, session["at_once"])
            found.append(Against(len(names), session["seconds"], time.seconds, session["peak_memory"], memory.total))
    return found


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
