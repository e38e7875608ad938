"""The engines of local training, by name. They share one contract, and `flsim.algorithms.fedavg` is their oracle."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np

from flsim.algorithms.fedavg import train_users
from flsim.algorithms.summation import RoundRequest
from flsim.base.errors import InputError
from flsim.base.extensions import configured
from flsim.base.progress import say
from flsim.data.records import Users
from flsim.data.vocabulary import Layout
from flsim.models.architectures import with_low_precision
from flsim.models.language_model import Capabilities, Params, TrainableModel, representative
from flsim.training.cohort.engine import CohortEngine, is_stacked, users_on_cpu
from flsim.training.cohort.products import precision_here
from flsim.training.hparams import LocalHParams
from flsim.training.optimizers import optimizer_named, refuse_low_precision
from flsim.training.update import UpdateSum

EngineName = Literal["cohort", "local"]


class Engine(Protocol):
    """An engine trains users from given parameters and sums their updates, as `flsim.algorithms.fedavg.train_users`."""

    def train(
        self, start: Params, users: Users, cohort: Iterable[int], seed: int, round_: int, clip: float | None = None
    ) -> UpdateSum: ...


@dataclass(frozen=True)
class LocalEngine:
    """The oracle: one user after another in plain PyTorch. Training overwrites the parameters of `model`."""

    model: TrainableModel
    hparams: LocalHParams
    rounds: int | None = None

    def train(
        self, start: Params, users: Users, cohort: Iterable[int], seed: int, round_: int, clip: float | None = None
    ) -> UpdateSum:
        request = RoundRequest(round_, 0, np.fromiter(cohort, np.int64), start, clip)
        return train_users(request, users, self.model, self.hparams, seed=seed, rounds=self.rounds)


def engine_of(
    name: EngineName,
    model: TrainableModel,
    layout: Layout,
    hparams: LocalHParams,
    micro_cohort: int | None = None,
    memory_share: float = 1.0,
    rounds: int | None = None,
) -> Engine:
    """Return an engine on the model's device; the last three arguments are those of `CohortEngine`.

    Without a size of micro-cohorts users of small models train in those of `users_on_cpu`, where there is no GPU. On a
    processor without instructions for bfloat16 all that trains in bfloat16 elsewhere trains as in float32.
    Engine "cohort" needs a model that declares a written-out gradient. Where users are stacked it also needs a model
    that declares stacking, and an optimizer that has a `direction`. Otherwise "local", plain PyTorch, is returned.

    Raises:
        InputError: the engine or the device cannot do what the settings ask for.
    """
    able = model.capabilities
    refuse_precision(name, hparams, model.hparams.architecture, able)
    if name == "cohort" and able.written_out:
        refuse_low_precision(configured(hparams, "optimizer"), hparams.precision)
        like = {name: value.detach() for name, value in model.trainable.items()}
        if representative(like).device.type == "cpu":
            hparams = replace(hparams, precision=precision_here(hparams.precision))
        can_stack = able.stacked and optimizer_named(configured(hparams, "optimizer")).direction is not None
        if micro_cohort is None and can_stack:
            micro_cohort = users_on_cpu(like, hparams)
        if can_stack or not is_stacked(like, micro_cohort):
            return CohortEngine(like, layout, hparams, micro_cohort, memory_share, rounds)
        if able.stacked:
            say(f'optimizer "{hparams.optimizer}" has no kernel for stacked users; engine "local" trains in its place')
    return LocalEngine(model, hparams, rounds)


def refuse_precision(name: EngineName, hparams: LocalHParams, architecture: str, able: Capabilities | None) -> None:
    """Raise InputError where the model or the engine has only float32; `able` is None where it is not known yet."""
    if hparams.precision == "float32":
        return
    if able and not (able.low_precision and able.stacked and able.written_out):
        raise InputError(
            f'architecture "{architecture}" trains in float32; local.precision {hparams.precision!r} needs '
            f"{with_low_precision()}"
        )
    if name == "local":
        raise InputError(
            f'system.engine "local" trains in float32; local.precision {hparams.precision!r} needs "cohort"'
        )
