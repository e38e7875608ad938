"""The engines of local training, by name: one contract, of which `local` is the oracle."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from flsim.base.errors import InputError
from flsim.data.records import Users
from flsim.data.vocabulary import Layout
from flsim.models.architectures import with_low_precision
from flsim.models.language_model import Capabilities, Params, TrainableModel
from flsim.training.cohort.engine import CohortEngine
from flsim.training.hparams import LocalHParams
from flsim.training.local import train_cohort
from flsim.training.update import UpdateSum

EngineName = Literal["cohort", "local"]


class Engine(Protocol):
    """Trains users from given parameters and sums their updates; see `flsim.training.local.train_cohort`."""

    def train(
        self, start: Params, users: Users, cohort: Iterable[int], seed: int, round_: int, clip: float | None = None
    ) -> UpdateSum: ...


@dataclass(frozen=True)
class LocalEngine:
    """The oracle, which a model is scratch for."""

    model: TrainableModel
    hparams: LocalHParams

    def train(
        self, start: Params, users: Users, cohort: Iterable[int], seed: int, round_: int, clip: float | None = None
    ) -> UpdateSum:
        self.model.load(start)
        return train_cohort(self.model, users, cohort, self.hparams, seed, round_, clip)


def engine_of(
    name: EngineName,
    model: TrainableModel,
    layout: Layout,
    hparams: LocalHParams,
    micro_cohort: int | None = None,
    memory_share: float = 1.0,
) -> Engine:
    """An engine on the model's device; the last two are `CohortEngine`'s.

    "cohort" is for models that declare a gradient written out, on GPUs stacking. Others take "local", plain PyTorch.

    Raises:
        InputError: the engine, or the device, cannot do what is asked for.
    """
    refuse_precision(name, hparams, model.hparams.architecture, model.capabilities)
    able = model.capabilities
    if name == "cohort" and able.written_out and (able.stacked or model.device.type == "cpu"):
        like = {name: value.detach() for name, value in model.trainable.items()}
        return CohortEngine(like, layout, hparams, micro_cohort, memory_share)
    return LocalEngine(model, hparams)


def refuse_precision(name: EngineName, hparams: LocalHParams, architecture: str, able: Capabilities | None) -> None:
    """Raises InputError where the model, or the engine, has only float32; `able` None is not known yet."""
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
