"""Comparison of two settings over seeds: both runs of a seed have the same canaries, and seeds have different ones."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flsim.base.errors import InputError
from flsim.base.statistics import ROUNDING, paired_t_p, t_interval
from flsim.measures.built_in import PRIMARY
from flsim.measures.quantity import Quantity
from flsim.results.compare import paired_exposure, signed
from flsim.results.store import RunResults


@dataclass(frozen=True)
class PairedOverSeeds:
    """Exposure in setting a less that in setting b, as a mean over each seed's canaries, compared over seeds.

    Attributes:
        a, b: the settings.
        seeds: seeds with a run of both, ascending.
        unpaired: seeds with a run of only one of them.
        diverged_a, diverged_b: seeds whose run diverged. No difference has them, so both runs of such a seed are out.
        differences: a - b of each seed, bits; positive if a exposes canaries more.
        mean_difference: mean over seeds, bits.
        ci_low, ci_high: its 95% interval, from Student's t over seeds; NaN below two.
        p: two-sided p-value of the t test that it is zero; NaN below two seeds.
        agreeing: number of seeds whose difference has the sign of the mean.
        quantity: the compared number; by default exposure.
    """

    a: str
    b: str
    seeds: tuple[int, ...]
    unpaired: tuple[int, ...]
    differences: tuple[float, ...]
    mean_difference: float
    ci_low: float
    ci_high: float
    p: float
    agreeing: int
    quantity: Quantity = PRIMARY
    diverged_a: tuple[int, ...] = ()
    diverged_b: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.text()

    def text(self, corrected: float = math.nan) -> str:
        """Return the comparison in words, with p as `corrected` by Holm too; NaN leaves that out."""
        mean = mean_text(self.differences, self.quantity, corrected) + f", {self.agreeing} of {len(self.seeds)} seeds"
        mean += f"; no pair of {', '.join(map(str, self.unpaired))}" if self.unpaired else ""
        return mean + _dropped((self.a, self.diverged_a), (self.b, self.diverged_b))


def mean_text(differences: Sequence[float], quantity: Quantity, corrected: float = math.nan) -> str:
    """Return the mean of the seeds' differences with its interval and p, e.g. ``"+1.50 (+0.20 to +2.80), p = 0.03"``.

    Args:
        differences: a - b of each seed, in the number's unit.
        quantity: the number.
        corrected: p as corrected by Holm for the number of tests, which then follows; NaN if it is not.
    """
    sign = signed(quantity)
    mean, low, high, p = t_test_over_seeds(np.asarray(differences, dtype="float64"))
    interval = f"({low:{sign}} to {high:{sign}}), p = {p:.2g}" if len(differences) > 1 else "(one seed: no interval)"
    return f"{mean:{sign}} {interval}" + ("" if math.isnan(corrected) else f", Holm {corrected:.2g}")


def paired_over_seeds(
    a: Sequence[RunResults],
    b: Sequence[RunResults],
    round: int | None = None,
    epoch: float | None = None,
    quantity: Quantity = PRIMARY,
) -> PairedOverSeeds:
    """Compare two series seed by seed, each seed canary by canary.

    Seeds are the independent unit here. Canaries of one model rise and fall together, so a test over all seeds'
    canaries pooled would report differences that do not exist. The t test treats the seeds' mean differences as normal.
    A seed that diverged in one series is dropped from both, so that neither keeps its survivors alone.

    Args:
        a: runs of one series, one per seed.
        b: runs of another series, over the same canaries seed by seed.
        round: the evaluated round of all; by default each run's last.
        epoch: the number of epochs to compare at, in place of `round`.
        quantity: the compared number.

    Raises:
        InputError: no seed has a run of both that did not diverge, a seed has two runs or is unknown, or
            `paired_exposure` refuses two runs.
    """
    lost_a, lost_b = _diverged(a), _diverged(b)
    kept = without_diverged(a, b)
    if not all(kept):
        settings = _dropped((a[0].setting, sorted(lost_a)), (b[0].setting, sorted(lost_b)))
        raise InputError(f"no seed is left{settings}; lower the learning rate of both")
    pairs = pairs_of_seeds(*kept)
    seeds = [seed for seed, _, _ in pairs]
    means = [paired_exposure(run_a, run_b, round, epoch, quantity).mean_difference for _, run_a, run_b in pairs]
    differences = np.round(means, ROUNDING)
    mean, low, high, p = t_test_over_seeds(differences)
    return PairedOverSeeds(
        a=a[0].setting,
        b=b[0].setting,
        seeds=tuple(seeds),
        unpaired=tuple(sorted({run.seed for run in (*a, *b) if run.seed is not None} - {*seeds} - lost_a - lost_b)),
        differences=tuple(differences.tolist()),
        mean_difference=mean,
        ci_low=low,
        ci_high=high,
        p=p,
        agreeing=int((np.sign(differences) == np.sign(mean)).sum()),
        quantity=quantity,
        diverged_a=tuple(sorted(lost_a)),
        diverged_b=tuple(sorted(lost_b)),
    )


def without_diverged(a: Sequence[RunResults], b: Sequence[RunResults]) -> tuple[list[RunResults], list[RunResults]]:
    """Return the runs of two series without those of seeds that diverged in one of them."""
    lost = _diverged(a) | _diverged(b)
    kept_a, kept_b = ([run for run in runs if run.seed not in lost] for runs in (a, b))
    return kept_a, kept_b


def _diverged(runs: Sequence[RunResults]) -> set[int]:
    return {*_of_seeds([run for run in runs if run.status == "diverged"])}


def _dropped(*diverged: tuple[str, Sequence[int]]) -> str:
    """Return words about seeds that diverged in a setting; empty where none did."""
    words = [f"{', '.join(map(str, seeds))} in {setting}" for setting, seeds in diverged if seeds]
    return f"; diverged, so dropped from both: seed {' and seed '.join(words)}" if words else ""


def t_test_over_seeds(differences: NDArray[np.float64]) -> tuple[float, float, float, float]:
    """Return the mean of float64 [seeds] differences, its 95% interval, and the two-sided p that it is zero.

    Interval and p are from Student's t, and NaN below two seeds.
    """
    return float(differences.mean()), *t_interval(differences), paired_t_p(differences)


def pairs_of_seeds(a: Sequence[RunResults], b: Sequence[RunResults]) -> list[tuple[int, RunResults, RunResults]]:
    """Return the runs of two series with the same seed: (seed, run of a, run of b), by ascending seed.

    Raises:
        InputError: no seed has a run of both, or a seed has two runs or is unknown.
    """
    runs_a, runs_b = _of_seeds(a), _of_seeds(b)
    seeds = sorted({*runs_a} & {*runs_b})
    if not seeds:
        raise InputError(f"no seed has a run of both: {sorted(runs_a)} and {sorted(runs_b)}; train both with one seed")
    return [(seed, runs_a[seed], runs_b[seed]) for seed in seeds]


def _of_seeds(runs: Sequence[RunResults]) -> dict[int, RunResults]:
    by_seed: dict[int, RunResults] = {}
    for run in runs:
        if run.seed is None:
            raise InputError(f"run {run.name}: an older run, which does not say its seed; compare it by itself")
        if run.seed in by_seed:
            raise InputError(f"runs {by_seed[run.seed].name} and {run.name}: both of seed {run.seed}; leave one out")
        by_seed[run.seed] = run
    return by_seed
