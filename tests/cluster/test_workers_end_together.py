"""Processes that train one central run end after the same chunk of steps, whenever each could see the request."""

import multiprocessing
import shutil
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist
from helpers import CENTRAL, Experiment
from test_central_run import LONG, log_of, state_of
from torch.multiprocessing.spawn import spawn

from flsim.algorithms.checkpoint import latest
from flsim.base.errors import Interrupted
from flsim.runs import config
from flsim.runs.folder import Run
from server.central.steps import News
from server.central.workers import train_in_group
from server.stopping import StopFile

WORKERS = 2
TIMEOUT = 120.0  # seconds; the test takes a few on a quiet machine


def train(rank: int, folder: Path, told: Any) -> None:
    """A process that sees the run in a folder of its own; an exception ends it."""
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=WORKERS, timeout=timedelta(seconds=TIMEOUT))
    try:
        train_in_group(Run.open(folder / str(rank)), told.put)
    except Interrupted as end:
        assert rank == 0  # the others only return
        told.put(end)
    dist.destroy_process_group()


def test_a_request_that_one_process_sees_ends_all_of_them_after_its_chunk(experiment: Experiment) -> None:
    """The second process sees another folder, as on a node whose view of a shared filesystem lags for ever."""
    experiment.config.write_text(CENTRAL)
    overrides = (*LONG, "system.checkpoint_every=1000000", "system.workers=2")
    first = Run.create(config.load(experiment.config, overrides), experiment.folder / "0")
    shutil.copytree(first.path, experiment.folder / "1")
    told = multiprocessing.get_context("spawn").Queue()
    group = spawn(train, (experiment.folder, told), nprocs=WORKERS, join=False)  # type: ignore[no-untyped-call]

    def heard() -> News | Exception:
        while True:
            group.join(timeout=0)  # raises what a process raised
            with suppress(Empty):
                news: News | Exception = told.get(timeout=1)
                return news

    last = news = heard()
    while isinstance(news, News):
        if news.step > 0:
            StopFile(first.path).write()
        last, news = news, heard()
    while not group.join(timeout=TIMEOUT):
        pass
    assert isinstance(news, Interrupted)
    assert isinstance(last, News)
    assert last.saved
    assert last.step > 0
    assert last.step == state_of(first.path).round == log_of(first.path)[-1]["round"]
    assert latest(experiment.folder / "1" / "checkpoints") is None
