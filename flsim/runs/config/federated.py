"""The configuration of a federated run."""

from dataclasses import field, replace
from typing import Literal, Self

import numpy as np

from flsim.algorithms import server_optimizers
from flsim.algorithms.built_in import algorithm_named, label_of
from flsim.algorithms.hparams import FedAvgHParams
from flsim.algorithms.micro_cohorts import MicroCohorts
from flsim.algorithms.rounds import EngineName, FederatedTraining, refuse_injections, refuse_precision
from flsim.algorithms.summation import default_branch
from flsim.algorithms.user_states import UserStates
from flsim.base.errors import InputError
from flsim.base.extensions import by_content, configured, is_custom, not_executed
from flsim.base.settings import Count, Natural, NotNegative, Positive, Seconds, settings
from flsim.canaries.population import Population
from flsim.data.corpus import Split
from flsim.models.architectures import build, declared
from flsim.privacy import noise, sampling
from flsim.privacy.ledger import Entry
from flsim.privacy.update_canaries import AuditHParams
from flsim.runs.config import participation
from flsim.runs.config.base import CommonSystemHParams, Config, whole_rounds
from flsim.runs.config.participation import Flags, Meetings
from flsim.training.hparams import LocalHParams, label_of_steps, total_rate

SHARDS = 2  # the number where neither the settings nor the client processes of a launch decide another one


@settings
class TrainingHParams(FedAvgHParams):
    """Settings of federated training: `FedAvgHParams`, the kind of training, and its length in epochs.

    Attributes:
        kind: Kind of training: "federated".
        epochs: In place of `rounds`: passes over all records, as far as whole rounds reach. Where users or records are
            drawn, the number is an expectation. Unit: epochs.
    """

    kind: Literal["federated"] = "federated"
    epochs: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs is not None and self.rounds != type(self).rounds:
            raise InputError(f"epochs ({self.epochs:g}) and rounds ({self.rounds}) both say how long; set one of them")


@settings
class SystemHParams(CommonSystemHParams):
    """Settings of how a federated run uses the machines; they change nothing in its results but float rounding.

    Attributes:
        engine: "cohort" trains many users with the same kernels. "local" is plain PyTorch: slower, and it trains any
            architecture.
        micro_cohort: Users that the cohort engine trains at the same time. When not set: on a CPU 16 of a small CIFG,
            up to 600,000 parameters times records of a step, otherwise one; on a GPU as many as fit its memory when the
            run begins, which micro-cohorts.jsonl in the run folder records. Unit: users.
        shards: Number of Flower nodes. Each holds a contiguous range of users and replies once a round. No more client
            processes than shards work at the same time. When not set: as many as client processes have room when
            `flsim run` begins the run, no more than the cohort; 2 under `flwr run`, and in a sweep that trains several
            runs at once. The run folder keeps the number. Unit: nodes.
        branch: Consecutive shards whose sums a client process adds up before the server adds the sums of these
            branches, e.g. 10 for 100 shards; 0 for none, where the server adds all. It decides the order of additions,
            so results differ by float rounding. When not set: none below 64 shards, from 64 on the square root of their
            number, rounded up, which the run folder keeps from the beginning of a run. Unit: nodes.
        cpus_per_client: CPU cores, and torch threads, of a client process. Unit: cores.
        gpus_per_client: GPUs of a client process, e.g. 0.4 for two on one GPU beside the evaluator; 0 trains on CPUs.
            When not set: 1 where the cluster has GPUs, less the evaluators' share. Where clients hold all GPUs,
            evaluators run on CPUs. Unit: GPUs.
        deadline: Longest wait for the replies of a round, from the request on, before missing ones are asked for again.
            When not set: ten times the longest reply since the command started, at least a minute and at most an hour,
            and an hour before the first reply (`server/federated/exchange.py`). Unit: seconds.
        retries: Times that a shard is asked again after an error or the deadline, before the run fails. The pauses
            before them are 1, 2, 4, ... seconds, in which a client process that died comes back. Unit: attempts.
        checkpoint_every: Rounds between two checkpoints; the newest two and the evaluated ones are kept. Unit: rounds.
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
        """Return the number of shards; 2 where it is not decided yet."""
        return SHARDS if self.shards is None else self.shards

    @property
    def known_branch(self) -> int:
        """Return the number of shards in a branch; 0 where there are none, or where it is not decided yet."""
        return self.branch or 0


@settings
class FederatedConfig(Config):
    """A run of Federated Averaging.

    Attributes:
        training: Federated algorithm, cohorts, server optimizer and number of rounds.
        local: Training of a user on the user's own records.
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
        self.privacy.update_noise_multiplier(self.training.cohort)  # raises where there is none
        self.audit.refuse_without_clip(self.privacy)
        if self.privacy.mechanism == "dp":
            sampling.refuse_unaccounted(configured(self.training, "sampler"))
        architecture = self.model.architecture
        refuse_precision(self.system.engine, self.local, architecture, declared(architecture))

    @property
    def _label(self) -> str:
        training, privacy = self.training, self.privacy
        label = label_of(configured(training, "algorithm"))
        algorithm = {"none": label, "clip": f"{label}+Clip", "dp": f"DP-{label}"}[privacy.mechanism]
        if training.server_label:
            algorithm += f"+{training.server_label}"
        parts = [algorithm, self.model.label]
        if privacy.target_quantile is not None:
            parts.append(f"S=q{100 * privacy.target_quantile:g}%")
        elif privacy.clip is not None:
            parts.append(f"S={privacy.clip:g}")
        if privacy.noise_multiplier:
            parts.append(f"z={privacy.noise_multiplier:g}")
        local = self.local
        parts.append(label_of_steps(local.milestones, local.milestone_factor, "local rate"))
        parts.append(label_of_steps(training.server_milestones, training.server_milestone_factor, "server rate"))
        sampler = sampling.label_of(configured(training, "sampler"))
        parts += [noise.label_of(privacy.process), f"b_u={training.cohort}", sampler]
        if self.audit.update_canaries:
            parts.append(f"{self.audit.update_canaries:,} canary users" + " by coins" * self.audit.canary_coins)
        return ", ".join(filter(None, parts))

    @property
    def sampler(self) -> str:
        return by_content(configured(self.training, "sampler"))

    @property
    def round_size(self) -> int:
        return self.training.cohort

    def optimizer_slots(self, vocabulary_size: int) -> int:
        slots = len(server_optimizers.slots_of(self.training, vocabulary_size, self.model))
        slots += len(algorithm_named(configured(self.training, "algorithm")).slots)
        if self.privacy.mechanism == "dp":
            like = build(vocabulary_size, self.model).trainable
            slots += 2 * len(noise.init(self.privacy.process, self.seed, like))  # in float64
        return slots

    @property
    def slots_kept_by_users(self) -> int:
        return len(algorithm_named(configured(self.training, "algorithm")).user_slots)

    @property
    def canary_users(self) -> AuditHParams:
        return self.audit

    def refuse_users(self, users: int) -> None:
        sampling.check_cohort(users, self.training.cohort, self.sampler)
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
        """Return the settings with numbers of shards and of shards in a branch: their own ones, or the default ones.

        The default is a shard for each client process. There are no more than users of a round, as a shard without any
        of them has no work. For branches see `flsim.algorithms.summation.default_branch`.

        Args:
            processes: number of client processes that have room, at least 1.
            users: number of training users.
        """
        shards, branch = self.system.shards, self.system.branch
        if shards is None:
            shards = min(processes, users, max(self.training.cohort, SHARDS))
        if branch is None:
            branch = default_branch(shards) or None  # without branches config.toml stays what it was before them
        return replace(self, system=replace(self.system, shards=shards, branch=branch))

    def resuming(self, started: Config) -> Self:
        if not isinstance(started, FederatedConfig):
            return self
        ours, theirs = self.system, started.system
        shards = theirs.shards if ours.shards is None else ours.shards
        branch = theirs.branch if ours.branch is None else ours.branch
        return replace(self, system=replace(ours, shards=shards, branch=branch))

    def training_of(
        self,
        users: Population | Split,
        rounds: int,
        device: str | None = None,
        user_states: UserStates | None = None,
        micro_cohorts: MicroCohorts | None = None,
    ) -> FederatedTraining:
        if self.canaries.injections:  # a split has no pseudo-users yet
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
