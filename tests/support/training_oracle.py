"""The oracle of all engines, with its arguments in the order that tests of engines use."""

from collections.abc import Iterable

import numpy as np

from flsim.algorithms.fedavg import train_users
from flsim.algorithms.summation import RoundRequest
from flsim.data.records import Users
from flsim.models.language_model import TrainableModel
from flsim.training.update import LocalHParams, UpdateSum


def train_cohort(
    model: TrainableModel,
    users: Users,
    cohort: Iterable[int],
    hparams: LocalHParams,
    seed: int,
    round_: int,
    clip: float | None = None,
    rounds: int | None = None,
) -> UpdateSum:
    """Return the sum of the updates of a cohort that begins with the model's parameters."""
    start = {name: value.detach().clone() for name, value in model.trainable.items()}
    request = RoundRequest(round_, 0, np.fromiter(cohort, np.int64), start, clip)
    return train_users(request, users, model, hparams, seed=seed, rounds=rounds)
