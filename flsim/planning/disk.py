"""Disk space of a run, from its settings alone."""

from dataclasses import dataclass

import numpy as np

from flsim.canaries.spec import configurations, expected_copies
from flsim.canaries.twin import order_dtype
from flsim.data.corpus import Corpus
from flsim.models.architectures import build
from flsim.runs.config import Config

# Measured on runs of experiments/table1.toml, tier smoke; small beside checkpoints.
CHECKPOINT_HEADER = 900
ROUND, STEPS = 340, 150  # a line of rounds.jsonl, of federated and of central training
TRACKED, TRACKED_EVALUATION = 540, 700  # of tensorboard/, for such a line and for an evaluation
ROWS, ROWS_CANARY = 3_500, 30
ROSTER, ROSTER_CANARY = 6_000, 60
REST = 6_000  # settings, status, log
KEPT = 2  # states of a user that a resume may need, on average


@dataclass(frozen=True)
class DiskUse:
    """Disk space of a run, in bytes.

    Attributes:
        checkpoints: checkpoints that stay.
        planted: canaries, and the IID twin.
        rest: rows, logs, files of trackers, and what sampled users keep between rounds.
        newest: the newest two checkpoints during training, and one more while it is written.
    """

    checkpoints: int
    planted: int
    rest: int
    newest: int

    @property
    def total(self) -> int:
        """Return the bytes after training."""
        return self.checkpoints + self.planted + self.rest


def parameters_of(config: Config, vocabulary: int) -> int:
    """Return the number of the model's trained weights; a user's own model code is executed."""
    return sum(value.numel() for value in build(vocabulary, config.model).trainable.values())


def checkpoint_bytes(config: Config, vocabulary: int) -> int:
    """Return the bytes of a checkpoint: parameters in float32, the optimizer's state, and a header."""
    copies = config.optimizer_slots(vocabulary)
    return 4 * parameters_of(config, vocabulary) * (1 + copies) + CHECKPOINT_HEADER * (1 + copies)


def run_bytes(
    config: Config, users: int, records: int, vocabulary: int, rounds: int, evaluations: int, checkpoints: int
) -> DiskUse:
    """Return the disk space of a run folder.

    Args:
        config: settings of the run.
        users: number of training users.
        records: number of their records.
        vocabulary: number of token ids.
        rounds: number of rounds or steps.
        evaluations: number of evaluated checkpoints.
        checkpoints: number of checkpoints that stay.
    """
    one = checkpoint_bytes(config, vocabulary)
    canaries = len(configurations(config.canaries)) + config.canaries.controls
    planted = ROSTER + ROSTER_CANARY * canaries + round(10 * expected_copies(config.canaries, records))
    if config.data.world == "iid":
        planted += np.dtype(order_dtype(records)).itemsize * records + 8 * (users + 1)
    lines = rounds if config.has_a_line_per_round else evaluations + rounds // config.system.checkpoint_every
    tracked = "tensorboard" in config.system.tracking
    line = ROUND if config.has_a_line_per_round else STEPS
    rest = REST + lines * line + evaluations * (ROWS + ROWS_CANARY * canaries)
    rest += tracked * (lines * TRACKED + evaluations * TRACKED_EVALUATION)
    if config.slots_kept_by_users:
        sampled = users * (1 - (1 - min(1.0, config.round_size / users)) ** rounds)
        rest += round(KEPT * sampled * 4 * parameters_of(config, vocabulary) * config.slots_kept_by_users)
    return DiskUse(checkpoints * one, planted, rest, 3 * one)


def corpus_bytes(corpus: Corpus) -> int:
    """Return the bytes of all files of a corpus."""
    return sum(path.stat().st_size for path in corpus.path.rglob("*") if path.is_file())
