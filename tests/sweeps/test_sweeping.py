"""`flsim sweep` for real: killed in the middle and gone on with, with a run that fails beside others."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from helpers import final_params
from raynodes import without_agents

from flsim.results.sweeps import read_sweep
from flsim.runs.folder import Run
from flsim.sweeps.folder import SweepFolder
from flsim.training import central
from flsim.training.central import CentralTraining, train_central

DEADLINE = 900.0  # a busy machine takes half a minute to start a run
STEPS = 3_000
SWEEP = f"""
title = "Two worlds"
question = "?"

[base]
data = {{ user_holdout = 0.25, shadow = "user" }}  # shadow runs resume as others do
canaries = {{ p_u = [0.2], p_e = [0.5], count = 4, length = 3 }}
model = {{ embedding = 4, units = 6 }}
evaluation = {{ every = 1_000_000, references = 50 }}
system = {{ checkpoint_every = 10 }}

[[grids]]
name = "good"
axes = {{ "data.world" = ["iid", "non-iid"] }}
set = {{ training = {{ kind = "central", steps = {STEPS}, batch_size = 4, learning_rate = 0.1 }} }}

[[grids]]
name = "bad"                       # more users in a round than there are
axes = {{}}
set = {{ training = {{ rounds = 1, cohort = 13 }}, system = {{ shards = 1 }} }}

[tiers.smoke]
about = "tiny"

[tiers.smoke.corpus]
synthetic = {{ users = 12, test_users = 2, heldout_users = 0, words_per_user = 60, vocabulary_size = 50 }}
"""

SEEDS = 4
SHADOWS = """
title = "Shadow models"
question = "?"

[base]
data = { shadow = "user" }
canaries = { count = 0 }
model = { embedding = 4, units = 6 }
evaluation = { every = 1_000_000, references = 50 }
system = { checkpoint_every = 10, shards = 1 }

[[grids]]
name = "users"
axes = {}
set = { training = { epochs = 25, cohort = 2 }, local = { batch_size = 4 } }

[tiers.smoke]
about = "tiny"
seeds = [0, 1, 2, 3]

[tiers.smoke.corpus]
synthetic = { users = 16, test_users = 2, heldout_users = 4, words_per_user = 60, vocabulary_size = 50 }
"""


def flsim(tmp_path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "flsim", "sweep", "sweep.toml", "--out", "out"]
    return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_a_checkpoint(process: subprocess.Popen[str], run: Path) -> None:
    until = time.monotonic() + DEADLINE
    log = run.parents[1] / "logs" / f"{run.name}.log"
    while not list((run / "checkpoints").glob("round-*")):
        assert process.poll() is None, (*process.communicate(), log.read_text())
        assert time.monotonic() < until
        time.sleep(0.05)


def completed(folder: SweepFolder) -> set[str]:
    return {run.name for run in read_sweep(folder.path).runs if run.results and run.results.status == "completed"}


@pytest.mark.slow
def test_a_sweep_that_was_killed_goes_on_and_a_run_that_fails_leaves_the_others_alone(tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text(SWEEP)
    folder = SweepFolder(tmp_path / "out")
    first = flsim(tmp_path)
    wait_for_a_checkpoint(first, folder.run("good-iid-seed0"))
    below = without_agents(psutil.Process(first.pid).children(recursive=True))
    os.kill(first.pid, signal.SIGKILL)
    first.communicate(timeout=DEADLINE)
    assert not psutil.wait_procs(below, timeout=60)[1], "what it started outlives it"
    over = completed(folder)  # the other one, if its processes had more of the machine
    assert "good-iid-seed0" not in over

    second = flsim(tmp_path)
    table, messages = second.communicate(timeout=DEADLINE)
    assert second.returncode == 1, messages
    assert completed(folder) == {"good-iid-seed0", "good-non-iid-seed0"}
    why = (folder.path / "logs" / "bad-seed0.log").read_text().strip().removeprefix("flsim: ")
    assert "13" in why
    assert f"1 of 3 runs failed, the first bad-seed0: {why}" in messages
    assert "IID, SGD, b_r=4" in table
    assert "<html" in (folder.path / "report.html").read_text()
    [session] = read_sweep(folder.path).sessions  # the killed one could not say anything
    assert list(session["failed"]) == ["bad-seed0"]
    assert set(session["trained"]) == completed(folder) - over
    assert session["peak_memory"] > 2**28
    for world in ("iid", "non-iid"):
        assert_trained_as_without_a_kill(Run.open(folder.run(f"good-{world}-seed0")))

    changed = (folder.path / "runs" / "good-iid-seed0" / "rounds.jsonl").stat().st_mtime_ns
    third = flsim(tmp_path)
    _, messages = third.communicate(timeout=DEADLINE)
    assert third.returncode == 1, messages
    assert "2 of 3 runs are finished" in messages
    assert (folder.path / "runs" / "good-iid-seed0" / "rounds.jsonl").stat().st_mtime_ns == changed

    (tmp_path / "sweep.toml").write_text(SWEEP.replace("users = 12", "users = 13"))
    assert "its corpus was made by other settings than sweep.toml has now" in flsim(tmp_path).communicate()[1]
    (tmp_path / "sweep.toml").write_text(SWEEP.replace("0.1", "0.2"))
    fourth = flsim(tmp_path)
    _, messages = fourth.communicate(timeout=DEADLINE)
    assert fourth.returncode == 2
    assert "its run good-iid-seed0 has other settings than sweep.toml gives now; name another --out" in messages
    assert json.loads((folder.path / "sweep.json").read_text())["runs"][0]["name"] == "good-iid-seed0"


def assert_trained_as_without_a_kill(run: Run) -> None:
    """Bit for bit: the steps in this process, without a stop."""
    settings = run.central
    training = CentralTraining(run.users, settings.training, settings.seed, settings.order)
    torch.set_num_threads(1)
    state = central.init(run.corpus.layout.vocabulary_size, settings.model, settings.seed)
    *_, (state, _) = train_central(state, training, STEPS)
    found = final_params(run.path)
    assert all(torch.equal(found[name], value) for name, value in state.params.items())


@pytest.mark.nightly
def test_shadow_runs_that_were_killed_go_on_and_attack_each_other(tmp_path: Path) -> None:
    """The runs end as if nothing had been killed; a repeated command knows their lengths, which their coins decide."""
    (tmp_path / "sweep.toml").write_text(SHADOWS)
    folder = SweepFolder(tmp_path / "out")
    names = [f"users-seed{seed}" for seed in range(SEEDS)]
    first = flsim(tmp_path)
    wait_for_a_checkpoint(first, folder.run(names[2]))
    below = without_agents(psutil.Process(first.pid).children(recursive=True))
    os.kill(first.pid, signal.SIGKILL)
    first.communicate(timeout=DEADLINE)
    assert not psutil.wait_procs(below, timeout=60)[1], "what it started outlives it"
    assert completed(folder) < set(names)

    second = flsim(tmp_path)
    _, messages = second.communicate(timeout=DEADLINE)
    assert second.returncode == 0, messages
    assert completed(folder) == set(names)
    lengths = set()
    for name in names:
        run = Run.open(folder.run(name))
        torch.set_num_threads(1)
        training = run.training()
        *_, last = training.states(training.first_state(), run.rounds, lambda _: False)
        assert all(torch.equal(value, last.params[key]) for key, value in final_params(run.path).items())
        lengths.add(run.rounds)
    assert len(lengths) > 1, "coins leave runs of unlike numbers of users"

    third = flsim(tmp_path)
    _, messages = third.communicate(timeout=DEADLINE)
    assert (third.returncode, f"{SEEDS} of {SEEDS} runs are finished" in messages) == (0, True)
    command = [sys.executable, "-m", "flsim", "membership", "out", "--shadows", "--json"]
    attacked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    (shadows,) = json.loads(attacked.stdout)["shadows"]
    assert {row["shadows"] for row in shadows["attacks"]} == {SEEDS - 1}
