"""Central training in several processes on any nodes, by Ray Train and `torch.distributed`."""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist

from flsim.base.errors import InputError, RunFailed, last_line
from flsim.base.extensions import naming_own_code
from flsim.runs.config import CentralSystemHParams
from flsim.runs.folder import Run
from flsim.runs.locks import hold_lock
from flsim.training.central.distributed import shared
from flsim.training.central.distributed_stacked import group_engine_of
from flsim.training.central.training import train_chunks
from server.central.steps import Lost, News, opened, use, written
from server.cluster.internals import trainer_without_cleaner
from server.stopping import StopFile

LOOK = "0.5"  # seconds between two checks of the workers' health
TIMEOUT = 600  # seconds that a worker waits for the others; the first one also saves and writes meanwhile
STORAGE = ".ray-train"  # in the run's folder, where all nodes see it; its files are not needed afterwards


def train_together(path: Path, gpus: float) -> Iterator[News]:
    """Train a run like `server.central.steps.train`, by as many processes as its settings say, each with `gpus` GPUs.

    Raises:
        InputError, Diverged, Interrupted, RunFailed, OSError: see `server.central.steps.train`.
        Lost: a process died, or failed in another way.
    """
    from ray.train import RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchConfig
    from ray.util.queue import Empty, Queue

    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", LOOK)
    system, told = Run.open(path).central.system, Queue(actor_options={"num_cpus": 0})
    resources = {"CPU": float(system.threads)} | ({"GPU": gpus} if gpus else {})
    trainer = trainer_without_cleaner()(
        _work,
        train_loop_config={"path": path, "gpus": gpus, "told": told},
        torch_config=TorchConfig(timeout_s=TIMEOUT),
        scaling_config=ScalingConfig(num_workers=system.workers, use_gpu=gpus > 0, resources_per_worker=resources),
        run_config=RunConfig(name=path.name, storage_path=str(path / STORAGE)),
    )
    failure: Exception | None = None
    with ThreadPoolExecutor(1) as pool:
        fit = pool.submit(trainer.fit)
        while True:
            ended = fit.done()
            try:
                news = told.get(timeout=0.2)
            except Empty:
                if ended:
                    break
                continue
            if isinstance(news, News):
                yield news
            else:
                failure = failure or news
    told.shutdown()
    try:
        fit.result()
    except TrainingFailedError as error:
        raise failure or Lost(last_line(error)) from error


def _work(settings: dict[str, Any]) -> None:
    """Work as a worker of Ray Train; the first one also sends news and errors to the driver."""
    told, run = settings["told"], Run.open(settings["path"])
    try:
        use_own_device(run.central.system, settings["gpus"])
        train_in_group(run, told.put)
    except (InputError, RunFailed, OSError) as error:
        told.put(error)
        raise


def train_in_group(run: Run, tell: Callable[[News], None]) -> None:
    """Train a run as one process of torch's default group; the first one also reads the checkpoint and writes files.

    Args:
        run: the run.
        tell: what to do with news, which only the first process has.

    Raises:
        Interrupted: in the first process: the driver asked for the end, and there is a checkpoint. The others return,
            after the same step.
        InputError, Diverged, RunFailed, OSError: see `server.central.steps.train`.
    """
    leads = dist.get_rank() == 0
    with hold_lock(run) if leads else nullcontext(), naming_own_code():
        state = shared(opened(run)[1] if leads else None)
        training = run.central.training_of(run.users, run.rounds)
        engine = group_engine_of(training, state, StopFile(run.path))
        chunks = train_chunks(state, training, run.rounds, run.is_saved_at, engine, engine.ends)
        if leads:
            for news in written(run, state, chunks):
                tell(news)
        else:
            deque(chunks, maxlen=0)


def use_own_device(system: CentralSystemHParams, gpus: float) -> None:
    """Restrict a worker of Ray Train to its share of the machine, see `server.central.steps.use`."""
    from ray.train.torch import get_device

    # Ray Train shows each worker all GPUs of its node: without this all of them would use the first one, which NCCL
    # refuses as a duplicate. The device of a thread is its own, so this runs in the thread that trains.
    use(system, gpus, get_device())
