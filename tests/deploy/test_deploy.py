"""Tests of the image, Kubernetes, Ray's launchers and Slurm. `make image-check` runs the image's steps, in minutes."""

import copy
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import ray
import yaml
from helpers import Experiment, wait_for_round
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).parents[2]
PACKAGES = ("flsim", "clients", "server", "experiments")


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """Return a folder with the files that .dockerignore does not exclude."""
    for name in re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path / name)
    return tmp_path


def test_the_wheel_has_every_module_and_every_file_of_data(context: Path) -> None:
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--wheel-dir", context, context], check=True, capture_output=True)
    (wheel,) = context.glob("*.whl")
    kinds = {".py", ".toml", ".csv", ".html", ".css", ".typed"}
    tracked = subprocess.run(
        ["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    expected = {name for name in tracked if Path(name).suffix in kinds and (ROOT / name).exists()}
    assert len(expected) > 100
    assert expected - set(zipfile.ZipFile(wheel).namelist()) == set()


def pins(path: Path) -> dict[str, str]:
    lines = [line.strip() for line in path.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def test_pins_of_the_image_agree_with_constraints_and_the_project() -> None:
    ours, more = pins(ROOT / "constraints.txt"), pins(ROOT / "deploy" / "constraints.txt")
    assert {name for name in ours.keys() & more.keys() if ours[name] != more[name]} == set()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for text in project["dependencies"] + extras["cluster"] + extras["hdf5"]:
        requirement = Requirement(text)
        version = {**more, **ours}[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), text


def test_the_image_runs_as_user_1000() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["1000"]
    assert text.index("USER 1000") > text.rindex("RUN ")
    assert "useradd --create-home --uid 1000" in (ROOT / "deploy" / "install.sh").read_text()


def test_flsim_job_starts_a_run_once_and_then_resumes_it(tmp_path: Path) -> None:
    """A fake `flsim` prints its arguments."""
    (tmp_path / "flsim").write_text('#!/bin/sh\necho "$*"\n')
    (tmp_path / "flsim").chmod(0o755)

    def job() -> str:
        return subprocess.run(
            [ROOT / "deploy" / "flsim-job", "a.toml", "run", "--address", "auto"],
            cwd=tmp_path,
            env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert job() == "run a.toml --out run --address auto\n"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").touch()
    assert job() == "run a.toml --out run --resume --address auto\n"


# Tests of the RayJob check its pods and volumes with Kubernetes' schemas, and single fields of KubeRay's types
# (ray-operator/apis/ray/v1, RayJobSpec and RayClusterSpec; `authOptions`). The CRD is not available to the tests.

FILE = Path(__file__).parents[2] / "deploy" / "kuberay-rayjob.yaml"
KUBERNETES = "1.31"


def documents() -> tuple[dict[str, Any], dict[str, Any]]:
    claim, job = yaml.safe_load_all(FILE.read_text())
    return claim, job


def pods(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    cluster = job["spec"]["rayClusterSpec"]
    yield job["spec"]["submitterPodTemplate"]
    yield cluster["headGroupSpec"]["template"]
    for group in cluster["workerGroupSpecs"]:
        yield group["template"]


def test_volume_and_pods_match_the_schemas_of_kubernetes() -> None:
    claim, job = documents()
    kubernetes_validate.validate(claim, KUBERNETES, strict=True)
    templates = list(pods(job))
    assert len(templates) == 4
    for template in templates:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **template}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_pods_do_not_run_as_root_and_have_limits_of_resources() -> None:
    """Pods have the settings that the `restricted` level of Kubernetes' pod security standards requires."""
    for template in pods(documents()[1]):
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        (container,) = spec["containers"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {"cpu", "memory"} <= set(container["resources"]["requests"]) == set(container["resources"]["limits"])


def test_all_nodes_share_the_volume_and_the_versions_of_the_image() -> None:
    claim, job = documents()
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == ray.__version__
    assert cluster["authOptions"] == {"mode": "token"}
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    names = {container["image"] for template in pods(job) for container in template["spec"]["containers"]}
    assert len(names) == 1
    for template in list(pods(job))[1:]:
        (mount,), (volume,) = template["spec"]["containers"][0]["volumeMounts"], template["spec"]["volumes"]
        assert mount == {"name": volume["name"], "mountPath": "/shared"}
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    program, *paths = job["spec"]["entrypoint"].split()
    assert (FILE.parent / program).is_file()
    assert [path.startswith("/shared/") for path in paths[:2]] == [True, True]
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


DEPLOY = Path(__file__).parents[2] / "deploy"
LAUNCHERS = ("ray-cluster", "ray-cluster-aws")


def launcher(name: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((DEPLOY / f"{name}.yaml").read_text())
    return config


def prepared(config: dict[str, Any]) -> dict[str, Any]:
    done: dict[str, Any] = prepare_config(copy.deepcopy(config))
    validate_config(done)
    return done


def test_ray_accepts_the_launchers_with_their_numbers_of_nodes() -> None:
    local, aws = (prepared(launcher(name)) for name in LAUNCHERS)
    (kind,) = local["available_node_types"].values()
    assert (kind["min_workers"], kind["max_workers"]) == (2, 2) == (len(local["provider"]["worker_ips"]),) * 2
    assert aws["available_node_types"]["gpu"]["min_workers"] == aws["max_workers"] == 4
    assert aws["available_node_types"]["head"]["max_workers"] == 0


@pytest.mark.parametrize("name", LAUNCHERS)
def test_settings_of_a_node_are_written_once_and_keep_the_token(name: str, tmp_path: Path) -> None:
    """Setup commands run twice, with another path for /shared. A shell like that of `ray exec` reads the settings."""
    shared, home = tmp_path / "shared", tmp_path / "home"
    shared.mkdir()
    home.mkdir()
    environment = {"HOME": str(home), "PATH": os.environ["PATH"]}

    def bash(*command: str) -> str:
        return subprocess.run(
            ["bash", *command], env=environment, capture_output=True, text=True, check=True, cwd=home
        ).stdout

    for _ in range(2):
        for command in launcher(name)["setup_commands"]:
            bash("-c", command.replace("/shared", str(shared)))
    token = (shared / "flsim.token").read_text()
    assert len(token.strip()) == 64
    assert (shared / "flsim.token").stat().st_mode & 0o777 == 0o600
    assert len((home / ".bashrc").read_text().splitlines()) == 1
    printed = bash("-c", "source ~/.bashrc; echo $RAY_AUTH_MODE $PATH; cat $RAY_AUTH_TOKEN_PATH")
    assert printed == f"token {shared}/flsim/bin:{environment['PATH']}\n{token}"


@pytest.mark.parametrize("name", LAUNCHERS)
def test_shellcheck_accepts_the_commands_of_launchers(name: str) -> None:
    """SC2016 is excluded: the node's shell expands `~` and variables, and .bashrc gets settings unexpanded."""
    commands = [line for key, lines in launcher(name).items() if key.endswith("_commands") for line in lines]
    assert len(commands) >= 6
    shellcheck = [str(Path(sys.executable).parent / "shellcheck"), "--shell=bash", "--exclude=SC2016", "-"]
    done = subprocess.run(shellcheck, input="\n".join([*commands, ""]), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm.sbatch"
SRUN = """#!/usr/bin/env bash
printf 'srun %s\\n' "${*@Q}" >> "$PRINTED"
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """#!/usr/bin/env bash
printf 'scontrol %s\\n' "$*" >> "$PRINTED"
[[ $1 != show ]] || printf '%s\\n' ${3//,/ }
"""


class Slurm:
    """A fake Slurm that starts the batch script, each time with the same job id."""

    def __init__(self, experiment: Experiment, nodes: str) -> None:
        self.experiment, self.printed = experiment, experiment.folder / "printed"
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
            "PRINTED": str(self.printed),
            "SLURM_JOB_ID": self.job,
            "SLURM_JOB_NUM_NODES": str(len(nodes.split(","))),
            "SLURM_JOB_NODELIST": nodes,
            "SLURM_CPUS_PER_TASK": "1",
            "FLSIM_HEAD_IP": "127.0.0.2",
        }
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        """Start the batch script like slurmd."""
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
        return [shlex.split(line) for line in self.printed.read_text().splitlines()] if self.printed.exists() else []

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
def test_a_job_at_its_time_limit_is_requeued_and_resumes(slurm: Slurm) -> None:
    long = ["--set", "training.rounds=100", "--set", "evaluation.every=100"]
    job = slurm.start(*long)
    wait_for_round(slurm.experiment.folder / "run", 3)
    os.kill(job.pid, signal.SIGUSR1)
    assert job.wait(120) == 128 + signal.SIGTERM, slurm.log
    assert slurm.calls() == [["scontrol", "requeue", slurm.job]]  # no srun: a single node starts no Ray nodes
    assert 3 <= len(rounds(slurm.experiment)) < 100
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
    hostnames, head, worker = slurm.calls()  # no requeue, which Slurm decides
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
    assert subprocess.run(["pgrep", "-f", f"ray-{slurm.job}/"], capture_output=True, text=True).stdout == ""
    assert not slurm.ray_folder().exists()


def test_the_batch_script_requests_a_signal_to_itself_and_requeueing() -> None:
    """`B:` sends the signal only to the script. Without `B:`, the signal would first end Ray's nodes."""
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", SCRIPT.read_text(), re.MULTILINE))
    assert re.fullmatch(r"B:USR1@\d+", asked["signal"])
    assert {"requeue", "no-kill", "cpus-per-task"} <= set(asked)
    assert (asked["nodes"], asked["ntasks-per-node"], asked["open-mode"]) == ("1", "1", "append")
