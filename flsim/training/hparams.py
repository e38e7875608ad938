"""The settings of local training, for all engines."""

import math
from collections.abc import Callable
from dataclasses import field
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from flsim.base.errors import InputError
from flsim.base.extensions import (
    CustomName,
    configured,
    custom_code_errors,
    is_custom,
    made,
    refuse_wrong_options,
    resolve,
)
from flsim.base.settings import Count, Fraction, NotNegative, Options, Positive, check, settings
from flsim.training.optimizers import OPTIMIZERS, optimizer_named

# Learning rate schedules: each is a function (step or round, total) -> factor of the learning rate.
#  Central steps, local training and the server's step share them. A custom schedule, ``path/to/file.py:NAME``, is such
# a function, which can have options as further arguments. Steps and rounds count from 0, so the last one is total - 1.

Schedule = Callable[[int, int], float]


def steps(at: int, total: int, milestones: tuple[float, ...] = (), factor: float = 0.1) -> float:
    """Return `factor` to the power of passed milestones, counts or fractions of `total`, like torch's MultiStepLR."""
    return factor ** sum(at >= (round(one * total) if one < 1 else one) for one in milestones)


SAMPLES = 1_000  # number of learning rates from which their sum is estimated
SCHEDULES: dict[str, Schedule] = {
    "constant": lambda _at, _total: 1.0,
    "linear": lambda at, total: 1 - at / total,  # would be 0 one step after the last
    # half a cosine (Loshchilov and Hutter, 2017, equation 5, without restarts)
    "cosine": lambda at, total: (1 + math.cos(math.pi * (at / total))) / 2,
    "steps": steps,
}


def label_of_steps(milestones: tuple[float, ...], factor: float, whose: str = "rate") -> str:
    """Return the part of a run's name for milestones, e.g. ``"rate x0.1 at 60%"``; empty without any."""
    times = ", ".join(f"{100 * one:g}%" if one < 1 else f"{one:g}" for one in milestones)
    return f"{whose} x{factor:g} at {times}" if milestones else ""


def _milestone(at: float) -> float:
    if not (0 < at < 1 or (at >= 1 and at.is_integer())):
        raise ValueError("must be fractions of training below 1, or integers of at least 1")
    return at


ScheduleName = Annotated[str, CustomName("schedule", SCHEDULES)]
Milestones = tuple[Annotated[float, check(_milestone)], ...]


def refuse_wrong_milestones(schedule: str, milestones: tuple[float, ...], prefix: str = "") -> None:
    """Raise InputError if milestones are set without schedule "steps", or missing with it; `prefix` is for names."""
    if (schedule == "steps") != bool(milestones):
        what = "needs" if schedule == "steps" else "has no"
        raise InputError(f'{prefix}schedule "{schedule}" {what} {prefix}milestones, found {list(milestones)}')


def rate_at(
    rate: float,
    schedule: str,
    at: int,
    total: int,
    warmup: int = 0,
    milestones: tuple[float, ...] = (),
    factor: float = 0.1,
) -> float:
    """Return the learning rate of a step or round `at`, from 0: `rate` times the factor of the schedule after `warmup`.

    Milestones count from the beginning. InputError if a custom schedule failed, or its factor is negative or infinite.
    """
    if at < warmup:
        return rate * (at + 1) / warmup
    if schedule == "steps":
        return rate * steps(at, total, milestones, factor)
    with custom_code_errors(InputError):
        factor = made(schedule, resolve(schedule, SCHEDULES, "schedule"), at - warmup, max(total - warmup, 1))
    if is_custom(schedule) and not (isinstance(factor, int | float) and 0 <= factor < math.inf):
        raise InputError(
            f"{schedule}: returned the factor {factor!r} at {at:,} of {total:,}; return a finite number of at least 0"
        )
    return rate * factor


def total_rate(rate: Callable[[int], float], steps: int) -> float:
    """Return the sum of the learning rates of steps 0 to `steps` - 1; for many, an estimate from evenly spaced ones."""
    sampled = range(steps) if steps <= SAMPLES else np.linspace(0, steps - 1, SAMPLES).astype(int).tolist()
    return steps * float(np.mean([rate(step) for step in sampled]))


Precision = Literal["float32", "tf32", "bf16"]


@settings
class LocalHParams:
    """Settings of the local training of one user in one round.

    Each user begins with a fresh optimizer state in each round. A step's gradient is that of the mean cross-entropy
    (nats) over the batch's real positions. Then `proximal` adds its term, and `gradient_clip` bounds the sum.

    Attributes:
        epochs: Number of passes of a user over their records in a round. Unit: epochs.
        batch_size: Number of records in a step; the last batch of an epoch can be smaller. Unit: records.
        learning_rate: Learning rate of the optimizer at the highest value of `schedule`. Choose it by perplexity, e.g.
            with flsim tune. Unit: none.
        optimizer: Optimizer of the user. "momentum" adds `momentum` times the previous direction; "adam" and "rmsprop"
            have torch's defaults.
        momentum: Momentum of optimizer "momentum". Unit: none.
        gradient_clip: Bound on the L2 norm of the complete gradient of a step. When not set: no bound. Unit: L2 norm.
        proximal: Weight mu of FedProx's term mu / 2 ||w - w_global||^2 in the loss (Li et al., 2020, equation 2). Unit:
            none.
        max_records: Largest number of records that a user trains on in a round. Each round draws new records. When not
            set: all. Unit: records.
        precision: Precision of matrix products: "float32"; "tf32", on GPUs that support it; or "bf16", with weights in
            float32 and products in bfloat16, on GPUs also activations; on a CPU only large products, if the processor
            has instructions for bfloat16 (AMX, avx512_bf16), and float32 elsewhere. The last two need engine "cohort".
        schedule: Schedule of the learning rate over the rounds of the run: "constant"; "linear" or "cosine", which
            decrease towards 0; or "steps", which multiplies it by `milestone_factor` at each of the `milestones`.
        milestones: With schedule "steps": when the learning rate changes: a number of completed rounds, e.g. 120, or a
            fraction of training below 1, e.g. 0.6. Unit: rounds.
        milestone_factor: With schedule "steps": factor of the learning rate at each milestone. Unit: none.
        optimizer_options: Options of a custom optimizer, e.g. { beta = 0.99 }: keyword
            arguments, numbers or text. Unit: none.
        schedule_options: Options of a custom schedule, e.g. { floor = 0.1 }: keyword
            arguments, numbers or text. Unit: none.

    Examples:
        >>> flsim.LocalSGD(batch_size=4, learning_rate=1.0)                    # doctest: +SKIP
    """

    epochs: Count = 1
    batch_size: Count = 16
    learning_rate: Positive = 0.3
    optimizer: Annotated[str, CustomName("optimizer", OPTIMIZERS)] = "sgd"
    momentum: Fraction = 0.9
    gradient_clip: Positive | None = None
    proximal: NotNegative = 0.0
    max_records: Count | None = None
    precision: Precision = "float32"
    schedule: ScheduleName = "constant"
    milestones: Milestones = ()
    milestone_factor: Positive = 0.1
    optimizer_options: Options = field(default_factory=dict)
    schedule_options: Options = field(default_factory=dict)

    def __post_init__(self) -> None:
        refuse_wrong_options(self, "optimizer", "schedule")
        refuse_wrong_milestones(self.schedule, self.milestones)

    @property
    def is_plain(self) -> bool:
        """Return whether a step only subtracts the gradient, times the learning rate, from the weights."""
        return self.optimizer == "sgd" and self.gradient_clip is None and not self.proximal

    def rate(self, round_: int, rounds: int | None) -> float:
        """Return the learning rate of a round, from 0; a constant schedule needs no number of rounds."""
        if self.schedule == "constant":
            return self.learning_rate
        if rounds is None:
            raise ValueError(f"schedule {self.schedule!r} needs the number of rounds")
        milestones, factor = self.milestones, self.milestone_factor
        schedule = configured(self, "schedule")
        return rate_at(self.learning_rate, schedule, round_, rounds, milestones=milestones, factor=factor)

    def optimizer_over(self, parameters: list[Tensor], rate: float | None = None) -> torch.optim.Optimizer:
        """Return a new torch optimizer over parameters; a `rate` of None means `learning_rate`."""
        rate = self.learning_rate if rate is None else rate
        return optimizer_named(configured(self, "optimizer")).over(parameters, rate, self.momentum, 0.0)

    def examples(self, records: int) -> int:
        """Return the number of records that a user with this number of records trains on in a round."""
        return records if self.max_records is None else min(records, self.max_records)
