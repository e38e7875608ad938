"""`flsim sweep` is told to end: its runs save what they have trained, and the same command goes on from there."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from raynodes import without_agents
from waiting import hear_ctrl_c

from flsim.algorithms.checkpoint import all_in, round_of
from flsim.runs import roundlog
from flsim.runs.folder import Run
from flsim.sweeps.folder import SweepFolder

DEADLINE = 900.0  # a busy machine takes half a minute to start a run
EVERY = 5_000  # steps, some seconds, between checkpoints of the central run
SWEEP = """
title = "Two worlds"
question = "?"

[base]
canaries = {{ p_u = [0.2], p_e = [0.5], count = 4, length = 3 }}
model = {{ embedding = 4, units = 6 }}
evaluation = {{ every = 1_000_000, references = 50 }}

[[grids]]
name = "one"
axes = {{}}
set = {{ {training} }}

[tiers.smoke]
about = "tiny"

[tiers.smoke.corpus]
synthetic = {{ users = 12, test_users = 2, heldout_users = 0, words_per_user = 60, vocabulary_size = 50 }}
"""
CENTRAL = f"""
    training = {{ kind = "central", steps = {8 * EVERY}, batch_size = 4, learning_rate = 0.1 }},
    system = {{ checkpoint_every = {EVERY} }}
"""
ON_RAY = """
    training = { rounds = 800, cohort = 4 }, system = { shards = 2, checkpoint_every = 1_000_000 }
"""


def one_line(table: str) -> str:
    return " ".join(table.split())


def flsim(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "flsim", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hear_ctrl_c,
    )


def has_saved_a_line(run: Path) -> bool:
    return (run / roundlog.FILE).exists() and len(roundlog.read(run)) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("training", "number"),
    [
        pytest.param(CENTRAL, signal.SIGTERM, id="SIGTERM, a run in one process"),
        pytest.param(ON_RAY, signal.SIGINT, id="Ctrl-C, a run with a Ray of its own"),
    ],
)
def test_runs_of_a_sweep_that_is_told_to_end_are_saved(tmp_path: Path, training: str, number: signal.Signals) -> None:
    """A terminal sends Ctrl-C to the whole process group."""
    (tmp_path / "sweep.toml").write_text(SWEEP.format(training=one_line(training)))
    folder = SweepFolder(tmp_path / "out")
    path = folder.run("one-seed0")
    first = flsim(tmp_path, "sweep", "sweep.toml", "--out", "out")
    until = time.monotonic() + DEADLINE
    while not has_saved_a_line(path):
        assert first.poll() is None, first.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)
    below = without_agents(psutil.Process(first.pid).children(recursive=True))
    if number == signal.SIGINT:
        os.killpg(first.pid, number)
    else:
        first.send_signal(number)
    _, messages = first.communicate(timeout=DEADLINE)
    assert first.returncode == 128 + number, messages
    assert messages.splitlines()[-2:] == [
        "runs are told to save and end; a second signal ends them at once",
        "flsim: interrupted; repeat the command to go on",
    ]
    assert not psutil.wait_procs(below, timeout=60)[1], "what it started outlives it"

    saved = round_of(all_in(path / "checkpoints")[-1])
    about = json.loads((path / "run.json").read_text())
    assert (about["status"], about["round"]) == ("interrupted", saved)
    assert saved == roundlog.read(path)[-1]["round"]
    run = Run.open(path)
    assert 0 < saved < run.rounds
    assert not run.is_saved_at(saved), "a checkpoint that was due"

    second = flsim(tmp_path, "sweep", "sweep.toml", "--out", "out")
    _, messages = second.communicate(timeout=DEADLINE)
    assert second.returncode == 0, messages
    assert json.loads((path / "run.json").read_text())["status"] == "completed"
    verified, messages = flsim(tmp_path, "verify", str(path), "--round", str(run.rounds)).communicate(timeout=DEADLINE)
    assert "trained again" in verified, messages
