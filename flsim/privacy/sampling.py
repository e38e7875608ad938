"""Samplers, each of which draws the users of a round and states the privacy cost of the draw.

A draw is a pure function of (seed, round, population). A custom sampler, ``path/to/file.py:NAME``, is a class like
those of this file; its options are further fields of the dataclass.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from flsim.base.errors import InputError, RunFailed, at_least_one
from flsim.base.extensions import (
    custom_call_errors,
    is_custom,
    made,
    name_in_settings,
    options_of,
    refuse_unknown,
    resolve_class,
    short_name,
    with_options,
    without_options,
)
from flsim.base.rng import stream
from flsim.privacy.devices import Buffer, Days, Durations, Law, Trace, buffers, cohorts_of_available

if TYPE_CHECKING:  # importing takes half a second in every process of a run
    from dp_accounting import DpEvent

Relation = Literal["replace-one", "add-or-remove-one", "zero-out"]


@dataclass(frozen=True)
class Participation:
    """A user's limit: k, the most rounds, and b, the least number of rounds from one to the next (1 is no limit)."""

    times: int
    separation: int


@dataclass(frozen=True)
class Sampler(ABC):
    """A rule by which the users of a round are drawn.

    Attributes:
        cohort: users per round; the expected number, if cohorts differ in size. Sums of clipped updates are divided by
            it.
        label: the part of a row's name in tables that names the sampler; "" for none. Custom code is named NAME.
        relation: the difference between neighbouring data sets for which `event` holds: one user's data
            ("replace-one"), the presence of one user ("add-or-remove-one"), or zeros from one user ("zero-out").
        has_repeats: whether a cohort can contain a user more than once. Each occurrence counts as a separate user in
            the sum.
        is_asynchronous: whether users can train models of earlier rounds, see `started`.
        unaccounted: for a built-in sampler, the reason why no accountant supports it; empty if one does.
        dropout: probability that a drawn user does not answer in time, independently of all others. Sums are still
            divided by `cohort`.
        deadline: duration of training after which an answer is too late, as if the user had dropped out; None for no
            deadline. The unit is the mean duration.
        durations, spread: the law of durations, see `flsim.privacy.devices.Durations`.
        unaccounted_with_dropout: for a built-in sampler, whether no accountant supports it if users drop out or are
            late.
    """

    cohort: int
    dropout: float = field(default=0.0, kw_only=True)
    deadline: float | None = field(default=None, kw_only=True)
    durations: Law = field(default="half-normal", kw_only=True)
    spread: float = field(default=0.0, kw_only=True)
    label: ClassVar[str] = ""
    relation: ClassVar[Relation] = "add-or-remove-one"
    has_repeats: ClassVar[bool] = False
    is_asynchronous: ClassVar[bool] = False
    unaccounted: ClassVar[str] = ""
    unaccounted_with_dropout: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not (isinstance(self.dropout, float | int) and 0 <= self.dropout < 1):
            raise InputError(f"dropout must be at least 0 and below 1, found {self.dropout!r}")
        if self.deadline is not None and not (isinstance(self.deadline, float | int) and self.deadline > 0):
            raise InputError(f"deadline must be a number of mean durations above 0, found {self.deadline!r}")
        self._law  # noqa: B018 (raises)

    @property
    def _law(self) -> Durations:
        return Durations(self.durations, self.spread)

    @property
    def answer_rate(self) -> float:
        """Return the probability that a drawn user answers in time, if all users are equally fast."""
        return (1 - self.dropout) * (1.0 if self.deadline is None else self._law.within(self.deadline))

    def answering(self, seed: int, round_: int, population: int, users: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return those of the drawn users who do not drop out and answer before the deadline."""
        if self.dropout:
            users = users[stream(seed, "dropout", round_).random(len(users)) >= self.dropout]
        if self.deadline is not None:
            users = users[self._law.of_users(seed, round_, population, users) <= self.deadline]
        return users

    def check(self, population: int) -> None:  # noqa: B027 (most samplers draw from any population)
        """Raise InputError if the sampler cannot draw from `population` users."""

    @abstractmethod
    def draw(self, seed: int, round_: int, population: int) -> NDArray[np.int64]:
        """Return the users of a round (from 0), in ascending order: int64 [users], each in [0, population).

        Users are distinct unless the sampler `has_repeats`.
        """

    def sizes(self, population: int) -> tuple[int, int]:  # noqa: ARG002 (for others)
        """Return the smallest and the largest possible size of a cohort; both are `cohort` unless overridden."""
        return self.cohort, self.cohort

    def event(self, population: int, mechanism: "DpEvent") -> "DpEvent | None":  # noqa: ARG002 (for others)
        """Return the cost of a round that applies a mechanism to the sum over its users; None if it is unknown.

        It is the cost for a user who can take part in the round.
        """
        return None

    def participation(self, population: int, rounds: int) -> Participation | None:  # noqa: ARG002 (for others)
        """Return the limit of a user's rounds among any consecutive `rounds` rounds; None if there is no limit."""
        return None

    def started(self, seed: int, round_: int, population: int, users: NDArray[np.int64]) -> NDArray[np.int64]:  # noqa: ARG002
        """Return the round whose model each of these users of a round trains; `round_` unless overridden."""
        return np.full(len(users), round_)

    def pending(self, seed: int, round_: int, population: int) -> tuple[int, ...]:  # noqa: ARG002 (for others)
        """Return the rounds, at most `round_`, whose models users still train after the round; ascending."""
        return ()

    @property
    def most_pending(self) -> int:
        """Return an estimate of the largest number of `pending` rounds, from which flsim plans memory."""
        return 0


class FixedSize(Sampler):
    """A fixed number of different users, drawn uniformly.

    Thakkar et al. (2020), Algorithm 1: "sample without replacement qN users".
    """

    relation = "replace-one"
    unaccounted_with_dropout = True

    def draw(self, seed: int, round_: int, population: int) -> NDArray[np.int64]:
        return np.sort(stream(seed, "cohort", round_).choice(population, self.cohort, replace=False))

    def event(self, population: int, mechanism: "DpEvent") -> "DpEvent":
        from dp_accounting import SampledWithoutReplacementDpEvent

        return SampledWithoutReplacementDpEvent(population, self.cohort, mechanism)


class Poisson(Sampler):
    """Poisson sampling: each user takes part with probability cohort / population, independently of the others.

    Cohorts differ in size, and a cohort can be empty.
    """

    label = "Poisson"

    def draw(self, seed: int, round_: int, population: int) -> NDArray[np.int64]:
        return np.flatnonzero(stream(seed, "poisson-cohort", round_).random(population) < self.cohort / population)

    def sizes(self, population: int) -> tuple[int, int]:
        return 0, population

    def event(self, population: int, mechanism: "DpEvent") -> "DpEvent | None":
        from dp_accounting import PoissonSampledDpEvent

        return PoissonSampledDpEvent(self.cohort / population * self.answer_rate, mechanism)  # losses lower the rate


@dataclass(frozen=True)
class TruncatedPoisson(Poisson):
    """Poisson sampling whose larger cohorts are cut to `limit` users, a uniformly random subset.

    Ganesh, "Tight Privacy Audit/Accounting of Truncated Poisson Subsampling" (arXiv:2508.15089), as in dp_accounting.
    """

    limit: int
    label = "truncated Poisson"
    unaccounted_with_dropout = True

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(limit=self.limit)
        if self.limit < self.cohort:
            raise InputError(f"limit must be at least the cohort of {self.cohort:,} users, found {self.limit:,}")

    def draw(self, seed: int, round_: int, population: int) -> NDArray[np.int64]:
        drawn = super().draw(seed, round_, population)
        if len(drawn) <= self.limit:
            return drawn
        return np.sort(stream(seed, "truncated-cohort", round_).choice(drawn, self.limit, replace=False))

    def sizes(self, population: int) -> tuple[int, int]:
        return 0, min(self.limit, population)

    def event(self, population: int, mechanism: "DpEvent") -> "DpEvent | None":
        from dp_accounting import GaussianDpEvent, TruncatedSubsampledGaussianDpEvent

        if not isinstance(mechanism, GaussianDpEvent):  # the only mechanism whose cost is known
            return None
        rate = self.cohort / population
        return TruncatedSubsampledGaussianDpEvent(population, rate, self.limit, mechanism.noise_multiplier)


class WithReplacement(Sampler):
    """A fixed number of draws, each uniform over all users, so a cohort can contain a user more than once.

    Thakkar et al. (2020), footnote 1: "our experiments use sampling with replacement instead of without replacement".
    """

    label = "with replacement"
    relation = "replace-one"
    has_repeats = True
    unaccounted_with_dropout = True
    unaccounted = "a user can be drawn several times in a round, and no accountant of dp_accounting supports this"

    def draw(self, seed: int, round_: int, population: int) -> NDArray[np.int64]:
        return np.sort(stream(seed, "cohort-with-replacement", round_).integers(population, size=self.cohort))

    def event(self, population: int, mechanism: "DpEvent") -> "DpEvent":
        from dp_accounting import SampledWithReplacementDpEvent

        return SampledWithReplacementDpEvent(population, self.cohort, mechanism)


class RoundRobin(Sampler):
    """Consecutive cohorts of a random order of users that is drawn once, repeated from the beginning at its end.

    If the cohort size divides the population, there are population / cohort cohorts, and round r has cohort r modulo
    their number. Otherwise, a cohort that reaches the end of the order continues with its first users.
    """

    label = "round-robin"
    relation = "zero-out"

    def draw(self, seed: int, round_: int, population: int) -> NDArray[np.int64]:
        order = stream(seed, "cohort-order").permutation(population)
        return np.sort(order[(round_ * self.cohort + np.arange(self.cohort)) % population])

    def event(self, population: int, mechanism: "DpEvent") -> "DpEvent":  # noqa: ARG002 (nothing is drawn)
        return mechanism

    def participation(self, population: int, rounds: int) -> Participation:
        # a place in the order recurs after `population` places, which hold population / cohort rounds
        return Participation(-(-rounds * self.cohort // population), population // self.cohort)


class BallsInBins(RoundRobin):
    """Every user is in one uniformly random bin, drawn once; population / cohort bins, rounded, take turns.

    Sums are divided by `cohort`, as for other samplers, and a bin has population / bins users on average. Choose a
    cohort near population / n, for an integer n.

    Chua et al., "Balls-and-Bins Sampling for DP-SGD" (2024); with the same bins in each epoch, Choquette-Choo et al.,
    "Near-Exact Privacy Amplification for Matrix Mechanisms" (2024). Their amplification is estimated by simulation,
    which is no proof, so the cost is that of the limit of a user's rounds.
    """

    label = "balls in bins"

    def draw(self, seed: int, round_: int, population: int) -> NDArray[np.int64]:
        bins = round(population / self.cohort)
        return np.flatnonzero(stream(seed, "bins").integers(bins, size=population) == round_ % bins)

    def sizes(self, population: int) -> tuple[int, int]:
        return 0, population

    def participation(self, population: int, rounds: int) -> Participation:
        bins = round(population / self.cohort)
        return Participation(-(-rounds // bins), bins)


@dataclass(frozen=True)
class MinSeparation(Sampler):
    """A fixed number of users of one group; the users are in `separation` groups, drawn once, which take turns.

    Any two rounds of a user are therefore at least `separation` apart. Groups differ by at most one user.
    """

    separation: int
    label = "min separation"
    relation: ClassVar[Relation] = "zero-out"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(separation=self.separation)

    def check(self, population: int) -> None:
        if self.cohort > (size := population // self.separation):
            raise InputError(
                f"sampler_options: a separation of {self.separation:,} allows cohorts of at most {size:,} of the "
                f"{population:,} users, found {self.cohort:,}; lower the separation or the cohort"
            )

    def group(self, seed: int, round_: int, population: int) -> NDArray[np.int64]:
        """Return the users of a round's group, in random order."""
        order = stream(seed, "cohort-groups").permutation(population)
        return np.asarray(order[round_ % self.separation :: self.separation])

    def draw(self, seed: int, round_: int, population: int) -> NDArray[np.int64]:
        group = self.group(seed, round_, population)
        return np.sort(stream(seed, "cohort-of-group", round_).choice(group, self.cohort, replace=False))

    def event(self, population: int, mechanism: "DpEvent") -> "DpEvent | None":  # noqa: ARG002 (nothing is amplified)
        """Return the mechanism itself: the drawn users of a group can be public."""
        return mechanism

    def participation(self, population: int, rounds: int) -> Participation:  # noqa: ARG002 (the same for all)
        return Participation(-(-rounds // self.separation), self.separation)


class CyclicPoisson(MinSeparation):
    """Poisson sampling within one group; groups take turns as in `MinSeparation`.

    Choquette-Choo et al., "(Amplified) Banded Matrix Factorization" (2023), section 4: sampling amplifies the privacy
    of independent noise, and of correlated noise whose matrix has no more bands than there are groups.
    """

    label = "cyclic Poisson"
    relation = "add-or-remove-one"

    def draw(self, seed: int, round_: int, population: int) -> NDArray[np.int64]:
        group = self.group(seed, round_, population)
        drawn = stream(seed, "poisson-cohort-of-group", round_).random(len(group)) < self._rate(population)
        return np.sort(group[drawn])

    def sizes(self, population: int) -> tuple[int, int]:
        return 0, -(-population // self.separation)

    def event(self, population: int, mechanism: "DpEvent") -> "DpEvent":
        from dp_accounting import PoissonSampledDpEvent

        return PoissonSampledDpEvent(self._rate(population) * self.answer_rate, mechanism)

    def _rate(self, population: int) -> float:
        return self.cohort * self.separation / population


@dataclass(frozen=True)
class Available(MinSeparation):
    """A fixed number of the users who are available, uniformly drawn, or all of them if there are fewer.

    A user can take part again after `separation` rounds, as if the device had a timer. The cost is that of this limit,
    without amplification, because availability is not random sampling. It must not depend on the text of users.
    """

    availability: float = 0.25  # by the time of day, see `flsim.privacy.devices.Days`
    day: float = 24
    zones: float = 1
    trace: str = ""  # in place of these, a file, see `flsim.privacy.devices.Trace`
    trace_digest: str = ""
    label = "available"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._availability  # noqa: B018 (raises)

    @property
    def _availability(self) -> Days | Trace:
        days = Days(self.availability, self.day, self.zones)
        return Trace(self.trace, self.trace_digest) if self.trace else days

    def draw(self, seed: int, round_: int, population: int) -> NDArray[np.int64]:
        return cohorts_of_available(seed, population, self.cohort, self.separation, self._availability)[round_]

    def sizes(self, population: int) -> tuple[int, int]:  # noqa: ARG002 (the same for all)
        return 0, self.cohort


@dataclass(frozen=True)
class FedBuff(Sampler):
    """Buffered asynchronous training: the first `cohort` answers, of users who began at different times, are a round.

    `concurrency` users train at any time, and each trains the newest model of the time when it began. For the order of
    answers see `flsim.privacy.devices.simulated_buffers`. `flsim.algorithms.fedavg` weighs an answer by its staleness.
    """

    concurrency: int
    label = "FedBuff"
    is_asynchronous = True
    unaccounted = "faster users take part more often, and no accountant of dp_accounting supports this"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(concurrency=self.concurrency)
        if self.dropout or self.deadline is not None:
            raise InputError('sampler "fedbuff" waits for the next answers; remove dropout and deadline')

    def check(self, population: int) -> None:
        """Raise InputError if there can be too few users to replace those who have answered."""
        if (needed := self.concurrency + self.cohort - 1) > population:
            raise InputError(
                f"sampler_options: a concurrency of {self.concurrency:,} and a cohort of {self.cohort:,} need "
                f"{needed:,} users, found {population:,}; lower one of them"
            )

    def draw(self, seed: int, round_: int, population: int) -> NDArray[np.int64]:
        return self._buffer(seed, round_, population).users

    def started(self, seed: int, round_: int, population: int, users: NDArray[np.int64]) -> NDArray[np.int64]:
        buffer = self._buffer(seed, round_, population)
        return buffer.started[np.searchsorted(buffer.users, users)]

    def pending(self, seed: int, round_: int, population: int) -> tuple[int, ...]:
        return self._buffer(seed, round_, population).pending

    @property
    def most_pending(self) -> int:
        """Return the largest number in four times as many rounds as a user needs on average, for seed 0."""
        rounds = range(4 * -(-self.concurrency // self.cohort))
        return max(len(self.pending(0, round_, self.concurrency + self.cohort)) for round_ in rounds)

    def _buffer(self, seed: int, round_: int, population: int) -> Buffer:
        return buffers(seed, population, self.cohort, self.concurrency, self._law)[round_]


SAMPLERS: dict[str, type[Sampler]] = {
    "fixed-size": FixedSize,
    "poisson": Poisson,
    "truncated-poisson": TruncatedPoisson,
    "with-replacement": WithReplacement,
    "round-robin": RoundRobin,
    "min-separation": MinSeparation,
    "cyclic-poisson": CyclicPoisson,
    "balls-in-bins": BallsInBins,
    "available": Available,
    "fedbuff": FedBuff,
}


def sampler_class(name: str) -> type[Sampler]:
    """Return the class of a name; raise InputError if there is none, or if a custom file fails."""
    return resolve_class(name, SAMPLERS, "sampler", Sampler)  # type: ignore[type-abstract]


def sampler_named(name: str, cohort: int) -> Sampler:
    """Return the sampler of a name, with its options; for errors see `sampler_class`."""
    return made(name, sampler_class(name), cohort)


def draw_cohort(
    seed: int,
    round_: int,
    population: int,
    size: int,
    sampler: str,
    failure: type[InputError] | type[RunFailed] = RunFailed,
) -> NDArray[np.int64]:
    """Draw the users of a round (from 0), in ascending order: int64 [users]; `size` is expected if cohorts differ.

    InputError for an unfit cohort size; the `failure` if a custom sampler fails, or draws a cohort outside `sizes`.
    """
    check_cohort(population, size, sampler)
    kind = sampler_class(sampler)
    with custom_call_errors(sampler, "draw(seed, round_, population) and sizes(population)", failure):
        rule = made(sampler, kind, size)
        cohort, (fewest, most) = rule.draw(seed, round_, population), rule.sizes(population)
    are_users = isinstance(cohort, np.ndarray) and cohort.dtype == np.int64 and cohort.ndim == 1
    if are_users and len(cohort):
        are_distinct = (np.diff(cohort) >= (0 if kind.has_repeats else 1)).all()
        are_users = bool(cohort[0] >= 0 and cohort[-1] < population and are_distinct)
    if is_custom(sampler) and not (are_users and fewest <= len(cohort) <= most):
        numbers = "numbers" if kind.has_repeats else "distinct numbers"
        raise failure(
            f"{sampler}: round {round_ + 1} did not draw a cohort of {fewest:,} to {most:,} users; return "
            f"{numbers} from 0 to {population - 1:,} in ascending order, int64, with a size within sizes"
        )
    return rule.answering(seed, round_, population, cohort)


def refuse_unrepeatable(seed: int, population: int, size: int, sampler: str) -> None:
    """Raise InputError if a custom sampler fails, or its cohorts, which are drawn again later, differ between calls."""
    for round_ in range(2):
        one, other = (draw_cohort(seed, round_, population, size, sampler, InputError) for _ in range(2))
        if not np.array_equal(one, other):
            raise InputError(
                f"{sampler}: the cohort differs between two calls for round {round_ + 1}; draw users with "
                "flsim.base.rng.stream"
            )


@dataclass(frozen=True)
class Sampling:
    """The privacy of a sampler on a population."""

    sampler: str
    population: int
    cohort: int

    def __call__(self, mechanism: "DpEvent") -> "DpEvent":
        """Return the cost of a round that applies `mechanism` to the sum over the users of `draw_cohort`."""
        check_cohort(self.population, self.cohort, self.sampler)
        written = name_in_settings(self.sampler)
        if loss := _loss_of(self.sampler):
            if is_custom(self.sampler):
                raise InputError(f"{written}: accountants support {loss} of built-in samplers only; remove {loss}")
            refuse_unaccounted(self.sampler)
        with custom_call_errors(written, "event(population, mechanism)", InputError):
            event = sampler_named(self.sampler, self.cohort).event(self.population, mechanism)
        if event is None:
            refuse_unaccounted(self.sampler)
            raise InputError(
                f'{written}: this sampler has no privacy event; define event, or use privacy.mechanism "clip"'
            )
        refuse_no_event(written, event)
        return event

    @property
    def is_fixed(self) -> bool:
        """Return whether all cohorts have exactly `cohort` users, none of whom drops out or misses a deadline."""
        sampler = sampler_named(self.sampler, self.cohort)
        has_losses = sampler.dropout or _loss_of(self.sampler)
        return not has_losses and sampler.sizes(self.population) == (self.cohort, self.cohort)

    def participation(self, rounds: int) -> Participation | None:
        """Return the limit of a user's rounds, see `Sampler.participation`; raise InputError if it is invalid."""
        written = name_in_settings(self.sampler)
        with custom_call_errors(written, "participation(population, rounds)", InputError):
            limit = sampler_named(self.sampler, self.cohort).participation(self.population, rounds)
        if limit is not None and not (isinstance(limit, Participation) and limit.times >= 1 and limit.separation >= 1):
            raise InputError(f"{written}: participation returned {limit!r:.60}; return a Participation of at least 1")
        return limit


def refuse_no_event(name: str, event: object) -> None:
    """Raise InputError if the result of a custom `event` is not an event of dp_accounting."""
    from dp_accounting import DpEvent

    if not isinstance(event, DpEvent):
        raise InputError(f"{name}: event returned {event!r:.60}; return an event of dp_accounting")


def refuse_unaccounted(sampler: str) -> None:
    """Raise InputError for a built-in sampler that no accountant supports, without executing custom code."""
    if is_custom(sampler):
        return
    kind = sampler_class(sampler)
    reason, remedy = kind.unaccounted, 'use "poisson"'
    if (loss := _loss_of(sampler)) and kind.unaccounted_with_dropout:
        reason = f"{loss} changes the distribution of its cohorts, and no accountant of dp_accounting supports this"
    elif loss == "deadline" and options_of(sampler).get("spread") and kind.relation != "zero-out":
        reason = "with a deadline and a spread, slower users take part less often, and no accountant supports this"
        remedy = "remove the spread"
    if reason:
        raise InputError(
            f'training.sampler "{without_options(sampler)}": {reason}, and there is no epsilon; {remedy}, '
            'or set privacy.mechanism to "clip"'
        )


def _loss_of(sampler: str) -> str:
    """Return the option by which drawn users can be lost; empty if there is none."""
    options = options_of(sampler)
    return "deadline" if options.get("deadline") is not None else "dropout" if options.get("dropout") else ""


def refuse_options(sampler: str, options: Mapping[str, object], cohort: int) -> None:
    """Raise InputError if the name of a sampler includes options, or a built-in sampler does not accept them."""
    if options_of(sampler):
        raise InputError(f"sampler: write the options of {short_name(sampler)} in sampler_options")
    if not is_custom(sampler):
        sampler_named(with_options(sampler, options), cohort)


def check_cohort(population: int, size: int, sampler: str) -> None:
    """Raise InputError if the cohort or the sampler does not exist, without executing custom code."""
    refuse_unknown(sampler, SAMPLERS, "sampler")
    if not 1 <= size <= population:
        raise InputError(f"cohort must be between 1 and the {population:,} users, found {size:,}")
    if not is_custom(sampler):
        sampler_named(sampler, size).check(population)


def shard_ranges(population: int, shards: int) -> list[tuple[int, int]]:
    """Return contiguous ranges [first, last) of users, whose sizes differ by at most one; InputError if impossible."""
    if not 1 <= shards <= population:
        raise InputError(f"system.shards must be between 1 and the {population:,} training users, found {shards:,}")
    bounds = [population * shard // shards for shard in range(shards + 1)]
    return list(pairwise(bounds))
