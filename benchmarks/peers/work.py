"""Work and results of a platform, as files."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flsim.models.language_model import Params

UserData = tuple[Tensor, Tensor]
PAD = 0


@dataclass(frozen=True)
class Work:
    """Rounds of Federated Averaging over the same users, weighted by their records, with a server learning rate of 1.

    Attributes:
        start: parameters of the global model.
        rounds: for each round and user, int64 inputs and targets [records, longest record], padded with `PAD`, in the
            order in which the round trains on them.
        batch_size: records in a step of the one local epoch.
        learning_rate: learning rate of a user's SGD.
    """

    start: Params
    rounds: list[list[UserData]]
    batch_size: int
    learning_rate: float

    def save(self, path: Path) -> None:
        torch.save(vars(self), path)

    @classmethod
    def load(cls, path: Path) -> "Work":
        return cls(**torch.load(path, weights_only=True))


@dataclass(frozen=True)
class Result:
    """The result of training.

    Attributes:
        params: the global model's parameters after all rounds.
        seconds: seconds of each round.
    """

    params: Params
    seconds: list[float]

    def save(self, path: Path) -> None:
        torch.save(vars(self), path)

    @classmethod
    def load(cls, path: Path) -> "Result":
        return cls(**torch.load(path, weights_only=True))
