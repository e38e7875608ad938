"""The `fused` engine on a CPU: the cohort engine's written-out gradient of one user, without padding."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from flsim.models.language_model import Params, representative
from flsim.training.central.state import load_moments, moments_of
from flsim.training.central.task import CentralTask, Chunk
from flsim.training.cohort.gradient import PackedBatch, packed_batches
from flsim.training.cohort.packed_models import packed_model
from flsim.training.cohort.products import products_for
from flsim.training.cohort.steps import Steps
from flsim.training.dropout import factors
from flsim.training.local import bound_norm
from flsim.training.state import Moments, State


class PackedEngine:
    """The written-out gradient with torch's optimizers; a `flsim.training.central.engines.Engine`."""

    def __init__(self, training: CentralTask, state: State) -> None:
        self._training = training
        self._model = packed_model(state.params, products_for(training.hparams.precision, state.params))
        self._model.load(state.params)
        self._optimizer: torch.optim.Optimizer | None = None
        if not training.hparams.is_plain:  # an optimizer that does nothing would load torch's compiler, in two seconds
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
        training, hparams = self._training, self._training.hparams
        if self._optimizer is None:
            return self._model.descend(batch, training.rate(step))
        loss, gradient = self._model.gradient(batch)
        gradients = list(gradient.values())
        if hparams.gradient_clip is not None:
            gradients = list(bound_norm(gradients, hparams.gradient_clip))
        for weight, own in zip(self._model.weights.values(), gradients, strict=True):
            weight.grad = own
        for group in self._optimizer.param_groups:
            group["lr"] = training.rate(step)
        self._optimizer.step()
        return loss

    def _with_dropout(self, chunk: Chunk, steps: Steps, batches: list[PackedBatch]) -> list[PackedBatch]:
        training, dropout = self._training, self._training.hparams.dropout
        if not dropout:
            return batches
        times, width = training.records.layout.record_words, self._model.width
        like = representative(self._model.weights)
        with_factors, first = [], 0
        for index, (batch, end, rows) in enumerate(zip(batches, steps.ends, chunk.counts, strict=True)):
            drawn = factors(dropout, training.seed, chunk.first + index, int(rows), times, width)
            kept = torch.from_numpy(drawn[:, steps.row[first:end], steps.time[first:end]]).to(like)
            with_factors.append(replace(batch, kept=(kept[0], kept[1])))
            first = end
        return with_factors
