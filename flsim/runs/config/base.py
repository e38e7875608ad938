"""The parts of a configuration that federated and central runs share."""

import json
import math
from abc import ABC, abstractmethod
from dataclasses import MISSING, asdict, field, fields, replace
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import PlainValidator

from flsim.algorithms.micro_cohorts import MicroCohorts
from flsim.algorithms.user_states import UserStates
from flsim.base.errors import InputError
from flsim.base.extensions import by_content, is_custom
from flsim.base.files import digest
from flsim.base.progress import say
from flsim.base.settings import Count, Fraction, Natural, NotNegative, Positive, Seconds, settings, with_former_names
from flsim.canaries.population import Partition, Population
from flsim.canaries.spec import CanaryHParams
from flsim.data.corpus import Split
from flsim.data.stores import is_uri
from flsim.data.vocabulary import Layout
from flsim.data.withheld import Shadow, without_withheld
from flsim.evaluation.evaluate import EvaluationHParams, refuse_uncounted
from flsim.models.architectures import ModelHParams
from flsim.models.hf import FILES
from flsim.privacy.ledger import Entry, Unit, affordable_rounds
from flsim.privacy.mechanism import PrivacyHParams
from flsim.privacy.update_canaries import AuditHParams
from flsim.results.store import setting_of
from flsim.runs.config import custom_code
from flsim.runs.config.participation import Flags, Meetings
from flsim.runs.trackers import Kind
from flsim.training.footprint import Footprint
from flsim.training.update import Training

OWN = ("algorithm", "sampler", "server_optimizer", "server_schedule", "optimizer", "schedule")
MILESTONES = ("milestones", "milestone_factor")
# Newer settings are omitted from a digest if they have their defaults, so digests of older runs do not change.
LATER = {
    "data": ("user_holdout", "shadow", "max_records"),
    "canaries": (
        *("insertions", "controls", "coins", "windows", "arm", "source", "injections"),
        *("injection_users", "injection_copies", "template", "phrases"),
    ),
    "model": ("architecture", "layers", "heads", "filter_width", "options", "digest", "config", "dtype", "lora"),
    "training": (
        *(f"{name}_options" for name in OWN),
        *("server_schedule", "algorithm", *MILESTONES, *(f"server_{name}" for name in MILESTONES)),
    ),
    "local": ("schedule", *MILESTONES, "optimizer_options", "schedule_options"),
    "privacy": ("noise", "noise_options", "max_epsilon"),
    "evaluation": ("utility_only",),
    "audit": ("update_canaries", "canary_coins"),
}


def whole_rounds(rounds: float) -> int:
    """Return `rounds` rounded up to an integer, up to floating-point rounding."""
    return math.ceil(round(rounds, 6))


def _location(value: object) -> Path | str:
    if not isinstance(value, Path | str):
        raise ValueError("must be a folder, or the URI of a corpus")
    return value if is_uri(value) else Path(value)


@settings
class DataHParams:
    """The corpus, and the partition of its records.

    Attributes:
        corpus: Folder of a corpus, relative to the configuration file, or the URI of a corpus in an object store, such
            as ``s3://bucket/corpus``. `flsim data` makes corpora.
        partition: "non-iid" trains on the users of the corpus. "iid" trains on their IID twin: users of the same sizes,
            who have the same records in random order. Change it to compare IID with non-IID.
        user_holdout: Share of each user's records that no run trains on, e.g. 0.1. `flsim membership --unit user` needs
            this fresh text of users. Runs of all seeds exclude the same records. Unit: probability.
        shadow: Train on each "user", or each "record", only if a fair coin of the seed lands heads. Runs of several
            seeds are then shadow models of each other. When not set: no coins, all are trained on.
        max_records: Largest number of records of each user that a run trains on, drawn once. DP-SGD needs it for a
            user-level epsilon (`flsim privacy RUN`). When not set: all. Unit: records.
    """

    corpus: Annotated[Path | str, PlainValidator(_location)]
    partition: Partition = "non-iid"
    user_holdout: Fraction = 0.0
    shadow: Shadow | None = None
    max_records: Count | None = None

    def __post_init__(self) -> None:
        if self.max_records is not None and self.shadow == "record":
            raise InputError('data.max_records excludes records that coins of shadow "record" would choose; remove one')

    @property
    def leaves_out(self) -> bool:
        return self.user_holdout > 0 or self.shadow is not None or self.max_records is not None

    def without_withheld(self, train: Split, seed: int) -> Split:
        """Return the records that a run of this seed trains on; see `flsim.data.withheld.without_withheld`."""
        return without_withheld(train, self.user_holdout, self.shadow, seed, self.max_records)


@settings
class ScheduledEvaluationHParams(EvaluationHParams):
    """Settings of the measurements of checkpoints, and of their times.

    Attributes:
        every: Number of rounds between two evaluations; the last round is always evaluated. Decrease it for a finer
            curve. Unit: rounds.
        every_epochs: In place of `every`: number of passes over all records between two evaluations, rounded up to
            complete rounds. Use it to measure federated and central runs after equally many records. Unit: epochs.
    """

    every: Count = 100
    every_epochs: Positive | None = None

    def __post_init__(self) -> None:
        if self.every_epochs is not None and self.every != type(self).every:
            raise InputError(
                f"every_epochs ({self.every_epochs:g}) and every ({self.every}) both set when to evaluate; set "
                "only one of them"
            )

    def is_due(self, round_: int, rounds_per_epoch: float) -> bool:
        """Return whether to evaluate after this number of rounds."""
        if self.every_epochs is None:
            return round_ % self.every == 0
        interval = self.every_epochs * rounds_per_epoch
        intervals = math.floor(round(round_ / interval, 6))
        return round_ == whole_rounds(intervals * interval)


@settings
class CommonSystemHParams:
    """Use of the machines, for both kinds of training.

    Attributes:
        evaluators: Number of processes that evaluate checkpoints during training. Increase it if evaluations take
            longer than the rounds between them. Unit: processes.
        gpus_for_evaluation: GPUs of each evaluator, which training leaves free; 0 evaluates on a CPU. An evaluator can
            use this share of the GPU's memory, or 1 GiB if that is more. When not set: a small share of a GPU if the
            cluster has GPUs, in central training only with device "cuda". Unit: GPUs.
        evaluation_deadline: Longest time of an attempt to evaluate a checkpoint. A slower evaluator is killed, and
            after three more attempts the evaluation is recorded as failed. Increase it for slow measures. Unit:
            seconds.
        checkpoint_every: Number of rounds (in central training, steps) between two checkpoints. The newest two
            checkpoints and the evaluated checkpoints are kept. Unit: rounds or steps.
        tracking: Trackers that receive the values of rounds and evaluations; see `flsim.runs.trackers`.
    """

    evaluators: Count = 1
    gpus_for_evaluation: NotNegative | None = None
    evaluation_deadline: Seconds = 6 * 3600.0
    checkpoint_every: Count = 10
    tracking: tuple[Kind, ...] = ("tensorboard",)

    @property
    def training_threads(self) -> int:
        """Return the number of torch threads of a training process."""
        return 1

    @property
    def is_one_process(self) -> bool:
        """Return whether one process trains; on a CPU, this needs no Ray."""
        return False


@settings
class Config(ABC):
    """The configuration of a run of either kind of training.

    Its methods and the results of runs also call a step of central training a round.

    Attributes:
        data: Corpus and its users.
        seed: Seed of everything random: canaries, weights, cohorts, noise and references. Change it to repeat an
            experiment. Unit: none.
        canaries: Planted phrases, and their numbers of copies.
        model: Architecture and size of the network.
        privacy: Clipping and noise.
        evaluation: Measurements of checkpoints, and their times.
        system: Use of the machines. These settings change results only by floating-point rounding.
    """

    data: DataHParams
    seed: Natural = 0
    canaries: CanaryHParams = field(default_factory=CanaryHParams)
    model: ModelHParams = field(default_factory=ModelHParams)
    privacy: PrivacyHParams = field(default_factory=PrivacyHParams)
    evaluation: ScheduledEvaluationHParams = field(default_factory=ScheduledEvaluationHParams)
    system: CommonSystemHParams = field(default_factory=CommonSystemHParams)

    unit: ClassVar[Unit]  # the unit that an epsilon protects
    has_a_line_per_round: ClassVar[bool]  # rounds.jsonl has a line for each round; otherwise only for each saved round

    def __post_init__(self) -> None:
        refuse_uncounted(self.canaries.template, self.evaluation.also)
        has_length = not (self.canaries.template or self.canaries.phrases)
        if has_length and self.evaluation.prefix >= self.canaries.length:
            raise InputError(
                f"evaluation.prefix must be below canaries.length ({self.canaries.length}), "
                f"found {self.evaluation.prefix}"
            )
        if self.privacy.max_epsilon is not None and (is_custom(self.sampler) or is_custom(self.privacy.noise)):
            raise InputError(  # the length of a run is read without executing its code
                "privacy.max_epsilon needs a built-in sampler and noise; remove it, and set the number of rounds"
            )

    @property
    def digest(self) -> str:
        """Return the digest of the settings that change results: without system, length and corpus path."""
        return self._digest_without(seed=False)

    @property
    def series(self) -> str:
        """Return the digest that runs of all seeds share."""
        return self._digest_without(seed=True)

    def _digest_without(self, seed: bool) -> str:
        values = custom_code.renamed(type(self), asdict(self), by_content)
        del values["system"], values["data"]["corpus"], values["evaluation"]["every"]
        del values["evaluation"]["every_epochs"]
        for name in FILES:  # `digest` identifies the contents of the base, and the digest of the corpus those of tokens
            del values["model"][name]
        for name in self._without_digest:
            del values["training"][name]
        if not self._knows_end:
            values["privacy"]["max_epsilon"] = None
        for section, names in LATER.items():
            if section not in values:
                continue
            for setting in fields(getattr(self, section)):
                default = setting.default if setting.default_factory is MISSING else setting.default_factory()
                if setting.name in names and values[section][setting.name] == default:
                    del values[section][setting.name]
            if not values[section]:  # a section that is newer
                del values[section]
        if seed:
            del values["seed"]
        return digest(json.dumps(with_former_names(values), sort_keys=True))

    @abstractmethod
    def footprint(self, layout: Layout) -> Footprint:
        """Return what each process needs that trains a Hugging Face model, without its weights."""

    @property
    @abstractmethod
    def clients(self) -> int:
        """Return the number of client processes; 0 without clients."""

    @property
    @abstractmethod
    def _knows_end(self) -> bool:
        """Return whether the first rounds depend on the number of rounds."""

    @property
    @abstractmethod
    def _without_digest(self) -> tuple[str, ...]:
        """Return the settings of `training` that no digest contains: length and derived settings."""

    @property
    def setting(self) -> str:
        """Return the name of the run's row in a table, as in the paper."""
        return setting_of(self.partition, self.label)

    @property
    def partition(self) -> Partition | None:
        """Return the partition of the users; None if records are drawn in the same way in both partitions."""
        return self.data.partition

    @property
    def label(self) -> str:
        """Return the name of the run's row, without the partition."""
        bits, is_out = self.evaluation.weight_bits, self.canaries.arm == "out"
        return self._label + (f", {bits}-bit weights" if bits is not None else "") + ", arm out" * is_out

    @property
    @abstractmethod
    def _label(self) -> str:
        """Return the name of the run's row, without the partition and the bits of weights."""

    @property
    @abstractmethod
    def sampler(self) -> str:
        """Return the sampler of the units of privacy, as a ledger names it: a custom sampler by content."""

    @property
    @abstractmethod
    def round_size(self) -> int:
        """Return the number of users in a round, or of records in a step; expected if drawn at random."""

    @abstractmethod
    def optimizer_slots(self, vocabulary_size: int) -> int:
        """Return the size of a checkpoint without the parameters, as a multiple of their size."""

    @property
    def slots_kept_by_users(self) -> int:
        """Return the number of tensors of each parameter's shape, float32, that a user stores between rounds."""
        return 0

    @property
    def canary_users(self) -> AuditHParams:
        """Return the settings of canary users with random updates; central training has no canary users."""
        return AuditHParams()

    def refuse_users(self, users: int) -> None:  # noqa: B027 (training without users takes any number of them)
        """Raise InputError if there are too few training users for the cohort or the shards."""

    @abstractmethod
    def meetings(self, users: Population, rounds: int) -> Meetings:
        """Return the rounds, out of `rounds`, in which users used canaries; see `flsim.runs.folder.participation`."""

    @abstractmethod
    def records_read(self, users: Population, rounds: int) -> Flags:
        """Return whether training read each record in `rounds` rounds, bool [records] in the population's order."""

    @abstractmethod
    def rounds_per_epoch(self, train: Split) -> float:
        """Return the number of rounds per epoch; an expectation if records or users are drawn at random."""

    @abstractmethod
    def rounds_asked(self, train: Split) -> int:
        """Return the number of rounds in the settings for these users, without `privacy.max_epsilon`."""

    def rounds_over(self, train: Split) -> int:
        """Return the number of rounds within `privacy.max_epsilon` on these users; InputError if one exceeds it."""
        return self.within_budget(self.rounds_asked(train), self.protected(train))

    def within_budget(self, rounds: int, units: int) -> int:
        """Return the most rounds, up to `rounds`, within `privacy.max_epsilon` for `units` users or records."""
        if (most := self.privacy.max_epsilon) is None:
            return rounds
        delta = self.privacy.delta_for(units)
        return affordable_rounds(lambda number: self.planned(units, number), rounds, most, delta)

    def say_end(self, asked: int, rounds: int) -> None:
        """Print that training ends early, if `rounds` within `privacy.max_epsilon` is below `asked`."""
        if rounds < asked:
            say(
                f"privacy.max_epsilon {self.privacy.max_epsilon:g}: training ends after round {rounds:,} of {asked:,}, "
                f"because round {rounds + 1:,} would exceed this epsilon"
            )

    @abstractmethod
    def rate_steps(self, train: Split) -> float | None:
        """Return the sum of learning rates over all steps; in federated training, over the local steps of a user.

        There, a rate is the product of the local one and that of the server; a server optimizer that divides the update
        by its size, such as Adam, makes a step of its rate in each round. Momentum is not counted. The sum is None with
        a custom server optimizer.
        """

    def trained_on(self, train: Split) -> Split:
        """Return the training users and records of the corpus that a run with these settings trains on."""
        return self.data.without_withheld(train, self.seed)

    def protected(self, train: Split) -> int:
        """Return the number of users, or of records, of a split that an epsilon protects."""
        return len(train) if self.unit == "user" else train.records

    @abstractmethod
    def lasting(self, rounds: int) -> Self:
        """Return the same settings with this number of rounds."""

    @abstractmethod
    def planned(self, population: int, rounds: int) -> Entry:
        """Return the ledger's entry for `rounds` rounds on `population` users, or records in central training."""

    def resuming(self, started: "Config") -> Self:  # noqa: ARG002 (most settings depend on no earlier ones)
        """Return these settings for a started run, with the defaults that were chosen at its start."""
        return self

    @abstractmethod
    def training_of(
        self,
        users: Population | Split,
        rounds: int,
        device: str | None = None,
        user_states: UserStates | None = None,
        micro_cohorts: MicroCohorts | None = None,
    ) -> Training:
        """Return the training of these users; InputError if it cannot begin."""


def settings_of_both(settings: Config) -> str:
    """Return a digest of settings that both arms of a seed share."""
    return replace(settings, canaries=replace(settings.canaries, arm="in")).digest


def shared_rounds(settings: Config, rounds: int) -> int:
    """Return the last of `rounds` rounds after which one arm can continue from a checkpoint of the other.

    Both arms are equal until the first window. Checkpoints have no tensors of users: such algorithms share none.
    """
    return 0 if settings.slots_kept_by_users else settings.canaries.parting(rounds)
