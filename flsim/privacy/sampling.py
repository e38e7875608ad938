"""Samplers, each of which draws the users of a round and states the privacy cost of the draw.

A draw is a pure function of (seed, round, population). A custom sampler, ``path/to/file.py:NAME``, is a class like
those of this file; its options are further fields of the dataclass.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from flsim.base.errors import InputError, RunFailed
from flsim.base.extensions import (
    custom_call_errors,
    declared_label,
    is_custom,
    made,
    name_in_settings,
    refuse_unknown,
    resolve_class,
)
from flsim.base.rng import stream

if TYPE_CHECKING:  # importing takes half a second in every process of a run
    from dp_accounting import DpEvent

Relation = Literal["replace-one", "add-or-remove-one"]


@dataclass(frozen=True)
class Sampler(ABC):
    """A rule by which the users of a round are drawn.

    Attributes:
        cohort: users per round; the expected number, if cohorts differ in size. Sums of clipped updates are divided by
            it.
        label: the part of a row's name in tables that names the sampler; "" for none. Custom code without a label is
            named NAME.
        relation: the difference between neighbouring data sets for which `event` holds: one user's data
            ("replace-one"), or the presence of one user ("add-or-remove-one").
        has_repeats: whether a cohort can contain a user more than once. Each occurrence counts as a separate user in
            the sum.
        unaccounted: for a built-in sampler, the reason why no accountant supports it; empty if one does.
    """

    cohort: int
    label: ClassVar[str] = ""
    relation: ClassVar[Relation] = "add-or-remove-one"
    has_repeats: ClassVar[bool] = False
    unaccounted: ClassVar[str] = ""

    @abstractmethod
    def draw(self, seed: int, round_: int, population: int) -> NDArray[np.int64]:
        """Return the users of a round (from 0), in ascending order: int64 [users], each in [0, population).

        Users are distinct unless the sampler `has_repeats`.
        """

    def sizes(self, population: int) -> tuple[int, int]:  # noqa: ARG002 (for others)
        """Return the smallest and the largest possible size of a cohort; both are `cohort` unless overridden."""
        return self.cohort, self.cohort

    def event(self, population: int, mechanism: "DpEvent") -> "DpEvent | None":  # noqa: ARG002 (for others)
        """Return the cost of a round that applies a mechanism to the sum over its users; None if it is unknown."""
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

    Cohorts differ in size, and a cohort can be empty.
    """

    label = "Poisson"

    def draw(self, seed: int, round_: int, population: int) -> NDArray[np.int64]:
        """Return about `cohort` users."""
        return np.flatnonzero(stream(seed, "poisson-cohort", round_).random(population) < self.cohort / population)

    def sizes(self, population: int) -> tuple[int, int]:
        """Return 0 and the size of the population."""
        return 0, population

    def event(self, population: int, mechanism: "DpEvent") -> "DpEvent":
        """Return Poisson sampling."""
        from dp_accounting import PoissonSampledDpEvent

        return PoissonSampledDpEvent(self.cohort / population, mechanism)


class WithReplacement(Sampler):
    """A fixed number of draws, each uniform over all users, so a cohort can contain a user more than once.

    Thakkar et al. (2020), footnote 1: "our experiments use sampling with replacement instead of without replacement".
    """

    label = "with replacement"
    relation = "replace-one"
    has_repeats = True
    unaccounted = "a user can be drawn several times in a round, and no accountant of dp_accounting supports this"

    def draw(self, seed: int, round_: int, population: int) -> NDArray[np.int64]:
        """Return `cohort` users, with repeats."""
        return np.sort(stream(seed, "cohort-with-replacement", round_).integers(population, size=self.cohort))

    def event(self, population: int, mechanism: "DpEvent") -> "DpEvent":
        """Return sampling with replacement, which no accountant of dp_accounting supports."""
        from dp_accounting import SampledWithReplacementDpEvent

        return SampledWithReplacementDpEvent(population, self.cohort, mechanism)


class RoundRobin(Sampler):
    """Consecutive cohorts of a random order of users that is drawn once, repeated from the beginning at its end.

    If the cohort size divides the population, there are population / cohort cohorts, and round r has cohort r modulo
    their number. Otherwise, a cohort that reaches the end of the order continues with its first users.
    """

    label = "round-robin"
    relation = "replace-one"
    unaccounted = "cohorts are not drawn anew in each round, so no accountant of sampling applies"

    def draw(self, seed: int, round_: int, population: int) -> NDArray[np.int64]:
        """Return the next `cohort` users of the order."""
        order = stream(seed, "cohort-order").permutation(population)
        return np.sort(order[(round_ * self.cohort + np.arange(self.cohort)) % population])


SAMPLERS: dict[str, type[Sampler]] = {
    "fixed-size": FixedSize,
    "poisson": Poisson,
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
    """Return the part of a row's name in tables that names the sampler, without executing custom code."""
    return declared_label(name) if is_custom(name) else SAMPLERS[name].label


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
        size: users per round; the expected number, if cohorts differ in size.
        sampler: a key of `SAMPLERS`, or a custom sampler.
        failure: the type of the error if a custom sampler fails; InputError before training.

    Raises:
        InputError: the cohort is larger than the population, or empty; or the sampler does not exist.
        RunFailed: a custom sampler failed, or drew a cohort whose size is outside `sizes`.
    """
    check_cohort(population, size, sampler)
    kind = sampler_class(sampler)
    with custom_call_errors(sampler, "draw(seed, round_, population) and sizes(population)", failure):
        drawn = made(sampler, kind, size)
        cohort, (fewest, most) = drawn.draw(seed, round_, population), drawn.sizes(population)
    are_users = _are_users(cohort, population, kind.has_repeats)
    if is_custom(sampler) and not (are_users and fewest <= len(cohort) <= most):
        numbers = "numbers" if kind.has_repeats else "distinct numbers"
        raise failure(
            f"{sampler}: round {round_ + 1} did not draw a cohort of {fewest:,} to {most:,} users; return "
            f"{numbers} from 0 to {population - 1:,} in ascending order, int64, with a size within sizes"
        )
    return cohort


def refuse_unrepeatable(seed: int, population: int, size: int, sampler: str) -> None:
    """Raise InputError if a custom sampler fails, or its cohorts differ between calls.

    For the arguments, see `draw_cohort`.

    A resumed run, `flsim verify` and attacks draw the cohorts of a run again.
    """
    for round_ in range(2):
        one, other = (draw_cohort(seed, round_, population, size, sampler, InputError) for _ in range(2))
        if not np.array_equal(one, other):
            raise InputError(
                f"{sampler}: the cohort differs between two calls for round {round_ + 1}; draw users with "
                "flsim.base.rng.stream"
            )


def _are_users(cohort: object, population: int, has_repeats: bool) -> bool:
    if not isinstance(cohort, np.ndarray) or cohort.dtype != np.int64 or cohort.ndim != 1:
        return False
    is_inside = not len(cohort) or (cohort[0] >= 0 and cohort[-1] < population)
    return bool(is_inside and (np.diff(cohort) >= (0 if has_repeats else 1)).all())


def cohort_event(sampler: str, population: int, size: int, mechanism: "DpEvent") -> "DpEvent":
    """Return the cost of a round that applies `mechanism` to the sum over the users of `draw_cohort`.

    Raises:
        InputError: see `draw_cohort`; or a custom sampler failed, or has no event.
    """
    check_cohort(population, size, sampler)
    kind = sampler_class(sampler)
    written = name_in_settings(sampler)
    with custom_call_errors(written, "event(population, mechanism)", InputError):
        event = made(sampler, kind, size).event(population, mechanism)
    if event is None:
        if not is_custom(sampler):
            raise InputError(f'training.sampler "{sampler}": {kind.unaccounted}')
        raise InputError(f'{written}: this sampler has no privacy event; define event, or use privacy.mechanism "clip"')
    refuse_no_event(written, event)
    return event


def refuse_no_event(name: str, event: object) -> None:
    """Raise InputError if the result of a custom `event` is not an event of dp_accounting."""
    from dp_accounting import DpEvent

    if not isinstance(event, DpEvent):
        raise InputError(f"{name}: event returned {event!r:.60}; return an event of dp_accounting")


def refuse_unaccounted(sampler: str) -> None:
    """Raise InputError for a built-in sampler that no accountant supports, without executing custom code."""
    if not is_custom(sampler) and (reason := SAMPLERS[sampler].unaccounted):
        raise InputError(
            f'training.sampler "{sampler}": {reason}, and there is no epsilon; use "fixed-size" or "poisson", '
            'or set privacy.mechanism to "clip"'
        )


def check_cohort(population: int, size: int, sampler: str) -> None:
    """Raise InputError if the cohort or the sampler does not exist, without executing custom code."""
    refuse_unknown(sampler, SAMPLERS, "sampler")
    if not 1 <= size <= population:
        raise InputError(f"cohort must be between 1 and the {population:,} users, found {size:,}")


def shard_ranges(population: int, shards: int) -> list[tuple[int, int]]:
    """Return contiguous ranges [first, last) of users, whose sizes differ by at most one.

    A shard is a range of users that a Flower node serves. The corpus is memory-mapped, and a request names its users,
    so any process can serve any shard. The number of shards is therefore a setting of a run, not of a corpus.

    Raises:
        InputError: there are more shards than users, or none.
    """
    if not 1 <= shards <= population:
        raise InputError(f"system.shards must be between 1 and the {population:,} training users, found {shards:,}")
    bounds = [population * shard // shards for shard in range(shards + 1)]
    return list(pairwise(bounds))
