"""Server optimizers as (init, apply) over an explicit state: what turns the averaged update into a step.

FedAvg is `sgd` at rate 1. Reddi et al., "Adaptive Federated Optimization" (2021), Algorithm 2, for `adam`, `yogi` and
`adagrad`; Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification" (2019), for `momentum` (FedAvgM).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flsim.base.errors import InputError
from flsim.models.language_model import Params

ServerOptimizer = Literal["sgd", "momentum", "adam", "yogi", "adagrad"]
Moments = dict[str, Params]


@dataclass(frozen=True)
class ServerOptimizerHParams:
    """How the server steps along the averaged update D, elementwise, after any noise.

        sgd        x <- x + eta D
        momentum   m <- beta m + D;               x <- x + eta m
        adagrad    v <- v + D^2
        adam       v <- beta2 v + (1 - beta2) D^2
        yogi       v <- v - (1 - beta2) D^2 sign(v - D^2)
        the last three with  m <- beta m + (1 - beta) D;  x <- x + eta m / (sqrt(v) + tau)

    m starts at 0 and v at tau^2; there is no bias correction, as in Reddi et al. (2021), Algorithm 2.

    Attributes:
        server_optimizer: one of the above.
        server_learning_rate: eta; 1 with sgd is plain averaging.
        server_momentum: beta (beta_1 of adam and yogi); Reddi et al. set it to 0 for adagrad.
        server_beta2: decay of the second moment, of adam and yogi.
        server_tau: tau, the degree of adaptivity: small is more adaptive.
    """

    server_optimizer: ServerOptimizer = "sgd"
    server_learning_rate: float = 1.0
    server_momentum: float = 0.9
    server_beta2: float = 0.99
    server_tau: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("server_learning_rate", "server_tau"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InputError(f"{name} must be above 0, found {getattr(self, name)}")
        for name in ("server_momentum", "server_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 0 and below 1, found {getattr(self, name)}")


def init(params: Params, hparams: ServerOptimizerHParams) -> Moments:
    """The optimizer's state before the first step: "m" and "v", like the parameters, as far as it has them."""
    moments: Moments = {}
    if hparams.server_optimizer != "sgd":
        moments["m"] = {name: torch.zeros_like(value) for name, value in params.items()}
    if hparams.server_optimizer in ("adam", "yogi", "adagrad"):
        moments["v"] = {name: torch.full_like(value, hparams.server_tau**2) for name, value in params.items()}
    return moments


def apply(params: Params, mean: Params, moments: Moments, hparams: ServerOptimizerHParams) -> tuple[Params, Moments]:
    """The next parameters and state; computed in float64, kept in the parameters' type.

    Args:
        params: the global model's.
        mean: the averaged update, float64, of the same shapes.
        moments: the state from `init` or the last step.
        hparams: the optimizer.
    """
    stepped: Params = {}
    kept: Moments = {moment: {} for moment in moments}
    for name, value in params.items():
        direction, after = _direction(mean[name], {moment: of[name] for moment, of in moments.items()}, hparams)
        stepped[name] = (value.to(torch.float64) + hparams.server_learning_rate * direction).to(value.dtype)
        for moment, tensor in after.items():
            kept[moment][name] = tensor.to(value.dtype)
    return stepped, kept


def _direction(
    update: Tensor, moments: dict[str, Tensor], hparams: ServerOptimizerHParams
) -> tuple[Tensor, dict[str, Tensor]]:
    """What eta multiplies, of one tensor, and its moments after the step."""
    kind, beta, beta2 = hparams.server_optimizer, hparams.server_momentum, hparams.server_beta2
    if kind == "sgd":
        return update, {}
    m, square = moments["m"].to(torch.float64), update.square()
    if kind == "momentum":
        m = beta * m + update
        return m, {"m": m}
    m, v = beta * m + (1 - beta) * update, moments["v"].to(torch.float64)
    if kind == "adagrad":
        v = v + square
    elif kind == "adam":
        v = beta2 * v + (1 - beta2) * square
    else:
        v = v - (1 - beta2) * square * torch.sign(v - square)
    return m / (v.sqrt() + hparams.server_tau), {"m": m, "v": v}
