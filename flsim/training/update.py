"""The state of training, and the result of local training: a sum over users, never a single user's update."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from numpy import int64
from numpy.typing import NDArray

from flsim.base.errors import Diverged
from flsim.models.language_model import Params
from flsim.privacy.ledger import Ledger
from flsim.privacy.update_canaries import update_of

# The state of training, for any algorithm; a checkpoint contains only the state.


Moments = dict[str, Params]


@dataclass(frozen=True)
class State:
    """Everything that the next round of training needs; central training counts steps as rounds.

    Checkpoints, messages and digests contain nothing else of an algorithm.

    Attributes:
        round: number of completed rounds.
        params: the model's parameters by name.
        moments: other named tensors, such as an optimizer's: slot -> parameter -> tensor.
        values: numbers by name, such as the "clip" of the next round.
        ledger: the ledger of the completed rounds.

    Examples:
        >>> state = flsim.open_run("runs/iid").latest_state()                  # doctest: +SKIP
        >>> state.round, sorted(state.params)                                  # doctest: +SKIP
    """

    round: int
    params: Params = field(repr=False)  # a notebook would print every value
    moments: Moments = field(default_factory=dict, repr=False)
    values: Mapping[str, float] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger.zero)

    @property
    def clip(self) -> float | None:
        """Return the bound on the norm of users' updates in the next round; None if there is no clip."""
        return self.values.get("clip")


def flat(slots: Mapping[str, Params]) -> Params:
    """Return named tensors in the form of messages and sums: "slot/parameter" -> tensor."""
    return {f"{slot}/{name}": value for slot, tensors in slots.items() for name, value in tensors.items()}


def by_slot(tensors: Params) -> Moments:
    """Return tensors by slot and parameter, from keys of `flat`."""
    slots: Moments = {}
    for key, value in tensors.items():
        slot, _, name = key.rpartition("/")
        slots.setdefault(slot, {})[name] = value
    return slots


def transposed(by_name: Mapping[str, Params]) -> Moments:
    """Return tensors by slot and parameter, from tensors by parameter and slot."""
    return by_slot({f"{slot}/{name}": value for name, slots in by_name.items() for slot, value in slots.items()})


# The check of the training loss that finds diverged models whose values are all finite.
#  Such a model memorizes nothing, and would look private.

ABSURD = 10  # multiple of the loss of uniform guessing


def refuse_absurd_loss(when: str, loss: float, tokens: int, vocabulary_size: int, culprit: str) -> None:
    """Raise Diverged if the mean of a summed loss (nats) exceeds `ABSURD` times that of uniform guessing.

    `when` and `culprit`, the setting that is most likely too high, are for the message. No positions never diverge.
    """
    guessing = math.log(vocabulary_size)
    if tokens and loss > ABSURD * guessing * tokens:
        raise Diverged(
            f"{when}: the training loss is {loss / tokens:.3g} nats per word, and guessing gives "
            f"{guessing:.3g}; most likely {culprit} is too high"
        )


# The interface of training for callers, for all algorithms.


class Training(Protocol):
    """The settings of training and its users, without a state."""

    def first_state(self) -> State:
        """Return the state before the first round."""

    def states(self, state: State, until: int, is_wanted: Callable[[int], bool] = ...) -> Iterator[State]:
        """Train in this process to a round or step, and yield the last state and wanted ones; raises Diverged."""


# The clip of one user's update, by the L2 norm over all of its tensors.
#
# Thakkar et al. (2020), Algorithm 1, UserUpdate: "return update Delta_k = Delta min(1, S / ||Delta||)".


def global_norm(update: Params) -> float:
    """Return the L2 norm of all tensors as one vector; float64 keeps it finite for every finite float32 update."""
    squares = [torch.linalg.vector_norm(value, dtype=torch.float64) for value in update.values()]
    return float(torch.linalg.vector_norm(torch.stack(squares)))


def clip_factor(norm: float, bound: float) -> float:
    """Return min(1, bound / norm), 1 for a norm of 0; ValueError if it is not finite: no factor removes a NaN."""
    if not math.isfinite(norm):
        raise ValueError(f"an update of norm {norm} cannot be clipped")
    return 1.0 if norm <= bound else bound / norm


@dataclass(frozen=True)
class Counts:
    """The counts of users' local training; they add, and `Counts()` is the identity."""

    weight: float = 0.0  # sum of the users' weights: numbers of local examples, or 1 per user if updates are clipped
    users: int = 0  # number of users, including users without records
    loss: float = 0.0  # summed training cross-entropy in nats, over all local steps
    tokens: int = 0  # number of positions in `loss`
    norms: float = 0.0  # sum of the finite norms of users' updates, before the clip
    clipped: int = 0  # number of users whose norm exceeded the clip
    # number of users whose update is not finite. Such updates are excluded from the sum, and a number above 0 fails the
    # round in `flsim.algorithms.fedavg.step`.
    non_finite: int = 0
    examples: int = 0  # number of local examples
    left_out: int = 0  # number of records beyond the users' `max_records`, which were not trained on

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    @property
    def within(self) -> int:
        """Return the number of users whose update's norm is at most the clip, including users without records."""
        return self.users - self.clipped - self.non_finite

    @classmethod
    def of_user(
        cls,
        norm: float,
        examples: int,
        loss: float,
        tokens: int,
        *,
        clip: float | None = None,
        left_out: int = 0,
        weight: float | None = None,
    ) -> tuple["Counts", float]:
        """Return the counts of one user, and the factor of its update in a sum: its weight, or that of the clip.

        The `norm` is that before the clip; if it is not finite, the factor is 0. The weight is `examples` by default.
        """
        counts = cls(users=1, loss=loss, tokens=tokens, examples=examples, left_out=left_out)
        if not math.isfinite(norm):
            return replace(counts, non_finite=1), 0.0
        if clip is None:
            factor = float(examples if weight is None else weight)
            return replace(counts, weight=factor, norms=norm), factor
        return replace(counts, weight=1.0, norms=norm, clipped=int(norm > clip)), clip_factor(norm, clip)


@dataclass(frozen=True)
class UpdateSum:
    """A sum over users of weight x (local model - global model), or of clipped updates, with counts; sums merge."""

    delta: Params  # the sum, in float64, so the order and grouping of users change it by only about 1e-15 of its size
    counts: Counts = field(default_factory=Counts)  # the counts of the same users

    @classmethod
    def zero(cls, like: Params) -> "UpdateSum":
        return cls({name: torch.zeros_like(value, dtype=torch.float64, device="cpu") for name, value in like.items()})

    @classmethod
    def of_user(
        cls,
        update: Params,
        examples: int,
        loss: float,
        tokens: int,
        *,
        clip: float | None = None,
        left_out: int = 0,
        weight: float | None = None,
    ) -> "UpdateSum":
        """Return one user's part of a sum, see `Counts.of_user`; an update that is not finite is only counted."""
        counts, factor = Counts.of_user(
            global_norm(update), examples, loss, tokens, clip=clip, left_out=left_out, weight=weight
        )
        if counts.non_finite:
            return cls(cls.zero(update).delta, counts)
        return cls({name: (value * factor).cpu() for name, value in update.items()}, counts)

    def merge(self, other: "UpdateSum", in_place: bool = False) -> "UpdateSum":
        """Return the sum of both; with `in_place` the memory of this sum is reused, and this sum becomes invalid."""
        add = torch.Tensor.add_ if in_place else torch.Tensor.add
        delta = {name: add(value, other.delta[name]) for name, value in self.delta.items()}
        return UpdateSum(delta, self.counts + other.counts)

    def refuse_divergence(self, when: str, vocabulary_size: int) -> None:
        """Raise Diverged, with `when`, if a value is not finite or the loss is implausibly large."""
        counts = self.counts
        if not self.is_finite:
            of_users = f" with {counts.non_finite:,} of {counts.users:,} users" if counts.non_finite else ""
            raise Diverged(
                f"{when}: local training produced values that are not finite{of_users}; most likely "
                "local.learning_rate is too high"
            )
        refuse_absurd_loss(when, counts.loss, counts.tokens, vocabulary_size, "local.learning_rate")

    @property
    def is_finite(self) -> bool:
        return (
            not self.counts.non_finite
            and math.isfinite(self.counts.loss)
            and all(bool(torch.isfinite(value).all()) for value in self.delta.values())
        )


# Updates of canary users in a sum: each passes through the clip that real users' updates pass through.


def with_canaries(total: Params, users: NDArray[int64], seed: int, clip: float) -> Params:
    """Return a sum of clipped updates, float64 by parameter, with those of canary users, int64 [n], of the round.

    A user that is drawn twice counts twice. `clip` is S of the round. The argument does not change.
    """
    if not len(users):
        return total
    total = {name: value.clone() for name, value in total.items()}
    for canary in users.tolist():
        sent = UpdateSum.of_user(update_of(canary, seed, clip, total), 0, 0.0, 0, clip=clip)
        for name, value in sent.delta.items():
            total[name].add_(value)
    return total
