"""The parts of a configuration that federated and central runs share, and the configuration of a federated run."""

import json
import math
from abc import ABC, abstractmethod
from dataclasses import MISSING, asdict, field, fields, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from pydantic import PlainValidator

from flsim.algorithms import server_optimizers
from flsim.algorithms.algorithm import ALGORITHMS, FedAvgHParams, algorithm_named
from flsim.algorithms.micro_cohorts import MicroCohorts
from flsim.algorithms.rounds import EngineName, FederatedTraining, refuse_injections, refuse_precision
from flsim.algorithms.summation import default_branch
from flsim.algorithms.user_states import UserStates
from flsim.base.errors import InputError
from flsim.base.extensions import by_content, configured, is_custom, label_of, not_executed
from flsim.base.files import digest
from flsim.base.progress import say
from flsim.base.settings import Count, Fraction, Natural, NotNegative, Positive, Seconds, settings, with_former_names
from flsim.canaries.population import Partition, Population
from flsim.canaries.spec import CanaryHParams
from flsim.data.corpus import Shadow, Split, without_withheld
from flsim.data.records import Layout
from flsim.data.stores import is_uri
from flsim.models.architectures import ModelHParams, declared, without_values
from flsim.models.hf import FILES
from flsim.privacy import noise, sampling
from flsim.privacy.ledger import AuditHParams, Entry, PrivacyHParams, Unit, affordable_rounds
from flsim.results.rows import setting_of
from flsim.runs.config import custom_code, participation
from flsim.runs.config.participation import Flags, Meetings
from flsim.runs.evaluate import EvaluationHParams, refuse_uncounted
from flsim.runs.trackers import Kind
from flsim.training.own_model import Footprint, footprint_of, gpu_memory
from flsim.training.update import LocalHParams, Training, label_of_steps, total_rate

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
        """Return the records that a run of this seed trains on; see `flsim.data.corpus.without_withheld`."""
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


# The configuration of a federated run.

SHARDS = 2  # the default, if neither the settings nor the client processes of a launch give the number


@settings
class TrainingHParams(FedAvgHParams):
    """Settings of federated training: `FedAvgHParams`, the kind of training, and its length in epochs.

    Attributes:
        kind: Kind of training: "federated".
        epochs: In place of `rounds`: passes over all records, rounded up to a complete round. If users or records are
            drawn at random, the number is an expectation. Unit: epochs.
    """

    kind: Literal["federated"] = "federated"
    epochs: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs is not None and self.rounds != type(self).rounds:
            raise InputError(
                f"epochs ({self.epochs:g}) and rounds ({self.rounds}) both set how long to train; set only one of them"
            )


@settings
class SystemHParams(CommonSystemHParams):
    """Settings of the use of machines in federated training; they change results only by floating-point rounding.

    Attributes:
        engine: "cohort" trains many users with the same kernels. "local" is plain PyTorch, which is slower and supports
            any architecture.
        micro_cohort: Number of users that the cohort engine trains at the same time. When not set: on a CPU, 16 for a
            small CIFG (at most 600,000 parameters times records of a step), otherwise 1; on a GPU, as many as fit in
            its memory at the beginning of the run. The file micro-cohorts.jsonl in the run folder records the number.
            Unit: users.
        shards: Number of Flower nodes. Each node has a contiguous range of users and replies once per round. At most
            this number of client processes work at the same time. When not set: the number of client processes that fit
            when `flsim run` begins the run, at most the cohort; 2 under `flwr run`, and in a sweep that trains several
            runs at once. The run folder stores the number. Unit: nodes.
        branch: Number of consecutive shards whose sums a client process adds before the server adds the sums of these
            branches, e.g. 10 for 100 shards; 0 for no branches: the server adds all sums. This setting determines the
            order of additions, so results differ by floating-point rounding. When not set: no branches below 64 shards;
            from 64 shards on, the square root of their number, rounded up. The run folder stores the number. Unit:
            nodes.
        cpus_per_client: CPU cores, and torch threads, of a client process. Increase it if there are fewer shards than
            cores. Unit: cores.
        gpus_per_client: GPUs of a client process, e.g. 0.4 for two processes and an evaluator on one GPU; 0 trains on
            CPUs. When not set: 1 minus the evaluators' share if the cluster has GPUs. If clients use all GPUs,
            evaluators run on CPUs. Unit: GPUs.
        deadline: Longest wait for the replies of a round before missing replies are requested again. When not set: ten
            times the longest reply since the command started, at least a minute and at most an hour; an hour before the
            first reply (`server/federated/rounds.py`). Unit: seconds.
        retries: Number of repeated requests to a shard after an error or the deadline, before the run fails. The pauses
            before them are 1, 2, 4, ... seconds, in which a dead client process restarts. Unit: attempts.
    """

    engine: EngineName = "cohort"
    micro_cohort: Count | None = None
    shards: Count | None = None
    branch: Natural | None = None
    cpus_per_client: Count = 1
    gpus_per_client: NotNegative | None = None
    deadline: Seconds | None = None
    retries: Natural = 3

    @property
    def training_threads(self) -> int:
        return self.cpus_per_client

    @property
    def is_one_process(self) -> bool:
        return self.known_shards == 1

    @property
    def known_shards(self) -> int:
        """Return the number of shards; 2 if it is not chosen yet."""
        return SHARDS if self.shards is None else self.shards

    @property
    def known_branch(self) -> int:
        """Return the number of shards in a branch; 0 if there are none, or if it is not chosen yet."""
        return self.branch or 0


@settings
class FederatedConfig(Config):
    """A run of Federated Averaging.

    Attributes:
        training: Federated algorithm, cohorts, server optimizer and number of rounds.
        local: Training of a user on the records of the user.
        audit: Canary users, whose updates are random, to test the noise.
    """

    training: TrainingHParams = field(default_factory=TrainingHParams)
    local: LocalHParams = field(default_factory=LocalHParams)
    system: SystemHParams = field(default_factory=SystemHParams)
    audit: AuditHParams = field(default_factory=AuditHParams)

    unit = "user"
    has_a_line_per_round = True

    @property
    def _knows_end(self) -> bool:
        is_constant = self.training.server_schedule == self.local.schedule == "constant"
        return not is_constant or self.canaries.depends_on_length or noise.depends_on_length(self.privacy.noise)

    @property
    def _without_digest(self) -> tuple[str, ...]:
        return () if self._knows_end else ("rounds", "epochs")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.privacy.update_noise_multiplier(self.training.cohort)  # raises if there is none
        self.audit.refuse_without_clip(self.privacy)
        if self.privacy.mechanism == "dp":
            sampling.refuse_unaccounted(configured(self.training, "sampler"))
        architecture = self.model.architecture
        refuse_precision(self.system.engine, self.local, architecture, declared(architecture))

    @property
    def _label(self) -> str:
        training, privacy = self.training, self.privacy
        label = label_of(configured(training, "algorithm"), ALGORITHMS)
        algorithm = {"none": label, "clip": f"{label}+Clip", "dp": f"DP-{label}"}[privacy.mechanism]
        if training.server_label:
            algorithm += f"+{training.server_label}"
        parts = [algorithm, f"mu={self.local.proximal:g}" if self.local.proximal else "", self.model.label]
        if privacy.target_quantile is not None:
            parts.append(f"S=q{100 * privacy.target_quantile:g}%")
        elif privacy.clip is not None:
            parts.append(f"S={privacy.clip:g}")
        if privacy.noise_multiplier:
            parts.append(f"z={privacy.noise_multiplier:g}")
        local = self.local
        parts.append(label_of_steps(local.milestones, local.milestone_factor, "local rate"))
        parts.append(label_of_steps(training.server_milestones, training.server_milestone_factor, "server rate"))
        sampler = label_of(configured(training, "sampler"), sampling.SAMPLERS)
        parts += [label_of(privacy.process, noise.NOISES), f"b_u={training.cohort}", sampler]
        if self.audit.update_canaries:
            parts.append(f"{self.audit.update_canaries:,} canary users" + " by coins" * self.audit.canary_coins)
        return ", ".join(filter(None, parts))

    @property
    def sampler(self) -> str:
        return by_content(configured(self.training, "sampler"))

    @property
    def round_size(self) -> int:
        return self.training.cohort

    @property
    def clients(self) -> int:
        return self.system.known_shards

    def footprint(self, layout: Layout) -> Footprint:
        system = self.system
        at_once = 1 if system.engine == "local" else system.micro_cohort
        return footprint_of(self.model, layout, self.local, gpu_memory(system.gpus_per_client), at_once=at_once)

    def optimizer_slots(self, vocabulary_size: int) -> int:
        slots = len(server_optimizers.slots_of(self.training, vocabulary_size, self.model))
        slots += len(algorithm_named(configured(self.training, "algorithm")).slots)
        if self.privacy.mechanism == "dp":
            like = without_values(vocabulary_size, self.model).trainable
            slots += 2 * len(noise.init(self.privacy.process, self.seed, like))  # in float64
        if not is_custom(self.training.sampler):
            slots += sampling.sampler_named(self.sampler, self.training.cohort).most_pending
        return slots

    @property
    def slots_kept_by_users(self) -> int:
        return len(algorithm_named(configured(self.training, "algorithm")).user_slots)

    @property
    def canary_users(self) -> AuditHParams:
        return self.audit

    def refuse_users(self, users: int) -> None:
        sampling.check_cohort(users, self.training.cohort, self.sampler)
        if not is_custom(self.sampler):
            sampling.draw_cohort(
                self.seed, 0, users, self.training.cohort, self.sampler
            )  # raises, e.g. without a trace
        if self.system.shards is not None:
            sampling.shard_ranges(users, self.system.shards)

    def meetings(self, users: Population, rounds: int) -> Meetings:
        if is_custom(self.training.sampler):
            raise not_executed(configured(self.training, "sampler"), "sampler")
        return participation.of_cohorts(users, self.seed, self.training.cohort, self.sampler, rounds)

    def records_read(self, users: Population, rounds: int) -> Flags:
        training = self.training
        return participation.read_by_cohorts(users, self.seed, training.cohort, self.sampler, self.local, rounds)

    def rounds_per_epoch(self, train: Split) -> float:
        of_users, local = np.diff(train.user_offsets), self.local
        read = local.epochs * int(
            (of_users if local.max_records is None else of_users.clip(max=local.max_records)).sum()
        )
        return train.records * len(train) / max(read * self.training.cohort, 1)

    def rounds_asked(self, train: Split) -> int:
        epochs = self.training.epochs
        return self.training.rounds if epochs is None else max(1, whole_rounds(epochs * self.rounds_per_epoch(train)))

    def rate_steps(self, train: Split) -> float | None:
        rounds, local, server = self.rounds_over(train), self.local, self.training
        if is_custom(server.server_optimizer):
            return None
        if server.server_optimizer not in server_optimizers.ALONG_UPDATE:
            return total_rate(lambda round_: server.server_rate(round_, rounds), rounds)
        of_users = np.diff(train.user_offsets)
        examples = of_users if local.max_records is None else of_users.clip(max=local.max_records)
        steps = local.epochs * float(np.ceil(examples / local.batch_size).mean())
        return steps * total_rate(
            lambda round_: local.rate(round_, rounds) * server.server_rate(round_, rounds), rounds
        )

    def lasting(self, rounds: int) -> Self:
        return replace(self, training=replace(self.training, rounds=rounds, epochs=None))

    def with_shards(self, processes: int, users: int) -> Self:
        """Return the settings with numbers of branches and of shards: one a process, at most the users in a round."""
        shards, branch = self.system.shards, self.system.branch
        if shards is None:
            shards = min(processes, users, max(self.training.cohort, SHARDS))
        if branch is None:
            branch = default_branch(shards) or None  # without branches, config.toml omits the setting
        return replace(self, system=replace(self.system, shards=shards, branch=branch))

    def resuming(self, started: Config) -> Self:
        if not isinstance(started, FederatedConfig):
            return self
        system, stored = self.system, started.system
        shards = stored.shards if system.shards is None else system.shards
        branch = stored.branch if system.branch is None else system.branch
        return replace(self, system=replace(system, shards=shards, branch=branch))

    def training_of(
        self,
        users: Population | Split,
        rounds: int,
        device: str | None = None,
        user_states: UserStates | None = None,
        micro_cohorts: MicroCohorts | None = None,
    ) -> FederatedTraining:
        if self.canaries.injections:  # at this point, a split has no pseudo-users
            refuse_injections(self.training, self.privacy)
        return FederatedTraining(
            users,
            self.model,
            self.training,
            self.local,
            self.privacy,
            self.seed,
            length=rounds,
            audit=self.audit,
            shards=self.system.known_shards,
            branch=self.system.known_branch,
            engine=self.system.engine,
            micro_cohort=self.system.micro_cohort,
            device=device or "cpu",
            user_states=user_states or UserStates(),
            micro_cohorts=micro_cohorts or MicroCohorts(),
        )

    def planned(self, population: int, rounds: int) -> Entry:
        return self.training.releases(self.privacy, population, rounds, rounds)
