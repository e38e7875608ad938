"""The configuration of a federated run."""

from dataclasses import field, replace
from typing import Literal, Self

import numpy as np

from flsim.algorithms import server_optimizers
from flsim.algorithms.built_in import ALGORITHMS, FedAvgHParams, algorithm_named
from flsim.algorithms.micro_cohorts import MicroCohorts
from flsim.algorithms.rounds import EngineName, FederatedTraining, refuse_injections, refuse_precision
from flsim.algorithms.summation import default_branch
from flsim.algorithms.user_states import UserStates
from flsim.base.errors import InputError
from flsim.base.extensions import by_content, configured, is_custom, label_of, not_executed
from flsim.base.settings import Count, Natural, NotNegative, Positive, Seconds, settings
from flsim.canaries.population import Population
from flsim.data.corpus import Split
from flsim.data.vocabulary import Layout
from flsim.models.architectures import declared, without_values
from flsim.privacy import noise, sampling
from flsim.privacy.ledger import Entry
from flsim.privacy.update_canaries import AuditHParams
from flsim.runs.config import participation
from flsim.runs.config.base import CommonSystemHParams, Config, whole_rounds
from flsim.runs.config.participation import Flags, Meetings
from flsim.training.footprint import Footprint, footprint_of, gpu_memory
from flsim.training.hparams import LocalHParams, label_of_steps, total_rate

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
