"""Runs that cannot go on say why: clients that all fail, models that are not finite. Other faults: tests/faults."""

import json
import os
import re
import signal

import pytest
from helpers import Experiment, finish, start, wait_for_round


@pytest.mark.nightly
def test_a_client_that_keeps_failing_fails_the_run(experiment: Experiment) -> None:
    """The settings are changed under the clients' feet; nothing is averaged away."""
    process = start(experiment, "--out", "broken", "--set", "training.rounds=4000", "--set", "system.retries=1")
    workers = wait_for_round(experiment.folder / "broken", 3)
    config = experiment.folder / "broken" / "config.toml"
    config.write_text(config.read_text().replace("batch_size = 4", "batch_size = 5"))
    for worker in workers:  # those that take their place read the settings again
        os.kill(int(worker.split("/")[1]), signal.SIGKILL)
    code, said = finish(experiment, process)
    assert code == 1
    assert re.search(r"^flsim: round \d+: shard [01] failed 2 times, last with: ", said, re.MULTILINE)
    about = json.loads((experiment.folder / "broken" / "run.json").read_text())
    assert about["status"] == "failed"
    assert "failed 2 times" in about["reason"]
    assert "no single one of its users is the cause" in about["reason"]
