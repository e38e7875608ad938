"""Tests of real `flsim sweep` commands: killed or interrupted and continued, with runs that fail or share rounds."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path

import psutil
import pytest
import torch
from helpers import Experiment, final_params
from raynodes import without_agents
from rich.console import Console
from waiting import hear_ctrl_c, wait_until

from flsim.algorithms.checkpoint import all_in, round_of
from flsim.base.errors import InputError
from flsim.results.sweeps import read_sweep
from flsim.runs import roundlog
from flsim.runs.config import (
    CentralConfig,
    CentralSystemHParams,
    Config,
    DataHParams,
    FederatedConfig,
    SystemHParams,
    dump,
)
from flsim.runs.folder import Run
from flsim.runs.sweeps import folder as module
from flsim.runs.sweeps.definition import Planned
from flsim.runs.sweeps.folder import RunState, Screen, SweepFolder, state_of
from server.launch import refuse_what_does_not_fit, share
from server.sweep import JobEnd, SweepJob, train_all, twins_of

DEADLINE = 900.0  # seconds; a run takes half a minute to start on a busy machine
SWEEP = """
title = "Two partitions"
question = "?"

[base]
canaries = {{ p_u = [0.2], p_e = [0.5], count = 4, length = 3 }}
model = {{ embedding = 4, units = 6 }}
evaluation = {{ every = 1_000_000, references = 50 }}
{base}

{grids}

[tiers.smoke]
about = "tiny"
seeds = {seeds}

[tiers.smoke.corpus]
synthetic = {{ users = {users}, test_users = 2, heldout_users = 4, words_per_user = 60, vocabulary_size = 50 }}
"""


def write_sweep(folder: Path, base: str, grids: str, users: int = 12, seeds: str = "[0]") -> SweepFolder:
    (folder / "sweep.toml").write_text(SWEEP.format(base=base, grids=grids, users=users, seeds=seeds))
    return SweepFolder(folder / "out")


def begin(folder: SweepFolder) -> subprocess.Popen[str]:
    """Start the sweep in a new process group, as a terminal does."""
    return subprocess.Popen(
        [sys.executable, "-m", "flsim", "sweep", "sweep.toml", "--out", "out"],
        cwd=folder.path.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hear_ctrl_c,
    )


def finish(folder: SweepFolder) -> tuple[int, str, str]:
    """Continue the sweep to its end, and return exit code, standard output and standard error."""
    process = begin(folder)
    table, messages = process.communicate(timeout=DEADLINE)
    return process.returncode, table, messages


def interrupt(folder: SweepFolder, name: str, number: signal.Signals) -> tuple[int, str]:
    """Start the sweep, send a signal once a run has a checkpoint or ten rounds, and return exit code and messages.

    A terminal sends Ctrl-C to the complete process group. All processes that the sweep started must end with it.
    """
    process, run = begin(folder), folder.run(name)

    def has_saved() -> bool:
        assert process.poll() is None, (*process.communicate(), folder.log(name).read_text())
        lines = roundlog.read(run) if (run / roundlog.FILE).exists() else []
        return bool(lines and all_in(run / "checkpoints")) or len(lines) > 10

    wait_until(has_saved, seconds=DEADLINE)
    below = without_agents(psutil.Process(process.pid).children(recursive=True))
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    _, messages = process.communicate(timeout=DEADLINE)
    assert not psutil.wait_procs(below, timeout=60)[1], "what it started outlives it"
    return process.returncode, messages


def completed(folder: SweepFolder) -> set[str]:
    return {run.name for run in read_sweep(folder.path).runs if run.results and run.results.status == "completed"}


def assert_trained_as_without_a_stop(path: Path) -> Run:
    """Check that training without a stop, in this process, gives the same parameters, bit for bit."""
    run = Run.open(path)
    torch.set_num_threads(1)
    training = run.training()
    *_, last = training.states(training.first_state(), run.rounds, lambda _: False)
    trained = final_params(path)
    assert all(torch.equal(trained[name], value) for name, value in last.params.items())
    return run


FAILING = """
[[grids]]
name = "good"
axes = { "data.partition" = ["iid", "non-iid"] }
set = { training = { kind = "central", steps = 1_500, batch_size = 4, learning_rate = 0.1 } }

[[grids]]
name = "bad"                       # more users in a round than the coins leave
axes = {}
set = { training = { rounds = 1, cohort = 12 }, system = { shards = 1 } }
"""


@pytest.mark.slow
def test_a_killed_sweep_continues_and_a_failed_run_does_not_stop_the_others(tmp_path: Path) -> None:
    base = (
        'data = { user_holdout = 0.25, shadow = "user" }\nsystem = { checkpoint_every = 10 }'  # shadow runs also resume
    )
    folder = write_sweep(tmp_path, base, FAILING)
    interrupt(folder, "good-iid-seed0", signal.SIGKILL)
    over = completed(folder)  # the other run may be completed, if it trained faster
    assert "good-iid-seed0" not in over

    code, table, messages = finish(folder)
    assert code == 1, messages
    assert completed(folder) == {"good-iid-seed0", "good-non-iid-seed0"}
    why = folder.log("bad-seed0").read_text().strip().removeprefix("flsim: ")
    assert "found 12" in why
    assert f"1 of 3 runs failed, the first bad-seed0: {why}" in messages
    assert "IID, SGD, b_r=4" in table
    assert "<html" in (folder.path / "report.html").read_text()
    [session] = read_sweep(folder.path).sessions  # the killed sweep could not record its session
    assert list(session["failed"]) == ["bad-seed0"]
    assert set(session["trained"]) == completed(folder) - over
    assert session["peak_memory"] > 2**28
    for name in completed(folder):
        assert_trained_as_without_a_stop(folder.run(name))

    changed = (folder.run("good-iid-seed0") / "rounds.jsonl").stat().st_mtime_ns
    code, _, messages = finish(folder)
    assert (code, "2 of 3 runs are finished" in messages) == (1, True), messages
    assert (folder.run("good-iid-seed0") / "rounds.jsonl").stat().st_mtime_ns == changed
    write_sweep(tmp_path, base, FAILING, users=13)
    refused = Experiment(tmp_path).call("sweep", "sweep.toml", "--out", "out", check=False)
    assert "its corpus was created with other settings than those of sweep.toml" in refused.stderr
    write_sweep(tmp_path, base, FAILING.replace("0.1", "0.2"))
    refused = Experiment(tmp_path).call("sweep", "sweep.toml", "--out", "out", check=False)
    assert refused.returncode == 2
    assert "its run good-iid-seed0 has other settings than those of sweep.toml; name another --out" in refused.stderr
    assert read_sweep(folder.path).runs[0].name == "good-iid-seed0"


EVERY = 2_500  # steps between checkpoints of the central run, which take some seconds
CENTRAL = f"""kind = "central", steps = {2 * EVERY}, batch_size = 4, learning_rate = 0.1 }},
    system = {{ checkpoint_every = {EVERY} """
ON_RAY = "rounds = 300, cohort = 4 }, system = { shards = 2, checkpoint_every = 1_000_000 "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("training", "number"),
    [
        pytest.param(CENTRAL, signal.SIGTERM, id="SIGTERM, a run in one process"),
        pytest.param(ON_RAY, signal.SIGINT, id="Ctrl-C, a run with a Ray of its own"),
    ],
)
def test_runs_of_an_interrupted_sweep_are_saved(tmp_path: Path, training: str, number: signal.Signals) -> None:
    grid = f'[[grids]]\nname = "one"\naxes = {{}}\nset = {{ training = {{ {" ".join(training.split())} }} }}\n'
    folder = write_sweep(tmp_path, "", grid)
    path = folder.run("one-seed0")
    code, messages = interrupt(folder, "one-seed0", number)
    assert code == 128 + number, messages
    assert messages.splitlines()[-1] == "flsim: interrupted; repeat the command to continue"
    run, saved = Run.open(path), round_of(all_in(path / "checkpoints")[-1])
    about = json.loads((path / "run.json").read_text())
    assert (about["status"], about["round"]) == ("interrupted", saved)
    assert saved == roundlog.read(path)[-1]["round"]
    assert 0 < saved < run.rounds
    assert not run.is_saved_at(saved), "a checkpoint that was due"

    code, _, messages = finish(folder)
    assert code == 0, messages
    assert completed(folder) == {"one-seed0"}
    assert_trained_as_without_a_stop(path)


def planned(name: str, config: FederatedConfig) -> Planned:
    return Planned(name, "grid", config.seed, {}, None, config)


def test_an_arm_out_shares_rounds_with_the_arm_in_of_equal_settings() -> None:
    """Twins differ only in the arm, and share rounds only if training has a round before the first window."""
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
def test_an_arm_out_starts_from_rounds_of_its_arm_in(tmp_path: Path) -> None:
    """Arm `out` waits for arm `in`, though both fit at once, and ends with the bits of training without arm `in`."""
    grid = """
[[grids]]
name = "arms"
axes = { "canaries.arm" = ["out", "in"] }
set = { training = { rounds = 8, cohort = 4 }, canaries = { windows = [[0.5, 1.0]] } }
"""
    folder = write_sweep(tmp_path, "local = { batch_size = 4 }\nsystem = { checkpoint_every = 100, shards = 1 }", grid)
    code, _, messages = finish(folder)
    assert code == 0, messages
    folders = {path.name.split("-")[1]: path for path in (folder.path / "runs").iterdir()}
    log = folder.log(folders["out"].name).read_text()
    assert f"{folders['out'].name}: starts with the first 4 of 8 rounds of {folders['in'].name}" in log
    assert_trained_as_without_a_stop(folders["out"])


CPU_NODE, GPU_NODE = {"CPU": 8.0}, {"CPU": 8.0, "GPU": 1.0}
DATA = DataHParams(Path("nowhere"))


def federated(**system: object) -> Config:
    return FederatedConfig(DATA, system=SystemHParams(**system))  # type: ignore[arg-type]


def central(**system: object) -> Config:
    return CentralConfig(DATA, system=CentralSystemHParams(**system))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "nodes", "expected"),
    [
        (federated(shards=3, cpus_per_client=2), [CPU_NODE], (6, 0)),
        (federated(), [CPU_NODE], (2, 0)),  # if shards are not set, a run needs CPUs for two
        (central(threads=2), [CPU_NODE], (2, 0)),
        # Shares of training and evaluation add up: two such runs fit on a GPU at once, and five of the next.
        (federated(shards=1, gpus_per_client=0.4, gpus_for_evaluation=0.1), [GPU_NODE], (1, 0.5)),
        (central(device="cuda", gpus=0.15, gpus_for_evaluation=0.05), [GPU_NODE], (1, 0.2)),
        (central(device="cuda"), [GPU_NODE], (1, 1)),  # by default one complete GPU
        (federated(shards=1), [GPU_NODE], (1, 1)),
        (federated(shards=2, gpus_per_client=0.9, gpus_for_evaluation=0.1), [GPU_NODE], (2, 2)),  # Ray has no 1.9 GPUs
    ],
)
def test_a_run_reserves_the_cpus_and_gpus_of_its_processes(
    config: Config, nodes: list[dict[str, float]], expected: tuple[int, float]
) -> None:
    assert share(config, nodes) == expected


@pytest.mark.parametrize(
    ("config", "needs", "remedy"),
    [
        (federated(shards=9), "9 CPUs and 0 GPUs", "lower the settings"),
        (
            federated(shards=1, gpus_per_client=0.4, gpus_for_evaluation=0.1),
            "1 CPUs and 0.5 GPUs",
            "--set system.gpus_per_client=0",
        ),
        (
            central(device="cuda", gpus=0.3, gpus_for_evaluation=0.1),
            "1 CPUs and 0.4 GPUs",
            "--set system.device=cpu --set system.gpus=0",
        ),
    ],
)
def test_a_run_that_fits_no_node_is_refused_with_a_remedy(config: Config, needs: str, remedy: str) -> None:
    with pytest.raises(InputError, match=f"^run a needs {needs}, but no Ray node has .*{remedy}$"):
        refuse_what_does_not_fit("a", config, [CPU_NODE])
    for on_cpus in (federated(shards=1, gpus_per_client=0), central(device="cpu", gpus=0)):
        refuse_what_does_not_fit("a", on_cpus, [CPU_NODE])


@pytest.mark.slow
def test_a_run_that_cannot_start_reports_why_and_the_next_run_is_tried(tmp_path: Path) -> None:
    """Runs are real processes, one after another, without a Ray cluster that the sweep starts."""
    jobs = []
    for name in ("one", "two"):
        config = FederatedConfig(DataHParams(tmp_path / f"corpus of {name}"))
        dump(config, tmp_path / f"{name}.toml")
        jobs.append(SweepJob(name, config, tmp_path / f"{name}.toml", tmp_path / name, tmp_path / f"{name}.log"))
    ended = list(train_all(jobs, whole_cluster=True))
    assert [each.name for each in ended] == ["one", "two"]
    for job, each in zip(jobs, ended, strict=True):
        assert isinstance(each, JobEnd)
        assert each.failure is not None
        assert each.failure.startswith(f"{tmp_path / f'corpus of {job.name}'}: ")
        assert each.failure in job.log.read_text()
        assert not job.out.exists()


def run_folder(folder: Path, status: str, round_: int, log: str = "") -> Path:
    folder.mkdir(parents=True)
    about = {"name": folder.name, "setting": "IID, SGD", "status": status, "round": round_, "rounds": 100}
    (folder / "run.json").write_text(json.dumps(about | {"reason": None}))
    (folder / "rounds.jsonl").write_text(log)
    return folder


def test_the_state_of_a_run(tmp_path: Path) -> None:
    log = '{"round": 30, "loss": 2.5}\n{"round": 41, "loss": 2.25}\n'
    running = run_folder(tmp_path / "a", "running", 40, log)
    assert state_of(running, began=0) == RunState("runs", 0.41, "41/100, loss 2.25")
    before = state_of(running, began=time.time() + 60)
    assert before == RunState("waits", note="stopped at 40"), "the sweep has not continued it yet"
    assert state_of(tmp_path / "none", began=0) == RunState("waits")
    assert state_of(run_folder(tmp_path / "b", "failed", 7), began=0).status == "failed"
    cut_short = run_folder(tmp_path / "c", "running", 40, log + '{"round": 4')
    assert state_of(cut_short, began=0) == RunState("runs", 0.40, "40/100")
    assert state_of(run_folder(tmp_path / "d", "diverged", 12), began=0) == RunState("diverged", 1.0, "")


def test_a_completed_run_that_a_search_continues_waits(tmp_path: Path) -> None:
    """A search continues the better half of its trials; a sweep does not continue completed runs."""
    run, later = run_folder(tmp_path / "a", "completed", 40), time.time() + 60
    assert state_of(run, later) == RunState("waits", note="stopped at 40")
    assert state_of(run, later, is_finished=True) == RunState("completed", 1.0, "")


def test_a_terminal_shows_bars_of_the_runs_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = StringIO()
    console = Console(file=said, width=80, force_terminal=True, color_system=None)
    monkeypatch.setattr(module, "console", console)
    monkeypatch.setattr("flsim.base.terminal.console", console)
    folder = SweepFolder(tmp_path)
    names = [f"fedavg-non-iid-cohort{index}-a-rather-long-name-of-a-run-seed0" for index in range(30)]
    run_folder(folder.run(names[25]), "running", 50, '{"round": 50, "loss": 4.0}\n')
    with Screen(folder, names, began=time.time() - 100).live() as screen:
        screen.look()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said.getvalue())
    assert max(map(len, re.split(r"[\r\n]+", text))) <= 80
    assert "0 of 30 runs" in text
    assert "50/100, loss 4.00" in text
    assert "cohort25" in text
    assert "cohort0-" not in text


def test_without_a_terminal_each_start_or_failure_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = SweepFolder(tmp_path)
    run_folder(folder.run("one"), "running", 5)
    with Screen(folder, ["one", "two"], began=0).live() as screen:
        screen.look()
        screen.look()
        screen.ended("two", "disk full", remaining=1)
    assert capsys.readouterr().err.splitlines() == ["one: started", "two: failed: disk full (1 run remaining)"]
