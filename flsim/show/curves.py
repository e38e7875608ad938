"""Curves over training: values of a run, or their means over the seeds of a setting, at the evaluated rounds."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flsim.base.statistics import t_interval
from flsim.measures.built_in import PRIMARY
from flsim.measures.quantity import Quantity
from flsim.measures.utility import PERPLEXITY
from flsim.results.store import RunResults
from flsim.show.figures import plain

EPOCHS = "epochs: records read / records there are"
NEAR = 0.25  # of the distance between the two evaluations before
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """A line of one panel with its band.

    Attributes:
        x: float64 [points], epochs or rounds.
        y: float64 [points], values.
        low: float64 [points], lower end of the band; NaN without a band.
        high: float64 [points], upper end of the band; NaN without a band.
    """

    x: Values
    y: Values
    low: Values
    high: Values


def curve(
    runs: Sequence[RunResults],
    measured: Callable[[RunResults, int], Values | None],
    in_epochs: bool,
    over_seeds: bool,
) -> Curve:
    """Return the mean over runs of what was measured, at the rounds where all runs measured it.

    Args:
        runs: one run, or those of a setting's seeds.
        measured: float64 [canaries], or [1] of a number of the model, of a run after so many rounds; None if it was
            not measured.
        in_epochs: whether x is in epochs, otherwise in rounds.
        over_seeds: whether bands are intervals over the runs' means, otherwise over the canaries of one run.
    """
    points = []
    for round_ in drawn_rounds(sorted(set.intersection(*(set(run.evaluated) for run in runs)) if runs else ())):
        values = [value for run in runs if (value := measured(run, round_)) is not None]
        if len(values) == len(runs):
            means = np.array([value.mean() for value in values])
            x = np.mean([run.epochs_of(round_) if in_epochs else round_ for run in runs])
            points.append((x, means.mean(), *t_interval(means if over_seeds else values[0])))
    return Curve(*np.array(points, dtype="float64").reshape(-1, 4).T)


def exposure_by_utility(runs: Sequence[RunResults], over_seeds: bool) -> Values:
    """Return float64 [evaluations, 4]: perplexity, mean exposure in bits, and both ends of its interval.

    Args:
        runs: one run, or those of a setting's seeds; evaluations that only some of them have are left out.
        over_seeds: whether intervals are over the runs' means, otherwise over the canaries of one run.
    """
    losses = curve(runs, _log_perplexity, in_epochs=False, over_seeds=over_seeds)
    exposures = curve(runs, partial(measured_values, PRIMARY), in_epochs=False, over_seeds=over_seeds)
    _, of_losses, of_exposures = np.intersect1d(losses.x, exposures.x, return_indices=True)
    columns = (
        np.exp(losses.y[of_losses]),
        *(part[of_exposures] for part in (exposures.y, exposures.low, exposures.high)),
    )
    return np.column_stack(columns)


def drawn_rounds(rounds: list[int]) -> list[int]:
    """Return the rounds without the last but one if it is just before the last, as 10.0 epochs before 10.2.

    Two points so near would end the curve in a hook that is noise.
    """
    if len(rounds) < 3 or rounds[-1] - rounds[-2] >= NEAR * (rounds[-2] - rounds[-3]):
        return rounds
    return [*rounds[:-2], rounds[-1]]


def measured_values(quantity: Quantity, run: RunResults, round_: int) -> Values | None:
    """Return float64 [canaries] of a number of canaries, otherwise float64 [1].

    None means that the quantity was not measured or is not finite.
    """
    if not quantity.of_canaries:
        value = run.of_model(quantity.name, round_)
        return None if value is None or not math.isfinite(value) else np.array([value * quantity.scale])
    values = run.of_planted(quantity.name, round_)
    if values is None or values.empty:
        return None
    return np.array([(values == 1).sum()] if quantity.is_flag else values * quantity.scale, dtype="float64")


def know_epochs(runs: Sequence[RunResults]) -> bool:
    """Return whether every run with an evaluation knows its epochs."""
    return all(run.rounds_per_epoch is not None for run in runs if run.evaluated)


def averaged(series: Sequence[RunResults]) -> list[RunResults]:
    """Return the runs of a series that a mean is over: those that were evaluated, and did not end early."""
    return [run for run in series if run.status not in {"diverged", "failed", "interrupted"} and run.evaluated]


def label_of(group: Sequence[RunResults], runs: Sequence[Any], means_over: int | None) -> str:
    """Return the setting, with the number of runs of a series, or with the name of a run if settings are equal.

    Args:
        group: the runs of a line.
        runs: all runs of the figure.
        means_over: number of runs of a series that the line is the mean of; None where the line is one run.
    """
    run = group[0]
    if means_over is not None:
        left_out = len(group) - means_over
        label = f"{run.setting} ({means_over} seed{'s' * (means_over != 1)}{f', {left_out} left out' * (left_out > 0)})"
    else:
        name = f" [{run.name}]" if [other.setting for other in runs].count(run.setting) > 1 else ""
        status = f" ({run.status}, round {run.round})" if run.status != "completed" else ""
        label = f"{run.setting}{name}{status}"
    return plain(label)


def _log_perplexity(run: RunResults, round_: int) -> Values | None:
    perplexity = measured_values(PERPLEXITY, run, round_)
    return None if perplexity is None else np.log(perplexity)
