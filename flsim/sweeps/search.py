"""The search for values of settings by loss alone: ranges, successive halving, and widening.

Successive halving: Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization"
(2016). All trials train for a share of the length; the better half trains on, and so forth.

Nothing here trains. `search` is a generator that yields the trials to measure and takes their losses.
"""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Literal

import numpy as np

from flsim.base.errors import InputError, RunFailed
from flsim.sweeps.values import Strict

Method = Literal["grid", "random"]
Point = dict[str, float]
FEWEST = 8  # trials
DIGITS = 4  # significant digits of a searched value, so that names and tables are short


@dataclass(frozen=True)
class Range(Strict):
    """The searched range of a setting.

    Attributes:
        low: its least value.
        high: its largest value.
        scale: "log" spaces and draws the logarithms of values evenly, "linear" the values.
        points: number of values of method "grid"; may be left out where it is the only setting.
    """

    low: float
    high: float
    scale: Literal["log", "linear"] = "log"
    points: int | None = None

    def __post_init__(self) -> None:
        if not self.low < self.high < math.inf or (self.scale == "log" and self.low <= 0):
            raise InputError(f"a range needs low < high, both above 0 on a log scale, found {self.low} and {self.high}")
        if self.points is not None and self.points < 2:
            raise InputError(f"points must be at least 2, found {self.points}")

    def at(self, share: float) -> float:
        """Return the value at a share of the range; a share below 0 or above 1 is outside of it."""
        if self.scale == "linear":
            return _rounded(self.low + share * (self.high - self.low))
        return _rounded(self.low * (self.high / self.low) ** share)

    def share(self, value: float) -> float:
        """Return the share of the range at which a value is: the inverse of `at`, but for rounding."""
        if self.scale == "linear":
            return (value - self.low) / (self.high - self.low)
        return math.log(value / self.low) / math.log(self.high / self.low)


@dataclass(frozen=True)
class Rule(Strict):
    """The rule of a search, which is the same for all groups.

    Attributes:
        method: "grid" takes all products of evenly spaced values, "random" draws values.
        trials: number of trials before the range is widened; at least 8.
        halving: ascending shares of the length of training after which the better half of the trials goes on; the last
            one is 1.
        widenings: how often the range of a group may be widened.
    """

    method: Method = "grid"
    trials: int = 8
    halving: tuple[float, ...] = (0.25, 0.5, 1.0)
    widenings: int = 3

    def __post_init__(self) -> None:
        if self.trials < FEWEST:
            raise InputError(f"trials must be at least {FEWEST}, found {self.trials}")
        if self.widenings < 0:
            raise InputError(f"widenings must not be negative, found {self.widenings}")
        shares = (0.0, *self.halving)
        if shares[-1] != 1 or any(low >= high for low, high in pairwise(shares)):
            raise InputError(f"halving must list ascending shares above 0 that end with 1, found {list(self.halving)}")

    def first_points(self, ranges: Mapping[str, Range], rng: np.random.Generator) -> list[Point]:
        """Return the values of the first trials; raise InputError if the points of a grid are not `trials`."""
        if self.method == "random":
            return [{name: range_.at(rng.random()) for name, range_ in ranges.items()} for _ in range(self.trials)]
        counts = [range_.points or (self.trials if len(ranges) == 1 else 0) for range_ in ranges.values()]
        if math.prod(counts) != self.trials:
            raise InputError(f"the points of {', '.join(ranges)} must multiply to trials ({self.trials}); set points")
        spaced = [
            [range_.at(place / (count - 1)) for place in range(count)]
            for range_, count in zip(ranges.values(), counts, strict=True)
        ]
        return [dict(zip(ranges, values, strict=True)) for values in product(*spaced)]

    def points_beyond(
        self, ranges: Mapping[str, Range], best: Point, name: str, side: int, rng: np.random.Generator
    ) -> list[Point]:
        """Return values beyond the best one of a setting, on one side: half as many as the range had.

        A grid goes on with its steps, and keeps the other settings at their best values. A random search draws within
        half a range's width, and draws the other settings from their ranges.

        Args:
            ranges: the ranges of all settings.
            best: the best values.
            name: the setting.
            side: -1 for lower values, 1 for higher ones.
            rng: generator of a random search.
        """
        range_, start = ranges[name], ranges[name].share(best[name])
        if self.method == "grid":
            count = range_.points or self.trials
            return [
                best | {name: range_.at(start + side * (place + 1) / (count - 1))}
                for place in range(max(1, count // 2))
            ]
        return [
            {other: ranges[other].at(rng.random()) for other in ranges} | {name: range_.at(start + side * share / 2)}
            for share in rng.random(self.trials // 2).tolist()
        ]


@dataclass(frozen=True)
class Trial:
    """A trial of a search.

    Attributes:
        number: its place among the trials of its group.
        values: values of the searched settings.
        losses: its loss after each share of `Rule.halving` that it trained for; infinite where it diverged.
    """

    number: int
    values: Point
    losses: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a search.

    Attributes:
        best: the best trial.
        trials: all trials.
        widenings: how often the range was widened.
    """

    best: Trial
    trials: list[Trial]
    widenings: int


def search(
    rule: Rule,
    ranges: Mapping[str, Range],
    rng: np.random.Generator,
    is_possible: Callable[[Point], bool] = lambda _: True,
) -> Generator[list[tuple[Trial, int]], list[float], Outcome]:
    """Search for the values with the least loss.

    The best value of each setting lies inside: some trial had a lower value, and some trial a higher one. Otherwise
    there are further trials beyond, halved alike, unless the values beyond are impossible.

    Args:
        rule: the rule of the search.
        ranges: ranges by setting.
        rng: generator of a random search.
        is_possible: function that returns whether the settings may have these values.

    Yields:
        Trials to measure, each with the index of a share in `Rule.halving`; their losses are to be sent.

    Raises:
        RunFailed: all trials diverged, or the best one is at the edge still after all widenings.
    """
    trials = [Trial(number, values) for number, values in enumerate(rule.first_points(ranges, rng))]
    new = trials
    for widenings in range(rule.widenings + 1):
        left = new
        for rung in range(len(rule.halving)):
            for trial, loss in zip(left, (yield [(trial, rung) for trial in left]), strict=True):
                trial.losses.append(loss)
            if rung + 1 < len(rule.halving):
                left = survivors(left)
        finished = [trial for trial in trials if len(trial.losses) == len(rule.halving)]
        best = min(finished, key=_place, default=trials[0])
        if not best.losses or not math.isfinite(best.losses[-1]):
            raise RunFailed(f"all {len(trials)} trials diverged; search lower values of {', '.join(ranges)}")
        sides = open_sides([trial.values for trial in trials], best.values)
        beyond = [point for name, side in sides for point in rule.points_beyond(ranges, best.values, name, side, rng)]
        possible = [point for point in beyond if is_possible(point)]
        if not possible:
            return Outcome(best, trials, widenings)
        new = [Trial(len(trials) + place, point) for place, point in enumerate(possible)]
        trials = [*trials, *new]
    settings = ", ".join(f"{name} {best.values[name]:g}" for name, _ in sides)
    raise RunFailed(f"the best {settings} is at the edge after {widenings} widenings; search a range around it")


def survivors(trials: Sequence[Trial]) -> list[Trial]:
    """Return the better half by the last loss, rounded up, in their order, without trials that diverged.

    Of equal losses the earlier trial is better.
    """
    better = sorted(trials, key=_place)[: (len(trials) + 1) // 2]
    return [trial for trial in trials if trial in better and math.isfinite(trial.losses[-1])]


def open_sides(points: Sequence[Point], best: Point) -> list[tuple[str, int]]:
    """Return the settings and sides, -1 or 1, on which no point has a value beyond the best one."""
    sides = []
    for name, value in best.items():
        sides += [(name, -1)] * all(point[name] >= value for point in points)
        sides += [(name, 1)] * all(point[name] <= value for point in points)
    return sides


def _place(trial: Trial) -> tuple[float, int]:
    return trial.losses[-1], trial.number


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
