"""Disk space of runs, computed from their settings."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flsim.canaries.spec import configurations, expected_copies
from flsim.canaries.twin import order_dtype
from flsim.data.corpus import Corpus, Split
from flsim.models.architectures import build
from flsim.planning.scale import checkpoints_of, evaluations_of, trained_on
from flsim.planning.text import cell, size, with_unit
from flsim.runs.config import Config
from flsim.runs.sweeps.definition import Planned

# Measured on runs of experiments/table1.toml, tier smoke; small beside checkpoints.
CHECKPOINT_HEADER = 900
ROUND, STEPS = 340, 150  # a line of rounds.jsonl, of federated and of central training
TRACKED, TRACKED_EVALUATION = 540, 700  # of tensorboard/, for such a line and for an evaluation
ROWS, ROWS_CANARY = 3_500, 30
ROSTER, ROSTER_CANARY = 6_000, 60
REST = 6_000  # settings, status, log
KEPT = 2  # states of a user that a resume may need, on average


@dataclass(frozen=True)
class Disk:
    """Disk space of runs, in bytes.

    `meanwhile` is the newest two checkpoints of runs that train, and one more while it is written.
    """

    total: int = cell("Disk after training", size)
    checkpoints: int = cell("Disk of checkpoints", size)
    kept: int = cell("Number of checkpoints", with_unit("{:,}", "checkpoints"))
    planted: int = cell("Disk of planted canaries and IID twins", size)
    rest: int = cell("Disk of rows, logs and states of users", size)
    corpus: int = cell("Disk of the corpus, if the sweep makes it", size)
    meanwhile: int = cell("Additional disk during training", size)


def disk_of(runs: Sequence[Planned], train: Split, at_once: int, corpus: int) -> Disk:
    """Return the disk space of all runs.

    Args:
        runs: all runs.
        train: the training users.
        at_once: number of runs at the same time.
        corpus: bytes of the corpus, if the sweep makes it; 0 otherwise.
    """
    disks = [run_disk(run.config, trained_on(run.config, train)) for run in runs]
    meanwhile = sum(sorted((disk.meanwhile for disk in disks), reverse=True)[:at_once])
    checkpoints, kept = sum(disk.checkpoints for disk in disks), sum(disk.kept for disk in disks)
    planted, rest = sum(disk.planted for disk in disks), sum(disk.rest for disk in disks)
    return Disk(checkpoints + planted + rest + corpus, checkpoints, kept, planted, rest, corpus, meanwhile)


def parameters_of(config: Config, vocabulary: int) -> int:
    """Return the number of the model's trained weights; a user's own model code is executed."""
    return sum(value.numel() for value in build(vocabulary, config.model).trainable.values())


def checkpoint_bytes(config: Config, vocabulary: int) -> int:
    """Return the bytes of a checkpoint: parameters in float32, the optimizer's state, and a header."""
    copies = 1 + config.optimizer_slots(vocabulary)
    return (4 * parameters_of(config, vocabulary) + CHECKPOINT_HEADER) * copies


def run_disk(config: Config, train: Split) -> Disk:
    """Return the disk space of the folder of a run that trains on these users."""
    users, records, vocabulary = len(train), train.records, train.layout.vocabulary_size
    rounds, evaluations, kept = config.rounds_over(train), evaluations_of(config, train), checkpoints_of(config, train)
    one = checkpoint_bytes(config, vocabulary)
    canaries = len(configurations(config.canaries)) + config.canaries.controls
    planted = ROSTER + ROSTER_CANARY * canaries + round(10 * expected_copies(config.canaries, records))
    if config.data.partition == "iid":
        planted += np.dtype(order_dtype(records)).itemsize * records + 8 * (users + 1)
    lines = rounds if config.has_a_line_per_round else evaluations + rounds // config.system.checkpoint_every
    tracked = "tensorboard" in config.system.tracking
    line = ROUND if config.has_a_line_per_round else STEPS
    rest = REST + lines * line + evaluations * (ROWS + ROWS_CANARY * canaries)
    rest += tracked * (lines * TRACKED + evaluations * TRACKED_EVALUATION)
    if config.slots_kept_by_users:
        sampled = users * (1 - (1 - min(1.0, config.round_size / users)) ** rounds)
        rest += round(KEPT * sampled * 4 * parameters_of(config, vocabulary) * config.slots_kept_by_users)
    return Disk(kept * one + planted + rest, kept * one, kept, planted, rest, corpus=0, meanwhile=3 * one)


def corpus_bytes(corpus: Corpus) -> int:
    """Return the bytes of all files of a corpus."""
    return sum(path.stat().st_size for path in corpus.path.rglob("*") if path.is_file())
