"""The `local` engine, the oracle for every faster one: one user after another, with autograd and torch's optimizers.

McMahan et al. (2017), Algorithm 1, ClientUpdate; Thakkar et al. (2020), Algorithm 1, UserUpdate.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flsim.base.rng import shared_generators, states_of_shared_generators, stream
from flsim.data.records import Batch, Records, Users, batch
from flsim.data.vocabulary import Layout
from flsim.models.language_model import Params, TrainableModel, loss_sum
from flsim.training.hparams import LocalHParams
from flsim.training.update import UpdateSum

# The random numbers that a network draws while it is trained, such as those of dropout.
#
# torch's modules draw from generators that a process shares. Here these generators are seeded for each piece of
# training, so that the numbers depend neither on the process nor on what it trained before.


@contextmanager
def training_mode(model: TrainableModel, seed: int, *keys: int) -> Iterator[None]:
    """Set a model to training mode, in which dropout is active, and seed the shared generators within the block.

    After the block the model is in evaluation mode, and the generators are in their states from before.

    Args:
        model: the model, whose device tells which generators it draws from.
        seed: the experiment's seed.
        keys: the round and the user of federated training; the step of central training.
    """
    with shared_generators(model.device, seed, *keys):
        model.train()
        try:
            yield
        finally:
            model.eval()


@torch.no_grad()
def draws(model: TrainableModel, tokens: Tensor) -> bool:
    """Return whether reading tokens int64 [B, T] in training mode draws from a generator that the process shares."""
    with training_mode(model, 0):
        before = states_of_shared_generators()
        model(tokens)
        return before != states_of_shared_generators()


# The choice and order of the records that a user trains on, which is the same for every engine.


def epoch_orders(records: int, hparams: LocalHParams, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """Return the records of each epoch in the order of training, int64 [examples] each, shuffled anew for every epoch.

    Args:
        records: number of records that the user has. If it exceeds `hparams.max_records`, that many are drawn once and
            used in all epochs.
        hparams: settings of local training.
        rng: random stream of the user and the round.
    """
    examples = hparams.examples(records)
    chosen = np.arange(records) if examples == records else rng.choice(records, examples, replace=False)
    return [chosen[rng.permutation(examples)] for _ in range(hparams.epochs)]


def local_batches(records: Records, layout: Layout, hparams: LocalHParams, rng: np.random.Generator) -> Iterator[Batch]:
    """Yield the user's batches in the order of training."""
    for order in epoch_orders(len(records), hparams, rng):
        for first in range(0, len(order), hparams.batch_size):
            yield batch(records, order[first : first + hparams.batch_size], layout)


def train_cohort(
    model: TrainableModel,
    users: Users,
    cohort: Iterable[int],
    hparams: LocalHParams,
    seed: int,
    round_: int,
    clip: float | None = None,
    rounds: int | None = None,
) -> UpdateSum:
    """Train every user of the cohort from the model's parameters, and return the sum of their updates.

    Without a clip, updates are weighted by local examples. With a clip each update is clipped and has weight 1, so that
    one user moves the sum by at most the clip.

    Args:
        model: the global model; its parameters are the same afterwards.
        users: the population.
        cohort: indices of users in the population; a user without records counts, with an update of zero.
        hparams: settings of local training.
        seed: the experiment's seed; a user's batches and dropout are functions of (seed, round, user).
        round_: the round, from 0.
        clip: S, the bound on the norm of a user's whole update; None leaves updates as they are.
        rounds: number of rounds of the run, which a schedule of the learning rate needs.
    """
    start = {name: value.detach().clone() for name, value in model.trainable.items()}
    total, rate = UpdateSum.zero(start), hparams.rate(round_, rounds)
    for user in cohort:
        records = users[user]
        batches = local_batches(records, users.layout, hparams, stream(seed, "local", round_, user))
        with training_mode(model, seed, round_, user):
            loss, tokens = train_user(model, batches, hparams, rate)
        examples = hparams.examples(len(records))
        part = UpdateSum.of_user(restored(model, start), examples, loss, tokens, clip, len(records) - examples)
        total = total.merge(part)
    return total


def train_user(
    model: TrainableModel,
    batches: Iterable[Batch],
    hparams: LocalHParams,
    rate: float | None = None,
    correction: Params | None = None,
) -> tuple[float, int]:
    """Train the model in place on one user's batches.

    Args:
        model: the model, at the global parameters.
        batches: the user's batches in the order of training.
        hparams: settings of local training.
        rate: learning rate; None for `hparams.learning_rate`.
        correction: tensors by parameter name, added to each step's gradient before any clip of it; None for none.

    Returns:
        The cross-entropy (nats) before each step, summed over all steps, and the number of positions in the sum.
    """
    parameters: list[Tensor] = list(model.trainable.values())
    anchor = [parameter.detach().clone() for parameter in parameters]
    optimizer, device = hparams.optimizer_over(parameters, rate), model.device
    total, tokens = 0.0, 0
    for step in batches:
        inputs, targets = torch.from_numpy(step.inputs).to(device), torch.from_numpy(step.targets).to(device)
        loss, count = loss_sum(model, inputs, targets)
        objective = loss / count
        if hparams.proximal:
            away = sum((p - origin).square().sum() for p, origin in zip(parameters, anchor, strict=True))
            objective = objective + hparams.proximal / 2 * away
        gradients = torch.autograd.grad(objective, parameters)
        if correction is not None:
            gradients = tuple(g + correction[name].to(g) for name, g in zip(model.trainable, gradients, strict=True))
        if hparams.gradient_clip is not None:
            gradients = bound_norm(gradients, hparams.gradient_clip)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        total, tokens = total + loss.item(), tokens + count
    return total, tokens


def bound_norm(gradients: Sequence[Tensor], bound: float) -> tuple[Tensor, ...]:
    """Return the gradients times min(1, bound / their norm as one vector)."""
    # torch's clip_grad_norm_ is not used, as it adds 1e-6 to the norm.
    norm = torch.nn.utils.get_total_norm(gradients)
    return tuple(gradient * (bound / norm).clamp(max=1) for gradient in gradients)


@torch.no_grad()
def restored(model: TrainableModel, start: Params) -> Params:
    """Return parameters - start, in float64 on the model's device, and set the parameters back to `start`."""
    update = {}
    for name, parameter in model.trainable.items():
        update[name] = (parameter - start[name]).to(torch.float64)
        parameter.copy_(start[name])
    return update
