"""What local training yields: one weighted sum over many users, never a single user's update."""

from dataclasses import dataclass

import torch

from flsim.model.cifg import Params


@dataclass(frozen=True)
class UpdateSum:
    """Sum over users of weight x (local model - global model), with counts; mergeable, with `zero` as identity.

    Attributes:
        delta: the sum, float64, so that neither the order nor the grouping of users matters beyond 1e-15 or so.
        weight: sum of the users' weights: their numbers of local examples.
        users: number of users, those without records included.
        loss: summed training cross-entropy in nats, over all local steps.
        tokens: number of positions that the loss is over.
    """

    delta: Params
    weight: float
    users: int
    loss: float
    tokens: int

    @classmethod
    def zero(cls, like: Params) -> "UpdateSum":
        delta = {name: torch.zeros_like(value, dtype=torch.float64, device="cpu") for name, value in like.items()}
        return cls(delta, 0.0, 0, 0.0, 0)

    def merge(self, other: "UpdateSum") -> "UpdateSum":
        return UpdateSum(
            {name: value + other.delta[name] for name, value in self.delta.items()},
            self.weight + other.weight,
            self.users + other.users,
            self.loss + other.loss,
            self.tokens + other.tokens,
        )

    @property
    def is_finite(self) -> bool:
        return bool(torch.isfinite(torch.tensor(self.loss))) and all(
            bool(torch.isfinite(value).all()) for value in self.delta.values()
        )
