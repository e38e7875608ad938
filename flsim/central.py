"""Central training over records as (init, step) over an explicit state: a checkpoint is the state and nothing else.

Thakkar et al. (2020), section 4.2: SGD, Momentum or Adam over records in random order, or in sequence through users.
With clip, or clip and noise, it is DP-SGD over records (`flsim.privacy.record_level`).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from flsim.data.records import Batch
from flsim.errors import Diverged, InputError, at_least_one
from flsim.model.cifg import CIFGLanguageModel, ModelHParams, Params
from flsim.model.loss import loss_sum
from flsim.privacy.ledger import Entry, Ledger
from flsim.privacy.mechanism import PrivacyHParams
from flsim.progress import progress
from flsim.train.divergence import refuse_absurd_loss
from flsim.train.records import Order, RecordSequence, poisson_lot, positions_at, steps_per_epoch


@dataclass(frozen=True)
class CentralHParams:
    """Training over minibatches of records.

    Attributes:
        epochs: passes over all records; under DP-SGD, of an expected record.
        steps: number of steps, in place of epochs.
        batch_size: records in a step; under DP-SGD the expected number.
        optimizer: of torch, with its defaults but for the settings below.
        learning_rate: on the mean cross-entropy (nats) over a batch's real positions.
        momentum: of optimizer "momentum".
    """

    epochs: int = 1
    steps: int | None = None
    batch_size: int = 32
    optimizer: Literal["sgd", "momentum", "adam", "rmsprop"] = "sgd"
    learning_rate: float = 0.005
    momentum: float = 0.9

    def __post_init__(self) -> None:
        at_least_one(epochs=self.epochs, batch_size=self.batch_size)
        if self.steps is not None:
            at_least_one(steps=self.steps)
        if not 0 < self.learning_rate < math.inf:
            raise InputError(f"learning_rate must be above 0, found {self.learning_rate}")
        if not 0 <= self.momentum < 1:
            raise InputError(f"momentum must be at least 0 and below 1, found {self.momentum}")

    def steps_over(self, records: int) -> int:
        """Number of steps of the whole training."""
        return self.steps or self.epochs * steps_per_epoch(records, self.batch_size)

    def optimizer_over(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if self.optimizer == "adam":
            return torch.optim.Adam(parameters, self.learning_rate)
        if self.optimizer == "rmsprop":
            return torch.optim.RMSprop(parameters, self.learning_rate)
        return torch.optim.SGD(parameters, self.learning_rate, self.momentum if self.optimizer == "momentum" else 0.0)


@dataclass(frozen=True)
class CentralState:
    """All that training carries from one step to the next.

    Attributes:
        step: number of completed steps.
        params: the model's parameters.
        moments: the optimizer's state: torch's name of it -> parameter -> tensor.
        ledger: what the completed steps released.
    """

    step: int
    params: Params
    moments: dict[str, Params] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger.zero)

    @property
    def round(self) -> int:
        """`step`, by the name of what a run counts."""
        return self.step

    def to(self, device: torch.device | str) -> "CentralState":
        """The same, with the tensors on a device; counts of steps, which Adam and RMSProp keep, stay on the CPU."""
        moments = {
            slot: {name: value.to(device) if value.dim() else value for name, value in of.items()}
            for slot, of in self.moments.items()
        }
        return replace(self, params={name: value.to(device) for name, value in self.params.items()}, moments=moments)


@dataclass(frozen=True)
class Log:
    """Sums over the steps since the last state.

    Attributes:
        loss: cross-entropy in nats before each step.
        tokens: number of positions that it is over.
        records: number of records.
    """

    loss: float = 0.0
    tokens: int = 0
    records: int = 0

    def merge(self, other: "Log") -> "Log":
        return Log(self.loss + other.loss, self.tokens + other.tokens, self.records + other.records)


def init(vocabulary_size: int, hparams: ModelHParams, seed: int) -> CentralState:
    model = CIFGLanguageModel(vocabulary_size, hparams).initialize(seed)
    return CentralState(0, {name: value.detach() for name, value in model.named_parameters()})


@dataclass(frozen=True)
class CentralTraining:
    """What a step needs besides the state.

    Attributes:
        model: scratch: a step overwrites its parameters. Computation is where it is.
        records: of all users.
        hparams: training.
        seed: the experiment's; batches, lots and noise are functions of (seed, step).
        order: "iid" permutes all records anew each epoch; "sequence" goes user by user, each epoch the same way.
        privacy: mechanism "none" is plain training; "clip" and "dp" are DP-SGD, a record in the place of a user.
        physical_batch: under DP-SGD, records whose gradients are in memory at a time.

    Raises:
        InputError: what DP-SGD over records cannot do is asked for.
    """

    model: CIFGLanguageModel
    records: RecordSequence
    hparams: CentralHParams
    seed: int
    order: Order = "iid"
    privacy: PrivacyHParams = field(default_factory=PrivacyHParams)
    physical_batch: int = 8

    def __post_init__(self) -> None:
        at_least_one(physical_batch=self.physical_batch)
        if self.privacy.mechanism == "none":
            return
        if self.order == "sequence":
            raise InputError('order "sequence" has no privacy accounting; with clip or noise use order "iid"')
        if self.privacy.target_quantile is not None:
            raise InputError("target_quantile adapts the clip of users' updates; central training has a fixed clip")
        poisson_lot(0, len(self.records), self.hparams.batch_size, self.seed)

    def batch(self, step: int) -> Batch:
        """What a step, from 0, reads."""
        size, records = self.hparams.batch_size, len(self.records)
        if self.privacy.mechanism == "none":
            return self.records.batch(positions_at(step, records, size, self.order, self.seed))
        return self.records.batch(poisson_lot(step, records, size, self.seed))

    def step(self, state: CentralState) -> tuple[CentralState, Log]:
        """The next state, a function of the one before; the loss is of before the step.

        Raises:
            Diverged: the loss or the new parameters are not finite, or the loss is absurd.
        """
        named = dict(self.model.named_parameters())
        self.model.load_state_dict(state.params)
        optimizer = self.hparams.optimizer_over(list(named.values()))
        for name, parameter in named.items():
            optimizer.state[parameter] = {slot: of[name].clone() for slot, of in state.moments.items()}
        batch, device = self.batch(state.step), self.model.embedding.device
        inputs, targets = torch.from_numpy(batch.inputs).to(device), torch.from_numpy(batch.targets).to(device)
        loss, tokens = self._descend(optimizer, inputs, targets, state.step)
        params = {name: parameter.detach().clone() for name, parameter in named.items()}
        moments: dict[str, Params] = {}
        for name, parameter in named.items():
            for slot, value in optimizer.state[parameter].items():
                moments.setdefault(slot, {})[name] = value
        self._refuse_divergence(state.step, params, loss, tokens)
        ledger = state.ledger.record(self._entry())
        return CentralState(state.step + 1, params, moments, ledger), Log(loss, tokens, len(inputs))

    def _descend(
        self, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor, step: int
    ) -> tuple[float, int]:
        """One step in place; the summed loss and its number of positions."""
        if self.privacy.clip is not None:
            from flsim.privacy.record_level import private_step  # opacus takes a second, which plain training saves

            return private_step(
                self.model,
                optimizer,
                inputs,
                targets,
                clip=self.privacy.clip,
                noise_multiplier=self.privacy.noise_multiplier,
                expected=self.hparams.batch_size,
                seed=self.seed,
                step=step,
                physical_batch=self.physical_batch,
            )
        parameters = list(self.model.parameters())
        loss, tokens = loss_sum(self.model, inputs, targets)
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss / tokens, parameters), strict=True):
            parameter.grad = gradient
        optimizer.step()
        return loss.item(), tokens

    def _entry(self) -> Entry:
        """Without noise there is no bound, however records were drawn; no entry would say that nothing was released."""
        records, size = len(self.records), self.hparams.batch_size
        if self.privacy.mechanism == "none":
            return Entry("fixed-size", records, min(size, records), noise_multiplier=0.0, rounds=1)
        return Entry("poisson", records, size, self.privacy.noise_multiplier, rounds=1)

    def _refuse_divergence(self, step: int, params: Params, loss: float, tokens: int) -> None:
        if not math.isfinite(loss) or not all(bool(torch.isfinite(value).all()) for value in params.values()):
            raise Diverged(f"step {step + 1}: values that are not finite; most likely learning_rate is too high")
        refuse_absurd_loss(f"step {step + 1}", loss, tokens, len(params["embedding"]), "learning_rate")


def train_central(
    state: CentralState,
    training: CentralTraining,
    until_step: int,
    stop_at: Callable[[int], bool] = lambda _: False,
    title: str = "training",
) -> Iterator[tuple[CentralState, Log]]:
    """Train, and hand out the state where it is asked for: save or evaluate it there, or leave the loop.

    Args:
        state: where to go on from; it stays as it is.
        training: what to do.
        until_step: the last step.
        stop_at: whether to hand out the state after that many steps; the last one always is.
        title: of the progress that is shown.

    Yields:
        The state, on the CPU, and the log of the steps since the one before.

    Raises:
        Diverged: see `CentralTraining.step`.
    """
    state, log = state.to(training.model.embedding.device), Log()
    with progress(title, until_step, state.step) as advance:
        while state.step < until_step:
            state, done = training.step(state)
            log = log.merge(done)
            advance(state.step, f"loss {done.loss / max(done.tokens, 1):.2f}")
            if state.step == until_step or stop_at(state.step):
                yield state.to("cpu"), log
                log = Log()
