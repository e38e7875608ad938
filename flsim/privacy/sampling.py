"""Samplers: each is one value, which draws the users of a round and states what the draw means for privacy.

A draw is a pure function of (seed, round, population). A user's own sampler, ``path/to/file.py:NAME``, is a class like
those of this file; its options are further fields of the dataclass.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from flsim.base.errors import InputError, RunFailed, at_least_one
from flsim.base.extensions import (
    custom_call_errors,
    declared_label,
    is_custom,
    made,
    name_in_settings,
    options_as_text,
    options_of,
    refuse_unknown,
    resolve_class,
    short_name,
    with_options,
    without_options,
)
from flsim.base.rng import stream

if TYPE_CHECKING:  # the import takes half a second, which every process of a run would pay
    from dp_accounting import DpEvent

Relation = Literal["replace-one", "add-or-remove-one"]


@dataclass(frozen=True)
class Sampler(ABC):
    """A rule by which the users of a round are drawn.

    Attributes:
        cohort: users per round; their expected number, where sizes differ. Sums of clipped updates are divided by it.
        label: the sampler's part of the name of a table's row; "" for none. Custom code
            without a label has NAME.
        relation: what neighbours differ in, for which `event` holds: one user's data ("replace-one"), or the presence
            of one user ("add-or-remove-one").
        has_repeats: whether a cohort may hold a user more than once. Each time counts as a user of its own in the sum.
        unaccounted: of a built-in sampler, why no accountant supports it; empty where one does.
    """

    cohort: int
    label: ClassVar[str] = ""
    relation: ClassVar[Relation] = "add-or-remove-one"
    has_repeats: ClassVar[bool] = False
    unaccounted: ClassVar[str] = ""

    @abstractmethod
    def draw(self, seed: int, round_: int, population: int) -> NDArray[np.int64]:
        """Return the users of a round (from 0), in ascending order: int64 [users], each in [0, population).

        Numbers differ unless the sampler `has_repeats`.
        """

    def sizes(self, population: int) -> tuple[int, int]:  # noqa: ARG002 (for others)
        """Return the fewest and the most users that a cohort may have; `cohort` of them unless overridden."""
        return self.cohort, self.cohort

    def event(self, population: int, mechanism: "DpEvent") -> "DpEvent | None":  # noqa: ARG002 (for others)
        """Return the cost of a round that applies a mechanism to the sum over its users; None where it is unknown."""
        return None


class FixedSize(Sampler):
    """A fixed number of different users, drawn uniformly.

    Thakkar et al. (2020), Algorithm 1: "sample without replacement qN users".
    """

    relation = "replace-one"

    def draw(self, seed: int, round_: int, population: int) -> NDArray[np.int64]:
        """Return exactly `cohort` users."""
        return np.sort(stream(seed, "cohort", round_).choice(population, self.cohort, replace=False))

    def event(self, population: int, mechanism: "DpEvent") -> "DpEvent":
        """Return sampling without replacement."""
        from dp_accounting import SampledWithoutReplacementDpEvent

        return SampledWithoutReplacementDpEvent(population, self.cohort, mechanism)


class Poisson(Sampler):
    """Poisson sampling: each user takes part with probability cohort / population, independently of the others.

    Cohorts differ in size, and an empty one is a draw like any other.
    """

    label = "Poisson"

    def draw(self, seed: int, round_: int, population: int) -> NDArray[np.int64]:
        """Return about `cohort` users."""
        return np.flatnonzero(stream(seed, "poisson-cohort", round_).random(population) < self.cohort / population)

    def sizes(self, population: int) -> tuple[int, int]:
        """Return 0 and the whole population as the fewest and the most users."""
        return 0, population

    def event(self, population: int, mechanism: "DpEvent") -> "DpEvent":
        """Return Poisson sampling."""
        from dp_accounting import PoissonSampledDpEvent

        return PoissonSampledDpEvent(self.cohort / population, mechanism)


@dataclass(frozen=True)
class TruncatedPoisson(Poisson):
    """Poisson sampling whose larger cohorts are cut to `limit` users, of which a uniformly random subset stays.

    The cost is that of Ganesh, "Tight Privacy Audit/Accounting of Truncated Poisson Subsampling"
    (arXiv:2508.15089), as dp_accounting implements it; only privacy loss distributions are known for it.
    """

    limit: int
    label = "truncated Poisson"

    def __post_init__(self) -> None:
        at_least_one(limit=self.limit)
        if self.limit < self.cohort:
            raise InputError(f"limit must be at least the cohort of {self.cohort:,} users, found {self.limit:,}")

    def draw(self, seed: int, round_: int, population: int) -> NDArray[np.int64]:
        """Return about `cohort` users, and at most `limit`."""
        drawn = super().draw(seed, round_, population)
        if len(drawn) <= self.limit:
            return drawn
        return np.sort(stream(seed, "truncated-cohort", round_).choice(drawn, self.limit, replace=False))

    def sizes(self, population: int) -> tuple[int, int]:
        """Return 0 and the limit as the fewest and the most users."""
        return 0, min(self.limit, population)

    def event(self, population: int, mechanism: "DpEvent") -> "DpEvent | None":
        """Return truncated Poisson sampling, which is known for Gaussian noise only."""
        from dp_accounting import GaussianDpEvent, TruncatedSubsampledGaussianDpEvent

        if not isinstance(mechanism, GaussianDpEvent):
            return None
        rate = self.cohort / population
        return TruncatedSubsampledGaussianDpEvent(population, rate, self.limit, mechanism.noise_multiplier)


class WithReplacement(Sampler):
    """A fixed number of draws, each uniform over all users, so that a cohort may hold a user more than once.

    Thakkar et al. (2020), footnote 1: "our experiments use sampling with replacement instead of without replacement".
    """

    label = "with replacement"
    relation = "replace-one"
    has_repeats = True
    unaccounted = "a user may be drawn several times in a round, which no accountant of dp_accounting supports"

    def draw(self, seed: int, round_: int, population: int) -> NDArray[np.int64]:
        """Return `cohort` users, with repeats."""
        return np.sort(stream(seed, "cohort-with-replacement", round_).integers(population, size=self.cohort))

    def event(self, population: int, mechanism: "DpEvent") -> "DpEvent":
        """Return sampling with replacement, which no accountant of dp_accounting supports."""
        from dp_accounting import SampledWithReplacementDpEvent

        return SampledWithReplacementDpEvent(population, self.cohort, mechanism)


class RoundRobin(Sampler):
    """Fixed cohorts in a fixed order: the users, in an order that is drawn once, cohort after cohort, again and again.

    Where the cohort divides the population, there are population / cohort cohorts, and round r has cohort r modulo
    their number. Where not, a cohort goes on with the first users of the order.
    """

    label = "round-robin"
    relation = "replace-one"
    unaccounted = "who takes part in a round is not drawn anew, so that no accountant of sampling applies"

    def draw(self, seed: int, round_: int, population: int) -> NDArray[np.int64]:
        """Return the next `cohort` users of the order."""
        order = stream(seed, "cohort-order").permutation(population)
        return np.sort(order[(round_ * self.cohort + np.arange(self.cohort)) % population])


SAMPLERS: dict[str, type[Sampler]] = {
    "fixed-size": FixedSize,
    "poisson": Poisson,
    "truncated-poisson": TruncatedPoisson,
    "with-replacement": WithReplacement,
    "round-robin": RoundRobin,
}


def sampler_class(name: str) -> type[Sampler]:
    """Return a built-in sampler, or the one at ``path/to/file.py:NAME``.

    Raises:
        InputError: there is no sampler of this name, or the file failed.
    """
    return resolve_class(name, SAMPLERS, "sampler", Sampler)  # type: ignore[type-abstract]


def label_of(name: str) -> str:
    """Return a sampler's part of the name of a table's row, without executing a user's file."""
    return declared_label(name) if is_custom(name) else sampler_class(name).label + options_as_text(name)


def draw_cohort(
    seed: int,
    round_: int,
    population: int,
    size: int,
    sampler: str,
    failure: type[InputError] | type[RunFailed] = RunFailed,
) -> NDArray[np.int64]:
    """Draw the users of a round, in ascending order: int64 [users].

    Args:
        seed: the experiment's seed.
        round_: the round, from 0.
        population: number of users to draw from.
        size: users per round; the expected number, where sizes differ.
        sampler: a key of `SAMPLERS`, or a user's own.
        failure: the type of the error where a user's own fails; InputError before training.

    Raises:
        InputError: the cohort is larger than the population, or empty; or there is no such sampler.
        RunFailed: a user's own sampler failed, or drew no cohort of a size that it promises.
    """
    check_cohort(population, size, sampler)
    kind = sampler_class(sampler)
    with custom_call_errors(sampler, "draw(seed, round_, population) and sizes(population)", failure):
        drawn = made(sampler, kind, size)
        cohort, (fewest, most) = drawn.draw(seed, round_, population), drawn.sizes(population)
    are_users = _are_users(cohort, population, kind.has_repeats)
    if is_custom(sampler) and not (are_users and fewest <= len(cohort) <= most):
        numbers = "numbers" if kind.has_repeats else "different numbers"
        raise failure(
            f"{sampler}: round {round_ + 1} drew no cohort of {fewest:,} to {most:,} users; return {numbers} "
            f"from 0 to {population - 1:,} in ascending order, int64, as many as sizes promises"
        )
    return cohort


def refuse_unrepeatable(seed: int, population: int, size: int, sampler: str) -> None:
    """Raise InputError where a user's own sampler fails, or draws other cohorts each time; arguments: `draw_cohort`.

    A resumed run, `flsim verify` and attacks draw the cohorts of a run again.
    """
    for round_ in range(2):
        one, other = (draw_cohort(seed, round_, population, size, sampler, InputError) for _ in range(2))
        if not np.array_equal(one, other):
            raise InputError(
                f"{sampler}: draws other users each time in round {round_ + 1}; draw them by flsim.base.rng.stream"
            )


def _are_users(cohort: object, population: int, has_repeats: bool) -> bool:
    if not isinstance(cohort, np.ndarray) or cohort.dtype != np.int64 or cohort.ndim != 1:
        return False
    is_inside = not len(cohort) or (cohort[0] >= 0 and cohort[-1] < population)
    return bool(is_inside and (np.diff(cohort) >= (0 if has_repeats else 1)).all())


def cohort_event(sampler: str, population: int, size: int, mechanism: "DpEvent") -> "DpEvent":
    """Return the cost of a round that applies `mechanism` to the sum over the users of `draw_cohort`.

    Raises:
        InputError: see `draw_cohort`; or a user's own sampler failed, or states no event.
    """
    check_cohort(population, size, sampler)
    kind = sampler_class(sampler)
    written = name_in_settings(sampler)
    with custom_call_errors(written, "event(population, mechanism)", InputError):
        event = made(sampler, kind, size).event(population, mechanism)
    if event is None:
        if not is_custom(sampler):
            raise InputError(f'training.sampler "{sampler}": {kind.unaccounted}')
        raise InputError(f'{written}: states no privacy event; define event, or take privacy.mechanism "clip"')
    refuse_no_event(written, event)
    return event


def refuse_no_event(name: str, event: object) -> None:
    """Raise InputError where what the `event` of a user's own returned is no event of dp_accounting."""
    from dp_accounting import DpEvent

    if not isinstance(event, DpEvent):
        raise InputError(f"{name}: event returned {event!r:.60}; return an event of dp_accounting")


def refuse_unaccounted(sampler: str) -> None:
    """Raise InputError for a built-in sampler that no accountant supports, without executing a user's code."""
    if not is_custom(sampler) and (reason := sampler_class(sampler).unaccounted):
        raise InputError(
            f'training.sampler "{without_options(sampler)}": {reason}, and no epsilon could be stated; take '
            f'"fixed-size" or "poisson", or set privacy.mechanism to "clip"'
        )


def refuse_options(sampler: str, options: Mapping[str, object], cohort: int) -> None:
    """Raise InputError where options are in the name of a sampler, or are not those of a built-in sampler."""
    if options_of(sampler):
        raise InputError(f"sampler: write the options of {short_name(sampler)} in sampler_options")
    if not is_custom(sampler):
        made(with_options(sampler, options), sampler_class(sampler), cohort)


def check_cohort(population: int, size: int, sampler: str) -> None:
    """Raise InputError where there is no such cohort or sampler, without executing a user's code."""
    refuse_unknown(sampler, SAMPLERS, "sampler")
    if not 1 <= size <= population:
        raise InputError(f"cohort must be between 1 and the {population:,} users, found {size:,}")
    if not is_custom(sampler):
        made(sampler, sampler_class(sampler), size)  # raises where its options do not fit


def shard_ranges(population: int, shards: int) -> list[tuple[int, int]]:
    """Return contiguous ranges [first, last) of users, whose sizes differ by at most one.

    A shard is a range of users, which a Flower node serves, and no file: the corpus is memory-mapped, and a request
    names its users, so that any process can serve any shard. The number of shards is therefore a setting of a run, and
    not of a corpus.

    Raises:
        InputError: there are more shards than users, or none.
    """
    if not 1 <= shards <= population:
        raise InputError(f"system.shards must be between 1 and the {population:,} training users, found {shards:,}")
    bounds = [population * shard // shards for shard in range(shards + 1)]
    return list(pairwise(bounds))
