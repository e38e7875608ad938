"""Each worker of Ray Train sets the GPU that Ray gave it, on a Ray that claims two GPUs which this machine may lack."""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from helpers import CENTRAL, Experiment
from test_central_run import log_of

from server.cluster.internals import trainer_without_cleaner

WORKERS = 2


@pytest.fixture
def ray_of_two_gpus() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
        ray.init("local", num_cpus=2, num_gpus=WORKERS, **quiet)
        yield
        ray.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray warns of its own settings
def test_each_worker_sets_its_own_gpu_before_anything_else(ray_of_two_gpus: None, tmp_path: Path) -> None:
    """All workers see both GPUs. torch's functions are recorded in place of done, as there may be no such GPUs."""

    def work(settings: dict[str, Any]) -> None:
        from unittest.mock import patch

        import torch
        import torch.distributed as dist

        from flsim.runs.config import CentralSystemHParams
        from server.central.workers import use_own_device

        calls: list[list[object]] = []
        fakes: dict[str, Any] = {
            "is_available": lambda: True,
            "set_device": lambda device: calls.append(["device", str(device)]),
            "set_per_process_memory_fraction": lambda share: calls.append(["share", share]),
        }
        with patch.multiple(torch.cuda, **fakes):
            use_own_device(CentralSystemHParams(device="cuda", workers=2), 0.9)
        about = {"calls": calls, "sees": os.environ["CUDA_VISIBLE_DEVICES"], "given": ray.get_gpu_ids()}
        (Path(settings["folder"]) / f"{dist.get_rank()}.json").write_text(json.dumps(about))

    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig

    trainer_without_cleaner()(
        work,
        train_loop_config={"folder": str(tmp_path)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=WORKERS, use_gpu=True, resources_per_worker={"CPU": 1, "GPU": 0.9}),
        run_config=RunConfig(storage_path=str(tmp_path / "storage")),
    ).fit()
    workers = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(WORKERS)]
    assert {worker["sees"] for worker in workers} == {"0,1"}
    assert sorted(int(worker["given"][0]) for worker in workers) == [0, 1]
    for worker in workers:
        assert worker["calls"] == [["device", f"cuda:{worker['given'][0]}"], ["share", 0.9]]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs, which this machine lacks")
def test_two_processes_on_two_gpus_train_as_one(experiment: Experiment) -> None:
    """The loss of the first 7 steps, to the rounding of float32, over NCCL, which refuses two processes on one GPU."""
    experiment.config.write_text(CENTRAL)
    one, two = (
        log_of(experiment.run(f"run{workers}", "system.device=cuda", f"system.workers={workers}"))[0]["loss"]
        for workers in (1, 2)
    )
    assert one == pytest.approx(two, rel=1e-5)
