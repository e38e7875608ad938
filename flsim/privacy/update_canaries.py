"""Canary users, whose updates are random directions, in addition to the users of a federated run.

Andrew et al., "One-shot Empirical Privacy Estimation for Federated Learning" (2023). Canary user j answers in each of
its rounds with 10 clip norms times u_j, an independent uniform unit vector, which the clip shortens to one clip norm.
After training, the cosine of u_j and the change of the model shows how visible one user's updates are.

The sampler draws from a virtual copy of the population, and canary user j takes part if user j of the copy is drawn. So
no draw for a real user changes, and every guarantee of the ledger for a user also holds for each canary user. Vectors
are recomputed from the seed, and never stored.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch

from flsim.base.arrays import Flags, Floats, Ints
from flsim.base.errors import InputError
from flsim.base.rng import stream
from flsim.base.settings import Natural, settings
from flsim.models.language_model import Params
from flsim.privacy.mechanism import PrivacyHParams
from flsim.privacy.sampling import draw_cohort

LENGTH = 10.0  # norm of a canary user's update before the clip, in clip norms; above 1, so that it tests the clip


@settings
class AuditHParams:
    """Settings of canary users, whose updates are random: they test the clip and the noise of a run for `flsim audit`.

    Attributes:
        update_canaries: Number K of canary users in addition to the users of the corpus. They take
            part like users, and each sends a random update of ten clip norms, which is clipped.
            Needs privacy.mechanism "clip" or "dp". Unit: users.
        canary_coins: Let a canary user take part in training only if an independent fair coin lands heads. Guesses of
            the coins then bound epsilon. Otherwise all canary users take part, which gives only an estimate.
    """

    update_canaries: Natural = 0
    canary_coins: bool = False

    def __post_init__(self) -> None:
        if self.canary_coins and not self.update_canaries:
            raise InputError("canary_coins needs canary users; set update_canaries, e.g. to 1000, or remove it")

    def refuse_without_clip(self, privacy: PrivacyHParams) -> None:
        """Raise InputError if there are canary users but no clip."""
        if self.update_canaries and privacy.mechanism == "none":
            raise InputError(
                f"audit.update_canaries {self.update_canaries:,}: canary users need a clip, and "
                f'privacy.mechanism "none" has no clip; set it to "clip" or "dp", or remove '
                f"update_canaries"
            )

    def random_updates(self, population: int) -> float:
        """Return the expected number of random updates per real update of a round with this population."""
        return self.update_canaries * (0.5 if self.canary_coins else 1.0) / population

    def cost(self, population: int) -> str:
        """Return a sentence on the cost of the canary users for a run with this number of real users."""
        return (
            f"{self.update_canaries:,} canary users in addition to {population:,} users: a round has about "
            f"{self.random_updates(population):.2g} times as many random updates as real ones, which cost "
            "utility as noise does"
        )

    def present(self, seed: int) -> Flags:
        """Return which canary users take part in training, bool [K]: all, or those whose coin lands heads."""
        numbers = range(self.update_canaries)
        return np.array([not self.canary_coins or toss(seed, number) for number in numbers], dtype=np.bool_)

    def drawn(self, seed: int, round_: int, population: int, cohort: int, sampler: str) -> Ints:
        """Return the canary users of a round (from 0) [n]; more than N users have several virtual populations."""
        present, canaries = self.present(seed), self.update_canaries
        numbers = []
        for copy, first in enumerate(range(0, canaries, population)):
            own_seed = int(stream(seed, "update canary cohorts", copy).integers(2**62))
            cohort_of_copy = draw_cohort(own_seed, round_, population, cohort, sampler) + first
            numbers.append(cohort_of_copy[cohort_of_copy < canaries])
        users: Ints = np.concatenate([np.empty(0, np.int64), *numbers])
        return np.asarray(users[present[users]])


def toss(seed: int, canary: int) -> bool:
    return bool(stream(seed, "update canary coin", canary).random() < 0.5)


def direction(seed: int, canary: int, like: Mapping[str, torch.Tensor]) -> tuple[Params, float]:
    """Return standard normal float32 tensors with the names and shapes of `like`, and the L2 norm of all of them."""
    vector = {
        name: torch.from_numpy(
            stream(seed, "update canary", canary, name).standard_normal(tuple(value.shape), np.float32)
        )
        for name, value in like.items()
    }
    return vector, math.sqrt(
        sum(float(torch.linalg.vector_norm(block, dtype=torch.float64)) ** 2 for block in vector.values())
    )


def update_of(canary: int, seed: int, clip: float, like: Mapping[str, torch.Tensor]) -> Params:
    """Return the update of a canary user before the clip: `LENGTH` clip norms long, float64 by parameter of `like`."""
    vector, norm = direction(seed, canary, like)
    return {name: block.double() * (LENGTH * clip / norm) for name, block in vector.items()}


def cosines(change: Params, seed: int, canaries: range) -> Floats:
    """Return the cosine of a change of the model and each canary user's vector, float64 [n]; 0 without a change."""
    change = {name: value.double() for name, value in change.items()}
    length = math.sqrt(sum(float(torch.linalg.vector_norm(value)) ** 2 for value in change.values()))
    result = np.zeros(len(canaries))
    for index, canary in enumerate(canaries if length else ()):
        vector, norm = direction(seed, canary, change)
        products = (torch.vdot(change[name].flatten(), block.double().flatten()) for name, block in vector.items())
        result[index] = sum(map(float, products)) / (length * norm)
    return result
