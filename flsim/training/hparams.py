"""What a user does with its records, whichever engine trains it."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flsim.base.errors import InputError, at_least_one

Precision = Literal["float32", "tf32", "bf16"]


@dataclass(frozen=True)
class LocalHParams:
    """Local training.

    Each user begins with a fresh optimizer state in each round. A step's gradient is that of the mean cross-entropy
    (nats) over the batch's real positions; then `proximal` adds its term, then `gradient_clip` bounds the sum.

    Attributes:
        epochs: passes over the records.
        batch_size: records in a step; the last batch of an epoch may be smaller.
        learning_rate: of the optimizer.
        optimizer: "sgd"; "momentum" adds `momentum` times the last step's direction; "adam" has torch's defaults.
        momentum: of optimizer "momentum".
        gradient_clip: bound on the L2 norm of a step's whole gradient; None for none.
        proximal: mu of FedProx, which adds mu / 2 ||w - w_global||^2 to the loss (Li et al., 2020, equation 2).
        max_records: a user with more records trains on so many of them, drawn anew each round; None for all.
        precision: of matrix products. "float32"; "tf32", on GPUs that have it; "bf16", whose weights stay in float32
            and whose products and activations are bfloat16. The last two need the cohort engine.
    """

    epochs: int = 1
    batch_size: int = 16
    learning_rate: float = 0.3
    optimizer: Literal["sgd", "momentum", "adam"] = "sgd"
    momentum: float = 0.9
    gradient_clip: float | None = None
    proximal: float = 0.0
    max_records: int | None = None
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        at_least_one(epochs=self.epochs, batch_size=self.batch_size)
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

    def optimizer_over(self, parameters: list[Tensor]) -> torch.optim.Optimizer:
        if self.optimizer == "adam":
            return torch.optim.Adam(parameters, self.learning_rate)
        return torch.optim.SGD(parameters, self.learning_rate, self.momentum if self.optimizer == "momentum" else 0.0)

    def examples(self, records: int) -> int:
        """How many of a user's records it trains on in a round."""
        return records if self.max_records is None else min(records, self.max_records)
