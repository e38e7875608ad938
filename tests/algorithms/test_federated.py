"""Tests of the server's step: averaging to the bit, fixed denominators, noise once, optimizer after noise, ledger."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import numpy as np
import pytest
import torch
from helpers import Experiment

import flsim
from flsim.algorithms import fedavg, server_optimizers
from flsim.algorithms.algorithm import FedAvgHParams
from flsim.algorithms.rounds import FederatedTraining
from flsim.base.errors import Diverged, InputError
from flsim.base.rng import stream
from flsim.models.architectures import ModelHParams
from flsim.models.language_model import Params
from flsim.privacy import noise as process
from flsim.privacy.ledger import Entry, PrivacyHParams, noisy_mean
from flsim.training.update import State, UpdateSum, global_norm

POPULATION = 1_000
NONE, CLIP = PrivacyHParams(), PrivacyHParams("clip", clip=0.5)
DP = PrivacyHParams("dp", clip=0.5, noise_multiplier=0.7)
TRAINING = FedAvgHParams(cohort=20)


def state_of(training: FedAvgHParams = TRAINING, privacy: PrivacyHParams = NONE) -> State:
    return fedavg.init(12, ModelHParams(3, 5), 0, training, privacy)


def users_of(state: State, count: int, clip: float | None, seed: int = 0) -> list[UpdateSum]:
    """Return users of 1 to 9 examples, whose float32 updates have norms from 0 to about 3."""
    made = []
    for user in range(count):
        rng = stream(seed, "update", user)
        update = {
            name: torch.from_numpy(rng.normal(scale=user / 100, size=value.shape)).float().double()
            for name, value in state.params.items()
        }
        made.append(UpdateSum.of_user(update, 1 + user % 9, 3.0, 2, clip=clip))
    return made


def summed(state: State, users: Sequence[UpdateSum]) -> UpdateSum:
    return reduce(UpdateSum.merge, users, UpdateSum.zero(state.params))


def step(
    state: State, users: Sequence[UpdateSum], privacy: PrivacyHParams, training: FedAvgHParams = TRAINING, seed: int = 0
) -> State:
    return fedavg.step(
        state, summed(state, users), training, privacy, seed=seed, population=POPULATION, vocabulary_size=12
    )[0]


def noise_of(state: State, seed: int, round_: int) -> Params:
    """Return the noise that DP adds to the mean of a round."""
    zero = UpdateSum.zero(state.params).delta
    return noisy_mean(zero, 0.5, DP, 20, process.step("independent", seed, zero, {}, round_)[0])


def moved(before: State, after: State) -> Params:
    return {name: after.params[name].double() - value.double() for name, value in before.params.items()}


@pytest.mark.parametrize("rate", [1.0, 0.25])
def test_without_mechanism_the_step_is_the_weighted_mean_to_the_bit(rate: float) -> None:
    """McMahan et al. (2017), Algorithm 1, gives w + eta sum n_k (w_k - w) / sum n_k, in float64, rounded once. These
    rates are powers of two; therefore, no order of the products changes a bit."""
    training = replace(TRAINING, server_learning_rate=rate)
    state = state_of(training)
    users = users_of(state, 20, None)
    after = step(state, users, NONE, training)
    total = summed(state, users)
    for name, value in state.params.items():
        expected = (value.double() + rate / sum(1 + user % 9 for user in range(20)) * total.delta[name]).float()
        assert torch.equal(after.params[name], expected)
    assert (after.round, after.clip, after.moments) == (1, None, {})


@pytest.mark.parametrize("came", [0, 1, 19, 20, 33])
def test_the_denominator_is_the_expected_cohort_size(came: int) -> None:
    """Half of the users have no records, and count; a Poisson cohort may be empty or oversized."""
    state = state_of(privacy=CLIP)
    users = [
        user if index % 2 else UpdateSum.of_user(UpdateSum.zero(state.params).delta, 0, 0.0, 0, clip=0.5)
        for index, user in enumerate(users_of(state, came, 0.5))
    ]
    after = step(state, users, CLIP)
    for name, value in state.params.items():
        expected = value.double() + sum(user.delta[name] for user in users) / 20
        torch.testing.assert_close(after.params[name].double(), expected, rtol=1e-7, atol=1e-8)
    total = summed(state, users)
    assert (total.counts.weight, total.counts.users) == (came, came)


def test_noise_is_added_once_to_the_mean_and_the_optimizer_follows() -> None:
    for kind in ("sgd", "adam"):
        training = FedAvgHParams(server_optimizer=kind, server_learning_rate=0.3, cohort=20)
        state = replace(state_of(training, DP), round=4)
        users = users_of(state, 20, 0.5)
        after = step(state, users, DP, training, seed=3)
        noise = noise_of(state, seed=3, round_=4)
        mean = {name: value / 20 + noise[name] for name, value in summed(state, users).delta.items()}
        expected, moments = server_optimizers.apply(state.params, mean, state.moments, training)
        for name in expected:
            torch.testing.assert_close(after.params[name], expected[name], rtol=1e-6, atol=1e-8)
        assert after.moments.keys() == moments.keys()


def test_neither_shards_nor_the_order_of_replies_change_noise_clip_ledger_or_more_than_rounding() -> None:
    privacy = replace(DP, target_quantile=0.5, count_noise=5.0)
    state = state_of(privacy=privacy)
    state = replace(state, params={name: value.double() for name, value in state.params.items()})
    users = users_of(state, 20, 0.5)
    first = step(state, users, privacy)
    shards = [summed(state, users[a:b]) for a, b in ((0, 3), (3, 3), (3, 15), (15, 20))]
    for grouping in (users[::-1], shards, shards[::-1]):
        after = step(state, grouping, privacy)
        for name, value in first.params.items():
            torch.testing.assert_close(after.params[name], value, rtol=0, atol=1e-12)
        assert (after.clip, after.ledger) == (first.clip, first.ledger)


def test_a_round_without_users_changes_nothing_without_mechanism_and_adds_noise_with_dp() -> None:
    momentum = FedAvgHParams(server_optimizer="momentum", cohort=20)
    state = step(state_of(momentum), users_of(state_of(), 20, None), NONE, momentum)
    after = step(state, [], NONE, momentum)
    assert after.round == 2
    assert all(torch.equal(after.params[name], value) for name, value in state.params.items())
    assert all(torch.equal(after.moments["m"][name], value) for name, value in state.moments["m"].items())
    state = state_of(privacy=DP)
    after = step(state, [], DP)
    noise = noise_of(state, seed=0, round_=0)
    assert all(
        torch.equal(after.params[name], (value.double() + noise[name]).float()) for name, value in state.params.items()
    )
    assert list(after.ledger.entries) == [Entry("fixed-size", POPULATION, 20, 0.7, 1)]


@pytest.mark.parametrize("sampler", ["fixed-size", "poisson"])
def test_the_ledger_has_the_rounds_that_were_run(sampler: str) -> None:
    training = FedAvgHParams(cohort=20, sampler=sampler)
    state = state_of(training, DP)
    for _ in range(3):
        state = step(state, users_of(state, 20, 0.5), DP, training)
    assert list(state.ledger.entries) == [Entry(sampler, POPULATION, 20, 0.7, 3)]


def test_noise_and_adaptation_follow_the_clip_of_the_state() -> None:
    """A few of 20 users have norms within the clip 0.1; without noise, b is exactly the share of these users."""
    privacy = PrivacyHParams("clip", clip=0.1, target_quantile=0.5)
    state = state_of(privacy=privacy)
    users = users_of(state, 20, 0.1)
    within = sum(user.counts.norms <= 0.1 for user in users)
    assert 0 < within < 10
    after = step(state, users, privacy)
    assert after.clip == pytest.approx(0.1 * math.exp(-0.2 * (within / 20 - 0.5)), rel=1e-12)
    noisy = replace(state_of(privacy=replace(DP, clip=0.1)), values={"clip": 7.0})  # a clip as after many rounds
    deviation = torch.cat(
        [value.flatten() for value in moved(noisy, step(noisy, [], replace(DP, clip=0.1))).values()]
    ).std()
    assert float(deviation) == pytest.approx(0.7 * 7.0 / 20, rel=0.3)  # about 170 coordinates: five standard errors


@pytest.mark.parametrize("privacy", [NONE, CLIP, DP], ids=lambda privacy: privacy.mechanism)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_users_update_that_is_not_finite_fails_the_round(privacy: PrivacyHParams, value: float) -> None:
    state = replace(state_of(privacy=privacy), round=6)
    users = users_of(state, 5, privacy.clip)
    users[1] = UpdateSum.of_user(
        {**users[1].delta, "gate_bias": torch.full((15,), value)}, 3, 1.0, 5, clip=privacy.clip
    )
    with pytest.raises(Diverged, match=r"round 7: .* not finite with 1 of 5 users; most likely local\.learning_rate"):
        step(state, users, privacy)


def test_an_optimizer_whose_state_overflows_fails_the_round() -> None:
    """1e30 squared is infinite in float32: v would freeze the model, although every parameter is finite."""
    training = FedAvgHParams(server_optimizer="adagrad", cohort=20)
    state = state_of(training)
    huge = {name: torch.full_like(value, 1e30, dtype=torch.float64) for name, value in state.params.items()}
    with pytest.raises(Diverged, match="round 1: the averaged model overflows"):
        step(state, [UpdateSum.of_user(huge, 1, 1.0, 1)], NONE, training)


@pytest.mark.parametrize(("rate", "privacy"), [(1.0, NONE), (0.25, NONE), (0.25, CLIP), (1.0, DP)])
def test_the_effective_step_of_plain_averaging_is_the_rate(rate: float, privacy: PrivacyHParams) -> None:
    training = replace(TRAINING, server_learning_rate=rate)
    state = state_of(training, privacy)
    total = summed(state, users_of(state, 20, privacy.clip))
    after, taken = fedavg.step(state, total, training, privacy, seed=0, population=POPULATION, vocabulary_size=12)
    assert taken.ratio == pytest.approx(rate, rel=1e-5)
    assert taken.step_norm == pytest.approx(global_norm(moved(state, after)), rel=1e-12)
    entries = torch.cat([value.flatten() for value in moved(state, after).values()]) / rate
    assert taken.rms == pytest.approx(float(entries.square().mean().sqrt()), rel=1e-5)


@pytest.mark.parametrize("tau", [1e-3, 1e-12])
def test_the_effective_step_of_adam_depends_on_tau(tau: float) -> None:
    """By hand from Reddi et al. (2021), Algorithm 2: m = D / 10 and v = 0.99 tau^2 + D^2 / 100 after one round.
    Therefore, the step is eta D / (10 (sqrt(v) + tau))."""
    training = replace(TRAINING, server_optimizer="adam", server_learning_rate=1e-4, server_tau=tau)
    state = state_of(training)
    state = replace(state, params={name: value.double() for name, value in state.params.items()})  # no rounding
    small = [
        replace(user, delta={name: 1e-4 * d for name, d in user.delta.items()}) for user in users_of(state, 20, None)
    ]
    total = summed(state, small)
    after, taken = fedavg.step(state, total, training, NONE, seed=0, population=POPULATION, vocabulary_size=12)
    mean = torch.cat([value.flatten() for value in total.delta.values()]) / total.counts.weight
    by_hand = 1e-4 * 0.1 * mean / ((0.99 * tau**2 + 0.01 * mean**2).sqrt() + tau)
    assert taken.mean_norm == pytest.approx(float(mean.norm()), rel=1e-9)
    assert taken.ratio == pytest.approx(float(by_hand.norm() / mean.norm()), rel=1e-6)
    assert taken.step_norm == pytest.approx(global_norm(moved(state, after)), rel=1e-12)


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
    """In 24 draws of 24 users, each clipped update counts as often as its user was drawn, and 24 divides the sum."""
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


def test_a_custom_sampler_may_repeat_users_if_it_declares_so(experiment: Experiment, users: flsim.Planted) -> None:
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
