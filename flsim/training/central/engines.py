"""The engines of central training on a CPU, `autograd` and `fused`, and the choice of the engine of a task."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from flsim.base.extensions import configured
from flsim.base.progress import say
from flsim.data.records import Batch, batch
from flsim.models.language_model import Params, loss_sum, representative
from flsim.training.central.record_level import private_step
from flsim.training.central.records import factors
from flsim.training.central.task import CentralTask, Chunk, Engine, load_moments, moments_of, refuse_precision
from flsim.training.cohort.gradient import PackedBatch, packed_batches, packed_model
from flsim.training.cohort.products import products_for
from flsim.training.cohort.steps import Steps
from flsim.training.local import take_step, training_mode
from flsim.training.optimizers import optimizer_named
from flsim.training.state import Moments, State

Batches = tuple[int, list[Batch]]


class AutogradEngine:
    """Plain PyTorch with torch's optimizers; a `flsim.training.central.task.Engine`."""

    def __init__(self, training: CentralTask, state: State) -> None:
        self._training, self._layout = training, training.records.layout
        self._model = training.model_with(state.params)
        self._named = self._model.trainable
        self._optimizer = training.hparams.optimizer_over(self._named.values())
        load_moments(self._optimizer, self._params, state.moments)

    @property
    def _params(self) -> Params:
        return dict(self._named)

    def pack(self, chunk: Chunk) -> Batches:
        places = np.split(np.arange(len(chunk.records)), np.cumsum(chunk.counts)[:-1])
        return chunk.first, [batch(chunk.records, chosen, self._layout) for chosen in places]

    def train(self, packed: Batches) -> tuple[Sequence[float], Sequence[int]]:
        first, batches = packed
        done = []
        for step, step_batch in enumerate(batches, start=first):
            with training_mode(self._model, self._training.seed, step):
                done.append(self._step(step, step_batch))
        return [loss for loss, _ in done], [tokens for _, tokens in done]

    def params(self) -> Params:
        return {name: value.detach().cpu().clone() for name, value in self._named.items()}

    def moments(self) -> Moments:
        return moments_of(self._optimizer, self._params)

    def _step(self, step: int, read: Batch) -> tuple[float, int]:
        """Take one step in place; return the batch's summed cross-entropy (nats) before it and its positions."""
        training, hparams = self._training, self._training.hparams
        inputs, targets = (torch.from_numpy(part).to(training.device) for part in (read.inputs, read.targets))
        for group in self._optimizer.param_groups:
            group["lr"] = training.rate(step)
        if training.privacy.clip is not None:
            return private_step(
                self._model,
                self._optimizer,
                inputs,
                targets,
                clip=training.privacy.clip,
                noise_multiplier=training.privacy.noise_multiplier,
                expected=hparams.batch_size,
                seed=training.seed,
                step=step,
                physical_batch=training.physical_batch,
            )
        loss, tokens = loss_sum(self._model, inputs, targets, dropout_mask=self._dropout_mask(step, read))
        gradients = torch.autograd.grad(loss / tokens, list(self._named.values()))
        take_step(self._optimizer, self._named.values(), gradients, hparams.gradient_clip)
        return loss.item(), tokens

    def _dropout_mask(self, step: int, read: Batch) -> Tensor | None:
        """Return dropout's factors of a batch, [2, B, T, D]; None without dropout."""
        training = self._training
        if not training.hparams.dropout:
            return None
        rows, times = read.inputs.shape
        width, like = self._model.hparams.embedding, representative(self._named)
        masks = factors(training.hparams.dropout, training.seed, step, rows, self._layout.record_words, width)
        longest_first = np.argsort(-(read.targets != self._layout.pad).sum(1), kind="stable")
        rank = np.empty(rows, np.int64)
        rank[longest_first] = np.arange(rows)
        return torch.from_numpy(masks[:, rank, :times]).to(like)


class PackedEngine:
    """The written-out gradient with torch's optimizers; a `flsim.training.central.task.Engine`."""

    def __init__(self, training: CentralTask, state: State) -> None:
        self._training = training
        self._model = packed_model(state.params, products_for(training.hparams.precision, state.params))
        self._model.load(state.params)
        self._optimizer: torch.optim.Optimizer | None = None
        # an unused optimizer would load the compiler of torch, which takes two seconds
        if not training.hparams.is_plain:
            self._optimizer = training.hparams.optimizer_over(self._model.weights.values())
            load_moments(self._optimizer, self._model.weights, state.moments)

    def pack(self, chunk: Chunk) -> tuple[int, list[PackedBatch]]:
        steps = chunk.positions(self._training.records.layout)
        return chunk.first, self._with_dropout(chunk, steps, list(packed_batches(steps)))

    def train(self, packed: tuple[int, list[PackedBatch]]) -> tuple[Sequence[float], Sequence[int]]:
        first, batches = packed
        losses = [self._step(step, batch) for step, batch in enumerate(batches, start=first)]
        return losses, [len(batch.inputs) for batch in batches]

    def params(self) -> Params:
        return {name: value.clone() for name, value in self._model.weights.items()}

    def moments(self) -> Moments:
        return {} if self._optimizer is None else moments_of(self._optimizer, self._model.weights)

    def _step(self, step: int, batch: PackedBatch) -> float:
        training = self._training
        if self._optimizer is None:
            return self._model.descend(batch, training.rate(step))
        loss, gradient = self._model.gradient(batch)
        for group in self._optimizer.param_groups:
            group["lr"] = training.rate(step)
        gradients = list(gradient.values())
        take_step(self._optimizer, self._model.weights.values(), gradients, training.hparams.gradient_clip)
        return loss

    def _with_dropout(self, chunk: Chunk, steps: Steps, batches: list[PackedBatch]) -> list[PackedBatch]:
        training, dropout = self._training, self._training.hparams.dropout
        if not dropout:
            return batches
        times, width = training.records.layout.record_words, self._model.width
        like = representative(self._model.weights)
        with_factors, first = [], 0
        for index, (packed, end, rows) in enumerate(zip(batches, steps.ends, chunk.counts, strict=True)):
            masks = factors(dropout, training.seed, chunk.first + index, int(rows), times, width)
            mask = torch.from_numpy(masks[:, steps.row[first:end], steps.time[first:end]]).to(like)
            with_factors.append(replace(packed, dropout_mask=(mask[0], mask[1])))
            first = end
        return with_factors


def engine_of(training: CentralTask, state: State) -> Engine:
    """Return the engine of the settings, with the state; InputError if it does not support device or precision.

    Engine "autograd" is plain PyTorch with torch's optimizers, the reference for the other engines. It also trains
    DP-SGD, which needs each record's gradient, and models that declare no written-out gradient. Engine "fused" is the
    written-out gradient: on a CPU without padding, and on other devices as one user of the cohort engine.
    """
    refuse_precision(training)
    able = training.capabilities
    needs_autograd = training.privacy.mechanism != "none" or training.records.layout.prompts or not able.written_out
    if training.engine == "autograd" or needs_autograd:
        return AutogradEngine(training, state)
    if training.device == "cpu":
        return PackedEngine(training, state)
    if not able.stacked:
        return AutogradEngine(training, state)
    if optimizer_named(configured(training.hparams, "optimizer")).direction is None:
        say(f'optimizer "{training.hparams.optimizer}" has no kernel; engine "autograd" is used instead')
        return AutogradEngine(training, state)
    from flsim.training.central.stacked_engine import StackedEngine

    return StackedEngine(training, state)
