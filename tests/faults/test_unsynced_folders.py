"""On file systems that cannot sync folders, runs and imports complete with one warning that names the folder."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from faulty import assert_equal_runs
from helpers import PRIVATE, Experiment

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc, to build the file system (folders.c)")
SETTINGS = tuple(part for text in PRIVATE for part in ("--set", text))
WARNING = "this file system cannot sync folders"


def environment(folder: Path, number: int) -> dict[str, str]:
    """Return variables that make fsync of folders fail in a process and in all processes that it starts."""
    library, source = folder / "folders.so", Path(__file__).with_name("folders.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source)], check=True)
    return {**os.environ, "LD_PRELOAD": str(library), "FOLDER_SYNC_ERROR": str(number)}


def call(experiment: Experiment, around: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flsim", *arguments]
    return subprocess.run(command, cwd=experiment.folder, env=around, capture_output=True, text=True)


def assert_warned_once(experiment: Experiment, done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if WARNING in line]
    assert line.startswith(f"{experiment.folder}")
    assert ".partial-" not in line


@pytest.mark.parametrize(
    "number",
    [pytest.param(errno.EINVAL, marks=pytest.mark.slow), pytest.param(errno.ENOTSUP, marks=pytest.mark.nightly)],
)
def test_a_run_on_a_file_system_that_cannot_sync_folders_is_the_same(experiment: Experiment, number: int) -> None:
    """The run is trained there, loses its newest checkpoint, and is resumed there."""
    around = environment(experiment.folder, number)
    run = ("run", str(experiment.config), "--out", "run", "--in-process", *SETTINGS)
    assert_warned_once(experiment, call(experiment, around, *run))
    (experiment.folder / "run" / "checkpoints" / "round-000004.safetensors").unlink()
    assert_warned_once(experiment, call(experiment, around, *run, "--resume"))
    whole = experiment.run("whole", *PRIVATE, options=["--in-process"])
    assert_equal_runs(experiment.folder / "run", whole)


@pytest.mark.slow
def test_a_run_of_many_processes_on_such_a_file_system_warns_once(experiment: Experiment) -> None:
    around = environment(experiment.folder, errno.EINVAL)
    assert_warned_once(experiment, call(experiment, around, "run", str(experiment.config), "--out", "run", *SETTINGS))


def test_an_import_on_such_a_file_system_warns_once(experiment: Experiment) -> None:
    around = environment(experiment.folder, errno.EINVAL)
    posts = [
        json.dumps({"author": f"author{number % 20}", "text": "one two three four five."}) for number in range(400)
    ]
    (experiment.folder / "posts.jsonl").write_text("\n".join(posts))
    options = ("--user-column", "author", "--words-per-user", "50", "--out", "imported")
    assert_warned_once(experiment, call(experiment, around, "data", "import", "posts.jsonl", *options))


def test_a_disk_that_fails_is_named(experiment: Experiment) -> None:
    """The command ends on any error of fsync other than those of file systems that cannot sync folders."""
    around = environment(experiment.folder, errno.EIO)
    done = call(experiment, around, "run", str(experiment.config), "--out", "run", "--in-process")
    assert (done.returncode, done.stderr) == (1, f"flsim: {experiment.folder}: Input/output error\n")
    assert not (experiment.folder / "run").exists()
