"""The state of central training: a checkpoint is the state and nothing else."""

from dataclasses import dataclass, field

import torch

from flsim.models.architectures import build
from flsim.models.hparams import ModelHParams
from flsim.models.language_model import Params
from flsim.privacy.ledger import Ledger

Moments = dict[str, Params]


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
    moments: Moments = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger.zero)

    @property
    def round(self) -> int:
        """`step`, by the name of what a run counts."""
        return self.step


@dataclass(frozen=True)
class Log:
    """Sums over steps.

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
    model = build(vocabulary_size, hparams).initialize(seed)
    return CentralState(0, {name: value.detach() for name, value in model.named_parameters()})


def load_moments(optimizer: torch.optim.Optimizer, parameters: Params, moments: Moments) -> None:
    """Give a new optimizer the state of an earlier one."""
    for name, parameter in parameters.items():
        optimizer.state[parameter] = {slot: _placed(of[name], parameter) for slot, of in moments.items()}


def moments_of(optimizer: torch.optim.Optimizer, parameters: Params) -> Moments:
    """A copy of an optimizer's state, on the CPU."""
    moments: Moments = {}
    for name, parameter in parameters.items():
        for slot, value in optimizer.state[parameter].items():
            moments.setdefault(slot, {})[name] = value.cpu().clone()
    return moments


def _placed(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A copy where the parameter is; counts of steps, which Adam and RMSProp keep, stay on the CPU."""
    return value.to(parameter.device, copy=True) if value.dim() else value.clone()
