"""What is planted: phrases of random words, in every configuration of user share and record share.

Thakkar et al. (2020), section 4.1, "Canary Construction" and "Canary Insertion".
"""

from dataclasses import dataclass
from itertools import product

import numpy as np

from flsim.data.vocabulary import Layout
from flsim.errors import InputError, at_least_one
from flsim.rng import stream


@dataclass(frozen=True)
class CanaryHParams:
    """The grid of canary configurations.

    Attributes:
        p_u: probabilities that a user is a sharer of a canary.
        p_e: probabilities that a record of a sharer is replaced by the canary.
        count: number of canaries in each configuration of p_u and p_e.
        length: number of words in a canary.
    """

    p_u: tuple[float, ...] = (1 / 5_000, 3 / 50_000, 1 / 50_000)
    p_e: tuple[float, ...] = (0.01, 0.1, 1.0)
    count: int = 10
    length: int = 5

    def __post_init__(self) -> None:
        for name, values in (("p_u", self.p_u), ("p_e", self.p_e)):
            for value in values:
                if not 0 < value <= 1:
                    raise InputError(f"{name} must be a probability above 0 and at most 1, found {value:g}")
            if not values or len(set(values)) < len(values):
                raise InputError(f"{name} must list different probabilities, found {list(values)}")
        at_least_one(count=self.count)
        if self.length < 2:
            raise InputError(f"length must be at least 2 (a prefix and what follows it), found {self.length}")


@dataclass(frozen=True)
class Canary:
    """One planted phrase.

    Attributes:
        id: its name in every table, e.g. ``"c07"``.
        tokens: its word ids.
        p_u: probability that a user is a sharer of it.
        p_e: probability that a record of a sharer is replaced by it.
    """

    id: str
    tokens: tuple[int, ...]
    p_u: float
    p_e: float


def draw_phrase(seed: int, index: int, attempt: int, length: int, layout: Layout) -> tuple[int, ...]:
    """Words of canary `index`, each uniform over the vocabulary's words; `attempt` counts the redraws."""
    rng = stream(seed, "canary", index, attempt)
    return tuple(rng.integers(layout.first_word, layout.last_word, length, endpoint=True).tolist())


def configurations(hparams: CanaryHParams) -> list[tuple[float, float]]:
    """(p_u, p_e) of every canary, in the order of their ids."""
    return [pair for pair in product(hparams.p_u, hparams.p_e) for _ in range(hparams.count)]


def expected_insertions(canary: Canary, records: int) -> float:
    """Expected number of a population's `records` that a canary replaces."""
    return float(np.prod([canary.p_u, canary.p_e, records]))
