"""The undisturbed run that all runs with faults are compared with, and one that was interrupted."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from faulty import SETTINGS
from helpers import Experiment, Trained


@pytest.fixture
def undisturbed(experiment: Experiment, copy_of_trained: Trained) -> Path:
    """Trained by the command without Ray, which gives the same bits."""
    return copy_of_trained(*SETTINGS).rename(experiment.folder / "undisturbed")


@pytest.fixture
def interrupted(experiment: Experiment, undisturbed: Path) -> Callable[[str], Path]:
    """A run as a kill after round 27 leaves it: the newest checkpoint is of round 25."""

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
