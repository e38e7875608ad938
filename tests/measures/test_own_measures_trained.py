"""Runs on Ray that are evaluated by a user's own measure: one that works, and one that fails in the evaluator."""

import json
import re

import pytest
from helpers import Experiment, final_state

from flsim.results.store import read_run

SOURCE = """from flsim.measures import Measure, Quantity


def compute(probe):
    return {result}


measure = Measure("own", compute, (Quantity(name="own", unit="words", description="Words of a canary."),))
"""


@pytest.mark.slow
def test_a_run_is_evaluated_by_its_own_measure_wherever_the_evaluator_is(experiment: Experiment) -> None:
    (experiment.folder / "own.py").write_text(SOURCE.format(result="len(probe.canary.tokens)"))
    run = experiment.run("run", 'evaluation.also=["own.py:measure"]')
    (copy,) = (run / "code").iterdir()
    assert copy.read_text() == (experiment.folder / "own.py").read_text()
    results = read_run(run)
    assert results.own["own"].unit == "words"
    for round_ in results.evaluated:
        values = results.of_canaries("own", round_)
        assert values is not None
        assert set(values) == {5.0}


@pytest.mark.slow
def test_a_measure_that_fails_is_named_with_its_line_and_training_goes_on(experiment: Experiment) -> None:
    """It fails with the 200 references of the run, and not with the fewer ones of the trial before training."""
    (experiment.folder / "own.py").write_text(SOURCE.format(result="1 / (len(probe.references) - 200)"))
    also = 'evaluation.also=["own.py:measure"]'
    done = experiment.flsim("run", experiment.config, "--out", "run", "--set", also, check=False)
    assert done.returncode == 1
    assert re.search(r"own\.[0-9a-f]{16}\.py:5: ZeroDivisionError", done.stderr.splitlines()[-1]), done.stderr
    run = experiment.folder / "run"
    assert json.loads((run / "run.json").read_text())["status"] == "failed"
    assert final_state(run).round == 4
    assert not list((run / "rows").iterdir())
