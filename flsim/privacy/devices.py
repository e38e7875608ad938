"""Simulated time of users' devices: how long users train, and the order of their answers in asynchronous training.

Time is simulated, and no clock is read: the mean duration of a user's training is 1. Everything is a function of a
seed, and depends neither on text nor on models.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from flsim.base.errors import InputError
from flsim.base.rng import stream

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Thing = TypeVar("Thing")
LAWS = ("half-normal", "exponential", "constant")


@dataclass(frozen=True)
class Durations:
    """The law of the durations of users' training.

    Attributes:
        law: "half-normal", which fits the devices of Nguyen et al. (2022); "exponential", whose longest durations are
            longer; or "constant". The mean is 1.
        spread: standard deviation of the logarithm of a factor that each user has in all rounds. The factors are
            lognormal, and their mean is 1; with 0, all users are equally fast.
    """

    law: str = "half-normal"
    spread: float = 0.0

    def __post_init__(self) -> None:
        if self.law not in LAWS:
            raise InputError(f"durations must be one of {', '.join(LAWS)}, found {self.law!r}")
        if not (isinstance(self.spread, float | int) and 0 <= self.spread < math.inf):
            raise InputError(f"spread must be a number of at least 0, found {self.spread!r}")

    def factors(self, seed: int, population: int) -> Floats:
        """Return the factor of each user, float64 [population]."""
        normal = stream(seed, "device factors").normal(size=population)
        return np.exp(self.spread * normal - self.spread**2 / 2)

    def draw(self, rng: np.random.Generator, number: int) -> Floats:
        """Return independent durations of users whose factor is 1, float64 [number]."""
        match self.law:
            case "half-normal":
                return np.abs(rng.normal(scale=math.sqrt(math.pi / 2), size=number))
            case "exponential":
                return rng.exponential(size=number)
        return np.ones(number)

    def within(self, deadline: float) -> float:
        """Return the probability that a user whose factor is 1 needs at most `deadline`."""
        match self.law:
            case "half-normal":
                return math.erf(deadline / math.sqrt(math.pi))
            case "exponential":
                return -math.expm1(-deadline)
        return float(deadline >= 1)


class Prefix(Generic[Thing]):
    """The first items of an endless sequence, which are computed once, when they are needed."""

    def __init__(self, items: Iterator[Thing]) -> None:
        self._items = items
        self._known: list[Thing] = []

    def __getitem__(self, index: int) -> Thing:
        while len(self._known) <= index:
            self._known.append(next(self._items))
        return self._known[index]


@dataclass(frozen=True)
class Buffer:
    """The answers of a step of asynchronous training.

    Attributes:
        users: int64 [n], different users in ascending order.
        started: int64 [n], the round, from 0, whose model each user trained.
        pending: the rounds whose models other users still train when the buffer is full, ascending.
    """

    users: Ints
    started: Ints
    pending: tuple[int, ...]


@lru_cache(maxsize=8)
def buffers(seed: int, population: int, size: int, concurrency: int, durations: Durations) -> Prefix[Buffer]:
    """Return the buffers of all rounds of FedBuff; the arguments are those of `simulated_buffers`."""
    return Prefix(simulated_buffers(seed, population, size, concurrency, durations))


def simulated_buffers(
    seed: int, population: int, size: int, concurrency: int, durations: Durations
) -> Iterator[Buffer]:
    """Simulate FedBuff, and yield the buffer of each round.

    Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation" (2022), Algorithm 1. Whenever users have
    answered, as many other users begin to train the newest model. They are uniformly random among the users who neither
    train nor have an answer in the buffer, so that a user is in a buffer at most once. Users whose durations end at the
    same time answer before others begin.

    Args:
        seed: the experiment's seed.
        population: number of users, at least size + concurrency - 1.
        size: K, the number of answers in a full buffer.
        concurrency: number of users who train at the same time.
        durations: the law of durations.
    """
    factors = durations.factors(seed, population)
    clock, busy = 0.0, set[int]()
    training: list[tuple[float, int, int]] = []  # a heap of (end, user, round of the model)
    for round_ in count():
        cohorts, times = stream(seed, "cohort", round_), stream(seed, "durations", round_)
        buffer: list[tuple[int, int]] = []
        while len(buffer) < size:
            while len(training) < concurrency and not (training and training[0][0] == clock):
                users = cohorts.choice(population, concurrency - len(training), replace=False)
                idle = np.array([user for user in users.tolist() if user not in busy], np.int64)
                ends = clock + factors[idle] * durations.draw(times, len(idle))
                for end, user in zip(ends.tolist(), idle.tolist(), strict=True):
                    heapq.heappush(training, (end, user, round_))
                busy.update(idle.tolist())
            clock, user, started = heapq.heappop(training)
            buffer.append((user, started))
        users, rounds = np.array(sorted(buffer), np.int64).T
        yield Buffer(users, rounds, tuple(sorted({started for *_, started in training})))
        busy.difference_update(users.tolist())
