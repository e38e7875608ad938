"""The `autograd` engine: plain PyTorch, one step after another. It is the faster engines' oracle, and trains DP-SGD."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flsim.data.records import Batch, batch
from flsim.models.language_model import Params, loss_sum, representative
from flsim.training.central.record_level import private_step
from flsim.training.central.state import load_moments, moments_of
from flsim.training.central.task import CentralTask, Chunk
from flsim.training.dropout import factors
from flsim.training.local import bound_norm, training_mode
from flsim.training.state import Moments, State

Batches = tuple[int, list[Batch]]


class AutogradEngine:
    """Plain PyTorch with torch's optimizers; a `flsim.training.central.engines.Engine`."""

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
        loss, tokens = loss_sum(self._model, inputs, targets, kept=self._kept(step, read))
        gradients: Sequence[Tensor] = torch.autograd.grad(loss / tokens, list(self._named.values()))
        if hparams.gradient_clip is not None:
            gradients = bound_norm(gradients, hparams.gradient_clip)
        for parameter, gradient in zip(self._named.values(), gradients, strict=True):
            parameter.grad = gradient
        self._optimizer.step()
        return loss.item(), tokens

    def _kept(self, step: int, read: Batch) -> Tensor | None:
        """Return dropout's factors of a batch, [2, B, T, D]; None without dropout."""
        training = self._training
        if not training.hparams.dropout:
            return None
        rows, times = read.inputs.shape
        width, like = self._model.hparams.embedding, representative(self._named)
        drawn = factors(training.hparams.dropout, training.seed, step, rows, self._layout.record_words, width)
        longest_first = np.argsort(-(read.targets != self._layout.pad).sum(1), kind="stable")
        rank = np.empty(rows, np.int64)
        rank[longest_first] = np.arange(rows)
        return torch.from_numpy(drawn[:, rank, :times]).to(like)
