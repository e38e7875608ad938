"""FlexLoRA equals numpy's truncated SVD of the mean of users' products, which plain local training gives."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from populations import InMemory
from tiny_bases import GPT2

from flsim.algorithms.algorithm import FedAvgHParams, ServerRound, factors, pairs
from flsim.algorithms.fedavg import train_users
from flsim.algorithms.rounds import FederatedTraining
from flsim.algorithms.summation import RoundRequest
from flsim.base.errors import InputError
from flsim.data.records import Layout
from flsim.models.architectures import ModelHParams, restore
from flsim.models.language_model import LoraHParams, Params
from flsim.privacy.ledger import PrivacyHParams
from flsim.training.update import LocalHParams, State

LAYOUT = Layout(50, 12)
RNG = np.random.default_rng(0)
USERS = [RNG.integers(1, 47, (records, 9)).tolist() for records in (3, 0, 7, 1, 5)]  # the second has no records
SERVER = FedAvgHParams(algorithm="flexlora", cohort=5)
LOCAL = LocalHParams(batch_size=2, epochs=2, optimizer="adam", learning_rate=0.02, max_records=6)

Products = dict[str, NDArray[np.float64]]


def training_of(rank: int = 3, server: FedAvgHParams = SERVER, **others: Any) -> FederatedTraining:
    lora = LoraHParams(rank=rank, alpha=2.0 * rank, targets=("c_attn",))
    model = ModelHParams(architecture="hf", config=GPT2, lora=lora)
    return FederatedTraining(InMemory(LAYOUT, USERS), model, server, LOCAL, **others)


def states_of(training: FederatedTraining, rounds: int) -> list[State]:
    first = training.first_state()
    return [first, *training.states(first, rounds)]


def products_of(params: Params) -> Products:
    return {a: params[b].double().numpy() @ params[a].double().numpy() for a, b in pairs(params).items()}


def mean_of_products(training: FederatedTraining, state: State) -> Products:
    """Return the mean of B_k A_k of users who train as in federated averaging, weighted by numbers of records."""
    model = restore(state.params, training.model, LAYOUT.vocabulary_size)
    total, records = dict.fromkeys(pairs(state.params), np.zeros(())), 0.0
    for user in training.cohort(state.round):
        request = RoundRequest(state.round, 0, np.array([user]), state.params)
        trained = train_users(request, training.users, model, LOCAL, seed=training.seed)
        if examples := trained.counts.weight:
            local = {name: state.params[name] + value / examples for name, value in trained.delta.items()}
            total = {name: total[name] + examples * value for name, value in products_of(local).items()}
            records += examples
    return {name: value / records for name, value in total.items()}


def nearest(matrix: NDArray[np.float64], rank: int) -> NDArray[np.float64]:
    """Return the nearest matrix of a rank (Eckart and Young, 1936)."""
    u, s, vt = np.linalg.svd(matrix)
    return np.asarray((u[:, :rank] * s[:rank]) @ vt[:rank])


def assert_near(result: Products, expected: Products) -> None:
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        assert np.abs(value).max() > 0.01
        np.testing.assert_allclose(result[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shards", [1, 2])
def test_the_next_product_is_the_nearest_to_the_mean_of_products(shards: int) -> None:
    """B is zeros in the first round; in the second round, the average of the factors has a larger error."""
    training = training_of(shards=shards)
    first, second, third = states_of(training, 2)
    for before, after in ((first, second), (second, third)):
        means = mean_of_products(training, before)
        assert_near(products_of(after.params), {name: nearest(mean, 3) for name, mean in means.items()})
    (averaged,) = training_of(server=replace(SERVER, algorithm="fedavg")).states(second, 2)
    for name, mean in means.items():
        errors = [np.linalg.norm(products_of(state.params)[name] - mean) for state in (third, averaged)]
        assert 0.001 < errors[0] < 0.9 * errors[1]


@pytest.mark.parametrize(("rank", "cohort"), [(3, 1), (16, 5)])
def test_one_user_or_a_sufficient_rank_loses_nothing(rank: int, cohort: int) -> None:
    """c_attn has 16 inputs; therefore, no product has a rank above 16."""
    training = training_of(rank, replace(SERVER, cohort=cohort), seed=1)
    _, before, after = states_of(training, 2)
    means = mean_of_products(training, before)
    assert_near(products_of(after.params), means)
    (averaged,) = training_of(rank, replace(SERVER, algorithm="fedavg", cohort=cohort), seed=1).states(before, 2)
    for name, mean in means.items():
        assert (np.abs(products_of(averaged.params)[name] - mean).max() < 1e-5) == (cohort == 1)


@pytest.mark.parametrize("shape", [(12, 7), (7, 12)])
def test_factors_are_those_of_the_truncated_decomposition(shape: tuple[int, int]) -> None:
    """The factors are in float64, with the sign that makes the largest entry of each row of A positive."""
    product, last = torch.from_numpy(RNG.normal(size=shape)), torch.from_numpy(RNG.normal(size=(4, shape[1])))
    a, b = factors(product, last)
    np.testing.assert_allclose(b @ a, nearest(product.numpy(), 4), rtol=0, atol=1e-10)
    np.testing.assert_allclose(a @ a.T, np.eye(4), rtol=0, atol=1e-10)
    assert torch.equal(a.abs().amax(1), a.amax(1))
    again = factors(-product, last)
    np.testing.assert_allclose(again[0], a, rtol=0, atol=1e-10)
    np.testing.assert_allclose(again[1], -b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_rows_without_a_singular_value_remain(rank: int) -> None:
    """A row of zeros in A and a column of zeros in B would have no gradient: dL/dB = G A^T and dL/dA = B^T G."""
    left, right = RNG.normal(size=(6, rank)), RNG.normal(size=(rank, 5))
    last = torch.from_numpy(RNG.normal(size=(8, 5)))  # r exceeds the number of inputs
    a, b = factors(torch.from_numpy(left @ right), last)
    np.testing.assert_allclose(b @ a, left @ right, rtol=0, atol=1e-10)
    assert torch.equal(a[rank:], last[rank:])
    assert not b[:, rank:].any()
    assert b[:, :rank].any(0).all()


def test_a_round_without_records_changes_nothing() -> None:
    training = training_of()
    state = training.first_state()
    zeros = {name: torch.zeros_like(value) for name, value in state.params.items()}
    summed = training.method.answers_like(state.params)
    update, after = training.method.aggregate(ServerRound(zeros, {}, summed, 2, 5, state.params))
    assert not any(value.any() for value in update.values())
    assert after == {}


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match=r"^training\.algorithm FlexLoRA .*; set model\.lora, without freeze_a$"):
        FederatedTraining(InMemory(LAYOUT, USERS), ModelHParams(3, 5), SERVER, LOCAL)
    frozen = ModelHParams(architecture="hf", config=GPT2, lora=LoraHParams(freeze_a=True))
    with pytest.raises(InputError, match="without freeze_a"):
        FederatedTraining(InMemory(LAYOUT, USERS), frozen, SERVER, LOCAL)
    others = {
        "optimizer": replace(SERVER, server_optimizer="adam"),
        "learning_rate": replace(SERVER, server_learning_rate=0.5),
        "schedule": replace(SERVER, server_schedule="linear"),
    }
    for name, server in others.items():
        with pytest.raises(InputError, match=rf"remove training\.server_{name}$"):
            training_of(server=server)
    for privacy in (PrivacyHParams("clip", clip=0.1), PrivacyHParams("dp", clip=0.1, noise_multiplier=1.0)):
        with pytest.raises(InputError, match="FlexLoRA: this algorithm sends more than a clipped update"):
            training_of(privacy=privacy)
