"""The settings, records and first state of central training, and the interface of its engines."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from flsim.base.errors import InputError, at_least_one
from flsim.base.extensions import configured, is_custom
from flsim.data.records import Records, RecordsByRound
from flsim.data.vocabulary import Layout
from flsim.models.architectures import build, class_of, restore, with_low_precision
from flsim.models.cifg import CIFGLanguageModel
from flsim.models.language_model import Capabilities, ModelSettings, NextWordModel, Params, TrainableModel
from flsim.privacy.ledger import Entry
from flsim.privacy.mechanism import PrivacyHParams
from flsim.training.central.hparams import CentralHParams, Order, poisson_lot, positions_at
from flsim.training.cohort.packing import Steps, lay_out
from flsim.training.local import draws
from flsim.training.optimizers import refuse_low_precision, slots_of
from flsim.training.update import Moments, State, transposed


@dataclass(frozen=True)
class Log:
    loss: float = 0.0  # summed cross-entropy in nats, before each step
    tokens: int = 0  # number of positions in `loss`
    records: int = 0  # number of records

    def merge(self, other: "Log") -> "Log":
        return Log(self.loss + other.loss, self.tokens + other.tokens, self.records + other.records)


def init(vocabulary_size: int, hparams: ModelSettings, seed: int) -> State:
    model = build(vocabulary_size, hparams).initialize(seed)
    return State(0, {name: value.detach() for name, value in model.trainable.items()})


def load_moments(optimizer: torch.optim.Optimizer, parameters: Params, moments: Moments) -> None:
    for name, parameter in parameters.items():
        optimizer.state[parameter] = {
            # counts of steps, which Adam and RMSProp store, remain on the CPU
            slot: value.to(parameter.device, copy=True) if (value := values[name]).dim() else value.clone()
            for slot, values in moments.items()
        }


def moments_of(optimizer: torch.optim.Optimizer, parameters: Params) -> Moments:
    """Return a copy of an optimizer's state, on the CPU."""
    states = {name: optimizer.state[parameter] for name, parameter in parameters.items()}
    return transposed({name: {slot: value.cpu().clone() for slot, value in of.items()} for name, of in states.items()})


EngineName = Literal["fused", "autograd"]


@dataclass(frozen=True)
class Chunk:
    """The records that consecutive steps read."""

    first: int  # the first of the steps, from 0
    records: Records  # the records of all steps, one step after another
    counts: NDArray[np.int64]  # int64 [steps], number of records of each step; under DP-SGD it can be 0

    def __len__(self) -> int:
        return len(self.counts)

    def positions(self, layout: Layout) -> Steps:
        step = np.repeat(np.arange(len(self)), self.counts)
        return lay_out(self.records, layout, np.arange(len(self.records)), step, len(self))


class Engine(Protocol):
    """An engine with parameters and an optimizer, which trains the parameters in place."""

    def pack(self, chunk: Chunk) -> Any:
        """Return the argument of `train`; can run in another thread while an earlier chunk trains."""

    def train(self, packed: Any) -> tuple[Sequence[float], Sequence[int]]:
        """Train; return each step's summed cross-entropy (nats) before the step, and its number of positions."""

    def params(self) -> Params:
        """Return a copy of the parameters, on the CPU."""

    def moments(self) -> Moments:
        """Return a copy of the optimizer's state, on the CPU; see `State.moments`."""


@dataclass(frozen=True)
class CentralTask:
    """The data and settings of central training, without the state; InputError if DP-SGD does not support them.

    Batches, lots, dropout and noise are functions of (`seed`, step). `order` "iid" permutes all records in each epoch;
    "sequence" uses the order of users. Mechanisms "clip" and "dp" of `privacy` are DP-SGD, with records instead of
    users, and the gradients of `physical_batch` records in memory at a time. A schedule ends at `steps`; None for the
    number that `hparams.steps_over` returns. `model` None is a CIFG with the sizes of the tensors in the state.
    """

    records: RecordsByRound
    hparams: CentralHParams
    seed: int
    order: Order = "iid"
    privacy: PrivacyHParams = field(default_factory=PrivacyHParams)
    steps: int | None = None
    device: str = "cpu"
    engine: EngineName = "fused"
    physical_batch: int = 8
    model: ModelSettings | None = None

    def __post_init__(self) -> None:
        at_least_one(physical_batch=self.physical_batch)
        if not self.records.records:
            raise InputError("there are no training records; import a corpus whose train split has users")
        slots_of(
            configured(self.hparams, "optimizer")
        )  # a custom optimizer is tried, because its state must fit in checkpoints
        if self.hparams.dropout and not issubclass(class_of(self.architecture), NextWordModel):
            raise InputError(
                f"training.dropout needs a NextWordModel, but {self.architecture} is not one; set dropout to 0"
            )
        if self.privacy.mechanism == "none":
            return
        if self.order == "sequence":
            raise InputError('order "sequence" has no privacy accounting; with clip or noise use order "iid"')
        if self.privacy.target_quantile is not None:
            raise InputError("target_quantile adapts the clip of users' updates; central training has a fixed clip")
        if self.privacy.noise != "independent":
            raise InputError("privacy.noise is for users' updates; remove it, or train federated")
        if self.model is not None and (is_custom(self.architecture) or self.model.lora):
            layout = self.records.layout
            if draws(build(layout.vocabulary_size, self.model), torch.tensor([[layout.bos, layout.first_word]])):
                raise InputError(
                    f"{self.architecture}: DP-SGD does not support random numbers in training, e.g. dropout; set "
                    "its probabilities to 0"
                )
        for name in ("gradient_clip", "dropout"):
            if getattr(self.hparams, name):
                raise InputError(f"{name} is not for DP-SGD, which clips each record's gradient; remove it")
        poisson_lot(0, self.records.records, self.hparams.batch_size, self.seed)

    @property
    def architecture(self) -> str:
        return "cifg" if self.model is None else self.model.architecture

    @property
    def capabilities(self) -> Capabilities:
        """Return the capabilities of the model; this executes the file of a custom model."""
        return class_of(self.architecture).capabilities

    def model_with(self, params: Params) -> TrainableModel:
        vocabulary_size = self.records.layout.vocabulary_size
        model = restore(params, self.model, vocabulary_size) if self.model else CIFGLanguageModel.from_params(params)
        return model.to(self.device)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return self.hparams.rate(step, self.steps or self.hparams.steps_over(self.records.records))

    def chunk(self, first: int, end: int) -> Chunk:
        """Return the records that the steps from `first` to `end` - 1 read; in a step, those of pseudo-users last."""
        size, records = self.hparams.batch_size, self.records.records
        if self.privacy.mechanism == "none":
            chosen = [positions_at(step, records, size, self.order, self.seed) for step in range(first, end)]
        else:
            chosen = [poisson_lot(step, records, size, self.seed) for step in range(first, end)]
        for index, step in enumerate(range(first, end)):
            if len(users := self.records.extra.users_in(step)):
                chosen[index] = np.concatenate([chosen[index], records + self.records.extra.records_of(users)])
        sources = [self.records.at(step) for step in range(first, end)]
        changes = [step for step, (old, new) in enumerate(pairwise(sources), start=1) if old is not new]
        parts = [
            sources[begin].records_at(np.concatenate(chosen[begin:until]))
            for begin, until in pairwise([0, *changes, len(chosen)])
        ]
        read = Records.joined(parts) if changes else parts[0]
        return Chunk(first, read, np.array([len(positions) for positions in chosen]))

    @property
    def largest_batch(self) -> int:
        return self.hparams.batch_size + self.records.extra.most_records

    def released_by(self, steps: int) -> Entry:
        """Return the ledger's entry for this many steps, also without noise: an empty ledger would mean no release."""
        records, size = self.records.records, self.hparams.batch_size
        if self.privacy.mechanism == "none":
            return Entry("fixed-size", records, min(size, records), noise_multiplier=0.0, rounds=steps)
        return Entry("poisson", records, size, self.privacy.noise_multiplier, rounds=steps)


def refuse_precision(training: CentralTask) -> None:
    """Raise InputError if model, engine or device support only float32, and the settings have another precision."""
    precision = training.hparams.precision
    if precision == "float32":
        return
    able = training.capabilities
    if not (able.low_precision and able.stacked and able.written_out):
        raise InputError(
            f'architecture "{training.architecture}" trains in float32; training.precision "{precision}" needs '
            f"{with_low_precision()}"
        )
    if training.engine == "autograd" or training.privacy.mechanism != "none":
        raise InputError(
            f'training.precision "{precision}" needs engine "fused" without clip or noise; set it to "float32"'
        )
    if training.records.layout.prompts:
        raise InputError(f'training.precision "{precision}": the corpus has prompts; set it to "float32"')
    refuse_low_precision(configured(training.hparams, "optimizer"), precision)
    if precision == "tf32" and training.device == "cpu":
        raise InputError('training.precision "tf32" needs an NVIDIA GPU; set system.device = "cuda", or "float32"')
