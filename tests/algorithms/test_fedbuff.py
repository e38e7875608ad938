"""Tests of buffered asynchronous training: the simulated order of answers, the server's step, runs, and refusals."""

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from helpers import Experiment
from hypothesis import given
from hypothesis import strategies as st

import flsim
from flsim.algorithms import checkpoint
from flsim.algorithms.checkpoint import digest_of
from flsim.algorithms.rounds import FederatedTraining
from flsim.base.errors import InputError
from flsim.base.rng import stream
from flsim.privacy.devices import Durations, Law, buffers, simulated_buffers
from flsim.privacy.ledger import PrivacyHParams
from flsim.privacy.sampling import draw_cohort
from flsim.training.update import State, epoch_orders

MODEL = flsim.Model(3, 5)
LAWS: tuple[Law, ...] = get_args(Law)


@pytest.fixture
def users(experiment: Experiment) -> flsim.Planted:
    return flsim.plant(experiment.folder / "corpus", flsim.Canaries(p_u=(0.2,), p_e=(0.5,), count=2))


def fedbuff(concurrency: int = 8, cohort: int = 5, durations: str = "exponential", **settings: object) -> flsim.FedAvg:
    options = {"concurrency": concurrency, "durations": durations}
    return flsim.FedAvg(cohort, sampler="fedbuff", sampler_options=options, **settings)  # type: ignore[arg-type]


def training_of(method: flsim.FedAvg, users: flsim.Planted, rounds: int = 1) -> FederatedTraining:
    training = method.config(users, MODEL, rounds, 3).training_of(users.users, rounds)
    assert isinstance(training, FederatedTraining)
    return training


@given(
    size=st.integers(1, 6), concurrency=st.integers(1, 12), spare=st.integers(0, 9), law=st.sampled_from(LAWS),
    spread=st.sampled_from([0.0, 1.0]), seed=st.integers(0, 99),
)  # fmt: skip
def test_at_most_concurrency_users_train_and_each_answers_once(
    size: int, concurrency: int, spare: int, law: Law, spread: float, seed: int
) -> None:
    """Users in training after a round are those who began by then and answer later, in one of the known rounds."""
    population = size + concurrency - 1 + spare
    known = list(islice(simulated_buffers(seed, population, size, concurrency, Durations(law, spread)), 40))
    answers = [(round_, *pair) for round_, one in enumerate(known) for pair in zip(one.users, one.started, strict=True)]
    assert len({(user, started) for _, user, started in answers}) == len(answers) == 40 * size
    for round_, one in enumerate(known):
        assert np.all(np.diff(one.users) > 0)
        assert one.users[0] >= 0
        assert one.users[-1] < population
        later = Counter(started for at, _, started in answers if at > round_ and started <= round_)
        assert set(later) <= set(one.pending) <= set(range(round_ + 1))
        assert later.total() <= concurrency


@pytest.mark.parametrize("law", LAWS)
def test_the_mean_staleness_is_that_of_littles_law(law: Law) -> None:
    """A user trains for concurrency / size steps, if `concurrency` users train and a step has `size` answers.

    This is Little's law (1961). Staleness counts complete steps. The first step that begins after a user begins on
    average half a step after the user, and the user's step ends half a step after the answer. With constant durations,
    however, 80 users answer at once, and are the answers of 4 steps of 20.
    """
    known = buffers(1, 1_000, 20, 80, Durations(law))
    staleness = np.concatenate([round_ - known[round_].started for round_ in range(40, 400)])
    expected = (0 + 1 + 2 + 3) / 4 if law == "constant" else 80 / 20
    assert staleness.mean() == pytest.approx(expected, abs=0.1)


def test_durations_have_mean_1_and_the_stated_law() -> None:
    """100,000 durations have standard errors below 0.004; the deadlines are 0.5 and 2 mean durations."""
    for law in LAWS:
        durations = Durations(law, 0.5)
        values = durations.draw(np.random.default_rng(0), 100_000)
        assert values.mean() == pytest.approx(1, abs=0.015)
        for deadline in (0.5, 2.0):
            assert (values <= deadline).mean() == pytest.approx(durations.within(deadline), abs=0.008)
    assert Durations(spread=0.5).factors(0, 100_000).mean() == pytest.approx(1, abs=0.01)
    assert np.log(Durations(spread=0.5).factors(0, 100_000)).std() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("mechanism", [PrivacyHParams(), PrivacyHParams("clip", clip=0.05)])
def test_fedbuff_without_staleness_equals_fedavg_bit_for_bit(users: flsim.Planted, mechanism: PrivacyHParams) -> None:
    """Buffer, concurrency and cohort are equal, as are all durations; the server has momentum, and sums two shards."""
    settings = {"privacy": mechanism, "server": flsim.ServerOptimizer("momentum")}
    one = flsim.simulate(users, MODEL, fedbuff(6, 6, "constant", **settings), 5, seed=3)
    other = flsim.simulate(users, MODEL, flsim.FedAvg(6, **settings), 5, seed=3)  # type: ignore[arg-type]
    for mine, theirs in zip(one, other, strict=True):
        assert mine.ledger != theirs.ledger, "which names the sampler"
        assert digest_of(State(**{**vars(mine), "ledger": theirs.ledger})) == digest_of(theirs)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_step_weighs_updates_of_old_models_by_their_staleness(users: flsim.Planted, clip: float | None) -> None:
    """w_(t+1) = w_t + sum of n_k d_k / sqrt(1 + s_k) / sum of n_k, or / K with a clip. User k trained the model of
    round t - s_k with the batches of that round. The test keeps all models in a list."""
    mechanism = PrivacyHParams("clip", clip=clip) if clip else PrivacyHParams()
    training = training_of(fedbuff(privacy=mechanism), users, 8)
    engine = training_of(flsim.FedAvg(5), users).engine_here()
    models = [training.first_state().params]
    staleness = []
    for round_, state in enumerate(training.states(training.first_state(), 8)):
        total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in state.params.items()}
        weight = 0.0
        buffer = buffers(3, 24, 5, 8, Durations("exponential"))[round_]
        for user, started in zip(buffer.users.tolist(), buffer.started.tolist(), strict=True):
            part = engine.train(models[started], training.users, [user], 3, started, clip)
            staleness.append(round_ - started)
            total = {name: total[name] + value / (1 + staleness[-1]) ** 0.5 for name, value in part.delta.items()}
            weight += part.counts.weight
        for name, value in state.params.items():
            np.testing.assert_allclose(value, models[-1][name].double() + total[name] / weight, rtol=0, atol=1e-7)
        models.append(state.params)
    assert max(staleness) >= 2


def test_a_checkpoint_has_the_models_in_training_and_resumes_to_the_same_bits(
    users: flsim.Planted, tmp_path: Path
) -> None:
    training = training_of(fedbuff(12, 3), users, 9)
    provenance = checkpoint.Provenance("", "", training.users.layout.vocabulary_size, MODEL)
    states = list(training.states(training.first_state(), 9))
    held = set()
    for state in states:
        models = {slot for slot in state.moments if slot.startswith("model/")}
        pending = buffers(3, 24, 3, 12, Durations("exponential"))[state.round - 1].pending
        assert models == {f"model/{round_}" for round_ in pending}
        held.add(len(models))
        loaded, _ = checkpoint.load(checkpoint.save(tmp_path, state, provenance))
        buffers.cache_clear()
        (*_, again) = [loaded, *training.states(loaded, 9)]
        assert digest_of(again) == digest_of(states[-1])
    assert max(held) >= 3


def test_records_read_are_those_of_the_rounds_in_which_users_began(users: flsim.Planted) -> None:
    """5 of 8 records of a user are in the user's batches, and the round in which the user began determines which."""
    method = fedbuff(12, 3, local=flsim.LocalSGD(batch_size=1, max_records=5))
    training = training_of(method, users, 6)
    read = np.zeros((24, 8), bool)
    for state in [training.first_state(), *training.states(training.first_state(), 5)]:
        for request in training.requests(state):
            for user in request.users.tolist():
                read[user, epoch_orders(8, method.local, stream(3, "local", request.round, user))[0]] = True
    np.testing.assert_array_equal(method.config(users, MODEL, 6, 3).records_read(users.users, 6).reshape(24, 8), read)


def test_settings_that_do_not_fit_are_refused(users: flsim.Planted) -> None:
    for method, reason in (
        (fedbuff(20, 6), "a concurrency of 20 and a cohort of 6 need 25 users, found 24; lower one of them"),
        (fedbuff(algorithm="scaffold"), r"SCAFFOLD: this algorithm has tensors in addition .* fedbuff\(concurrency=8"),
    ):
        with pytest.raises(InputError, match=reason):
            next(flsim.simulate(users, MODEL, method, 1))
    for options, reason in (
        ({"concurrency": 0}, "concurrency must be at least 1, found 0"),
        ({"concurrency": 8, "durations": "gamma"}, "durations must be 'half-normal', 'exponential' or 'constant'"),
        ({"concurrency": 8, "spread": -1}, "spread must be at least 0, found -1"),
        ({"concurrency": 8, "spread": 1e200}, r"spread must be at most 10, found 1e\+200"),
        ({"concurrency": 8, "dropout": 0.1}, "remove dropout"),
    ):
        with pytest.raises(InputError, match=reason):
            flsim.FedAvg(6, sampler="fedbuff", sampler_options=options)


def test_a_buffer_is_the_cohort_of_its_round() -> None:
    buffer = buffers(4, 50, 7, 20, Durations())[9]
    assert draw_cohort(4, 9, 50, 7, 'fedbuff{"concurrency": 20}').tolist() == buffer.users.tolist()
