"""Samplers, noise and an algorithm that state more privacy than they provide, for `benchmarks.detection`.

Runs name the classes of this file as custom code. All pass the checks before training, because nothing proves what
custom code states.
"""

import numpy as np
from numpy.typing import NDArray

from flsim.algorithms.algorithm import Algorithm, Answer, User
from flsim.base.rng import stream
from flsim.models.language_model import Params
from flsim.privacy.noise import Independent
from flsim.privacy.sampling import Poisson

TIMES = 50


class OneByOne(Algorithm):
    """Federated Averaging whose users train one after another, so that `UpdateSum.of_user` clips all of them."""

    def train(self, user: User) -> Answer:
        """Train a user, and return its answer."""
        return Answer(user.train(), {})


class DividedByCohort(Independent):
    """Independent noise divided by the square root of a cohort of 40 users."""

    def next(self, state: dict[str, Params], round_: int) -> tuple[Params, dict[str, Params]]:
        """Return too little noise, and the state."""
        return {name: value / 40**0.5 for name, value in self.fresh(round_).items()}, state


class SameEveryRound(Independent):
    """The noise of the first round in every round, stated as independent."""

    def next(self, state: dict[str, Params], round_: int) -> tuple[Params, dict[str, Params]]:  # noqa: ARG002
        """Return the noise of the first round, and the state."""
        return self.fresh(0), state


class FixedCohort(Poisson):
    """One cohort of a fixed seed in every round, stated as Poisson sampling."""

    def draw(self, seed: int, round_: int, population: int) -> NDArray[np.int64]:  # noqa: ARG002
        """Return the cohort of the first round."""
        return super().draw(seed, 0, population)


class OneUserManyTimes(Poisson):
    """Poisson sampling, but the first user is in the sum 50 times whenever it is sampled."""

    has_repeats = True

    def sizes(self, population: int) -> tuple[int, int]:
        """Return the smallest and the largest number of users."""
        return 0, population + TIMES - 1

    def draw(self, seed: int, round_: int, population: int) -> NDArray[np.int64]:
        """Return about `cohort` users, with repeats of the first one."""
        cohort = super().draw(seed, round_, population)
        return np.repeat(cohort, np.where(cohort == 0, TIMES, 1))


class FixedSizeAsPoisson(Poisson):
    """A fixed number of users without replacement, stated as Poisson sampling."""

    def draw(self, seed: int, round_: int, population: int) -> NDArray[np.int64]:
        """Return exactly `cohort` users."""
        return np.sort(stream(seed, "cohort", round_).choice(population, self.cohort, replace=False))
