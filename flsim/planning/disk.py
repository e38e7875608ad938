"""What a run leaves on the disk, from its settings alone."""

from dataclasses import dataclass

import numpy as np

from flsim.canaries.population import order_dtype
from flsim.canaries.spec import CanaryHParams, configurations
from flsim.data.corpus import Corpus
from flsim.models.architectures import build
from flsim.runs.config import Config

# Measured on runs of experiments/table1.toml, tier smoke; small beside checkpoints.
CHECKPOINT_HEADER = 900
ROUND, STEPS = 285, 150  # a line of rounds.jsonl, of federated and of central training
TRACKED, TRACKED_EVALUATION = 450, 700  # of tensorboard/, for such a line and for an evaluation
ROWS, ROWS_CANARY = 3_500, 30
ROSTER, ROSTER_CANARY = 6_000, 60
REST = 6_000  # settings, status, log


@dataclass(frozen=True)
class DiskUse:
    """Bytes.

    Attributes:
        checkpoints: those that are evaluated, which stay.
        planted: canaries, and the IID twin.
        rest: rows, logs and what trackers write.
        newest: what the newest two take while training goes on, and one more while it is written.
    """

    checkpoints: int
    planted: int
    rest: int
    newest: int

    @property
    def total(self) -> int:
        """When training is over."""
        return self.checkpoints + self.planted + self.rest


def parameters_of(config: Config, vocabulary: int) -> int:
    """Number of the model's trained weights; a user's own is executed."""
    return sum(value.numel() for value in build(vocabulary, config.model).trainable.values())


def expected_copies(hparams: CanaryHParams, records: int) -> float:
    """Records that canaries replace, of so many, in expectation and were none claimed twice."""
    each = configurations(hparams)
    return sum(p_u * p_e * records if copies is None else copies for p_u, p_e, copies in each)


def checkpoint_bytes(config: Config, vocabulary: int) -> int:
    """Of one: parameters in float32, the optimizer's state, and a header."""
    copies = config.optimizer_slots(vocabulary)
    return 4 * parameters_of(config, vocabulary) * (1 + copies) + CHECKPOINT_HEADER * (1 + copies)


def run_bytes(config: Config, users: int, records: int, vocabulary: int, rounds: int, evaluations: int) -> DiskUse:
    """Of a run folder.

    Args:
        config: its settings.
        users, records: of the training users.
        vocabulary: number of token ids.
        rounds: or steps, in all.
        evaluations: of its checkpoints.
    """
    one = checkpoint_bytes(config, vocabulary)
    canaries = len(configurations(config.canaries))
    planted = ROSTER + ROSTER_CANARY * canaries + round(10 * expected_copies(config.canaries, records))
    if config.data.world == "iid":
        planted += np.dtype(order_dtype(records)).itemsize * records + 8 * (users + 1)
    lines = rounds if config.has_a_line_per_round else evaluations + rounds // config.system.checkpoint_every
    tracked = "tensorboard" in config.system.tracking
    line = ROUND if config.has_a_line_per_round else STEPS
    rest = REST + lines * line + evaluations * (ROWS + ROWS_CANARY * canaries)
    rest += tracked * (lines * TRACKED + evaluations * TRACKED_EVALUATION)
    return DiskUse(evaluations * one, planted, rest, 3 * one)


def corpus_bytes(corpus: Corpus) -> int:
    """Of all its files."""
    return sum(path.stat().st_size for path in corpus.path.rglob("*") if path.is_file())
