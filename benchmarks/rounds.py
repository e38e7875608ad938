"""Rounds of the complete system as `flsim run` trains them: Flower, Ray, messages, engine, aggregation, checkpoints."""

import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from flsim.base.errors import InputError, at_least_one
from flsim.canaries.spec import CanaryHParams
from flsim.data.synthetic import SyntheticHParams, make_synthetic
from flsim.models.architectures import ModelHParams
from flsim.runs import roundlog
from flsim.runs.config import DataHParams, FederatedConfig, ScheduledEvaluationHParams, SystemHParams, TrainingHParams
from flsim.runs.folder import Run
from flsim.training.update import LocalHParams
from server.launch import train as train_on_ray


@dataclass(frozen=True)
class BenchHParams:
    """Settings of the benchmark, which trains the same users in every round.

    The first round starts processes and is not counted.

    Attributes:
        users: number of users in the population, and in each round.
        words: words of each user.
        rounds: number of rounds, with the first.
        vocabulary_size: V.
        model: sizes of the model.
        local: local training. Its learning rate is low, which does not change times. At 0.3 the loss falls fast after a
            few rounds, and differences by rounding grow to a percent, so that equal work could not be distinguished
            from different work.
    """

    users: int
    words: int = 2_000
    rounds: int = 3
    vocabulary_size: int = 10_000
    model: ModelHParams = field(default_factory=ModelHParams)
    local: LocalHParams = field(default_factory=partial(LocalHParams, learning_rate=0.1))

    def __post_init__(self) -> None:
        at_least_one(users=self.users, words=self.words)
        if self.rounds < 2:
            raise InputError(f"rounds must be at least 2, found {self.rounds}: the first one is not counted")


def new_run(folder: Path, hparams: BenchHParams, shards: int) -> Run:
    """Make a synthetic corpus and a run over it, with a checkpoint per round and an evaluation of the last."""
    folder.mkdir(parents=True, exist_ok=True)
    corpus = SyntheticHParams(
        users=hparams.users, words_per_user=hparams.words, vocabulary_size=hparams.vocabulary_size, test_users=1
    )
    make_synthetic(folder / "corpus", corpus, seed=0)
    settings = settings_over(
        folder / "corpus", hparams, hparams.users, SystemHParams(shards=shards, checkpoint_every=1)
    )
    return Run.create(settings, folder / "run")


def settings_over(corpus: Path, hparams: BenchHParams, cohort: int, system: SystemHParams) -> FederatedConfig:
    """Return the settings of a run over a corpus, with an evaluation of the last round.

    Args:
        corpus: folder of a corpus of `hparams.users` training users.
        hparams: model, local training, and number of rounds.
        cohort: number of users in each round.
        system: use of the machines.
    """
    return FederatedConfig(
        DataHParams(corpus),
        canaries=CanaryHParams(p_u=(1 / hparams.users,), p_e=(0.1,), count=1),
        model=hparams.model,
        training=TrainingHParams(rounds=hparams.rounds, cohort=cohort),
        local=hparams.local,
        evaluation=ScheduledEvaluationHParams(references=10, every=hparams.rounds),
        system=system,
    )


def train(run: Run, address: str | None = None) -> list[dict[str, Any]]:
    """Train all rounds of a run on a Ray cluster, or on all processors of this machine; return rounds.jsonl."""
    train_on_ray(run, address)
    return roundlog.read(run.path)


def overhead(hparams: BenchHParams, shards: int) -> float:
    """Return the seconds of a round beyond the training of its busiest client: the median without the first round."""
    with tempfile.TemporaryDirectory(prefix="flsim-bench-") as folder:
        log = train(new_run(Path(folder), hparams, shards))
    return float(median(line["overhead"] for line in log[1:]))
