"""Training in a known order, which never forgets in exact arithmetic, and forgets in floats when the difference rounds.

Jagielski et al. (2022), section 5.2 and appendix D.2: Algorithm 3 estimates a mean by steps theta <- theta - 2 eta
(theta - x) over examples in a fixed order. A step is one-to-one in theta for 0 < eta < 1/2. So two runs that once
differed always differ (Theorem 2), and an attacker who repeats training can distinguish them. A step also multiplies
the difference by 1 - 2 eta. Floats represent differences down to the spacing of floats near theta. So the two runs
become equal, and remain equal, after about log2(difference / spacing) / log2(1 / (1 - 2 eta)) steps.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from flsim.base.rng import stream

BITS = {"float64": 53, "float32": 24}  # of the significand, the leading one included
MOST_STEPS = 100_000
Number = TypeVar("Number", bound=Any)


def path(start: Number, examples: Iterable[Number], two_eta: Number) -> Iterator[Number]:
    """Yield theta after each step of Algorithm 3, in the arithmetic of its arguments.

    Args:
        start: theta before the first step.
        examples: the examples in the order of training; numbers, fractions, or arrays of several runs.
        two_eta: twice the learning rate.
    """
    theta = start
    for example in examples:
        theta = theta - two_eta * (theta - example)
        yield theta


def difference(rate: float, steps: int, moved: float) -> float:
    """Return theta - theta' in exact arithmetic, after two runs differed in one example.

    Args:
        rate: eta.
        steps: number of steps after the one that differs.
        moved: x - x', the difference of the two examples.
    """
    return 2 * rate * moved * (1 - 2 * rate) ** steps


def steps_until_equal(rate: float, moved: float, near: float = 1.0, bits: int = BITS["float64"]) -> float:
    """Return about how many steps later two runs are equal, because their difference is below the floats' spacing.

    Args:
        rate: eta.
        moved: size of the difference of the two examples.
        near: size of theta during these steps.
        bits: bits of the floats' significand.
    """
    first = difference(rate, 0, abs(moved))
    if not first:
        return 0.0
    return max(0.0, bits + math.log2(first / abs(near))) / -math.log2(1 - 2 * rate)


def measured_steps_until_equal(rate: float, kind: str = "float64", runs: int = 100, seed: int = 0) -> NDArray[np.int64]:
    """Return after how many steps runs on +1 and -1 are equal in floats, int64 [runs].

    All later examples are drawn from a normal distribution of mean 1 and variance 1, and are the same for both runs of
    a pair. A pair that is still different after `MOST_STEPS` steps has that number.

    Args:
        rate: eta.
        kind: a key of `BITS`.
        runs: number of pairs of runs.
        seed: the experiment's seed.
    """
    two_eta = np.dtype(kind).type(2 * rate)
    rng = stream(seed, "fixed order", kind)
    examples = (rng.normal(1, 1, runs).astype(kind) for _ in range(MOST_STEPS))
    start = np.outer([two_eta, -two_eta], np.ones(runs, kind)).astype(kind)
    counts = np.full(runs, MOST_STEPS)
    for step, (one, other) in enumerate(path(start, examples, two_eta), 1):
        counts[(one == other) & (counts == MOST_STEPS)] = step
        if counts.max() < MOST_STEPS:
            break
    return counts
