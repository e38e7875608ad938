"""Benchmark of the slowdown of training by evaluation beside it, on all cores, against the evaluator's share of them.

Nothing is free on a machine that is fully used. An evaluator that takes a share of the processors slows the training by
that share, and by more if it also makes others wait. So the slowdown is compared with the share. Within one run, rounds
with the evaluator at work and rounds without it alternate, a few seconds apart, so that other work on the machine
disturbs both. A run without any evaluation is trained before each, for comparison.
"""

import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flsim.base.progress import say
from flsim.canaries.spec import CanaryHParams
from flsim.data.synthetic import SyntheticHParams, make_synthetic
from flsim.models.hparams import ModelHParams
from flsim.results.evaluations import read_evaluations
from flsim.runs import roundlog
from flsim.runs.config import DataHParams, FederatedConfig, ScheduledEvaluationHParams, SystemHParams, TrainingHParams
from flsim.runs.folder import Run
from flsim.training.hparams import LocalHParams
from server.launch import train as train_on_ray

ROUNDS, EVERY = 59, 10
REPEATS = 2
USERS_PER_CORE = 12  # of a cohort
WARM_UP = EVERY + 5  # rounds in which processes start, those of the clients and of the evaluator
AT_WORK, AT_REST = 0.9, 0.1  # fraction of a round that the evaluator works, at least and at most
UNIT = "one round: 12 users a core, 2,000 words each, batch 16, V = 2,000, embedding 32, 128 units"


@dataclass(frozen=True)
class Round:
    """Seconds that a round took, and the fraction of it in which the evaluator worked."""

    seconds: float
    at_work: float


def bench_interference() -> dict[str, Any]:
    """Train with an evaluation at every tenth round, and without any, in turns.

    Returns:
        ``cores``; the median ``round_seconds`` of runs ``without_evaluation``, and in runs with it, of rounds
        ``at_rest`` and ``at_work``; the numbers of these ``rounds``; ``slowdown``, the fraction of a round at work that
        the evaluator cost; ``share``, the fraction of all processors that it took meanwhile; ``ratio`` of the two;
        ``evaluator_cpu_seconds``; the ``unit`` of work.
    """
    cores = len(os.sched_getaffinity(0))
    without: list[Round] = []
    with_: list[Round] = []
    cpu = seconds = 0.0
    with tempfile.TemporaryDirectory(prefix="flsim-bench-") as folder:
        users = SyntheticHParams(
            users=2 * USERS_PER_CORE * cores, words_per_user=2_000, vocabulary_size=2_000, test_users=2
        )
        corpus = make_synthetic(Path(folder) / "corpus", users, seed=0).path
        for repeat in range(REPEATS):
            say(f"repetition {repeat + 1} of {REPEATS}: without evaluation, with it")
            without += _train(corpus, cores, ROUNDS, f"without-{repeat}")[0]
            rounds, each_cpu, each_seconds = _train(corpus, cores, EVERY, f"with-{repeat}")
            with_, cpu, seconds = with_ + rounds, cpu + each_cpu, seconds + each_seconds
    share = cpu / (cores * seconds)
    return {"cores": cores, **compare(without, with_, share), "evaluator_cpu_seconds": cpu, "unit": UNIT}


def compare(without: Sequence[Round], with_: Sequence[Round], share: float) -> dict[str, Any]:
    """Return the figures of `bench_interference` that come from rounds, without rounds partly at work."""
    kinds = {
        "without_evaluation": [round_.seconds for round_ in without],
        "at_rest": [round_.seconds for round_ in with_ if round_.at_work <= AT_REST],
        "at_work": [round_.seconds for round_ in with_ if round_.at_work >= AT_WORK],
    }
    medians = {name: statistics.median(seconds) for name, seconds in kinds.items()}
    slowdown = 1 - medians["at_rest"] / medians["at_work"]
    return {
        "round_seconds": medians,
        "rounds": {name: len(seconds) for name, seconds in kinds.items()},
        "slowdown": slowdown,
        "share": share,
        "ratio": slowdown / share,
    }


def describe(measured: dict[str, Any]) -> str:
    """Return the results as text."""
    rounds = [
        f"{name.replace('_', ' '):<20} {seconds:7.3f} s a round, median of {measured['rounds'][name]}"
        for name, seconds in measured["round_seconds"].items()
    ]
    verdict = (
        f"while the evaluator takes {measured['share']:.1%} of {measured['cores']} cores, training is "
        f"{measured['slowdown']:.1%} slower: {measured['ratio']:.2f} times its share"
    )
    return "\n".join([f"unit: {measured['unit']}", *rounds, verdict])


def _train(corpus: Path, cores: int, every: int, name: str) -> tuple[list[Round], float, float]:
    """Train, and return rounds after the warm-up, and processor and wall-clock seconds of the evaluations after it."""
    settings = FederatedConfig(
        DataHParams(corpus),
        canaries=CanaryHParams(p_u=(0.1,), p_e=(0.1,), count=4),
        model=ModelHParams(embedding=32, units=128),
        training=TrainingHParams(rounds=ROUNDS, cohort=USERS_PER_CORE * cores),
        local=LocalHParams(batch_size=16),
        evaluation=ScheduledEvaluationHParams(references=100_000, every=every),
        system=SystemHParams(shards=cores, checkpoint_every=EVERY),
    )
    run = Run.create(settings, corpus.parent / name)
    train_on_ray(run)
    lines = roundlog.read(run.path)
    evaluations = [evaluation_ for evaluation_ in read_evaluations(run.path)[1:] if evaluation_.cpu_seconds is not None]
    rounds, end = [], (run.path / roundlog.FILE).stat().st_mtime  # when the last round was logged
    for line in reversed(lines[WARM_UP:]):
        began = end - line["seconds"]
        at_work = sum(
            max(0.0, min(end, evaluation_.ended) - max(began, evaluation_.ended - evaluation_.seconds))
            for evaluation_ in evaluations
        )
        rounds.append(Round(line["seconds"], at_work / line["seconds"]))
        end = began
    meanwhile = [
        evaluation_ for evaluation_ in evaluations if evaluation_.checkpoint != f"round-{ROUNDS:06d}.safetensors"
    ]
    return (
        rounds,
        sum(evaluation_.cpu_seconds or 0.0 for evaluation_ in meanwhile),
        sum(evaluation_.seconds for evaluation_ in meanwhile),
    )
