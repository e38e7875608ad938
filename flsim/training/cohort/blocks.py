"""LoRA adapters of many users at once on one frozen base: users are blocks of the batch.

A layer computes base(x) + s B_k A_k x for the rows of user k (`flsim.models.lora.LoraBlocks`). The loss is the sum of
the users' losses, so plain autograd gives each user's gradient. Its oracle is `flsim.algorithms.fedavg.train_users`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from flsim.base.extensions import configured
from flsim.data.records import Batch
from flsim.data.vocabulary import Layout
from flsim.models.hf import HuggingFaceModel
from flsim.models.language_model import Params, representative
from flsim.training.cohort.steps import Participant
from flsim.training.hparams import LocalHParams
from flsim.training.local import local_batches
from flsim.training.optimizers import BETAS, optimizer_named


@dataclass(frozen=True)
class Block:
    """A step of the first users of a group, who are those that have the step."""

    inputs: Tensor  # int64 [users * rows, T]; PAD fills up users and rows
    places: Tensor  # int64 [n], the positions of `inputs`, flat, that have targets
    targets: Tensor  # int64 [n]
    counts: Tensor  # int64 [users], number of targets of each user


@dataclass(frozen=True)
class Group:
    """The steps of users, who are in the order of their numbers of steps, most first."""

    blocks: list[Block]
    order: Tensor  # int64 [users], the place of each user in the argument of `BlockTrainer.pack`


class BlockTrainer:
    """A trainer of the adapters of several users at once; a `flsim.training.cohort.engine.Trainer`.

    The layers of `model`, which has adapters and no dropout, are replaced, so other code must not use it. `like` has
    its trained parameters, for names, shapes, dtype and device; at most `users` train at once, in float32.
    """

    def __init__(
        self, model: HuggingFaceModel, like: Params, hparams: LocalHParams, layout: Layout, users: int
    ) -> None:
        self._hparams, self._layout, self._model = hparams, layout, model
        self._optimizer = optimizer_named(configured(hparams, "optimizer"))
        self._layers = model.with_blocks()
        self._start: Params = {}
        self._weights = {name: value.new_zeros(users, *value.shape) for name, value in like.items()}
        self._order = torch.arange(0)

    def pack(self, group: Sequence[Participant]) -> Group:
        steps = [list(local_batches(records, self._layout, self._hparams, rng)) for records, rng in group]
        order = sorted(range(len(steps)), key=lambda user: -len(steps[user]))
        most = max(map(len, steps), default=0)
        batches = [[steps[user][at] for user in order if at < len(steps[user])] for at in range(most)]
        return Group([_block(step, self._device) for step in batches], torch.tensor(order, dtype=torch.int64))

    def train(self, start: Params, packed: Group, rate: float | None = None) -> tuple[list[float], list[int]]:
        rate = self._hparams.learning_rate if rate is None else rate
        self._start, self._order = start, packed.order
        for name, value in self._weights.items():
            value[: len(packed.order)] = start[name]
        weights = self._weights.items()
        moments = [{name: torch.zeros_like(value) for name, value in weights} for _ in self._optimizer.slots]
        losses = torch.zeros(len(packed.order), dtype=torch.float64, device=self._device)
        tokens = torch.zeros(len(packed.order), dtype=torch.int64, device=self._device)
        for number, block in enumerate(packed.blocks, start=1):
            users = len(block.counts)
            losses[:users] += self._step(block, rate, number, moments)
            tokens[:users] += block.counts
        return self._as_given(losses).tolist(), self._as_given(tokens).tolist()

    @torch.no_grad()
    def norms(self) -> list[float]:
        squares = sum(update.square().flatten(1).sum(1) for update in self._updates().values())
        return self._as_given(torch.as_tensor(squares).sqrt()).tolist()

    @torch.no_grad()
    def add_updates(self, factors: Sequence[float], into: Params) -> None:
        by_user = torch.tensor(factors, dtype=torch.float64)[self._order].to(self._device)
        users = by_user.nonzero().flatten()  # an update of factor 0 may not be finite
        for name, update in self._updates().items():
            into[name].add_(torch.tensordot(by_user[users], update[users], 1))

    @property
    def _device(self) -> torch.device:
        return representative(self._weights).device

    def _updates(self) -> Params:
        """Return the users' updates, float64 [users, ...], in the group's order."""
        users = len(self._order)
        return {name: value[:users].double() - self._start[name] for name, value in self._weights.items()}

    def _step(self, block: Block, rate: float, number: int, moments: list[Params]) -> Tensor:
        """Take a step of the block's users in place; return their summed losses before it, in nats, float64 [users]."""
        users = len(block.counts)
        weights = {name: value[:users].detach().requires_grad_() for name, value in self._weights.items()}
        for layer in self._layers:
            layer.A, layer.B = weights.get(layer.name_of_a, layer.frozen_a), weights[layer.name_of_b]
        hidden, _ = self._model.hidden(block.inputs)
        logits = self._model.logits(hidden.flatten(0, 1)[block.places])
        nats = cross_entropy(logits, block.targets, reduction="none")
        share = (1 / block.counts.to(nats.dtype)).repeat_interleave(block.counts, output_size=len(nats))
        gradients = torch.autograd.grad((nats * share).sum(), list(weights.values()))
        with torch.no_grad():
            self._descend(weights, dict(zip(weights, gradients, strict=True)), rate, number, moments)
            by_position = nats.new_zeros(block.inputs.numel(), dtype=torch.float64)
            by_position[block.places] = nats.double()
            return by_position.view(users, -1).sum(1)

    def _descend(self, weights: Params, gradients: Params, rate: float, number: int, moments: list[Params]) -> None:
        """Add FedProx's term, bound each user's norm, and step as the optimizer does, in place of the weights."""
        hparams, users = self._hparams, len(next(iter(weights.values())))
        if hparams.proximal:
            gradients = {
                name: gradient + hparams.proximal * (weights[name] - self._start[name])
                for name, gradient in gradients.items()
            }
        if hparams.gradient_clip is not None:
            squares = torch.stack([value.flatten(1).square().sum(1) for value in gradients.values()]).sum(0)
            scale = (hparams.gradient_clip / squares.sqrt()).clamp(max=1)
            gradients = {name: value * scale[:, None, None] for name, value in gradients.items()}
        corrections = [torch.tensor(1 - beta**number, dtype=torch.float64, device=self._device) for beta in BETAS]
        direction = self._optimizer.direction
        if direction is None:
            raise ValueError(f"optimizer {hparams.optimizer!r} has no direction, which blocks need")
        for name, gradient in gradients.items():
            slots = [moment[name][:users] for moment in moments]
            step, new = direction(gradient, slots, corrections, hparams.momentum)
            for old, value in zip(slots, new, strict=True):
                old.copy_(value)
            self._weights[name][:users].sub_(step, alpha=rate)

    def _as_given(self, values: Tensor) -> Tensor:
        """Return values [users] in the order of the argument of `pack`, on the CPU."""
        restored = torch.empty_like(values, device="cpu")
        restored[self._order] = values.cpu()
        return restored


def _block(batches: Sequence[Batch], device: torch.device) -> Block:
    rows, times = (max(batch.inputs.shape[axis] for batch in batches) for axis in (0, 1))
    inputs, targets = (np.zeros((len(batches), rows, times), np.int64) for _ in range(2))
    for user, batch in enumerate(batches):
        place = (user, slice(len(batch.inputs)), slice(batch.inputs.shape[1]))
        inputs[place], targets[place] = batch.inputs, batch.targets
    places = np.flatnonzero(targets)
    arrays = (
        inputs.reshape(-1, times), places, targets.reshape(-1)[places], np.count_nonzero(targets, axis=(1, 2))
    )  # fmt: skip
    return Block(*(torch.from_numpy(array).to(device) for array in arrays))
