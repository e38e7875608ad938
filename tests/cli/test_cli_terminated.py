"""SIGTERM while a command executes a user's own file: the exit is the signal's, and not the file's failure."""

import json
from textwrap import indent

import pytest
from helpers import Experiment

ENDED = "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nfor _ in range(10**9):\n    pass\n"


@pytest.mark.parametrize("source", [ENDED, "def make():\n" + indent(ENDED, "    ")], ids=["import", "call"])
def test_a_model_of_ones_own_is_not_blamed_for_it(experiment: Experiment, source: str) -> None:
    (experiment.folder / "mine.py").write_text(source)
    (experiment.folder / "c.json").write_text(json.dumps([{"id": "x", "tokens": [1, 36, 2]}]))
    options = ("--canaries", "c.json", "--vocabulary", "40")
    done = experiment.flsim("evaluate", "--model", "mine.py:make", *options, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (143, "flsim: terminated")


def test_a_file_that_a_configuration_names_is_not_blamed_for_it(experiment: Experiment) -> None:
    (experiment.folder / "mine.py").write_text(ENDED)
    options = ("--out", "run", "--set", "training.algorithm=mine.py:Mine")
    done = experiment.flsim("run", experiment.config, *options, check=False)
    assert (done.returncode, done.stderr) == (143, "flsim: terminated\n")
