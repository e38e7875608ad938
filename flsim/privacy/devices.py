"""Simulated devices of users: durations of training, the order of answers in asynchronous training, and availability.

Time is simulated, and no clock is read: the mean duration of a user's training is 1. Everything is a function of a
seed, or of a trace, and depends neither on text nor on models.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Annotated, Generic, Literal, TypeVar

import numpy as np

from flsim.base.arrays import Flags, Floats, Ints
from flsim.base.errors import InputError, first_line
from flsim.base.files import file_digest
from flsim.base.rng import stream
from flsim.base.settings import NUMBER, bounds, settings

Thing = TypeVar("Thing")
Law = Literal["half-normal", "exponential", "constant"]
MOST_SPREAD = 10  # then a typical factor is e^-50; larger spreads underflow
COLUMNS = ("user", "from", "to")  # of a trace


@settings
class Durations:
    """The law of the durations of users' training, whose mean is 1.

    "half-normal" is the law of FLSim, the simulator of the authors of FedBuff; "exponential" has longer durations; the
    third is "constant". `spread` is the standard deviation of the logarithm of a factor that each user has in all
    rounds. The factors are lognormal, and their mean is 1; with 0, all users are equally fast.
    """

    durations: Law = "half-normal"
    spread: Annotated[float, bounds(ge=0, le=MOST_SPREAD), NUMBER] = 0.0

    def factors(self, seed: int, population: int) -> Floats:
        """Return the factor of each user, float64 [population]."""
        normal = stream(seed, "device factors").normal(size=population)
        return np.exp(self.spread * normal - self.spread**2 / 2)

    def draw(self, rng: np.random.Generator, number: int) -> Floats:
        """Return independent durations of users whose factor is 1, float64 [number]."""
        match self.durations:
            case "half-normal":
                return np.abs(rng.normal(scale=math.sqrt(math.pi / 2), size=number))
            case "exponential":
                return rng.exponential(size=number)
        return np.ones(number)

    def of_users(self, seed: int, round_: int, population: int, users: Ints) -> Floats:
        """Return the durations of users of a round, float64 [n]."""
        return self.factors(seed, population)[users] * self.draw(stream(seed, "stragglers", round_), len(users))

    def within(self, deadline: float) -> float:
        """Return the probability that a user whose factor is 1 needs at most `deadline`."""
        match self.durations:
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
    """The answers of a step: different users [n], ascending, and the rounds, from 0, whose models they trained [n].

    `pending` are the rounds, ascending, whose models others still train.
    """

    users: Ints
    started: Ints
    pending: tuple[int, ...]


@lru_cache(maxsize=64)  # canary users have separate draws
def buffers(seed: int, population: int, size: int, concurrency: int, durations: Durations) -> Prefix[Buffer]:
    """Return the buffers of all rounds of FedBuff; the arguments are those of `simulated_buffers`."""
    return Prefix(simulated_buffers(seed, population, size, concurrency, durations))


def simulated_buffers(
    seed: int, population: int, size: int, concurrency: int, durations: Durations
) -> Iterator[Buffer]:
    """Simulate FedBuff, and yield the buffer of each round.

    Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation" (2022): the server steps as soon as its
    buffer has K = `size` answers. Whenever users have answered, as many uniformly random others, without an answer in
    the buffer, begin to train the newest model. Users whose durations end at the same time answer before others begin.
    """
    factors = durations.factors(seed, population)
    clock, is_busy = 0.0, np.zeros(population, bool)
    training: list[tuple[float, int, int]] = []  # a heap of (end, user, round of the model)
    for round_ in count():
        cohorts, times = stream(seed, "cohort", round_), stream(seed, "durations", round_)
        buffer: list[tuple[int, int]] = []
        while len(buffer) < size:
            missing = concurrency - len(training)
            if missing and not (training and training[0][0] == clock):
                # drawn like a fixed-size cohort; only if some are busy, the idle users are listed
                users = cohorts.choice(population, missing, replace=False)
                users = users[~is_busy[users]]
                is_busy[users] = True
                if len(users) < missing:
                    others = cohorts.choice(np.flatnonzero(~is_busy), missing - len(users), replace=False)
                    is_busy[others] = True
                    users = np.concatenate([users, others])
                ends = clock + factors[users] * durations.draw(times, missing)
                for end, user in zip(ends.tolist(), users.tolist(), strict=True):
                    heapq.heappush(training, (end, user, round_))
            clock, user, started = heapq.heappop(training)
            buffer.append((user, started))
        users, rounds = np.array(sorted(buffer), np.int64).T
        yield Buffer(users, rounds, tuple(sorted({started for *_, started in training})))
        is_busy[users] = False


@settings
class Days:
    """Availability of users by the time of day, of at most 0.5 on average.

    User u is available in round r with probability availability (1 + cos(2 pi (r / day - phase_u))), independently. The
    phases are uniform between 0 and `zones`: with 0, all users sleep at the same time.
    """

    availability: Annotated[float, bounds(gt=0, le=0.5), NUMBER]
    day: Annotated[float, bounds(ge=1), NUMBER]
    zones: Annotated[float, bounds(ge=0, le=1), NUMBER]

    def available(self, seed: int, round_: int, population: int) -> Flags:
        """Return whether each user is available in a round, bool [population]."""
        phases = self.zones * stream(seed, "phases").random(population)
        chances = self.availability * (1 + np.cos(2 * math.pi * (round_ / self.day - phases)))
        return stream(seed, "availability", round_).random(population) < chances


@dataclass(frozen=True)
class Trace:
    """Availability of users from a CSV or Parquet file with a row for each time in which a user is available.

    The columns are "user", a number from 0, "from" and "to": the user is available in rounds from <= round < to, from
    0. The digest is the sha256 of the file.
    """

    file: str
    digest: str

    def available(self, seed: int, round_: int, population: int) -> Flags:  # noqa: ARG002 (nothing is drawn)
        """Return whether each user is available in a round [population]; raise InputError for an unfit file."""
        users, begin, end = _rows_of(self)
        if (most := users.max()) >= population:
            raise InputError(
                f"{self.file}: user {most:.15g} is not one of the {population:,} users; users count from 0"
            )
        flags = np.zeros(population, bool)
        flags[users[(begin <= round_) & (round_ < end)].astype(np.int64)] = True
        return flags


@lru_cache(maxsize=2)
def _rows_of(trace: Trace) -> tuple[Floats, Floats, Floats]:
    import pandas as pd

    try:
        digest = file_digest(Path(trace.file))
        table = (pd.read_parquet if trace.file.endswith(".parquet") else pd.read_csv)(trace.file)
        users, begin, end = (table[name].to_numpy(np.float64) for name in COLUMNS)
    except (OSError, KeyError, TypeError, ValueError) as error:
        columns = ", ".join(COLUMNS)
        raise InputError(
            f"{trace.file}: not a trace with numbers in columns {columns} ({first_line(error)})"
        ) from error
    if digest != trace.digest:
        raise InputError(f"{trace.file}: trace_digest must be the sha256 of this file, which is {digest}")
    if not len(users):
        raise InputError(f"{trace.file}: has no rows, so no user is ever available")
    if not ((users >= 0) & (users == np.floor(users)) & (begin < end)).all():
        raise InputError(f"{trace.file}: user must be an integer of at least 0, and from below to, in every row")
    return users, begin, end


@lru_cache(maxsize=64)  # canary users have separate draws
def cohorts_of_available(
    seed: int, population: int, size: int, separation: int, availability: Days | Trace
) -> Prefix[Ints]:
    """Return each round's cohort: `size` random available users, or all if fewer, `separation` rounds apart."""

    def cohorts() -> Iterator[Ints]:
        last = np.full(population, -separation)
        for round_ in count():
            ready = np.flatnonzero(availability.available(seed, round_, population) & (round_ - last >= separation))
            users = stream(seed, "cohort", round_).choice(ready, min(size, len(ready)), replace=False)
            last[users] = round_
            yield np.sort(users)

    return Prefix(cohorts())
