"""The `local` engine, the oracle for every faster one: one user after another, with autograd and torch's optimizers.

McMahan et al. (2017), Algorithm 1, ClientUpdate; Thakkar et al. (2020), Algorithm 1, UserUpdate.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from flsim.base.rng import stream
from flsim.data.records import Batch, Users
from flsim.models.language_model import Params, TrainableModel, loss_sum
from flsim.training.batches import local_batches
from flsim.training.hparams import LocalHParams
from flsim.training.randomness import training_mode
from flsim.training.update import UpdateSum


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
