"""The result of local training: one weighted sum over many users, never a single user's update."""

import math
from dataclasses import dataclass, replace

import torch
from numpy import int64
from numpy.typing import NDArray

from flsim.models.language_model import Params
from flsim.privacy.update_canaries import update_of

# The clip of one user's update, by the L2 norm over all of its tensors.
#
# Thakkar et al. (2020), Algorithm 1, UserUpdate: "return update Delta_k = Delta min(1, S / ||Delta||)".


def global_norm(update: Params) -> float:
    """Return the L2 norm of all tensors as one vector; float64 keeps it finite for every finite float32 update."""
    squares = [torch.linalg.vector_norm(value, dtype=torch.float64) for value in update.values()]
    return float(torch.linalg.vector_norm(torch.stack(squares)))


def clip_factor(norm: float, bound: float) -> float:
    """Return min(1, bound / norm), which is 1 for a norm of 0.

    Raises:
        ValueError: the norm is not finite: infinity times 0 would be a NaN, and no factor mends a NaN.
    """
    if not math.isfinite(norm):
        raise ValueError(f"an update of norm {norm} cannot be clipped")
    return 1.0 if norm <= bound else bound / norm


@dataclass(frozen=True)
class UpdateSum:
    """A sum over users of weight x (local model - global model), with counts; sums merge, and `zero` is the identity.

    Where updates are clipped, `delta` sums the clipped updates and every user's weight is 1.

    Attributes:
        delta: the sum, in float64, so that the order and grouping of users change it by about 1e-15 of its size only.
        weight: sum of the users' weights: numbers of local examples, or 1 a user where updates are clipped.
        users: number of users, including users without records.
        loss: summed training cross-entropy in nats, over all local steps.
        tokens: number of positions in `loss`.
        norms: sum of the finite norms of users' updates, before the clip.
        clipped: number of users whose norm exceeded the clip.
        non_finite: number of users whose update is not finite. Such updates are left out of `delta`, and their number
            fails the round in `flsim.algorithms.fedavg.step`.
        examples: number of local examples.
        left_out: number of records beyond the users' `max_records`, which were not trained on.
    """

    delta: Params
    weight: float
    users: int
    loss: float
    tokens: int
    norms: float = 0.0
    clipped: int = 0
    non_finite: int = 0
    examples: int = 0
    left_out: int = 0

    @classmethod
    def zero(cls, like: Params) -> "UpdateSum":
        delta = {name: torch.zeros_like(value, dtype=torch.float64, device="cpu") for name, value in like.items()}
        return cls(delta, 0.0, 0, 0.0, 0)

    @classmethod
    def of_user(
        cls,
        update: Params,
        examples: int,
        loss: float,
        tokens: int,
        clip: float | None = None,
        left_out: int = 0,
        weight: float | None = None,
    ) -> "UpdateSum":
        """Return one user's part of a sum: weighted by its examples, or clipped and of weight 1.

        An update that is not finite is counted and left out of `delta`, since no clip would mend it.

        Args:
            update: local model - global model, float64.
            examples: number of local examples.
            loss, tokens: see the attributes.
            clip: S, the bound on the norm of the whole update; None for no clip.
            left_out: see the attribute.
            weight: the weight of an update without clip; None for `examples`.
        """
        counts, factor = cls.counts_of_user(global_norm(update), examples, loss, tokens, clip, left_out, weight)
        if counts.non_finite:
            return replace(counts, delta=cls.zero(update).delta)
        return replace(counts, delta={name: (value * factor).cpu() for name, value in update.items()})

    @classmethod
    def counts_of_user(
        cls,
        norm: float,
        examples: int,
        loss: float,
        tokens: int,
        clip: float | None = None,
        left_out: int = 0,
        weight: float | None = None,
    ) -> tuple["UpdateSum", float]:
        """Return all fields of `of_user` but `delta`, and the update's factor, for an engine that sums by itself."""
        if not math.isfinite(norm):
            return cls({}, 0.0, 1, loss, tokens, non_finite=1, examples=examples, left_out=left_out), 0.0
        own_weight = examples if weight is None else weight
        weight, factor = (own_weight, float(own_weight)) if clip is None else (1, clip_factor(norm, clip))
        clipped = int(clip is not None and norm > clip)
        return cls({}, float(weight), 1, loss, tokens, norm, clipped, examples=examples, left_out=left_out), factor

    def merge(self, other: "UpdateSum", in_place: bool = False) -> "UpdateSum":
        """Return the sum of both; with `in_place` it takes the memory of this one, which is then of no use."""
        add = torch.Tensor.add_ if in_place else torch.Tensor.add
        return UpdateSum(
            {name: add(value, other.delta[name]) for name, value in self.delta.items()},
            self.weight + other.weight,
            self.users + other.users,
            self.loss + other.loss,
            self.tokens + other.tokens,
            self.norms + other.norms,
            self.clipped + other.clipped,
            self.non_finite + other.non_finite,
            self.examples + other.examples,
            self.left_out + other.left_out,
        )

    @property
    def within(self) -> int:
        """Return the number of users whose update's norm is at most the clip, including users without records."""
        return self.users - self.clipped - self.non_finite

    @property
    def is_finite(self) -> bool:
        return (
            not self.non_finite
            and bool(torch.isfinite(torch.tensor(self.loss)))
            and all(bool(torch.isfinite(value).all()) for value in self.delta.values())
        )


# Updates of canary users in a sum: each passes through the clip that real users' updates pass through.


def with_canaries(total: Params, users: NDArray[int64], seed: int, clip: float) -> Params:
    """Return a sum of clipped updates with those of canary users, which `UpdateSum.of_user` clips.

    Args:
        total: sum of the real users' updates, float64 by parameter; it is not changed.
        users: int64 [n], the canary users of the round; one that is drawn twice counts twice.
        seed: the experiment's seed.
        clip: S of the round.
    """
    if not len(users):
        return total
    total = {name: value.clone() for name, value in total.items()}
    for canary in users.tolist():
        sent = UpdateSum.of_user(update_of(canary, seed, clip, total), 0, 0.0, 0, clip)
        for name, value in sent.delta.items():
            total[name].add_(value)
    return total
