"""The measures of docs/measures.md, and runs of two worlds measured by them."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import Experiment

from flsim.runs.config import load
from flsim.runs.folder import Run
from flsim.runs.measuring import evaluate_checkpoint

DOCUMENT = Path(__file__).parents[2] / "docs" / "measures.md"
OWN = ("surprise.py:surprise", "surprise.py:size")


@pytest.fixture
def measured(experiment: Experiment) -> Experiment:
    """Two runs, iid and non-iid, whose models were not trained, each evaluated twice with the document's measures."""
    (source,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    (experiment.folder / "surprise.py").write_text(source)
    for world in ("iid", "non-iid"):
        overrides = [f"data.world={world}", "training.rounds=4", f"evaluation.also={json.dumps(OWN)}"]
        run = Run.create(load(experiment.config, overrides), experiment.folder / world)
        state = run.latest_state()
        for round_, loudness in ((2, 2.0), (4, 4.0)):
            loud = {name: value * (loudness + (world == "iid")) for name, value in state.params.items()}
            evaluate_checkpoint(run.path, run.save(replace(state, round=round_, params=loud)))
        run.mark("completed")
    return experiment
