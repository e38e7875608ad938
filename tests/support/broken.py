"""An honest algorithm whose users' updates are known, and mechanisms that state more privacy than they give.

Runs name the classes of this file as a user's own. Each of the broken ones passes all checks before training, as
nothing proves what a user's own code states.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from flsim.algorithms.algorithm import Algorithm, Answer, Trained, User
from flsim.models.language_model import Params
from flsim.privacy.noise import Independent
from flsim.privacy.sampling import Poisson
from flsim.training.state import Moments
from flsim.training.update import clip_factor, global_norm

CLIP = 0.5
UPDATE = 100 * CLIP  # norm of an update before the clip


class OneWord(Algorithm):
    """A user's update moves the embedding of its only word, and nothing else. A user without records moves nothing."""

    def update(self, user: User) -> Params:
        delta = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in user.model.trainable.items()}
        for batch in user.batches:
            delta["embedding"][int(batch.targets[0, 0])] = UPDATE
        return delta

    def train(self, user: User) -> Answer:
        return Answer(Trained(self.update(user), len(user.batches), 0.0, 0), {})


class ClipAfterAverage(OneWord):
    """Updates leave users as they are, beside the model's; their average is clipped, and not each of them.

    What the server has learnt is the sum of the model, which gets the noise, and of its own tensors.
    """

    slots = ("learnt",)
    answers = ("update",)

    def train(self, user: User) -> Answer:
        update = self.update(user)
        nothing = {name: torch.zeros_like(value) for name, value in update.items()}
        return Answer(Trained(nothing, len(user.batches), 0.0, 0), {"update": update})

    def step(self, own: Moments, summed: Moments, users: int, population: int) -> Moments:
        average = {name: value / users for name, value in summed["update"].items()}
        factor = clip_factor(global_norm(average), CLIP)
        return {"learnt": {name: value + (factor * average[name]).float() for name, value in own["learnt"].items()}}


class NoNoise(Independent):
    """Zeros, stated as independent Gaussian noise."""

    def next(self, state: dict[str, Params], round_: int) -> tuple[Params, dict[str, Params]]:
        return {name: 0 * value for name, value in self.fresh(round_).items()}, state


class TenthOfNoise(Independent):
    """A tenth of the noise that is stated."""

    def next(self, state: dict[str, Params], round_: int) -> tuple[Params, dict[str, Params]]:
        return {name: value / 10 for name, value in self.fresh(round_).items()}, state


class Hundredfold(Poisson):
    """Poisson sampling, but the first user is in the sum a hundred times wherever it is drawn."""

    has_repeats = True

    def sizes(self, population: int) -> tuple[int, int]:
        return 0, population + 99

    def draw(self, seed: int, round_: int, population: int) -> NDArray[np.int64]:
        cohort = super().draw(seed, round_, population)
        return np.repeat(cohort, np.where(cohort == 0, 100, 1))


class SameUsers(Poisson):
    """The first users in every round, stated as Poisson sampling."""

    def draw(self, seed: int, round_: int, population: int) -> NDArray[np.int64]:
        return np.arange(self.cohort)
