"""These fixtures return the undisturbed run, with which tests compare runs with faults, and an interrupted run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from faulty import SETTINGS
from helpers import Experiment, Trained


@pytest.fixture
def undisturbed(experiment: Experiment, copy_of_trained: Trained) -> Path:
    """Return a run that the command trained without Ray, which gives the same bits."""
    return copy_of_trained(*SETTINGS).rename(experiment.folder / "undisturbed")


@pytest.fixture
def interrupted(experiment: Experiment, undisturbed: Path) -> Callable[[str], Path]:
    """Return a function that makes a run like one killed after round 27: the newest checkpoint is of round 25."""

    def make(name: str) -> Path:
        run = shutil.copytree(undisturbed, experiment.folder / name)
        (run / "checkpoints" / "round-000030.safetensors").unlink()
        (run / "rows" / "round-000030.parquet").unlink()
        log = run / "rounds.jsonl"
        log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:27]))
        about = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps(about | {"status": "running", "round": 25}))
        return run

    return make
