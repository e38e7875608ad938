"""The first state of central training, the log of its steps, and the state of torch's optimizers."""

from dataclasses import dataclass

import torch

from flsim.models.architectures import build
from flsim.models.language_model import ModelSettings, Params
from flsim.training.state import Moments, State


@dataclass(frozen=True)
class Log:
    """Sums over some steps.

    Attributes:
        loss: summed cross-entropy in nats, each step's before the step.
        tokens: number of positions in `loss`.
        records: number of records.
    """

    loss: float = 0.0
    tokens: int = 0
    records: int = 0

    def merge(self, other: "Log") -> "Log":
        return Log(self.loss + other.loss, self.tokens + other.tokens, self.records + other.records)


def init(vocabulary_size: int, hparams: ModelSettings, seed: int) -> State:
    model = build(vocabulary_size, hparams).initialize(seed)
    return State(0, {name: value.detach() for name, value in model.trainable.items()})


def load_moments(optimizer: torch.optim.Optimizer, parameters: Params, moments: Moments) -> None:
    """Give a new optimizer the state of an earlier one."""
    for name, parameter in parameters.items():
        optimizer.state[parameter] = {slot: _placed(values[name], parameter) for slot, values in moments.items()}


def moments_of(optimizer: torch.optim.Optimizer, parameters: Params) -> Moments:
    """Return a copy of an optimizer's state, on the CPU."""
    moments: Moments = {}
    for name, parameter in parameters.items():
        for slot, value in optimizer.state[parameter].items():
            moments.setdefault(slot, {})[name] = value.cpu().clone()
    return moments


def _placed(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy on the parameter's device; counts of steps, which Adam and RMSProp keep, stay on the CPU."""
    return value.to(parameter.device, copy=True) if value.dim() else value.clone()
