"""Comparison of two settings over seeds: both runs of a seed have the same canaries, and seeds have different ones."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flsim.base.errors import InputError
from flsim.measures.built_in import PRIMARY
from flsim.measures.quantity import Quantity, numbers
from flsim.results.ceiling import MANY, WHAT_TO_DO, at_ceiling
from flsim.results.compare import paired_exposure, signed
from flsim.results.formats import note
from flsim.results.inference import ROUNDING, paired_t_p, t_interval
from flsim.results.pairing import compared_in
from flsim.results.run_file import WORLDS
from flsim.results.seeds import by_series, sample
from flsim.results.store import RunResults

HEADING = """{} of IID less Non-IID{}, paired over the canaries of each seed: mean,
95% interval and p from Student's t over seeds, and seeds with the mean's sign.
"""
CEILING = (
    "Canaries at the ceiling of exposure, IID and Non-IID: {}. They are ranked before all references, and differences "
    f"between them cannot show; {WHAT_TO_DO}"
)


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
        sign = signed(self.quantity)
        mean = f"{self.mean_difference:{sign}}"
        if len(self.seeds) > 1:
            mean += f" ({self.ci_low:{sign}} to {self.ci_high:{sign}}), p = {self.p:.2g}"
        else:
            mean += " (one seed: no interval)"
        mean += f", {self.agreeing} of {len(self.seeds)} seeds"
        mean += f"; no pair of {', '.join(map(str, self.unpaired))}" if self.unpaired else ""
        return mean + _dropped((self.a, self.diverged_a), (self.b, self.diverged_b))


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
    lost_a, lost_b = ({*_of_seeds([run for run in runs if run.status == "diverged"])} for runs in (a, b))
    kept = [[run for run in runs if run.seed not in lost_a | lost_b] for runs in (a, b)]
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


def compare_worlds(runs: Sequence[RunResults], round: int | None = None, epoch: float | None = None) -> str:
    """Return a line for each two series whose settings differ only in the world; empty if there are none.

    There is a line for exposure, and one for each number of canaries of a user's own measures. The compared runs are
    those that a table over seeds averages, and seeds that diverged are named. Series that cannot be compared have a
    line with the reason.

    Raises:
        InputError: as for `flsim.results.seeds_table.seeds_table`.
    """
    twins: dict[str, dict[str, list[list[RunResults]]]] = {}
    groups = by_series(runs)
    lengths = Counter((label, world) for label, world, _ in {(run.label, run.world, run.rounds) for run, *_ in groups})
    for group in groups:
        series, first = sample(group, round, epoch), group[0]
        if first.world is not None:
            has_lengths = max(lengths[first.label, world] for world in WORLDS) > 1
            label = first.label + f", {first.rounds:,} rounds" * has_lengths
            worlds = twins.setdefault(label, {world: [] for world in WORLDS})
            diverged = [run for run in group if run.status == "diverged"]
            worlds[first.world].append([run for run, _ in series.taken] + diverged)
    text = ""
    for quantity in numbers(compared_in(runs)):
        lines = [
            f"{label}: {_line(worlds, round, epoch, quantity)}\n"
            for label, worlds in twins.items()
            if all(worlds.values())
        ]
        heading = HEADING.format(quantity.title, f", {quantity.unit}" if quantity.unit else "")
        text += "\n" * bool(text) + heading + "".join(lines) if lines else ""
        text += _ceilings(twins, round, epoch) if quantity.is_primary else ""
    return text


def _line(worlds: dict[str, list[list[RunResults]]], round: int | None, epoch: float | None, quantity: Quantity) -> str:
    if any(len(series) > 1 for series in worlds.values()):
        return "not compared, since several rows have this setting; show fewer runs"
    try:
        return str(paired_over_seeds(worlds["iid"][0], worlds["non-iid"][0], round, epoch, quantity))
    except InputError as error:
        return f"not compared: {error}"


def _ceilings(twins: dict[str, dict[str, list[list[RunResults]]]], round: int | None, epoch: float | None) -> str:
    """Return a sentence on the shares of canaries at the ceiling in both worlds; empty where they are few."""
    words = []
    for label, worlds in twins.items():
        shares = [
            at_ceiling([(run, run.at(round, epoch)) for runs in of_world for run in runs if run.status != "diverged"])
            for of_world in worlds.values()
        ]
        if all(worlds.values()) and max(count.share for count in shares) >= MANY:
            words.append(f"{label} {' and '.join(f'{count.share:.0%}' for count in shares)}")
    return note(CEILING.format("; ".join(words))) if words else ""


def _of_seeds(runs: Sequence[RunResults]) -> dict[int, RunResults]:
    by_seed: dict[int, RunResults] = {}
    for run in runs:
        if run.seed is None:
            raise InputError(f"run {run.name}: an older run, which does not say its seed; compare it by itself")
        if run.seed in by_seed:
            raise InputError(f"runs {by_seed[run.seed].name} and {run.name}: both of seed {run.seed}; leave one out")
        by_seed[run.seed] = run
    return by_seed
