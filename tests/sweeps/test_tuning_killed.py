"""Test of real `flsim tune` commands: a search is killed and continued, and a sweep uses the chosen values."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flsim.runs.config import load
from flsim.runs.sweeps.definition import read_outcome

DEADLINE = 1_200.0  # seconds; a run takes half a minute to start on a busy machine
SWEEP = """
title = "A rate"
question = "?"

[base]
canaries = { p_u = [0.2], p_e = [0.5], count = 4, length = 3 }
model = { embedding = 4, units = 6 }
evaluation = { every = 1_000_000, references = 50 }

[[grids]]
name = "sgd"
axes = { "training.batch_size" = [4] }
set = { training = { kind = "central", steps = 60, learning_rate = 77 } }

[tiers.smoke]
about = "tiny"
[tiers.smoke.corpus]
synthetic = { users = 12, test_users = 2, heldout_users = 0, words_per_user = 60, vocabulary_size = 50 }
"""
TUNE = """
sweep = "sweep.toml"
seeds = [7]
halving = [0.5, 1.0]
[tiers.smoke]
corpus_seed = 1
[tiers.smoke.grids.sgd]
"training.learning_rate" = { low = 0.01, high = 10_000 }
"""


def flsim(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "flsim", *arguments, "--out", "out"]
    return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def measured(runs: Path) -> dict[Path, int]:
    """Return the time at which each measurement was stored."""
    return {path: path.stat().st_mtime_ns for path in runs.glob("*/rows/*.parquet")}


@pytest.mark.nightly
def test_a_killed_search_continues_and_a_sweep_uses_the_chosen_values(tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text(SWEEP)
    (tmp_path / "tune.toml").write_text(TUNE)
    runs = tmp_path / "out" / "runs"
    first = flsim(tmp_path, "tune", "tune.toml")
    until = time.monotonic() + DEADLINE
    while not measured(runs):
        assert first.poll() is None, first.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate(timeout=DEADLINE)  # the processes that it started end with it
    before = measured(runs)
    assert not (tmp_path / "out" / "tuned.toml").exists()

    second = flsim(tmp_path, "tune", "tune.toml")
    printed, told = second.communicate(timeout=DEADLINE)
    assert second.returncode == 0, told
    assert before.items() <= measured(runs).items()  # no measurement was repeated
    assert max(map(len, printed.splitlines())) <= 80
    tuned = read_outcome(tmp_path / "out" / "tuned.toml")
    (group,) = tuned.groups
    assert group.widenings == 0
    whole = [trial for trial in group.trials if len(trial.perplexities) == 2]
    least = min(trial.perplexities[1] for trial in whole)
    assert group.perplexity == least
    assert group.values in [trial.values for trial in whole if trial.perplexities[1] == least]
    assert_taken_by_a_sweep(tmp_path, group.values["training.learning_rate"])
    (tmp_path / "tune.toml").write_text(TUNE.replace("10_000", "9_000"))
    third = flsim(tmp_path, "tune", "tune.toml")
    assert "this folder has another search than tune.toml; name another --out" in third.communicate()[1]


def assert_taken_by_a_sweep(tmp_path: Path, rate: float) -> None:
    (tmp_path / "sweep.toml").write_text(SWEEP.replace('about = "tiny"', 'about = "tiny"\ntuned = "out/tuned.toml"'))
    command = [sys.executable, "-m", "flsim", "sweep", "sweep.toml", "--out", "swept"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "swept" / "runs").iterdir()
    assert load(run / "config.toml").training.learning_rate == rate  # type: ignore[attr-defined]
    assert f"training.learning_rate {rate:g}" in " ".join(done.stdout.split())
