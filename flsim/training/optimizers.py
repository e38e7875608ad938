"""The optimizers of local and central steps: each is a value in this file, and no other module contains its name.

A custom optimizer, ``path/to/file.py:NAME``, is one of three things: a class of `torch.optim.Optimizer`; a function
(parameters, lr) that makes such an optimizer; or an `Optimizer` as below, whose `direction` then also runs stacked on a
GPU. A class or function gets its options, and a `weight_decay` if set, as arguments.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from flsim.base import extensions
from flsim.base.errors import InputError

BETAS, EPSILON = (0.9, 0.999), 1e-8  # defaults of torch.optim.Adam
ALPHA = 0.99  # default of torch.optim.RMSprop, whose epsilon is Adam's

Moments = Sequence[Tensor]
Over = Callable[[Iterable[Tensor], float, float, float], torch.optim.Optimizer]
Direction = Callable[[Tensor, Moments, Moments, float], tuple[Tensor, Moments]]


@dataclass(frozen=True)
class Optimizer:
    """A rule that turns a gradient into a step.

    Attributes:
        label: the optimizer's name in a table.
        over: (parameters, learning rate, momentum, weight decay) -> torch's optimizer over the parameters. This is the
            reference, and all engines on a CPU use it.
        slots: torch's names of the tensors that the optimizer stores for each weight, in the weight's shape.
        counts_steps: whether torch also stores "step", a number, for each weight.
        direction: (gradient, moments, corrections, momentum) -> (direction, new moments). Stacked users step along the
            direction: w <- w - rate * direction. `moments` are in the order of `slots`; `corrections` are Adam's 1 -
            beta^t for both of `BETAS`. None if only torch's optimizer exists.
        triton: the optimizer's branch in `flsim.training.cohort.triton_kernels`; if None, PyTorch computes `direction`.
    """

    label: str
    over: Over
    slots: tuple[str, ...] = ()
    counts_steps: bool = False
    direction: Direction | None = None
    triton: str | None = None


def _sgd(gradient: Tensor, _moments: Moments, _corrections: Moments, _momentum: float) -> tuple[Tensor, Moments]:
    """Return g, the direction of stochastic gradient descent (Robbins and Monro, 1951)."""
    return gradient, ()


SGD = Optimizer(
    "SGD",
    lambda parameters, rate, _momentum, decay: torch.optim.SGD(parameters, rate, weight_decay=decay),
    direction=_sgd,
    triton="sgd",
)


def _momentum(gradient: Tensor, moments: Moments, _corrections: Moments, momentum: float) -> tuple[Tensor, Moments]:
    """Return m <- mu m + g (Polyak, 1964), as in torch: the first m is g."""
    m = momentum * moments[0] + gradient
    return m, (m,)


MOMENTUM = Optimizer(
    "Momentum",
    lambda parameters, rate, momentum, decay: torch.optim.SGD(parameters, rate, momentum, weight_decay=decay),
    slots=("momentum_buffer",),
    direction=_momentum,
    triton="momentum",
)


def _adam(gradient: Tensor, moments: Moments, corrections: Moments, _momentum: float) -> tuple[Tensor, Moments]:
    """Return m / (1 - beta_1^t) / (sqrt(v / (1 - beta_2^t)) + epsilon) (Kingma and Ba, 2015, Algorithm 1)."""
    m, v = (
        beta * moment + (1 - beta) * power
        for moment, power, beta in zip(moments, (gradient, gradient**2), BETAS, strict=True)
    )
    first, second = corrections
    return m / first / ((v / second).sqrt() + EPSILON), (m, v)


ADAM = Optimizer(
    "Adam",
    lambda parameters, rate, _momentum, decay: torch.optim.Adam(parameters, rate, weight_decay=decay),
    slots=("exp_avg", "exp_avg_sq"),
    counts_steps=True,
    direction=_adam,
    triton="adam",
)


def _rmsprop(gradient: Tensor, moments: Moments, _corrections: Moments, _momentum: float) -> tuple[Tensor, Moments]:
    """Return g / (sqrt(v) + epsilon) with v <- alpha v + (1 - alpha) g^2 (Tieleman and Hinton, 2012)."""
    v = ALPHA * moments[0] + (1 - ALPHA) * gradient**2
    return gradient / (v.sqrt() + EPSILON), (v,)


RMSPROP = Optimizer(
    "RMSProp",
    lambda parameters, rate, _momentum, decay: torch.optim.RMSprop(parameters, rate, weight_decay=decay),
    slots=("square_avg",),
    counts_steps=True,
    direction=_rmsprop,
    triton="rmsprop",
)

OPTIMIZERS = {"sgd": SGD, "momentum": MOMENTUM, "adam": ADAM, "rmsprop": RMSPROP}


def optimizer_named(name: str) -> Optimizer:
    """Return an optimizer by a key of `OPTIMIZERS`, or a custom one; InputError if its file has no such optimizer."""
    thing = extensions.resolve(name, OPTIMIZERS, "optimizer")
    if isinstance(thing, Optimizer) and extensions.options_of(name):
        raise InputError(f"{name}: takes no options; name a class or a function with options")
    if not callable(thing) and not isinstance(thing, Optimizer):
        raise InputError(
            f"{name}: must be a torch.optim.Optimizer, a function that returns one, or an Optimizer of flsim"
        )
    return thing if isinstance(thing, Optimizer) else _own(name, thing)


@lru_cache(maxsize=32)
def _own(name: str, make: Callable[..., object]) -> Optimizer:
    """Return an `Optimizer` that wraps a custom class of torch optimizers, or a function that returns an optimizer."""

    def over(parameters: Iterable[Tensor], rate: float, _momentum: float, decay: float) -> torch.optim.Optimizer:
        settings = {"lr": rate} | ({"weight_decay": decay} if decay else {}) | extensions.options_of(name)
        try:
            with extensions.custom_code_errors(InputError):
                made = make(parameters, **settings)
        except TypeError as error:  # raised by the call, not inside the custom code
            raise InputError(f"{name}: cannot be created from (parameters, {', '.join(settings)}): {error}") from error
        if not isinstance(made, torch.optim.Optimizer) or not all("lr" in group for group in made.param_groups):
            raise InputError(
                f"{name}: returned {type(made).__name__}, not a torch.optim.Optimizer with a learning rate"
            )
        return made

    return Optimizer(extensions.parts(name)[1] + extensions.options_as_text(name), over)


def refuse_low_precision(name: str, precision: str) -> None:
    """Raise InputError if an optimizer has no `direction`, without which engines train only in float32."""
    if precision != "float32" and optimizer_named(name).direction is None:
        raise InputError(
            f'optimizer "{name}" trains in float32; precision "{precision}" needs an Optimizer of flsim that has a '
            f"direction"
        )


def refuse_failing(name: str) -> None:
    """Try one step of a custom optimizer, and raise InputError if it fails."""
    if extensions.is_custom(name):
        _tried(optimizer_named(name))


def slots_of(name: str) -> tuple[str, ...]:
    """Return the slots of an optimizer's state in the weights' shape; a custom optimizer is tried for one step.

    Raises InputError if the step failed, or a checkpoint cannot store the complete state of the optimizer.
    """
    optimizer = optimizer_named(name)
    if not extensions.is_custom(name):
        return optimizer.slots
    stepped, before, weights = _tried(optimizer)
    if _settings_of(stepped) != before:
        raise InputError(
            f"{name}: its steps change param_groups, which checkpoints do not store; store this in its state"
        )
    return tuple(sorted(set().union(*(_slots_of(name, stepped.state[weight], weight) for weight in weights))))


def _tried(optimizer: Optimizer) -> tuple[torch.optim.Optimizer, list[dict[str, object]], list[Tensor]]:
    """Step once along two weights; return torch's optimizer, its settings before the step, and the weights."""
    weights = [torch.zeros(3, 2), torch.zeros(5)]
    stepping = optimizer.over(weights, 0.1, 0.9, 0.0)
    before = _settings_of(stepping)
    with extensions.custom_code_errors(InputError):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        stepping.step()
    return stepping, before, weights


def _settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _slots_of(name: str, state: Mapping[str, object], weight: Tensor) -> set[str]:
    """Return the slots of a weight's state that have the weight's shape."""
    for slot, value in state.items():
        shape = () if slot == "step" else weight.shape
        if not isinstance(value, Tensor) or value.shape != shape or not slot.isidentifier():
            kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise InputError(
                f"{name}: stores {slot!r}, {kind}, for a weight of shape {tuple(weight.shape)}; a checkpoint holds "
                f'tensors of the weight\'s shape, and "step", a tensor of one number'
            )
    return set(state) - {"step"}
