"""Which users take part in a round: a pure function of (seed, round, population). And what that draw is for privacy."""

from itertools import pairwise
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from flsim.base.errors import InputError
from flsim.base.rng import stream

if TYPE_CHECKING:  # it takes half a second, which every process of a run would pay
    from dp_accounting import DpEvent

Sampler = Literal["fixed-size", "poisson"]
SAMPLERS: tuple[Sampler, ...] = get_args(Sampler)


def draw_cohort(seed: int, round_: int, population: int, size: int, sampler: Sampler) -> NDArray[np.int64]:
    """The users of a round, in ascending order: int64 [size], or [about size] under Poisson sampling.

    Under "poisson" each user takes part with probability size / population, whatever the others do: cohorts differ in
    size, and an empty one is a draw like any other.

    Raises:
        InputError: the cohort is larger than the population, or empty; or there is no such sampler.
    """
    check_cohort(population, size, sampler)
    if sampler == "poisson":
        return np.flatnonzero(stream(seed, "poisson-cohort", round_).random(population) < size / population)
    return fixed_size_cohort(seed, round_, population, size)


def cohort_event(sampler: Sampler, population: int, size: int, mechanism: "DpEvent") -> "DpEvent":
    """What a round spends that applies `mechanism` to the sum over `draw_cohort`'s users.

    Raises:
        InputError: as `draw_cohort`.
    """
    from dp_accounting import PoissonSampledDpEvent, SampledWithoutReplacementDpEvent

    check_cohort(population, size, sampler)
    if sampler == "poisson":
        return PoissonSampledDpEvent(size / population, mechanism)
    return SampledWithoutReplacementDpEvent(population, size, mechanism)


def check_cohort(population: int, size: int, sampler: str) -> None:
    """Raises InputError where there is no such cohort, or sampler."""
    if sampler not in SAMPLERS:
        raise InputError(f'sampler must be one of {", ".join(SAMPLERS)}; found "{sampler}"')
    if not 1 <= size <= population:
        raise InputError(f"cohort must be between 1 and the {population:,} users, found {size:,}")


def fixed_size_cohort(seed: int, round_: int, population: int, size: int) -> NDArray[np.int64]:
    """`size` different users, uniformly, in ascending order: int64 [size].

    Thakkar et al. (2020), Algorithm 1: "sample without replacement qN users".

    Raises:
        InputError: the cohort is larger than the population, or empty.
    """
    check_cohort(population, size, "fixed-size")
    return np.sort(stream(seed, "cohort", round_).choice(population, size, replace=False))


def shard_ranges(population: int, shards: int) -> list[tuple[int, int]]:
    """Contiguous ranges [first, last) of users, of equal size but for one: a shard is what a Flower node serves.

    A shard is a range of users and not a file: the corpus is memory-mapped, and a request names its users, so that any
    process can serve any shard. The number of shards is therefore a setting of a run, and not of a corpus.

    Raises:
        InputError: there are more shards than users, or none.
    """
    if not 1 <= shards <= population:
        raise InputError(f"system.shards must be between 1 and the {population:,} training users, found {shards:,}")
    bounds = [population * shard // shards for shard in range(shards + 1)]
    return list(pairwise(bounds))
