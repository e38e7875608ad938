"""This fixture returns runs of two partitions that are evaluated with the measures of docs/measures.md."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import Experiment

from flsim.runs.config import load
from flsim.runs.folder import Run, evaluate_checkpoint

DOCUMENT = Path(__file__).parents[2] / "docs" / "measures.md"
OWN = ("surprise.py:surprise", "surprise.py:size")


@pytest.fixture
def measured(experiment: Experiment) -> Experiment:
    """Return an experiment with two untrained runs, iid and non-iid, evaluated twice with the document's measures."""
    (source,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    (experiment.folder / "surprise.py").write_text(source)
    also = [f"{experiment.folder}/{name}" for name in OWN]
    for partition in ("iid", "non-iid"):
        overrides = [f"data.partition={partition}", "training.rounds=4", f"evaluation.also={json.dumps(also)}"]
        run = Run.create(load(experiment.config, overrides), experiment.folder / partition)
        state = run.latest_state()
        for round_, loudness in ((2, 2.0), (4, 4.0)):
            loud = {name: value * (loudness + (partition == "iid")) for name, value in state.params.items()}
            evaluate_checkpoint(run.path, run.save(replace(state, round=round_, params=loud)))
        run.mark("completed")
    return experiment
