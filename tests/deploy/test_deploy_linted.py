"""What is shipped for clusters, as the linters of its languages see it."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
LAUNCHERS = ("ray-cluster", "ray-cluster-aws")


def lint(*command: str | Path, text: str | None = None) -> tuple[int, str]:
    done = subprocess.run(
        [str(BIN / command[0]), *map(str, command[1:])], cwd=ROOT, input=text, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def scripts() -> list[str]:
    """Every tracked file that a shell runs."""
    named = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    files = [name for name in named if (ROOT / name).is_file()]
    return [name for name in files if (ROOT / name).read_bytes()[:30].splitlines()[:1] == [b"#!/usr/bin/env bash"]]


def test_shell_scripts() -> None:
    found = scripts()
    assert {".ci/run", "deploy/install.sh", "deploy/slurm.sbatch", "deploy/flsim-job"} <= set(found)
    assert lint("shellcheck", *found) == (0, "")


@pytest.mark.parametrize("name", LAUNCHERS)
def test_commands_of_launchers(name: str) -> None:
    """`~` and variables are of the node's shell; a setting is written to .bashrc as it is."""
    config = yaml.safe_load((ROOT / "deploy" / f"{name}.yaml").read_text())
    commands = [line for key, lines in config.items() if key.endswith("_commands") for line in lines]
    assert len(commands) >= 6
    for command in commands:
        assert lint("shellcheck", "--shell=bash", "--exclude=SC2016", "-", text=command + "\n") == (0, ""), command


def test_yaml() -> None:
    assert lint("yamllint", "--strict", "deploy") == (0, "")


def test_dockerfile() -> None:
    assert lint("hadolint", "deploy/Dockerfile") == (0, "")
