"""How long runs take: a few numbers for each kind of run, and the order in which a sweep starts them.

A run starts, trains rounds of a + b x size seconds, evaluates beside training, and ends. Where all cores are taken,
whatever is computed beside training slows it or a neighbour by as much; where cores are left, nothing does. So what
an evaluation beside training adds to the clock is its seconds times `saturation`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

from flsim.base.errors import InputError

CUT = 0.1  # of the rounds, at either end: what else the machine did in a moment
EPSILON = 1e-9  # of resources: shares of GPUs are fractions


@dataclass(frozen=True)
class Observed:
    """What a run took; seconds.

    Attributes:
        size: users of a round, or records of a step.
        start: from the start of its process to the first round, and what the first took longer than others; None where
            the cluster had just started as well.
        rounds: of one round each, with no evaluation of its own beside it.
        pause: of the training for an evaluation: the accounting of a private run.
        first_evaluation: from its submission to its end, with the start of the evaluator.
        evaluation: of a later one.
        end: from the last evaluation to the end of the process.
    """

    size: float
    start: float | None
    rounds: tuple[float, ...]
    pause: float
    first_evaluation: float
    evaluation: float
    end: float


@dataclass(frozen=True)
class Cost:
    """Of one kind of run; seconds, as of `Observed`.

    Attributes:
        base, per_size: a round of s users, or a step of s records, takes base + per_size s.
    """

    start: float
    base: float
    per_size: float
    pause: float
    first_evaluation: float
    evaluation: float
    end: float

    def round_seconds(self, size: float) -> float:
        return self.base + self.per_size * size


@dataclass(frozen=True)
class Work:
    """What a run has to do.

    Attributes:
        rounds: or steps.
        size: users of a round, or records of a step.
        evaluations: of its checkpoints, the last one included.
        first_due: rounds before the first of them.
        weight: seconds of an evaluation, times those of one in the calibration.
    """

    rounds: int
    size: float
    evaluations: int
    first_due: int
    weight: float = 1.0


def fit(observed: Sequence[Observed], quantile: float | None = None) -> Cost:
    """The cost that runs of one kind show.

    Args:
        observed: at least one; base and per_size need two sizes, else all is base.
        quantile: of the rounds of a run, and of the runs: for a quick machine near 0, for a slow one near 1. By default
            means, of rounds without the tenth that is least and the tenth that is greatest.
    """
    if not observed:
        raise InputError("nothing was observed to fit a cost to")

    def middle(values: Sequence[float], cut: float = 0.0) -> float:
        return float(scipy.stats.trim_mean(values, cut) if quantile is None else np.quantile(values, quantile))

    seconds = np.array([middle(run.rounds, CUT) for run in observed])
    sizes = np.array([run.size for run in observed])
    base, per_size = _line(sizes, seconds)

    def of(name: str) -> float:
        return middle([getattr(run, name) for run in observed])

    starts = [run.start for run in observed if run.start is not None]
    return Cost(
        middle(starts) if starts else 0.0,
        base,
        per_size,
        of("pause"),
        of("first_evaluation"),
        of("evaluation"),
        of("end"),
    )


def _line(sizes: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[float, float]:
    """a, b >= 0 of a + b size, by least squares of what is off relative to each."""
    if len(np.unique(sizes)) == 1:
        return float(seconds.mean()), 0.0
    scale = 1 / np.maximum(seconds, 1e-12)
    (base, per_size), _ = scipy.optimize.nnls(np.stack([scale, sizes * scale], axis=1), seconds * scale)
    return float(base), float(per_size)


def saturation(runs: int, processes: float, evaluators: int, cores: int) -> float:
    """How much of what evaluators compute has no core of its own, 0 to 1.

    Args:
        runs: at once.
        processes: cores that the training of each takes.
        evaluators: of each.
        cores: of the machine.
    """
    return float(np.clip((runs * (processes + evaluators) - cores) / (runs * evaluators), 0.0, 1.0))


def run_seconds(cost: Cost, work: Work, saturated: float) -> float:
    """From the start of a run's process to its end, with as many others beside it as in the calibration.

    Args:
        cost: of its kind.
        work: what it has to do.
        saturated: see `saturation`.
    """
    round_ = cost.round_seconds(work.size)
    first, later = cost.first_evaluation * work.weight, cost.evaluation * work.weight
    if work.evaluations == 1:
        beside, last = 0.0, first
    else:
        beside, last = first + (work.evaluations - 2) * later, later
    training = work.rounds * round_ + work.evaluations * cost.pause
    behind = work.first_due * round_ + beside + last  # one evaluator works off one after another
    return cost.start + max(training + saturated * beside + last, behind) + cost.end


@dataclass(frozen=True)
class Need:
    """Cores and GPUs that a run holds while it is trained."""

    cpus: float
    gpus: float = 0.0


def schedule(
    seconds: Sequence[float],
    needs: Sequence[Need],
    cores: float,
    gpus: float = 0.0,
    at_once: int | None = None,
) -> list[tuple[float, float]]:
    """When each run begins and ends, as `server.sweep.train_all` starts them: in their order, whatever fits.

    Args:
        seconds: of each run, in the order in which they are started.
        needs: of each run.
        cores, gpus: of the machine.
        at_once: runs at once, at most.

    Raises:
        InputError: a run needs more than there is.
    """
    for need in needs:
        if need.cpus > cores + EPSILON or need.gpus > gpus + EPSILON:
            raise InputError(f"a run takes {need.cpus:g} cores and {need.gpus:g} GPUs; here are {cores:g} and {gpus:g}")
    spans, waiting, now = [(0.0, 0.0)] * len(seconds), list(range(len(seconds))), 0.0
    working: list[int] = []
    while waiting:
        for job in list(waiting):
            room = at_once is None or len(working) < at_once
            held_cpus, held_gpus = (sum(getattr(needs[k], name) for k in working) for name in ("cpus", "gpus"))
            fits = needs[job].cpus + held_cpus <= cores + EPSILON and needs[job].gpus + held_gpus <= gpus + EPSILON
            if room and fits:
                spans[job] = (now, now + seconds[job])
                working.append(job)
                waiting.remove(job)
        if waiting:
            now = min(spans[k][1] for k in working)
            working = [k for k in working if spans[k][1] > now]
    return spans


def most_at_once(spans: Sequence[tuple[float, float]]) -> int:
    """How many runs of a schedule are trained at the same time, at most."""
    return max((sum(begin <= at < end for begin, end in spans) for at, _ in spans), default=0)
