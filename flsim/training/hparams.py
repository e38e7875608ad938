"""The settings of local training, for whichever engine trains."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from flsim.base.errors import InputError, at_least_one
from flsim.base.extensions import Own, refuse_unknown
from flsim.training.optimizers import OPTIMIZERS, optimizer_named
from flsim.training.schedules import SCHEDULES, rate_at

Precision = Literal["float32", "tf32", "bf16"]


@dataclass(frozen=True)
class LocalHParams:
    """Settings of the local training of one user in one round.

    Each user begins with a fresh optimizer state in each round. A step's gradient is that of the mean cross-entropy
    (nats) over the batch's real positions. Then `proximal` adds its term, and `gradient_clip` bounds the sum.

    Attributes:
        epochs: passes over the user's records.
        batch_size: records in a step; the last batch of an epoch may be smaller.
        learning_rate: the optimizer's highest learning rate, which `schedule` multiplies by its factor.
        optimizer: a key of `flsim.training.optimizers.OPTIMIZERS`. "sgd" is plain; "momentum" adds `momentum` times the
            last step's direction; "adam" and "rmsprop" have torch's defaults. ``path/to/file.py:NAME`` is a user's own.
        momentum: factor of the last step's direction, for optimizer "momentum".
        gradient_clip: bound on the L2 norm of a step's whole gradient; None for no bound.
        proximal: mu of FedProx, which adds mu / 2 ||w - w_global||^2 to the loss (Li et al., 2020, equation 2).
        max_records: a user with more records trains on that many of them, drawn anew each round; None for all.
        precision: precision of matrix products: "float32"; "tf32", on GPUs that have it; or "bf16", which keeps weights
            in float32 and has products and activations in bfloat16. The last two need the cohort engine.
        schedule: change of the learning rate from round to round. "constant" keeps it; "linear" and "cosine" lower it
            towards 0 over the rounds of the run. ``path/to/file.py:NAME`` is a user's own.

    Examples:
        >>> flsim.LocalSGD(batch_size=4, learning_rate=1.0)                    # doctest: +SKIP
    """

    epochs: int = 1
    batch_size: int = 16
    learning_rate: float = 0.3
    optimizer: Annotated[str, Own("optimizer")] = "sgd"
    momentum: float = 0.9
    gradient_clip: float | None = None
    proximal: float = 0.0
    max_records: int | None = None
    precision: Precision = "float32"
    schedule: Annotated[str, Own("schedule")] = "constant"

    def __post_init__(self) -> None:
        at_least_one(epochs=self.epochs, batch_size=self.batch_size)
        refuse_unknown(self.optimizer, OPTIMIZERS, "optimizer")
        refuse_unknown(self.schedule, SCHEDULES, "schedule")
        if self.max_records is not None:
            at_least_one(max_records=self.max_records)
        for name in ("learning_rate", "gradient_clip"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"{name} must be above 0, found {value}")
        if not 0 <= self.momentum < 1:
            raise InputError(f"momentum must be at least 0 and below 1, found {self.momentum}")
        if not 0 <= self.proximal < math.inf:
            raise InputError(f"proximal must not be negative, found {self.proximal}")

    @property
    def is_plain(self) -> bool:
        """Return whether a step only subtracts the gradient, times the learning rate, from the weights."""
        return self.optimizer == "sgd" and self.gradient_clip is None and not self.proximal

    def rate(self, round_: int, rounds: int | None) -> float:
        """Return the learning rate of a round.

        Args:
            round_: the round, from 0.
            rounds: number of rounds of the run; None is enough for a constant schedule.

        Raises:
            InputError: a user's own schedule failed.
        """
        if self.schedule == "constant":
            return self.learning_rate
        if rounds is None:
            raise ValueError(f"schedule {self.schedule!r} needs the number of rounds")
        return rate_at(self.learning_rate, self.schedule, round_, rounds)

    def optimizer_over(self, parameters: list[Tensor], rate: float | None = None) -> torch.optim.Optimizer:
        """Return a new torch optimizer over parameters; a `rate` of None stands for `learning_rate`."""
        rate = self.learning_rate if rate is None else rate
        return optimizer_named(self.optimizer).over(parameters, rate, self.momentum, 0.0)

    def examples(self, records: int) -> int:
        """Return how many of a user's records it trains on in a round, from how many it has."""
        return records if self.max_records is None else min(records, self.max_records)
