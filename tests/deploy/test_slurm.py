"""The Slurm script, on nodes that are this machine: real bash, real Ray, real training; `srun` and `scontrol` are two
scripts that note how they were called, and start the rest of their arguments here."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import Experiment, wait_for_round

SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm.sbatch"
SRUN = """#!/usr/bin/env bash
printf 'srun %s\\n' "${*@Q}" >> "$SAID"
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """#!/usr/bin/env bash
printf 'scontrol %s\\n' "$*" >> "$SAID"
[[ $1 != show ]] || printf '%s\\n' ${3//,/ }
"""


class Slurm:
    """Jobs of one job id, as often as it is started."""

    def __init__(self, experiment: Experiment, nodes: str) -> None:
        self.experiment, self.said = experiment, experiment.folder / "said"
        bin_ = experiment.folder / "bin"
        bin_.mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (bin_ / name).write_text(text)
            (bin_ / name).chmod(0o755)
        with socket.socket() as free:
            free.bind(("127.0.0.2", 0))
            self.port = 20000 + free.getsockname()[1] % 20000
        self.job = str(self.port - 20000 + 20000 * os.getpid())  # the script takes its port from it
        self.environment = {
            **os.environ,
            "PATH": f"{bin_}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SAID": str(self.said),
            "SLURM_JOB_ID": self.job,
            "SLURM_JOB_NUM_NODES": str(len(nodes.split(","))),
            "SLURM_JOB_NODELIST": nodes,
            "SLURM_CPUS_PER_TASK": "1",
            "FLSIM_HEAD_IP": "127.0.0.2",
        }
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        """The batch script, as slurmd starts it."""
        with (self.experiment.folder / "log").open("ab") as log:
            job = subprocess.Popen(
                ["bash", str(SCRIPT), "tiny.toml", "run", *options],
                cwd=self.experiment.folder,
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.started.append(job)
        return job

    def calls(self) -> list[list[str]]:
        return [shlex.split(line) for line in self.said.read_text().splitlines()] if self.said.exists() else []

    @property
    def log(self) -> str:
        return (self.experiment.folder / "log").read_text()

    def ray_folder(self) -> Path:
        return Path(f"/tmp/ray-{self.job}")


@pytest.fixture
def slurm(experiment: Experiment, request: pytest.FixtureRequest) -> Iterator[Slurm]:
    slurm = Slurm(experiment, request.param)
    try:
        yield slurm
    finally:
        for job in slurm.started:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)


def rounds(experiment: Experiment) -> list[int]:
    return [json.loads(line)["round"] for line in (experiment.folder / "run" / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.nightly
@pytest.mark.parametrize("slurm", ["one"], indirect=True)
def test_a_job_at_its_time_limit_queues_again_and_goes_on(slurm: Slurm) -> None:
    long = ["--set", "training.rounds=100", "--set", "evaluation.every=100"]
    job = slurm.start(*long)
    wait_for_round(slurm.experiment.folder / "run", 3)
    os.kill(job.pid, signal.SIGUSR1)
    assert job.wait(120) == 128 + signal.SIGTERM, slurm.log
    assert slurm.calls() == [["scontrol", "requeue", slurm.job]]  # and no node of Ray's: one needs none
    before = rounds(slurm.experiment)
    assert 3 <= len(before) < 100
    assert slurm.start(*long).wait(120) == 0, slurm.log
    assert rounds(slurm.experiment) == list(range(1, 101))
    assert json.loads((slurm.experiment.folder / "run" / "run.json").read_text())["status"] == "completed"
    assert len(slurm.calls()) == 1
    assert not slurm.ray_folder().exists()


@pytest.mark.nightly
@pytest.mark.parametrize("slurm", ["first,second"], indirect=True)
def test_several_nodes_are_one_cluster_until_the_job_is_cancelled(slurm: Slurm) -> None:
    job = slurm.start("--set", "training.rounds=500", "--set", "evaluation.every=500")
    wait_for_round(slurm.experiment.folder / "run", 2)
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait(120) == 128 + signal.SIGTERM, slurm.log
    hostnames, head, worker = slurm.calls()  # and no requeue: that is Slurm's to decide
    assert hostnames == ["scontrol", "show", "hostnames", "first,second"]
    for call, name in ((head, "first"), (worker, "second")):
        step = ["srun", "--nodes=1", "--ntasks=1", "--cpus-per-task=1", f"--nodelist={name}"]
        assert call[: len(step)] == step
        assert {"--num-cpus=1", "--num-gpus=0"} <= set(call)
    assert {"--head", "--node-ip-address=127.0.0.2", f"--port={slurm.port}", "--include-dashboard=false"} <= set(head)
    assert f"--address=127.0.0.2:{slurm.port}" in worker
    done = rounds(slurm.experiment)
    assert done == list(range(1, len(done) + 1))
    assert (slurm.experiment.folder / "run" / "checkpoints" / f"round-{len(done):06d}.safetensors").is_file()
    left = subprocess.run(["pgrep", "-f", f"ray-{slurm.job}/"], capture_output=True, text=True).stdout
    assert left == ""
    assert not slurm.ray_folder().exists()


def test_slurm_is_asked_for_a_signal_to_the_script_and_for_another_try() -> None:
    """`B:` signals the script alone; without it the signal goes to Ray's nodes, and their deaths come first."""
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", SCRIPT.read_text(), re.MULTILINE))
    assert re.fullmatch(r"B:USR1@\d+", asked["signal"])
    assert {"requeue", "no-kill", "cpus-per-task"} <= set(asked)
    assert (asked["nodes"], asked["ntasks-per-node"], asked["open-mode"]) == ("1", "1", "append")
