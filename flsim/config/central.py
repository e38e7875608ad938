"""Settings of a central run: SGD over records, or DP-SGD."""

from dataclasses import dataclass, field
from typing import Literal

from flsim.central import CentralHParams
from flsim.central.engines import EngineName
from flsim.config.base import CommonSystemHParams, Config, ScheduledEvaluationHParams
from flsim.data.corpus import Split
from flsim.errors import InputError, at_least_one
from flsim.privacy.ledger import Entry
from flsim.sampling import Sampler
from flsim.train.records import Order, steps_per_epoch


@dataclass(frozen=True)
class CentralTrainingHParams(CentralHParams):
    """`CentralHParams`, the kind of training, and the order of records.

    Attributes:
        kind: "central".
        order: what data.world says, if it is said here as well: "iid" for world "iid", "sequence" for "non-iid". With
            clip or noise records are drawn at random whatever the world, which is "iid".
    """

    kind: Literal["central"] = "central"
    order: Order | None = None


@dataclass(frozen=True)
class StepwiseEvaluationHParams(ScheduledEvaluationHParams):
    """`ScheduledEvaluationHParams` of central training.

    Attributes:
        every: steps between two evaluations; the last step is always evaluated.
    """

    every: int = 10_000


@dataclass(frozen=True)
class CentralSystemHParams(CommonSystemHParams):
    """How a central run uses the machine: one process trains. Changes nothing in its results but float rounding.

    A run resumes to the same bits where device, threads and physical_batch are what they were.

    Attributes:
        engine: "fused", or "autograd", which is its slow oracle and does DP-SGD.
        device: "cpu" or "cuda", of the training.
        threads: torch threads of the training.
        physical_batch: with clip or noise, records whose gradients are in memory at a time: about 40 MB each for the
            paper's model.
    """

    engine: EngineName = "fused"
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = 1
    physical_batch: int = 8
    checkpoint_every: int = 1_000

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(threads=self.threads, physical_batch=self.physical_batch)


@dataclass(frozen=True)
class CentralConfig(Config):
    """A run of central training over records; with clip or noise, DP-SGD."""

    evaluation: StepwiseEvaluationHParams = field(default_factory=StepwiseEvaluationHParams)
    training: CentralTrainingHParams = field(default_factory=CentralTrainingHParams)
    system: CentralSystemHParams = field(default_factory=CentralSystemHParams)

    unit = "record"

    @property
    def _without_digest(self) -> tuple[str, ...]:
        how_long = ("epochs", "steps", "words")
        return (*how_long, "order") if self.training.schedule == "constant" else ("order",)  # others know the end

    def __post_init__(self) -> None:
        super().__post_init__()
        world, order = self.data.world, self.training.order
        if order in (None, self.order):
            return
        if self._is_private:
            raise InputError(
                'training.order "sequence" has no privacy accounting: with clip or noise records are drawn at random; '
                "remove it"
            )
        other = "iid" if world == "non-iid" else "non-iid"
        raise InputError(
            f'training.order "{order}" contradicts data.world "{world}", which is order "{self.order}"; remove it, or '
            f'set data.world = "{other}"'
        )

    @property
    def _is_private(self) -> bool:
        return self.privacy.mechanism != "none"

    @property
    def order(self) -> Order:
        """Records in random order, or in sequence through the users' own (Thakkar et al., 2020, section 4.2)."""
        return "iid" if self._is_private or self.data.world == "iid" else "sequence"

    @property
    def _setting(self) -> str:
        training, privacy = self.training, self.privacy
        optimizer = {"sgd": "SGD", "rmsprop": "RMSProp"}.get(training.optimizer, training.optimizer.capitalize())
        algorithm = {"none": f"{self._world}, {optimizer}", "clip": f"{optimizer}+Clip", "dp": f"DP-{optimizer}"}
        parts = [algorithm[privacy.mechanism]]
        if privacy.clip is not None:
            parts.append(f"C={privacy.clip:g}")
        if privacy.noise_multiplier:
            parts.append(f"z={privacy.noise_multiplier:g}")
        parts += [f"b_r={training.batch_size}"]
        for name, shown in (("gradient_clip", "clip"), ("weight_decay", "decay"), ("dropout", "dropout")):
            if value := getattr(training, name):
                parts.append(f"{shown} {value:g}")
        return ", ".join(parts)

    @property
    def sampler(self) -> Sampler:
        return "poisson" if self._is_private else "fixed-size"

    def rounds_per_epoch(self, train: Split) -> float:
        size = self.training.batch_size
        return train.records / size if self._is_private else float(steps_per_epoch(train.records, size))

    def rounds_over(self, train: Split) -> int:
        return self.training.steps_over(train.records, train.words)

    def planned(self, population: int, rounds: int) -> Entry:
        return Entry(self.sampler, population, self.training.batch_size, self.privacy.noise_multiplier, rounds)
