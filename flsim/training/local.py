"""The `local` engine: one user after another, plain autograd and torch's optimizers. The oracle for every faster one.

McMahan et al. (2017), Algorithm 1, ClientUpdate; Thakkar et al. (2020), Algorithm 1, UserUpdate.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from flsim.base.rng import stream
from flsim.data.records import Batch, Users
from flsim.models.language_model import Params, TrainableModel
from flsim.models.loss import loss_sum
from flsim.training.batches import local_batches
from flsim.training.hparams import LocalHParams
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
        rounds: number of rounds of the run, which a schedule of the learning rate needs.
    """
    start = {name: value.detach().clone() for name, value in model.trainable.items()}
    total, rate = UpdateSum.zero(start), hparams.rate(round_, rounds)
    for user in cohort:
        records = users[user]
        batches = local_batches(records, users.layout, hparams, stream(seed, "local", round_, user))
        loss, tokens = train_user(model, batches, hparams, rate)
        examples = hparams.examples(len(records))
        part = UpdateSum.of_user(_restore(model, start), examples, loss, tokens, clip, len(records) - examples)
        total = total.merge(part)
    return total


def train_user(
    model: TrainableModel, batches: Iterable[Batch], hparams: LocalHParams, rate: float | None = None
) -> tuple[float, int]:
    """Train in place, at a learning rate that is `hparams.learning_rate` where None.

    Returns:
        The summed cross-entropy (nats) before each step, and its number of positions.
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
        if hparams.gradient_clip is not None:
            gradients = bound_norm(gradients, hparams.gradient_clip)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        total, tokens = total + loss.item(), tokens + count
    return total, tokens


def bound_norm(gradients: Sequence[Tensor], bound: float) -> tuple[Tensor, ...]:
    """All scaled by min(1, bound / their norm as one vector); torch's own rule adds 1e-6 to the norm."""
    norm = torch.nn.utils.get_total_norm(gradients)
    return tuple(gradient * (bound / norm).clamp(max=1) for gradient in gradients)


@torch.no_grad()
def _restore(model: TrainableModel, start: Params) -> Params:
    """Parameters - start, in float64 on the model's device, and the parameters back at start."""
    update = {}
    for name, parameter in model.trainable.items():
        update[name] = (parameter - start[name]).to(torch.float64)
        parameter.copy_(start[name])
    return update
