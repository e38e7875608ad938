"""Federated Averaging as (init, apply) over an explicit state: a checkpoint is the state and nothing else.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (2017), Algorithm 1.
"""

import math
from dataclasses import dataclass

import torch

from flsim.errors import Diverged, InputError, at_least_one
from flsim.model.cifg import CIFGLanguageModel, ModelHParams, Params
from flsim.train.update import UpdateSum

ABSURD = 10  # times the loss of uniform guessing


@dataclass(frozen=True)
class FedAvgHParams:
    """The server's part.

    Attributes:
        rounds: number of rounds.
        cohort: users per round, drawn without replacement.
        server_learning_rate: the averaged update is multiplied by it; 1 is plain averaging.
    """

    rounds: int = 8_000
    cohort: int = 500
    server_learning_rate: float = 1.0

    def __post_init__(self) -> None:
        at_least_one(rounds=self.rounds, cohort=self.cohort)
        if not self.server_learning_rate > 0:
            raise InputError(f"server_learning_rate must be above 0, found {self.server_learning_rate}")


@dataclass(frozen=True)
class ServerState:
    """All that training carries from one round to the next.

    Attributes:
        round: number of completed rounds.
        params: the global model's parameters.
    """

    round: int
    params: Params


def init(vocabulary_size: int, hparams: ModelHParams, seed: int) -> ServerState:
    model = CIFGLanguageModel(vocabulary_size, hparams).initialize(seed)
    return ServerState(0, {name: value.detach() for name, value in model.named_parameters()})


def apply(state: ServerState, total: UpdateSum, hparams: FedAvgHParams) -> ServerState:
    """The next state: params + server_learning_rate x (sum of n_k delta_k) / (sum of n_k). No examples, no change.

    Raises:
        Diverged: the update, the loss or the new parameters are not finite, or the loss is absurd: a model that blew up
            without overflowing memorizes nothing, and would pass for a private one.
    """
    if not total.is_finite:
        raise Diverged(
            f"round {state.round + 1}: local training gave values that are not finite; "
            f"most likely local.learning_rate is too high"
        )
    guessing = math.log(len(state.params["embedding"]))
    if total.tokens and total.loss / total.tokens > ABSURD * guessing:
        raise Diverged(
            f"round {state.round + 1}: the training loss is {total.loss / total.tokens:.3g} nats a word, where "
            f"guessing gives {guessing:.3g}; most likely local.learning_rate is too high"
        )
    scale = hparams.server_learning_rate / total.weight if total.weight else 0.0
    params = {
        name: (value.to(torch.float64) + scale * total.delta[name]).to(value.dtype)
        for name, value in state.params.items()
    }
    if not all(bool(torch.isfinite(value).all()) for value in params.values()):
        raise Diverged(
            f"round {state.round + 1}: the averaged model overflows; most likely server_learning_rate is too high"
        )
    return ServerState(state.round + 1, params)
