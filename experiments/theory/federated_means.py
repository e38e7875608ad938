"""Federated mean estimation by the platform's own rounds, to compare with `experiments.theory.mean_estimation`.

The model is `experiments.theory.gaussian_words`, named as a custom model. Cohorts, local steps, sums and
the server's step are those of `flsim run`.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from experiments.theory import gaussian_words
from experiments.theory.mean_estimation import MeanEstimation
from flsim.algorithms.algorithm import FedAvgHParams
from flsim.algorithms.rounds import FederatedTraining
from flsim.base.rng import stream
from flsim.data.records import NOBODY, SPECIAL_TOKENS, ExtraUsers, Layout, Records
from flsim.models.architectures import ModelHParams
from flsim.training.update import LocalHParams

Floats = NDArray[np.float64]
MODEL = f"{Path(gaussian_words.__file__)}:{gaussian_words.GaussianWords.__name__}"
SPREAD = 16  # standard deviation of users' values, in steps of the lattice: rounding adds 0.03% to their variance
WORDS = 511  # values -255 to 255, which are 16 standard deviations to either side


@dataclass(frozen=True)
class MeanUsers:
    """Users with one record of as many values as there are positions. One user's record depends on the run.

    In round 0 that user holds `moved` at all positions, and all other users hold zeros. In later rounds users hold
    their values.

    Attributes:
        values: int64 [users, positions], the values of users, in steps of the lattice.
        target: the user whose record depends on the run.
        moved: the target's value in round 0.
        round: the round whose records these are.
    """

    values: NDArray[np.int64]
    target: int
    moved: int
    round: int = 0

    @property
    def layout(self) -> Layout:
        """Return a layout in which a record fills its positions, so that no end of sequence is learnt."""
        return Layout(WORDS + SPECIAL_TOKENS, record_words=self.values.shape[1])

    @property
    def extra(self) -> ExtraUsers:
        """Return that nobody takes part in addition to these users."""
        return NOBODY

    def at(self, round_: int) -> "MeanUsers":
        """Return the users of a round."""
        return replace(self, round=round_)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, user: int) -> Records:
        values = self.values[user].tolist()
        if self.round == 0:
            values = [self.moved if user == self.target else 0] * len(values)
        return Records.from_lists([[self.layout.first_word + WORDS // 2 + value for value in values]])


@dataclass(frozen=True)
class FederatedMeans:
    """Pairs of runs that differ in one record: one user of round 0 holds +v or -v.

    A run estimates as many means as there are positions, so it is that many repetitions.

    Attributes:
        moved: v, in steps of the lattice; values of users have standard deviation `SPREAD`.
        rate: eta of a local step.
        steps: number of local steps in a round.
        cohort: number of users in a round.
        population: number of users to draw from.
        rounds: number of rounds after round 0.
        positions: number of means that one run estimates.
    """

    moved: int = 80
    rate: float = 0.1
    steps: int = 1
    cohort: int = 4
    population: int = 500
    rounds: int = 5
    positions: int = 100

    @cached_property
    def values(self) -> NDArray[np.int64]:
        """Return the users' values, int64 [users, positions].

        All positions have the same values, normal over the users, each in a different order.
        """
        quantiles = SPREAD * ndtri((np.arange(self.population) + 0.5) / self.population)
        rounded = np.rint(quantiles).astype(np.int64)
        orders = [stream(0, "values of users", position).permutation(rounded) for position in range(self.positions)]
        return np.stack(orders, axis=1)

    @property
    def expected(self) -> MeanEstimation:
        """Return the formulas for these settings."""
        distance = 2 * self.moved / float(self.values[:, 0].std())
        return MeanEstimation(distance, self.rate, self.steps, self.cohort, self.population)

    def theta(self, seed: int, sign: int) -> Floats:
        """Return theta after each round, float64 [rounds + 1, positions], of the run in which the user holds sign v.

        Runs of one seed have the same cohorts.
        """
        options = {"positions": float(self.positions), "tau": float(SPREAD)}
        rate = gaussian_words.rate_for(self.rate, options)
        training = FederatedTraining(
            users=MeanUsers(self.values, target=-1, moved=sign * self.moved),
            model=ModelHParams(architecture=MODEL, options=options),
            algorithm=FedAvgHParams(cohort=self.cohort, rounds=self.rounds + 1),
            local=LocalHParams(epochs=self.steps, batch_size=1, learning_rate=rate),
            seed=seed,
            engine="local",
        )
        users = MeanUsers(self.values, target=int(training.cohort(0)[0]), moved=sign * self.moved)
        training = replace(training, users=users)
        states = training.states(training.first_state(), self.rounds + 1)
        return np.stack([state.params["theta"].double().numpy() for state in states])

    def pairs(self, seeds: int) -> Floats:
        """Return theta of runs with +v and of runs with -v, float64 [2, rounds, repetitions], from round 1 on.

        All runs have different seeds.
        """
        return np.stack(
            [
                np.concatenate([self.theta(2 * seed + (sign < 0), sign)[1:] for seed in range(seeds)], axis=1)
                for sign in (1, -1)
            ]
        )


def separation(pairs: Floats) -> tuple[Floats, Floats]:
    """Return the measured d_k of `FederatedMeans.pairs`, and its standard errors; float64 [rounds] each."""
    repetitions = pairs.shape[-1]
    spread = np.sqrt(pairs.var(axis=-1, ddof=1).mean(axis=0))
    measured = (pairs[0].mean(axis=-1) - pairs[1].mean(axis=-1)) / spread
    # of a difference of two means, and of a standard deviation that is estimated from both samples
    return measured, np.sqrt(2 / repetitions + measured**2 / (4 * repetitions))


def accuracy(pairs: Floats) -> Floats:
    """Return the share of runs that the sign of theta identifies correctly, float64 [rounds]."""
    right: Floats = ((pairs[0] > 0).mean(axis=-1) + (pairs[1] < 0).mean(axis=-1)) / 2
    return right
