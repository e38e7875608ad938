"""Server optimizers: pairs of functions (init, apply) that turn the averaged update into a step.

FedAvg is `sgd` at rate 1. Reddi et al., "Adaptive Federated Optimization" (2021), Algorithm 2, for `adam`, `yogi` and
`adagrad`; Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification" (2019), for `momentum`. A custom optimizer is a `ServerOptimizer`, or a function of options that returns
one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from typing import Annotated

import torch
from torch import Tensor

from flsim.base import extensions
from flsim.base.errors import InputError, RunFailed
from flsim.base.settings import Fraction, Options, Positive, settings
from flsim.models.architectures import ModelHParams, build, without_values
from flsim.models.language_model import Params
from flsim.training.update import (
    Milestones,
    Moments,
    ScheduleName,
    global_norm,
    rate_at,
    refuse_wrong_milestones,
    transposed,
)


@dataclass(frozen=True)
class ServerOptimizer:
    """A rule by which the server steps along the averaged update, after any noise.

    Attributes:
        label: the optimizer's name in a table, after "FedAvg+"; "" for none. A custom optimizer is named NAME.
        init: (x, settings) -> moments before the first step. x are the parameters by name. Moments are by slot, then by
            parameter, in the parameter's shape; slot "step" has one number per parameter.
        apply: (x, D, moments, eta, settings) -> (x, moments) after a step. D is the averaged update by name, eta the
            learning rate of the round, settings a `ServerOptimizerHParams`. All tensors are float64; results are stored
            in the dtype of the parameters.
    """

    label: str
    init: Callable[[Params, "ServerOptimizerHParams"], Moments]
    apply: Callable[[Params, Params, Moments, float, "ServerOptimizerHParams"], tuple[Params, Moments]]


Slots = dict[str, Tensor]
Init = Callable[[Tensor, "ServerOptimizerHParams"], Slots]
Direction = Callable[[Tensor, Slots, "ServerOptimizerHParams"], tuple[Tensor, Slots]]


def elementwise(label: str, init: Init, direction: Direction) -> ServerOptimizer:
    """Return a server optimizer that treats each tensor separately: x <- x + eta * direction."""

    def init_all(x: Params, settings: "ServerOptimizerHParams") -> Moments:
        return transposed({name: init(value, settings) for name, value in x.items()})

    def apply_all(
        x: Params, update: Params, moments: Moments, eta: float, settings: "ServerOptimizerHParams"
    ) -> tuple[Params, Moments]:
        stepped, after = {}, {}
        for name, value in x.items():
            slots = {slot: values[name] for slot, values in moments.items()}
            along, after[name] = direction(update[name], slots, settings)
            stepped[name] = value + eta * along
        return stepped, transposed(after)

    return ServerOptimizer(label, init_all, apply_all)


SGD = elementwise("", lambda _x, _settings: {}, lambda update, _slots, _settings: (update, {}))


def _momentum(update: Tensor, slots: Slots, settings: "ServerOptimizerHParams") -> tuple[Tensor, Slots]:
    """Return m, for m <- beta m + D and x <- x + eta m."""
    m = settings.server_momentum * slots["m"] + update
    return m, {"m": m}


MOMENTUM = elementwise("Momentum", lambda x, _settings: {"m": torch.zeros_like(x)}, _momentum)


def _both(x: Tensor, settings: "ServerOptimizerHParams") -> Slots:
    return {"m": torch.zeros_like(x), "v": torch.full_like(x, settings.server_tau**2)}


def _adaptive(second: Callable[[Tensor, Tensor, float], Tensor]) -> Direction:
    """Return m / (sqrt(v) + tau), where m <- beta m + (1 - beta) D and v <- second(v, D^2, beta2)."""

    def direction(update: Tensor, slots: Slots, settings: "ServerOptimizerHParams") -> tuple[Tensor, Slots]:
        beta = settings.server_momentum
        m = beta * slots["m"] + (1 - beta) * update
        v = second(slots["v"], update.square(), settings.server_beta2)
        return m / (v.sqrt() + settings.server_tau), {"m": m, "v": v}

    return direction


ADAGRAD = elementwise("Adagrad", _both, _adaptive(lambda v, square, _beta2: v + square))
ADAM = elementwise("Adam", _both, _adaptive(lambda v, square, beta2: beta2 * v + (1 - beta2) * square))
YOGI = elementwise("Yogi", _both, _adaptive(lambda v, square, beta2: v - (1 - beta2) * square * torch.sign(v - square)))

SERVER_OPTIMIZERS = {"sgd": SGD, "momentum": MOMENTUM, "adam": ADAM, "yogi": YOGI, "adagrad": ADAGRAD}
# optimizers whose step is proportional to the sum of updates; the others divide by its size
ALONG_UPDATE = ("sgd", "momentum")


@settings
class ServerOptimizerHParams:
    """Settings of server optimizers; each optimizer reads only the settings in its equations.

    The adaptive optimizers start with m at 0 and v at tau^2, and have no bias correction, as in Reddi et al. (2021),
    Algorithm 2.

    Attributes:
        server_optimizer: Optimizer that applies the averaged update D to the global model; "sgd" adds eta D.
        server_learning_rate: Learning rate eta of the server at the highest value of `server_schedule`; 1 with "sgd" is
            plain averaging. Unit: none.
        server_momentum: Momentum beta of the server optimizer, beta_1 of "adam" and "yogi"; Reddi et al. use 0 for
            "adagrad". Unit: none.
        server_beta2: Decay beta_2 of the second moment in "adam" and "yogi". Unit: none.
        server_tau: Degree of adaptivity tau of "adam", "yogi" and "adagrad"; smaller values are more adaptive. If tau
            is far above the entries of the mean update, these optimizers become plain averaging with a small learning
            rate. docs/optimizers.md shows how to choose it. Unit: none.
        server_schedule: Schedule of the server's learning rate over the rounds of the run: "constant"; "linear" or
            "cosine", which decrease towards 0; or "steps", which multiplies it by `server_milestone_factor` at each of
            the `server_milestones`.
        server_milestones: With server_schedule "steps": when the learning rate of the server changes: a number of
            completed rounds, e.g. 120, or a fraction of training below 1, e.g. 0.6. Unit: rounds.
        server_milestone_factor: With server_schedule "steps": factor of the learning rate at each milestone. Unit:
            none.
        server_optimizer_options: Options of a custom server optimizer, e.g. { decay = 0.5 }:
            keyword arguments, numbers or text. Unit: none.
        server_schedule_options: Options of a custom schedule, e.g. { floor = 0.1 }: keyword
            arguments, numbers or text. Unit: none.

    Examples:
        >>> flsim.ServerOptimizer("adam", server_learning_rate=0.01)           # doctest: +SKIP
    """

    server_optimizer: Annotated[str, extensions.CustomName("server optimizer", SERVER_OPTIMIZERS)] = "sgd"
    server_learning_rate: Positive = 1.0
    server_momentum: Fraction = 0.9
    server_beta2: Fraction = 0.99
    server_tau: Positive = 1e-3
    server_schedule: ScheduleName = "constant"
    server_milestones: Milestones = ()
    server_milestone_factor: Positive = 0.1
    server_optimizer_options: Options = field(default_factory=dict)
    server_schedule_options: Options = field(default_factory=dict)

    def __post_init__(self) -> None:
        extensions.refuse_wrong_options(self, "server_optimizer", "server_schedule")
        extensions.refuse_unused(self, "server_momentum", "server_optimizer", tuple(SERVER_OPTIMIZERS)[1:])
        refuse_wrong_milestones(self.server_schedule, self.server_milestones, "server_")

    def server_rate(self, round_: int, rounds: int) -> float:
        """Return eta of a round, from 0, in a run of `rounds` rounds."""
        milestones, factor = self.server_milestones, self.server_milestone_factor
        rate, schedule = self.server_learning_rate, extensions.configured(self, "server_schedule")
        return rate_at(rate, schedule, round_, rounds, milestones=milestones, factor=factor)

    @property
    def server_label(self) -> str:
        """Return the server optimizer's name in a table, "" for plain averaging, without executing custom code."""
        return extensions.label_of(extensions.configured(self, "server_optimizer"), SERVER_OPTIMIZERS)


def init(params: Params, hparams: ServerOptimizerHParams) -> Moments:
    """Return the optimizer's state before the first step, by slot and parameter; InputError if a custom one fails."""
    with extensions.custom_code_errors(InputError):
        return _optimizer_of(hparams).init(params, hparams)


def apply(
    params: Params, mean: Params, moments: Moments, hparams: ServerOptimizerHParams, rate: float | None = None
) -> tuple[Params, Moments]:
    """Return the next parameters and state, computed in float64, at eta `rate`, and stored in the parameters' type."""
    eta = hparams.server_learning_rate if rate is None else rate
    exact = {slot: {name: value.double() for name, value in values.items()} for slot, values in moments.items()}
    with extensions.custom_code_errors(RunFailed):
        x = {name: value.double() for name, value in params.items()}
        stepped, after = _optimizer_of(hparams).apply(x, mean, exact, eta, hparams)
    next_moments = {slot: _as_kept(values, params) for slot, values in after.items()}
    return _as_kept(stepped, params), next_moments


def slots_of(hparams: ServerOptimizerHParams, vocabulary_size: int, model: ModelHParams) -> list[str]:
    """Return the slots of the optimizer's state that have the parameters' shapes."""
    # A custom optimizer may read values.
    network = (build if extensions.is_custom(hparams.server_optimizer) else without_values)(vocabulary_size, model)
    x = {name: value.detach() for name, value in network.trainable.items()}
    return sorted(init(x, hparams).keys() - {"step"})


def refuse_unfit(hparams: ServerOptimizerHParams, vocabulary_size: int, model: ModelHParams) -> None:
    """Try a custom optimizer on the model's parameters, before training; raise InputError if it fails or is unfit."""
    name = hparams.server_optimizer
    if not extensions.is_custom(name):
        return
    x = {key: value.detach().double() for key, value in build(vocabulary_size, model).trainable.items()}
    update = {key: torch.ones_like(value) for key, value in x.items()}
    optimizer = _optimizer_of(hparams)
    with extensions.custom_call_errors(name, "init(x, settings) and apply(x, D, moments, eta, settings)", InputError):
        moments = optimizer.init(x, hparams)
        stepped, after = optimizer.apply(x, update, moments, hparams.server_learning_rate, hparams)
        slots, slots_after = sorted(moments), sorted(after)
    if slots != slots_after:
        raise InputError(f"{name}: the step changes the slots {slots} into {slots_after}; keep the same slots")
    shapes = {key: value.shape for key, value in x.items()}
    for slot, values in {"x": stepped, **after}.items():
        expected = dict.fromkeys(shapes, torch.Size()) if slot == "step" else shapes
        if {key: getattr(value, "shape", None) for key, value in values.items()} != expected or not slot.isidentifier():
            raise InputError(f"{name}: {slot!r}: names or shapes differ from those of the model's parameters")


def _optimizer_of(hparams: ServerOptimizerHParams) -> ServerOptimizer:
    name = extensions.configured(hparams, "server_optimizer")
    optimizer: object = extensions.resolve(name, SERVER_OPTIMIZERS, "server_optimizer")
    if extensions.options_of(name) and isinstance(optimizer, ServerOptimizer):
        written = hparams.server_optimizer
        raise InputError(f"{written}: takes no options; name a function that takes options")
    if callable(optimizer):
        needed = [one for one in signature(optimizer).parameters.values() if one.default is one.empty]
        if extensions.options_of(name) or not needed:
            optimizer = extensions.made(name, optimizer)
    if not isinstance(optimizer, ServerOptimizer):
        raise InputError(
            f"{hparams.server_optimizer}: found {type(optimizer).__name__}, not a ServerOptimizer; create one "
            "with flsim.algorithms.server_optimizers.ServerOptimizer(label, init, apply)"
        )
    return optimizer


def _as_kept(values: Params, like: Params) -> Params:
    return {name: value.to(like[name].dtype) for name, value in values.items()}


@dataclass(frozen=True)
class ServerStep:
    """The sizes of a step of the server; norms are over all parameters, and None if no update was averaged.

    `rms` is of the averaged update's entries; `wraps` are values of the sum beyond the range of secure aggregation.
    """

    mean_norm: float | None
    step_norm: float
    rms: float | None
    wraps: int = 0

    @property
    def ratio(self) -> float | None:
        """The effective step: the norm of the step divided by that of the averaged update; None if the latter is 0."""
        return self.step_norm / self.mean_norm if self.mean_norm else None

    @classmethod
    def between(cls, before: Params, after: Params, mean: Params | None) -> "ServerStep":
        """Return the step between two sets of parameters along an averaged update; None if no update was averaged."""
        step_norm = global_norm({name: value.double() - before[name].double() for name, value in after.items()})
        if mean is None:
            return cls(None, step_norm, None)
        mean_norm = global_norm(mean)
        return cls(mean_norm, step_norm, mean_norm / math.sqrt(sum(value.numel() for value in mean.values())))
