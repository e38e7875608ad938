"""What both kinds of runs have."""

import json
import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import PlainValidator

from flsim.algorithms.participation import Meetings
from flsim.algorithms.training import Training
from flsim.algorithms.user_states import UserStates
from flsim.base.errors import InputError, at_least_one
from flsim.base.extensions import by_content
from flsim.base.files import digest
from flsim.canaries.population import Population, World
from flsim.canaries.spec import CanaryHParams
from flsim.data.corpus import Split
from flsim.data.stores import is_uri
from flsim.evaluation.evaluate import EvaluationHParams
from flsim.models.hparams import ModelHParams
from flsim.privacy.ledger import Entry
from flsim.privacy.mechanism import PrivacyHParams
from flsim.privacy.report import Unit
from flsim.results.run_file import setting_of
from flsim.runs.config import own_code
from flsim.runs.trackers import Kind

# Settings that came after the first runs: no part of a digest where they are at their defaults, so that a run keeps the
# digest that it was started with.
LATER = {
    "canaries": ("insertions",),
    "model": ("architecture", "layers", "heads", "options"),
    "training": ("server_schedule", "algorithm"),
    "local": ("schedule",),
    "privacy": ("noise",),
}


def _location(value: object) -> Path | str:
    if not isinstance(value, Path | str):
        raise InputError("must be a folder, or the URI of one")
    return value if is_uri(value) else Path(value)


@dataclass(frozen=True)
class DataHParams:
    """Which users are trained on.

    Attributes:
        corpus: folder made by `flsim data import` or `flsim data synthetic`, relative to the configuration file; or the
            URI of one in an object store, such as ``s3://bucket/corpus``.
        world: "non-iid" for the corpus' own users, "iid" for their shuffled twin.
    """

    corpus: Annotated[Path | str, PlainValidator(_location)]
    world: World = "non-iid"


@dataclass(frozen=True)
class ScheduledEvaluationHParams(EvaluationHParams):
    """`EvaluationHParams`, and when.

    Attributes:
        every: rounds between two evaluations; the last round is always evaluated.
        every_epochs: in place of it, passes over all records between two evaluations, each rounded to a whole round, so
            that runs of any kind are measured where they have seen equally much.
    """

    every: int = 100
    every_epochs: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(every=self.every)
        if self.every_epochs is not None and not 0 < self.every_epochs < math.inf:
            raise InputError(f"every_epochs must be above 0, found {self.every_epochs:g}")
        if self.every_epochs is not None and self.every != type(self).every:
            raise InputError(
                f"every_epochs ({self.every_epochs:g}) and every ({self.every}) both say when; set one of them"
            )

    def is_due(self, round_: int, rounds_per_epoch: float) -> bool:
        """Whether to evaluate after so many rounds."""
        if self.every_epochs is None:
            return round_ % self.every == 0
        interval = self.every_epochs * rounds_per_epoch
        return round_ == round(round(round_ / interval) * interval)


@dataclass(frozen=True)
class CommonSystemHParams:
    """What both kinds of training set.

    Attributes:
        evaluators: processes that evaluate checkpoints meanwhile.
        gpus_for_evaluation: GPUs of each evaluator, to be left over by the training; 0 evaluates on a CPU. By default a
            small share where the cluster has GPUs; of central training, where its device is "cuda".
        evaluation_deadline: seconds for an attempt to evaluate a checkpoint; who takes longer is killed, tried again
            three times, and recorded as failed.
        checkpoint_every: rounds (of central training, steps) between two checkpoints; the newest two and the evaluated
            ones are kept.
        tracking: who is told of rounds and evaluations: any of "tensorboard", "mlflow", "wandb"; see
            `flsim.runs.trackers`.
    """

    evaluators: int = 1
    gpus_for_evaluation: float | None = None
    evaluation_deadline: float = 6 * 3600.0
    checkpoint_every: int = 10
    tracking: tuple[Kind, ...] = ("tensorboard",)

    def __post_init__(self) -> None:
        at_least_one(checkpoint_every=self.checkpoint_every, evaluators=self.evaluators)
        if not self.evaluation_deadline > 0:
            raise InputError(f"evaluation_deadline must be above 0 seconds, found {self.evaluation_deadline}")
        if self.gpus_for_evaluation is not None and self.gpus_for_evaluation < 0:
            raise InputError(f"gpus_for_evaluation must not be negative, found {self.gpus_for_evaluation}")

    @property
    def training_threads(self) -> int:
        """Torch threads of a process that trains."""
        return 1


@dataclass(frozen=True)
class Config(ABC):
    """A run, of either kind. Each section is documented by the settings it holds.

    What a run counts is called a round everywhere but here: rounds of federated training, steps of central training.
    """

    data: DataHParams
    seed: int = 0
    canaries: CanaryHParams = field(default_factory=CanaryHParams)
    model: ModelHParams = field(default_factory=ModelHParams)
    privacy: PrivacyHParams = field(default_factory=PrivacyHParams)
    evaluation: ScheduledEvaluationHParams = field(default_factory=ScheduledEvaluationHParams)
    system: CommonSystemHParams = field(default_factory=CommonSystemHParams)

    unit: ClassVar[Unit]  # what an epsilon is about
    has_a_line_per_round: ClassVar[bool]  # rounds.jsonl; otherwise it has one for each saved round

    def __post_init__(self) -> None:
        if self.evaluation.prefix >= self.canaries.length:
            raise InputError(
                f"evaluation.prefix must be below canaries.length ({self.canaries.length}), "
                f"found {self.evaluation.prefix}"
            )

    @property
    def digest(self) -> str:
        """Stands for all settings that change results: not the system's, not how long, not where the corpus lies."""
        return self._digest_without(seed=False)

    @property
    def series(self) -> str:
        """As `digest`, for all seeds."""
        return self._digest_without(seed=True)

    def _digest_without(self, seed: bool) -> str:
        values = own_code.renamed(type(self), asdict(self), by_content)
        del values["system"], values["data"]["corpus"], values["evaluation"]["every"]
        del values["evaluation"]["every_epochs"]
        for name in self._without_digest:
            del values["training"][name]
        for section, names in LATER.items():
            if section not in values:
                continue
            default = asdict(type(getattr(self, section))())
            for name in names:
                if name in default and values[section][name] == default[name]:
                    del values[section][name]
        if seed:
            del values["seed"]
        return digest(json.dumps(values, sort_keys=True))

    @property
    @abstractmethod
    def _without_digest(self) -> tuple[str, ...]:
        """Settings of training that say how long, and what others say as well."""

    @property
    def setting(self) -> str:
        """The row's name in a table, as in the paper's."""
        return setting_of(self.world, self.label)

    @property
    def world(self) -> World | None:
        """`DataHParams.world`; None where records are drawn in the same way in both worlds."""
        return self.data.world

    @property
    def label(self) -> str:
        """`setting` without the world."""
        bits = self.evaluation.weight_bits
        return self._label if bits is None else f"{self._label}, {bits}-bit weights"

    @property
    @abstractmethod
    def _label(self) -> str:
        """`label` without how the model is measured."""

    @property
    @abstractmethod
    def sampler(self) -> str:
        """How the units of privacy are drawn; a user's own sampler by content, as a ledger names it."""

    @property
    @abstractmethod
    def round_size(self) -> int:
        """Users of a round, or records of a step; expected ones where they are drawn."""

    @abstractmethod
    def optimizer_slots(self, vocabulary_size: int) -> int:
        """How many tensors like the parameters a checkpoint holds beside them."""

    @property
    def slots_kept_by_users(self) -> int:
        """How many tensors like the parameters each sampled user keeps between rounds, in float32."""
        return 0

    @abstractmethod
    def meetings(self, users: Population, rounds: int) -> Meetings:
        """Who met which canary in which of so many rounds; see `flsim.algorithms.participation`."""

    @abstractmethod
    def rounds_per_epoch(self, train: Split) -> float:
        """Rounds that read as many records as there are; where records or users are drawn, in expectation."""

    @abstractmethod
    def rounds_over(self, train: Split) -> int:
        """How long to train on these users. Raises InputError where they cannot say it."""

    @abstractmethod
    def planned(self, population: int, rounds: int) -> Entry:
        """What so many rounds release, of a population of that many units of privacy."""

    @abstractmethod
    def training_of(
        self, users: Population | Split, rounds: int, device: str | None = None, user_states: UserStates | None = None
    ) -> Training:
        """Training of these users over so many rounds.

        Args:
            users: the training users; canaries need not be planted to see whether training could begin.
            rounds: how long it is.
            device: of torch, in this process; None for what the settings say, or a CPU.
            user_states: what users keep between rounds; in memory where None.

        Raises:
            InputError: training could not begin.
        """
