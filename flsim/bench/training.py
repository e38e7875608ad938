"""Benchmarks: figures that are measured side by side in one run; absolute times mean little on shared machines."""

import importlib
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flsim import checkpoint
from flsim.canaries.spec import CanaryHParams
from flsim.config import DataHParams, FederatedConfig, ScheduledEvaluationHParams, SystemHParams, TrainingHParams
from flsim.data.synthetic import SyntheticHParams, make_synthetic
from flsim.model.cifg import ModelHParams
from flsim.runs import Run
from flsim.train.hparams import LocalHParams
from flsim.train.local import train_cohort

ROUNDS, COHORT = 4, 8
UNIT = "one user, 2,000 words, one local epoch at batch 16, the full model (V = 10,000)"


def bench_training() -> dict[str, Any]:
    """Users per second of the `local` engine alone, one thread, and of the whole system on all cores.

    The system is Flower, Ray, messages, aggregation and checkpoints; its first round, which starts processes, is left
    out.

    Returns:
        ``users_per_second`` with the keys ``local`` and ``system``, ``ratio`` of system to local, ``clients``, and the
        ``unit`` of work.
    """
    with tempfile.TemporaryDirectory(prefix="flsim-bench-") as folder:
        corpus = SyntheticHParams(users=ROUNDS * COHORT, words_per_user=2_000, vocabulary_size=10_000, test_users=1)
        make_synthetic(Path(folder) / "corpus", corpus, seed=0)
        settings = FederatedConfig(
            DataHParams(Path(folder) / "corpus"),
            canaries=CanaryHParams(p_u=(0.1,), p_e=(0.1,), count=1),
            model=ModelHParams(),
            training=TrainingHParams(rounds=ROUNDS, cohort=COHORT),
            local=LocalHParams(batch_size=16),
            evaluation=ScheduledEvaluationHParams(references=10, every=ROUNDS),
            system=SystemHParams(checkpoint_every=1),
        )
        run = Run.create(settings, Path(folder) / "run")
        local = COHORT / _seconds(lambda: _train_locally(run))
        importlib.import_module("server.launch").simulate(run)
        rounds = [json.loads(line) for line in (run.path / "rounds.jsonl").read_text().splitlines()][1:]
    system = sum(entry["users"] for entry in rounds) / sum(entry["seconds"] for entry in rounds)
    clients = len({worker for entry in rounds for worker in entry["workers"]})
    return {
        "users_per_second": {"local": local, "system": system},
        "ratio": system / local,
        "clients": clients,
        "unit": UNIT,
    }


def describe(measured: dict[str, Any]) -> str:
    """The figures for a person."""
    rates = [f"{name:<8} {rate:6.2f} users/s" for name, rate in measured["users_per_second"].items()]
    ratio = f"system is {measured['ratio']:.2f} times local, with {measured['clients']} clients"
    return "\n".join([f"unit: {measured['unit']}", *rates, ratio])


def _train_locally(run: Run) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = checkpoint.model_of(run.provenance)
    model.load_state_dict(run.latest_state().params)
    train_cohort(model, run.users, range(COHORT), run.federated.local, run.config.seed, 0)
    torch.set_num_threads(threads)


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
