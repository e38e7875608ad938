"""A real, local Ray for the tests of the service."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from evaluator_work import work

from server.cluster import internals
from server.pool.grid import EvaluationService

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """Start Ray with two CPUs; workers can import the tests, and Ray does not warn of its plans for GPU variables."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([*map(str, (HERE, HERE.parent / "support", HERE.parents[1]))]))
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_prestart_worker_first_driver", "0")  # nor are there processes that no test uses
        with internals.without_services():
            ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        yield
        ray.shutdown()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture(scope="module")
def shared_service(local_ray: None) -> Iterator[EvaluationService]:
    """Yield a service for all tests of a file, which leave nothing pending; a new process takes seconds to start."""
    service = EvaluationService(Path(), work)
    yield service
    service.close()


@pytest.fixture
def service(shared_service: EvaluationService, run: Path) -> EvaluationService:
    shared_service._run = run
    return shared_service
