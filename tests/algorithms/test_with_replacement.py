"""Cohorts with replacement in whole runs: by hand, killed and resumed, traced, and refused where it must be."""

import numpy as np
import pytest
from helpers import Experiment

import flsim
from flsim.algorithms.rounds import FederatedTraining
from flsim.base.errors import InputError
from flsim.privacy.mechanism import PrivacyHParams

SAMPLER = ("training.sampler=with-replacement",)
MODEL = flsim.Model(3, 5)
PRIVATE = ("privacy.mechanism=dp", "privacy.clip=0.5", "privacy.noise_multiplier=1")


@pytest.fixture
def users(experiment: Experiment) -> flsim.Planted:
    return flsim.plant(experiment.folder / "corpus", flsim.Canaries(p_u=(0.2,), p_e=(0.5,), count=2))


def federated(method: flsim.FedAvg, users: flsim.Planted, seed: int = 0) -> FederatedTraining:
    training = method.config(users, MODEL, 1, seed).training_of(users.users, 1)
    assert isinstance(training, FederatedTraining)
    return training


@pytest.mark.parametrize("shards", [1, 3])
def test_a_round_averages_over_draws(users: flsim.Planted, shards: int) -> None:
    """24 draws of 24 users: each user's clipped update counts as often as it was drawn, and 24 divides the sum."""
    method = flsim.FedAvg(cohort=24, sampler="with-replacement", privacy=PrivacyHParams("clip", clip=0.05))
    alone = flsim.FedAvg(cohort=24, privacy=PrivacyHParams("clip", clip=0.05))
    training = federated(method, users, 3)
    state = training.first_state()
    drawn, times = np.unique(training.cohort(0), return_counts=True)
    assert times.sum() == 24
    assert times.max() > 1
    engine = federated(alone, users, 3).engine_here()
    (after,) = flsim.simulate(
        users, MODEL, flsim.FedAvg(24, sampler="with-replacement", privacy=method.privacy, shards=shards), 1, seed=3
    )
    records = training.users.at(0)
    sums = [engine.train(state.params, records, [user], 3, 0, 0.05).delta for user in drawn.tolist()]
    for name, value in state.params.items():
        mean = sum(int(count) * part[name] for count, part in zip(times, sums, strict=True)) / 24
        np.testing.assert_allclose(after.params[name].double(), value.double() + mean, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("sampler", "reason"),
    [
        (SAMPLER, "drawn several times in a round"),
        (("training.sampler=fedbuff", "training.sampler_options={concurrency=8}"), "faster users take part more often"),
    ],
)
def test_noise_cannot_be_accounted_and_is_refused(
    experiment: Experiment, sampler: tuple[str, ...], reason: str
) -> None:
    settings = [part for one in (*sampler, *PRIVATE) for part in ("--set", one)]
    for command in ("run", "plan"):
        refused = experiment.call(command, experiment.config, *settings, check=False)
        assert refused.returncode == 2
        assert f"{reason}, and no accountant of dp_accounting supports this" in refused.stderr
        assert refused.stderr.count("\n") == 1


def test_users_that_keep_states_are_not_drawn_twice(users: flsim.Planted) -> None:
    with pytest.raises(InputError, match=r"SCAFFOLD: a user keeps one state a round, .* with-replacement may draw"):
        next(flsim.simulate(users, MODEL, flsim.FedAvg(5, algorithm="scaffold", sampler="with-replacement"), 1))


def test_a_sampler_of_ones_own_may_repeat_users_if_it_says_so(experiment: Experiment, users: flsim.Planted) -> None:
    own = experiment.folder / "twice.py"
    text = (
        "import numpy as np\n"
        "from flsim.privacy.sampling import Sampler\n"
        "class Twice(Sampler):\n"
        "    has_repeats = True\n"
        "    def draw(self, seed, round_, population):\n"
        "        return np.repeat(np.arange(self.cohort // 2), 2)\n"
    )
    own.write_text(text)
    method = flsim.FedAvg(cohort=6, sampler=f"{own}:Twice")
    assert federated(method, users).cohort(0).tolist() == [0, 0, 1, 1, 2, 2]
    other = experiment.folder / "silent.py"
    other.write_text(text.replace("    has_repeats = True\n", ""))
    with pytest.raises(InputError, match="return distinct numbers from 0 to 23 in ascending order"):
        federated(flsim.FedAvg(cohort=6, sampler=f"{other}:Twice"), users)
