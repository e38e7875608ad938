"""The run that nothing happens to, once for each file of tests: what all runs with faults are held against."""

from pathlib import Path

import pytest
from faulty import SETTINGS
from helpers import Experiment


@pytest.fixture(scope="module")
def _undisturbed_run() -> list[Path]:
    return []


@pytest.fixture
def undisturbed(experiment: Experiment, _undisturbed_run: list[Path]) -> Path:
    if not _undisturbed_run:
        _undisturbed_run.append(experiment.run("undisturbed", *SETTINGS))
    return _undisturbed_run[0]
