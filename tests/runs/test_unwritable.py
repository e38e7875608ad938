"""Run folders that cannot be written are refused before any computation, because results are stored in them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import Experiment, Trained

import flsim

MESSAGE = (
    "this folder must be writable, because results are stored in it; change its permissions, or copy the run folder"
)
READ_ONLY = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'
MOUNTING = ("unshare", "--mount", "--map-root-user", "sh", "-c", READ_ONLY, "sh")


@pytest.fixture
def run(trained_here: Trained, tmp_path: Path) -> Path:
    """Return a copy of a run without checkpoints: if a command starts to compute, it reports that there is none."""
    copy = tmp_path / "experiment" / "run"
    shutil.copytree(trained_here().parent, copy.parent)
    for path in (copy / "checkpoints").iterdir():
        path.rename(copy.parent / path.name)
    return copy


def refused(folder: Path, *arguments: str | Path) -> str:
    """Return the message of a command that is refused with exit code 2, in one line."""
    done = Experiment(folder).call(*arguments, check=False)
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (2, 1, "")
    return done.stderr


@pytest.mark.parametrize("options", [(), ("--shadows",)])
def test_attacks_are_refused_if_their_rows_cannot_be_stored(run: Path, options: tuple[str, ...]) -> None:
    (run / "membership").write_text("no folder")
    assert f"{run / 'membership'}: {MESSAGE}" in refused(run.parent, "membership", run, *options)


def test_an_evaluation_is_refused_if_its_rows_cannot_be_stored(run: Path) -> None:
    shutil.rmtree(run / "rows")
    (run / "rows").write_text("no folder")
    checkpoint = run / "checkpoints" / "round-000001.safetensors"
    with pytest.raises(flsim.InputError, match=MESSAGE):
        flsim.evaluate(checkpoint)
    checkpoint.write_bytes(b"no checkpoint")
    assert f"{run / 'rows'}: {MESSAGE}" in refused(run.parent, "evaluate", checkpoint)


def test_a_read_only_folder_is_refused(run: Path) -> None:
    """A mount makes the folder read-only, which also holds for root."""
    probe = subprocess.run([*MOUNTING, str(run), "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("folders cannot be mounted read-only here")
    command = [*MOUNTING, str(run), sys.executable, "-m", "flsim", "membership", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"{run}: {MESSAGE}" in done.stderr
