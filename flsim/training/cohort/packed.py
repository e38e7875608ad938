"""Local training on a CPU, one user at a time, by the written-out gradient of `gradient`."""

from collections.abc import Sequence

import torch

from flsim.data.vocabulary import Layout
from flsim.models.language_model import Params
from flsim.training.clip import global_norm
from flsim.training.cohort.gradient import packed_batches
from flsim.training.cohort.packed_models import packed_model
from flsim.training.cohort.products import products_for
from flsim.training.cohort.steps import Participant, Steps, steps_of
from flsim.training.hparams import LocalHParams
from flsim.training.local import bound_norm


class PackedTrainer:
    """A trainer of one user after another, each from the global parameters; a `flsim.training.cohort.engine.Trainer`.

    Args:
        like: parameters of the model, for names, shapes and dtype (float32 or float64); on a CPU.
        hparams: settings of local training, in precision "float32" or "bf16".
        layout: the corpus' token layout.
    """

    def __init__(self, like: Params, hparams: LocalHParams, layout: Layout) -> None:
        self._hparams, self._layout = hparams, layout
        self._model = packed_model(like, products_for(hparams.precision, like))
        self._start: Params = {}

    def pack(self, group: Sequence[Participant]) -> list[Steps]:
        return [steps_of(records, self._layout, self._hparams, rng) for records, rng in group]

    @torch.no_grad()
    def train(self, start: Params, group: Sequence[Steps], rate: float | None = None) -> tuple[list[float], list[int]]:
        (steps,) = group
        self._start, hparams, loss = start, self._hparams, 0.0
        rate = hparams.learning_rate if rate is None else rate
        self._model.load(start)
        if hparams.is_plain:
            for batch in packed_batches(steps):
                loss += self._model.descend(batch, rate)
            return [loss], [len(steps.inputs)]
        weights = list(self._model.weights.values())
        optimizer = hparams.optimizer_over(weights, rate)
        for batch in packed_batches(steps):
            summed, gradient = self._model.gradient(batch)
            if hparams.proximal:
                for name, weight in self._model.weights.items():
                    gradient[name].add_(weight - start[name], alpha=hparams.proximal)
            gradients = list(gradient.values())
            if hparams.gradient_clip is not None:
                gradients = list(bound_norm(gradients, hparams.gradient_clip))
            for weight, own in zip(weights, gradients, strict=True):
                weight.grad = own
            optimizer.step()
            loss += summed
        return [loss], [len(steps.inputs)]

    @torch.no_grad()
    def norms(self) -> list[float]:
        for name, value in self._model.weights.items():
            value.sub_(self._start[name])
        return [global_norm(self._model.weights)]

    @torch.no_grad()
    def add_updates(self, factors: Sequence[float], into: Params) -> None:
        (factor,) = factors
        if factor:
            for name, update in self._model.weights.items():
                into[name].add_(update, alpha=factor)
