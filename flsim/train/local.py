"""The `local` engine: one user after another, plain autograd. The oracle for every faster one.

McMahan et al. (2017), Algorithm 1, ClientUpdate; Thakkar et al. (2020), Algorithm 1, UserUpdate.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flsim.data.records import Batch, Records, Users, batch
from flsim.data.vocabulary import Layout
from flsim.errors import InputError, at_least_one
from flsim.model.cifg import CIFGLanguageModel, Params
from flsim.model.loss import loss_sum
from flsim.rng import stream
from flsim.train.update import UpdateSum


@dataclass(frozen=True)
class LocalHParams:
    """What a user does with its records.

    Attributes:
        epochs: passes over them.
        batch_size: records in a step; the last batch of an epoch may be smaller.
        learning_rate: of plain SGD on the mean cross-entropy (nats) over a batch's real positions.
    """

    epochs: int = 1
    batch_size: int = 16
    learning_rate: float = 0.3

    def __post_init__(self) -> None:
        at_least_one(epochs=self.epochs, batch_size=self.batch_size)
        if not self.learning_rate > 0:
            raise InputError(f"learning_rate must be above 0, found {self.learning_rate}")


def train_cohort(
    model: CIFGLanguageModel,
    users: Users,
    cohort: Iterable[int],
    hparams: LocalHParams,
    seed: int,
    round_: int,
    clip: float | None = None,
) -> UpdateSum:
    """Train every user of the cohort from the model's parameters, and sum the updates.

    Without a clip they are weighted by local examples. With one each is clipped and has weight 1, so that a user moves
    the sum by at most the clip.

    Args:
        model: the global model; its parameters are the same afterwards.
        users: the population.
        cohort: indices of users in it; a user without records counts, with an update of zero.
        hparams: local training.
        seed: the experiment's seed; a user's batches are a function of (seed, round, user).
        round_: the round, from 0.
        clip: S, bound on the norm of a user's whole update; None leaves updates as they are.
    """
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    total = UpdateSum.zero(start)
    for user in cohort:
        records = users[user]
        batches = local_batches(records, users.layout, hparams, stream(seed, "local", round_, user))
        loss, tokens = train_user(model, batches, hparams)
        total = total.merge(UpdateSum.of_user(_restore(model, start), len(records), loss, tokens, clip))
    return total


def local_batches(records: Records, layout: Layout, hparams: LocalHParams, rng: np.random.Generator) -> Iterator[Batch]:
    """The user's batches in the order of training: all records each epoch, shuffled anew."""
    for _ in range(hparams.epochs):
        order = rng.permutation(len(records))
        for first in range(0, len(records), hparams.batch_size):
            yield batch(records, order[first : first + hparams.batch_size], layout)


def train_user(model: CIFGLanguageModel, batches: Iterable[Batch], hparams: LocalHParams) -> tuple[float, int]:
    """SGD over the batches, in place. Returns the summed loss (nats) before each step, and its number of positions."""
    parameters: list[Tensor] = list(model.parameters())
    device = parameters[0].device
    total, tokens = 0.0, 0
    for step in batches:
        inputs, targets = torch.from_numpy(step.inputs).to(device), torch.from_numpy(step.targets).to(device)
        loss, count = loss_sum(model, inputs, targets)
        gradients = torch.autograd.grad(loss / count, parameters)
        with torch.no_grad():
            torch._foreach_add_(parameters, gradients, alpha=-hparams.learning_rate)
        total, tokens = total + loss.item(), tokens + count
    return total, tokens


@torch.no_grad()
def _restore(model: CIFGLanguageModel, start: Params) -> Params:
    """Parameters - start, in float64 on the model's device, and the parameters back at start."""
    update = {}
    for name, parameter in model.named_parameters():
        update[name] = (parameter - start[name]).to(torch.float64)
        parameter.copy_(start[name])
    return update
