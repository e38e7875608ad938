"""The configuration of a central run: SGD over records, or DP-SGD."""

from collections.abc import Iterator
from dataclasses import field, replace
from typing import Annotated, Literal, Self

import numpy as np

from flsim.algorithms.micro_cohorts import MicroCohorts
from flsim.algorithms.user_states import UserStates
from flsim.base.arrays import Ints
from flsim.base.errors import InputError
from flsim.base.extensions import configured, label_of
from flsim.base.settings import Count, Natural, bounds, settings
from flsim.canaries.population import Partition, Population
from flsim.data.corpus import Split
from flsim.data.records import Layout
from flsim.privacy.ledger import Entry
from flsim.runs.config import participation
from flsim.runs.config.base import CommonSystemHParams, Config, ScheduledEvaluationHParams
from flsim.runs.config.participation import Flags, Meetings
from flsim.training.central import CentralHParams, CentralTraining
from flsim.training.central.hparams import Order, steps_per_epoch
from flsim.training.central.training import EngineName, refuse_precision
from flsim.training.optimizers import OPTIMIZERS, slots_of
from flsim.training.own_model import Footprint, footprint_of, gpu_memory
from flsim.training.update import label_of_steps, total_rate


@settings
class CentralTrainingHParams(CentralHParams):
    """Settings of central training: `CentralHParams`, the kind of training, and the order of records.

    Attributes:
        kind: Kind of training: "central".
        order: Order of records, which follows from `data.partition`: "iid" for "iid", "sequence" for "non-iid". Other
            values are errors. With clip or noise, records are drawn at random, which is "iid".
    """

    kind: Literal["central"] = "central"
    order: Order | None = None


@settings
class StepwiseEvaluationHParams(ScheduledEvaluationHParams):
    """Settings of the measurements of checkpoints in central training, and of their times.

    Attributes:
        every: Number of steps between two evaluations; the last step is always evaluated. Decrease it for a finer
            curve. Unit: steps.
    """

    every: Count = 10_000


@settings
class CentralSystemHParams(CommonSystemHParams):
    """Settings of the use of machines in central training; they change results only by floating-point rounding.

    A run resumes to the same bits if device, threads and physical_batch do not change.

    Attributes:
        engine: "fused" uses a written-out gradient, for "cifg", "lstm" and "gru". "autograd" is plain PyTorch, which is
            slower, and supports any architecture and DP-SGD.
        device: Device of the training process. Use "cuda" to train on a GPU.
        threads: CPU cores, and torch threads, of the training process. Increase it for large models. Unit: cores.
        gpus: GPUs of the training process, at most 1, e.g. 0.2 for four runs on one GPU, each with an evaluator. The
            process can use this share of the GPU's memory. When not set: the remainder of one GPU after evaluators with
            device "cuda", and 0 with device "cpu". Unit: GPUs.
        retries: Number of consecutive restarts from the newest checkpoint after a process died, before the run fails.
            The pauses before restarts are 1, 2, 4, ... seconds. Unit: attempts.
        physical_batch: With clip or noise: number of records whose gradients are in memory at the same time, about 40
            MB each for the paper's model. Decrease it if memory runs out. Unit: records.
    """

    engine: EngineName = "fused"
    device: Literal["cpu", "cuda"] = "cpu"
    threads: Count = 1
    gpus: Annotated[float, bounds(ge=0, le=1)] | None = None
    retries: Natural = 3
    physical_batch: Count = 8
    checkpoint_every: Count = 1_000

    def __post_init__(self) -> None:
        if self.gpus == 0 and self.device == "cuda":
            raise InputError(f"gpus must be above 0 and at most 1, found {self.gpus:g}")
        if self.gpus and self.device != "cuda":
            raise InputError('gpus is for device "cuda"; remove it or set it to 0, or set device = "cuda"')

    @property
    def training_threads(self) -> int:
        return self.threads

    @property
    def is_one_process(self) -> bool:
        return self.device == "cpu"


@settings
class CentralConfig(Config):
    """A run of central training over records; with clip or noise, DP-SGD.

    Attributes:
        training: Optimizer over minibatches of records, and number of steps.
    """

    evaluation: StepwiseEvaluationHParams = field(default_factory=StepwiseEvaluationHParams)
    training: CentralTrainingHParams = field(default_factory=CentralTrainingHParams)
    system: CentralSystemHParams = field(default_factory=CentralSystemHParams)

    unit = "record"
    has_a_line_per_round = False

    @property
    def _knows_end(self) -> bool:
        return self.training.schedule != "constant" or self.canaries.depends_on_length

    @property
    def _without_digest(self) -> tuple[str, ...]:
        return ("order",) if self._knows_end else ("epochs", "steps", "words", "order")

    def __post_init__(self) -> None:
        super().__post_init__()
        partition, order = self.data.partition, self.training.order
        if order in (None, self.order):
            return
        if self._is_private:
            raise InputError(
                'training.order "sequence" has no privacy accounting: with a clip or noise, records are drawn at '
                "random; remove training.order"
            )
        other = "iid" if partition == "non-iid" else "non-iid"
        raise InputError(
            f'training.order "{order}" contradicts data.partition "{partition}", which requires order '
            f'"{self.order}"; remove it, or set data.partition = "{other}"'
        )

    @property
    def _is_private(self) -> bool:
        return self.privacy.mechanism != "none"

    @property
    def order(self) -> Order:
        """Return the order of records: random, or user by user (Thakkar et al., 2020, section 4.2)."""
        return "iid" if self._is_private or self.data.partition == "iid" else "sequence"

    @property
    def partition(self) -> Partition | None:
        return None if self._is_private else self.data.partition

    @property
    def _label(self) -> str:
        training, privacy = self.training, self.privacy
        optimizer = label_of(configured(training, "optimizer"), OPTIMIZERS)
        algorithm = {"none": optimizer, "clip": f"{optimizer}+Clip", "dp": f"DP-{optimizer}"}
        parts = [algorithm[privacy.mechanism], *filter(None, [self.model.label])]
        if privacy.clip is not None:
            parts.append(f"C={privacy.clip:g}")
        if privacy.noise_multiplier:
            parts.append(f"z={privacy.noise_multiplier:g}")
        parts += [f"b_r={training.batch_size}"]
        for name, setting in (("gradient_clip", "clip"), ("weight_decay", "decay"), ("dropout", "dropout")):
            if value := getattr(training, name):
                parts.append(f"{setting} {value:g}")
        parts.append(label_of_steps(training.milestones, training.milestone_factor))
        return ", ".join(filter(None, parts))

    def training_of(
        self,
        users: Population | Split,
        rounds: int,
        device: str | None = None,
        user_states: UserStates | None = None,  # noqa: ARG002 (records keep nothing)
        micro_cohorts: MicroCohorts | None = None,  # noqa: ARG002 (there are no cohorts)
    ) -> CentralTraining:
        training = CentralTraining(
            users,
            self.training,
            self.seed,
            self.order,
            self.privacy,
            rounds,
            device or self.system.device,
            self.system.engine,
            self.system.physical_batch,
            self.model,
        )
        refuse_precision(training)
        return training

    @property
    def sampler(self) -> str:
        return "poisson" if self._is_private else "fixed-size"

    @property
    def round_size(self) -> int:
        return self.training.batch_size

    @property
    def clients(self) -> int:
        return 0

    def footprint(self, layout: Layout) -> Footprint:
        system = self.system
        gpus = system.gpus or 1.0 if system.device == "cuda" else 0.0
        gradients = system.physical_batch if self.privacy.mechanism != "none" else None
        return footprint_of(self.model, layout, self.training, gpu_memory(gpus), gradients)

    def optimizer_slots(self, vocabulary_size: int) -> int:  # noqa: ARG002 (torch's optimizers have the same for all)
        return len(slots_of(configured(self.training, "optimizer")))

    def _drawn(self, users: Population, steps: int) -> Iterator[Ints]:
        order = None if self._is_private else self.order
        return participation.drawn_steps(users.records, self.seed, self.training.batch_size, order, steps)

    def meetings(self, users: Population, rounds: int) -> Meetings:
        at, copies = participation.of_steps(users, self._drawn(users, rounds))
        return at, users.overlay.canaries[copies].astype(np.int64), participation.holders(users)[copies]

    def records_read(self, users: Population, rounds: int) -> Flags:
        if not self._is_private:  # the first epoch contains each record once
            rounds = min(rounds, steps_per_epoch(users.records, self.training.batch_size))
        return participation.read_in_steps(users, self._drawn(users, rounds))

    def rounds_per_epoch(self, train: Split) -> float:
        size = self.training.batch_size
        return train.records / size if self._is_private else float(steps_per_epoch(train.records, size))

    def rounds_asked(self, train: Split) -> int:
        return self.training.steps_over(train.records, train.words)

    def rate_steps(self, train: Split) -> float:
        steps = self.rounds_over(train)
        return total_rate(lambda step: self.training.rate(step, steps), steps)

    def lasting(self, rounds: int) -> Self:
        return replace(self, training=replace(self.training, steps=rounds, words=None))

    def planned(self, population: int, rounds: int) -> Entry:
        return Entry(self.sampler, population, self.training.batch_size, self.privacy.noise_multiplier, rounds)
