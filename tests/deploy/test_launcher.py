"""Files for `ray up`, as `ray up` reads them: Ray's own defaults, then its own validation."""

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

DEPLOY = Path(__file__).parents[2] / "deploy"
LAUNCHERS = ("ray-cluster", "ray-cluster-aws")


def launcher(name: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((DEPLOY / f"{name}.yaml").read_text())
    return config


def prepared(config: dict[str, Any]) -> dict[str, Any]:
    done: dict[str, Any] = prepare_config(copy.deepcopy(config))
    validate_config(done)
    return done


def test_ray_accepts_them_and_knows_all_nodes() -> None:
    local, aws = (prepared(launcher(name)) for name in LAUNCHERS)
    (kind,) = local["available_node_types"].values()
    assert (kind["min_workers"], kind["max_workers"]) == (2, 2) == (len(local["provider"]["worker_ips"]),) * 2
    assert aws["available_node_types"]["gpu"]["min_workers"] == aws["max_workers"] == 4
    assert aws["available_node_types"]["head"]["max_workers"] == 0


@pytest.mark.parametrize("name", LAUNCHERS)
def test_settings_of_a_node_are_written_once_and_keep_the_token(name: str, tmp_path: Path) -> None:
    """Run as they would be, twice, but for where /shared is; then in a shell as `ray exec` starts one."""
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
    said = bash("-c", "source ~/.bashrc; echo $RAY_AUTH_MODE $PATH; cat $RAY_AUTH_TOKEN_PATH")
    assert said == f"token {shared}/flsim/bin:{environment['PATH']}\n{token}"


@pytest.mark.parametrize("name", LAUNCHERS)
def test_commands_of_launchers(name: str) -> None:
    """`~` and variables are of the node's shell; a setting is written to .bashrc as it is."""
    commands = [line for key, lines in launcher(name).items() if key.endswith("_commands") for line in lines]
    assert len(commands) >= 6
    shellcheck = [str(Path(sys.executable).parent / "shellcheck"), "--shell=bash", "--exclude=SC2016", "-"]
    done = subprocess.run(shellcheck, input="\n".join([*commands, ""]), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
