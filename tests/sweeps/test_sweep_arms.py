"""Arms in a sweep: the rounds before the first window are trained once."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import final_params

from flsim.runs.config import DataHParams, FederatedConfig
from flsim.runs.folder import Run
from flsim.sweeps.definition import Planned
from server.sweep import twins_of

SWEEP = """
title = "Arms"
question = "?"

[base]
canaries = { p_u = [0.2], p_e = [0.5], count = 4, length = 3, windows = [[0.5, 1.0]] }
model = { embedding = 4, units = 6 }
evaluation = { every = 3, references = 50 }
system = { checkpoint_every = 100, shards = 1 }

[[grids]]
name = "arms"
axes = { "canaries.arm" = ["out", "in"] }
set = { training = { rounds = 8, cohort = 4 }, local = { batch_size = 4 } }

[tiers.smoke]
about = "tiny"

[tiers.smoke.corpus]
synthetic = { users = 12, test_users = 2, heldout_users = 0, words_per_user = 60, vocabulary_size = 50 }
"""


def planned(name: str, config: FederatedConfig) -> Planned:
    return Planned(name, "grid", config.seed, {}, None, config)


def test_who_shares_rounds_with_whom() -> None:
    """By all settings but the arm, and only where there is a round before the first window."""
    base = FederatedConfig(DataHParams("corpus"))
    late = replace(base, canaries=replace(base.canaries, windows=((0.5, 0.6),)))
    other = replace(late, seed=1)
    states = replace(late, training=replace(late.training, algorithm="scaffold"))

    def out(config: FederatedConfig) -> FederatedConfig:
        return replace(config, canaries=replace(config.canaries, arm="out"))

    runs = [
        planned(f"{name} {arm}", config)
        for name, both in (("base", base), ("late", late), ("other", other), ("states", states))
        for arm, config in (("out", out(both)), ("in", both))
        if (name, arm) != ("other", "in")
    ]
    assert twins_of(runs, {run.name: 10 for run in runs}) == {"late out": "late in"}


@pytest.mark.slow
def test_an_arm_out_begins_with_its_arm_in(tmp_path: Path) -> None:
    """It waits, though it comes first and both fit at once; it has the bits of a training of its own."""
    (tmp_path / "sweep.toml").write_text(SWEEP)
    command = [sys.executable, "-m", "flsim", "sweep", "sweep.toml", "--out", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folders = {path.name.split("-")[1]: path for path in (tmp_path / "out" / "runs").iterdir()}
    log = (tmp_path / "out" / "logs" / f"{folders['out'].name}.log").read_text()
    assert f"{folders['out'].name}: begins with the first 4 of 8 rounds of {folders['in'].name}" in log
    run = Run.open(folders["out"])
    torch.set_num_threads(1)
    training = run.training()
    *_, state = training.states(training.first_state(), 8, lambda _: False)
    final = final_params(folders["out"])
    assert all(torch.equal(final[name], value) for name, value in state.params.items())
