"""Which users take part in a round: a pure function of (seed, round, population)."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from flsim.errors import InputError
from flsim.rng import stream


def fixed_size_cohort(seed: int, round_: int, population: int, size: int) -> NDArray[np.int64]:
    """`size` different users, uniformly, in ascending order: int64 [size].

    Thakkar et al. (2020), Algorithm 1: "sample without replacement qN users".

    Raises:
        InputError: the cohort is larger than the population, or empty.
    """
    if not 1 <= size <= population:
        raise InputError(f"training.cohort must be between 1 and the {population:,} training users, found {size:,}")
    return np.sort(stream(seed, "cohort", round_).choice(population, size, replace=False))


def shard_ranges(population: int, shards: int) -> list[tuple[int, int]]:
    """Contiguous ranges [first, last) of users, of equal size but for one: a shard is what a Flower node holds.

    Raises:
        InputError: there are more shards than users, or none.
    """
    if not 1 <= shards <= population:
        raise InputError(f"system.shards must be between 1 and the {population:,} training users, found {shards:,}")
    bounds = [population * shard // shards for shard in range(shards + 1)]
    return list(pairwise(bounds))
