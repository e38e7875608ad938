"""Broken mechanisms contradict their ledgers, and honest ones of the same size do not.

A coin of each user's own decides whether it has a record, and so an update, or moves nothing. The attacker knows which
entry of the model an update moves, and reads it. A ledger of Poisson sampling is about adding or removing a user, and a
user without records is as good as removed.
"""

import math
from dataclasses import dataclass

import broken
import numpy as np
import pytest
from numpy.typing import NDArray
from populations import InMemory

import flsim
from flsim.algorithms.hparams import FedAvgHParams
from flsim.algorithms.rounds import FederatedTraining
from flsim.attacks.audit import coins
from flsim.attacks.audit.claim import Claim
from flsim.base.rng import stream
from flsim.data.vocabulary import Layout
from flsim.privacy.ledger import Entry, Ledger
from flsim.privacy.mechanism import PrivacyHParams

DELTA = 1e-5


def own(name: str) -> str:
    return f"{broken.__file__}:{name}"


@dataclass(frozen=True)
class Size:
    """The size of what is audited.

    Attributes:
        population, cohort, rounds, noise: N, qN, T and z of the ledger.
        audited: number of users with coins in a run, which are the first ones.
        runs: number of runs whose coins are audited together.
    """

    population: int
    cohort: int
    rounds: int
    noise: float
    audited: int
    runs: int = 1

    @property
    def guesses_each(self) -> int:
        """Return how many coins are guessed as 1, and how many as 0: a quarter each, before scores are looked at."""
        return self.audited * self.runs // 4

    @property
    def claim(self) -> Claim:
        return Claim.of_ledger(
            Ledger((Entry("poisson", self.population, self.cohort, self.noise, self.rounds),)), "poisson", DELTA
        )


@dataclass(frozen=True)
class Mechanism:
    """Settings of a run; honest as they stand.

    Attributes:
        size: its size.
        mu: distance of a coin's two scores over the deviation of the noise, which power is computed from.
        algorithm, sampler, noise: as in a configuration.
    """

    size: Size
    mu: float
    algorithm: str = own("OneWord")
    sampler: str = "poisson"
    noise: str = "independent"


ONE_ROUND = Size(population=400, cohort=400, rounds=1, noise=1.0, audited=400)
MANY_RUNS = Size(population=4, cohort=4, rounds=1, noise=4.0, audited=1, runs=40)
SAMPLED = Size(population=1_000, cohort=50, rounds=16, noise=1.0, audited=50)
BROKEN = {
    "no noise": Mechanism(ONE_ROUND, math.inf, noise=own("NoNoise")),
    "a tenth of the noise": Mechanism(ONE_ROUND, 10.0, noise=own("TenthOfNoise")),
    # An average of 200 orthogonal updates has the norm S after the clip, and entries of S / 14 beside noise of S / 400.
    "clip after the average": Mechanism(ONE_ROUND, 400 / math.sqrt(200), algorithm=own("ClipAfterAverage")),
    "one user a hundredfold": Mechanism(MANY_RUNS, 100 / 4, sampler=own("Hundredfold")),
    "the same users in each round": Mechanism(SAMPLED, math.sqrt(16), sampler=own("SameUsers")),
}
HONEST = {
    "one round": Mechanism(ONE_ROUND, 1.0),
    "many runs": Mechanism(MANY_RUNS, 1 / 4),
    "sampled rounds": Mechanism(SAMPLED, 4 * 50 / 1_000),  # on average: a user takes part in 16 x 5% of rounds
}


def is_contradicted(claim: Claim, size: Size, right: int) -> bool:
    """Whether the lower bound is above the ledger's epsilon, or the ledger's trade-off curve is refuted."""
    counts = size.audited * size.runs, 2 * size.guesses_each, right
    is_refuted = coins.is_refuted(coins.of_one(claim.curve.least_probability), *counts)
    return is_refuted or coins.epsilon_of_coins(*counts, DELTA) > claim.epsilon


def run(mechanism: Mechanism, tossed: NDArray[np.bool_], seed: int) -> tuple[NDArray[np.float64], Ledger]:
    """Scores of the audited users after real rounds, and the ledger that the rounds left."""
    size = mechanism.size
    records = [[[user + 1]] if user < len(tossed) and tossed[user] else [] for user in range(size.population)]
    training = FederatedTraining(
        InMemory(Layout(size.population + 4, record_words=1), records),
        flsim.Model(1, 1),
        FedAvgHParams(cohort=size.cohort, sampler=mechanism.sampler, algorithm=mechanism.algorithm),
        privacy=PrivacyHParams("dp", clip=broken.CLIP, noise_multiplier=size.noise, noise=mechanism.noise),
        seed=seed,
    )
    first = training.first_state()
    *_, last = training.states(first, size.rounds)
    moved = last.params["embedding"] - first.params["embedding"]
    for learnt in last.moments.values():
        moved = moved + learnt["embedding"]
    return moved[1 : size.audited + 1, 0].double().numpy(), last.ledger


def audited(mechanism: Mechanism, seed: int) -> tuple[int, bool]:
    """How many guesses of coins are right, and whether they contradict the ledger."""
    size = mechanism.size
    tossed = stream(seed, "coins of a broken mechanism").random((size.runs, size.audited)) < 0.5
    parts = [run(mechanism, row, seed * size.runs + number) for number, row in enumerate(tossed)]
    (ledger,) = {ledger for _, ledger in parts}
    right = coins.correct_guesses(np.concatenate([scores for scores, _ in parts]), tossed.ravel(), size.guesses_each)
    return right, is_contradicted(Claim.of_ledger(ledger, mechanism.sampler, DELTA), size, right)


def power(mechanism: Mechanism) -> float:
    """Share of 1,000 simulated audits that contradict the ledger, if scores are Gaussian at distance mu."""
    size, rng = mechanism.size, stream(0, "power")
    tossed = rng.random((1_000, size.audited * size.runs)) < 0.5
    scores = (rng.normal(size=tossed.shape) if mechanism.mu < math.inf else 0) + np.where(tossed, mechanism.mu, 0)
    right = [coins.correct_guesses(*one, size.guesses_each) for one in zip(scores, tossed, strict=True)]
    claim = size.claim
    verdicts = {value: is_contradicted(claim, size, value) for value in set(right)}
    return float(np.mean([verdicts[value] for value in right]))


@pytest.mark.parametrize("defect", BROKEN)
def test_a_broken_mechanism_contradicts_its_ledger(defect: str) -> None:
    """The seed needs no luck, since at this size an audit contradicts the ledger with a probability above 99%."""
    assert power(BROKEN[defect]) > 0.99
    _, is_broken = audited(BROKEN[defect], seed=0)
    assert is_broken


@pytest.mark.parametrize("size", HONEST)
def test_an_honest_mechanism_of_that_size_does_not(size: str) -> None:
    assert power(HONEST[size]) <= 0.05
    _, is_broken = audited(HONEST[size], seed=0)
    assert not is_broken
