"""A bound, a simulated true value, and the probability with which the bound may exceed it."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flsim.base.rng import stream

Flags = NDArray[np.bool_]
Counts = NDArray[np.int64]
Simulate = Callable[[np.random.Generator, int], Flags]


@dataclass(frozen=True)
class Case:
    """A bound, and a truth that it is compared with.

    Attributes:
        bound: the function of `flsim.attacks.audit`.
        truth: what is simulated.
        exceeds: (random numbers, simulations) -> bool [simulations], whether the bound of each is above the truth.
        promised: probability of a bound above the truth that the bound promises; None without a promise.
    """

    bound: str
    truth: str
    exceeds: Simulate
    promised: float | None = 0.05

    def alarms(self, simulations: int, seed: int = 0) -> int:
        """Return the number of simulations whose bound is above the truth."""
        return int(self.exceeds(stream(seed, "false alarms", self.bound, self.truth), simulations).sum())


def most_alarms(promised: float, simulations: int) -> float:
    """Return the number of alarms that noise explains: three standard deviations above the promised number."""
    return promised * simulations + 3 * math.sqrt(promised * (1 - promised) * simulations)


def judged(counts: Counts, is_above: Callable[[int], bool]) -> Flags:
    """Return a verdict of each count; equal counts are judged once."""
    values, places = np.unique(counts, return_inverse=True)
    return np.array([is_above(int(value)) for value in values], np.bool_)[places]


def tossed(rng: np.random.Generator, simulations: int, canaries: int) -> Flags:
    """Return independent fair coins, [simulations, canaries]."""
    return rng.random((simulations, canaries)) < 0.5
