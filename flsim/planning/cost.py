"""Model of the time that runs take: a few numbers for each kind of run, and the order in which a sweep starts them.

A run starts, trains rounds of a + b x size seconds, evaluates beside training, and ends. If all cores are taken, any
computation beside training slows the run or a neighbour by as much. If cores are free, nothing slows. An evaluation
beside training therefore adds its seconds times `saturation` to the clock.
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
    """The measured times of a run, in seconds.

    Attributes:
        size: users of a round, or records of a step.
        start: from the start of its process to the first round, plus the extra time of the first round; None if the
            cluster had just started as well.
        rounds: one round each, without an evaluation of its own beside it.
        pause: interruption of training for an evaluation: the accounting of a private run.
        first_evaluation: from its submission to its end, with the start of the evaluator.
        evaluation: a later evaluation.
        end: from the last evaluation to the end of the process.
        canaries: number of canaries that an evaluation measures.
        references: number of references that it ranks each among.
    """

    size: float
    start: float | None
    rounds: tuple[float, ...]
    pause: float
    first_evaluation: float
    evaluation: float
    end: float
    canaries: int = 0
    references: int = 0


@dataclass(frozen=True)
class Cost:
    """The times of one kind of run, in seconds, as in `Observed`.

    Attributes:
        base, per_size: a round of s users, or a step of s records, takes base + per_size s.
        first_wait: from the submission of the first evaluation to its start, which starts the evaluator.
        evaluation, per_reference: of an evaluation with r references the canaries take evaluation + per_reference r,
        canaries: with this number of canaries, and in proportion with others;
        utility: and this is what all else takes, with any number.
    """

    start: float
    base: float
    per_size: float
    pause: float
    first_wait: float
    evaluation: float
    end: float
    per_reference: float = 0.0
    canaries: int = 0
    utility: float = 0.0

    def round_seconds(self, size: float) -> float:
        """Return the seconds of a round or step of a size."""
        return self.base + self.per_size * size

    def evaluation_seconds(self, canaries: int, references: int) -> float:
        """Return the seconds of an evaluation."""
        share = canaries / self.canaries if self.canaries else 1.0
        return self.utility + (self.evaluation + self.per_reference * references) * share


@dataclass(frozen=True)
class Work:
    """The work of a run.

    Attributes:
        rounds: number of rounds or steps.
        size: users of a round, or records of a step.
        evaluations: number of evaluated checkpoints, the last one included.
        first_due: rounds before the first evaluation.
        canaries: number of canaries that an evaluation measures.
        references: number of references that it ranks each among.
    """

    rounds: int
    size: float
    evaluations: int
    first_due: int
    canaries: int = 0
    references: int = 0


def fit(observed: Sequence[Observed], quantile: float | None = None) -> Cost:
    """Return the cost of one kind of run that fits the measurements.

    Args:
        observed: at least one measurement; base and per_size need two sizes, otherwise all is base. Likewise an
            evaluation needs two numbers of references, and some without canaries to tell utility apart.
        quantile: quantile over the rounds of a run, and over the runs: near 0 for a quick machine, near 1 for a slow
            one. By default means, of rounds without the fastest and the slowest tenth.
    """
    if not observed:
        raise InputError("nothing was observed to fit a cost to")

    def middle(values: Sequence[float], cut: float = 0.0) -> float:
        return float(scipy.stats.trim_mean(values, cut) if quantile is None else np.quantile(values, quantile))

    seconds = np.array([middle(run.rounds, CUT) for run in observed])
    sizes = np.array([run.size for run in observed])
    base, per_size = _line(sizes, seconds)

    def middle_of(name: str) -> float:
        return middle([getattr(run, name) for run in observed])

    measured = [run for run in observed if run.canaries] or observed
    without = [run.evaluation for run in observed if not run.canaries and measured is not observed]
    utility = middle(without) if without else 0.0
    references = np.unique([run.references for run in measured])
    evaluations = [middle([run.evaluation for run in measured if run.references == number]) for number in references]
    evaluation, per_reference = _line(references, np.maximum(np.array(evaluations) - utility, 0.0))
    starts = [run.start for run in observed if run.start is not None]
    return Cost(
        middle(starts) if starts else 0.0,
        base,
        per_size,
        middle_of("pause"),
        max(0.0, middle([run.first_evaluation - run.evaluation for run in observed])),
        evaluation,
        middle_of("end"),
        per_reference,
        measured[0].canaries,
        utility,
    )


def _line(sizes: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[float, float]:
    """Return a, b >= 0 of a + b size, by least squares of relative errors."""
    if len(np.unique(sizes)) == 1:
        return float(seconds.mean()), 0.0
    scale = 1 / np.maximum(seconds, 1e-12)
    (base, per_size), _ = scipy.optimize.nnls(np.stack([scale, sizes * scale], axis=1), seconds * scale)
    return float(base), float(per_size)


def saturation(runs: int, processes: float, evaluators: int, cores: int) -> float:
    """Return the share of the evaluators' computation that has no core of its own, 0 to 1.

    Args:
        runs: number of runs at once.
        processes: cores that the training of each run takes.
        evaluators: evaluators of each run.
        cores: cores of the machine.
    """
    return float(np.clip((runs * (processes + evaluators) - cores) / (runs * evaluators), 0.0, 1.0))


def run_seconds(cost: Cost, work: Work, saturated: float) -> float:
    """Return the seconds from the start of a run's process to its end, with as many other runs as in the calibration.

    Args:
        cost: the cost of its kind.
        work: the work of the run.
        saturated: the share of `saturation`.
    """
    round_ = cost.round_seconds(work.size)
    later = cost.evaluation_seconds(work.canaries, work.references)
    first = cost.first_wait + later
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
    """Return when each run begins and ends, as `server.sweep.train_all` starts them: in their order, whichever fits.

    Args:
        seconds: duration of each run, in the order in which they are started.
        needs: needs of each run.
        cores: cores of the machine.
        gpus: GPUs of the machine.
        at_once: largest number of runs at once.

    Raises:
        InputError: a run needs more than the machine has.
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
    """Return the largest number of runs in a schedule that train at the same time."""
    return max((sum(begin <= at < end for begin, end in spans) for at, _ in spans), default=0)
