"""Server optimizers against torch's own where definitions coincide, else against the paper's equations, by number."""

import math
from typing import Any

import pytest
import torch

from flsim.algorithms import server_optimizers
from flsim.algorithms.server_optimizers import ServerOptimizerHParams
from flsim.base.errors import InputError
from flsim.base.rng import stream
from flsim.models.language_model import Params

STEPS = 12


def start() -> Params:
    rng = stream(0, "start")
    return {name: torch.from_numpy(rng.normal(size=shape)) for name, shape in (("a", (3, 2)), ("b", (5,)))}


def updates() -> list[Params]:
    """One is zero, and sizes differ: what a round without users, and what clipping, give."""
    rng = stream(0, "updates")
    sizes = [1.0, 0.0, *rng.uniform(0.001, 2.0, STEPS - 2)]
    return [
        {name: torch.from_numpy(size * rng.normal(size=value.shape)) for name, value in start().items()}
        for size in sizes
    ]


def trained(hparams: ServerOptimizerHParams) -> Params:
    params, moments = start(), server_optimizers.init(start(), hparams)
    for update in updates():
        params, moments = server_optimizers.apply(params, update, moments, hparams)
    return params


def by_torch(make: type[torch.optim.Optimizer], **settings: Any) -> Params:
    """torch minimizes: the gradient is the update's negative."""
    params = {name: value.requires_grad_() for name, value in start().items()}
    optimizer = make(list(params.values()), **settings)
    for update in updates():
        for name, value in params.items():
            value.grad = -update[name]
        optimizer.step()
    return {name: value.detach() for name, value in params.items()}


def by_hand(kind: str, eta: float, beta1: float, beta2: float, tau: float) -> Params:
    """Reddi et al. (2021), Algorithm 2, on one number at a time."""
    result = {}
    for name, value in start().items():
        numbers = []
        for index, x in enumerate(value.flatten().tolist()):
            m, v = 0.0, tau**2
            for update in updates():
                delta = update[name].flatten()[index].item()
                m = beta1 * m + (1 - beta1) * delta
                if kind == "adagrad":
                    v = v + delta**2
                elif kind == "yogi":
                    sign = (v > delta**2) - (v < delta**2)
                    v = v - (1 - beta2) * delta**2 * sign
                else:
                    v = beta2 * v + (1 - beta2) * delta**2
                x = x + eta * m / (math.sqrt(v) + tau)
            numbers.append(x)
        result[name] = torch.tensor(numbers, dtype=torch.float64).reshape(value.shape)
    return result


def assert_close(mine: Params, other: Params) -> None:
    for name, value in other.items():
        torch.testing.assert_close(mine[name], value, rtol=0, atol=1e-12)


def test_sgd_is_torchs_and_at_rate_1_adds_the_update() -> None:
    assert_close(trained(ServerOptimizerHParams(server_learning_rate=0.3)), by_torch(torch.optim.SGD, lr=0.3))
    assert_close(trained(ServerOptimizerHParams()), {n: v + sum(u[n] for u in updates()) for n, v in start().items()})


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_momentum_is_torchs(momentum: float) -> None:
    mine = ServerOptimizerHParams("momentum", server_learning_rate=0.3, server_momentum=momentum)
    assert_close(trained(mine), by_torch(torch.optim.SGD, lr=0.3, momentum=momentum))


@pytest.mark.parametrize("kind", ["adam", "yogi", "adagrad"])
@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_adaptive_ones_are_the_papers(kind: str, beta1: float) -> None:
    mine = ServerOptimizerHParams(kind, 0.1, beta1, 0.95, 0.01)
    assert_close(trained(mine), by_hand(kind, 0.1, beta1, 0.95, 0.01))


def test_parameters_and_moments_keep_their_type_and_the_arguments_their_values() -> None:
    hparams = ServerOptimizerHParams("yogi")
    params = {name: value.float() for name, value in start().items()}
    moments = server_optimizers.init(params, hparams)
    stepped, after = server_optimizers.apply(params, updates()[0], moments, hparams)
    assert all(value.dtype == torch.float32 for of in (stepped, *after.values()) for value in of.values())
    assert set(after) == {"m", "v"}
    assert all(torch.equal(value, start()[name].float()) for name, value in params.items())
    assert all(
        torch.equal(value, server_optimizers.init(params, hparams)["v"][name]) for name, value in moments["v"].items()
    )


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("server_learning_rate", 0.0),
        ("server_learning_rate", math.inf),
        ("server_tau", 0.0),
        ("server_momentum", 1.0),
        ("server_momentum", -0.1),
        ("server_beta2", 1.0),
        ("server_beta2", math.nan),
    ],
)
def test_bad_settings_are_refused(setting: str, value: float) -> None:
    with pytest.raises(InputError, match=f"{setting} must be"):
        ServerOptimizerHParams(**{setting: value})  # type: ignore[arg-type]
