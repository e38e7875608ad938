"""Messages of one line name limits on processes and memory or an unusable temporary folder, and the remedy."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from fault_injection import little_memory
from faulty import fill, kill, of_run, small_disk
from helpers import Experiment, finish, start
from waiting import wait_until

from flsim.base.errors import RunFailed
from server.cluster import causes
from server.cluster.start import FILES, refuse_without_room

STARTS = """
from flsim.base.errors import RunFailed
from server.cluster.start import cluster
try:
    with cluster(cpus=1):
        print("it started")
except RunFailed as error:
    print(error)
"""


def refused(*prefix: str) -> str:
    """Return the line with which Ray does not start in a process whose command line has this prefix."""
    done = subprocess.run([*prefix, sys.executable, "-c", STARTS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return line


def test_a_limit_of_processes_is_named() -> None:
    """The command runs as another user, because root has no limit. This user keeps root's rights to files."""
    rights = "+dac_override,+fowner"
    user = ["setpriv", "--securebits", "+no_setuid_fixup", "--reuid", "54321", "--clear-groups"]
    user += ["--inh-caps", rights, "--ambient-caps", rights]
    done = subprocess.run([*user, sys.executable, "-c", ""], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no command can be run as another user here: {done.stderr.strip()}")
    line = refused("prlimit", "--nproc=100", *user)
    assert "300 threads" in line
    assert "`ulimit -u` is 100" in line


def test_a_limit_of_open_files_is_named() -> None:
    """Without the check, Ray's raylet would end while clients start."""
    line = refused("prlimit", "--nofile=64")
    assert "need 100 open files each, and `ulimit -n` is 64" in line
    assert "raise the limit (`ulimit -n 1024`), or run without Ray (--in-process)" in line


def test_an_unusable_temporary_folder_is_named(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", megabytes=1) as disk:
        fill(disk)
        with pytest.raises(RunFailed, match=f"^{disk}.* free space there, or set RAY_TMPDIR"):
            refuse_without_room(disk / "ray")
    (tmp_path / "file").touch()
    with pytest.raises(RunFailed, match=r"file/ray: Ray cannot use this folder \(Not a directory\); set RAY_TMPDIR"):
        refuse_without_room(tmp_path / "file" / "ray")


def test_a_temporary_folder_whose_path_is_too_long_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / ("x" * 80)))
    assert refused().endswith("is too long for its sockets; set RAY_TMPDIR to a shorter path, such as /tmp")


@pytest.mark.slow
def test_the_command_ends_if_a_process_of_ray_ends_during_the_start(experiment: Experiment) -> None:
    """The command ends within 20 s. Ray itself would wait for half a minute, and raise a plain `Exception`."""
    process = start(experiment, "--out", "lame")
    wait_until(lambda: bool(of_run(process, "raylet/raylet")))
    (raylet,) = of_run(process, "raylet/raylet")
    kill(raylet.pid)
    killed = time.monotonic()
    code, said = finish(experiment, process)
    assert code == 1
    assert said == "flsim: Ray does not start on this machine: its raylet has ended\n"
    assert time.monotonic() - killed < 20


@pytest.mark.slow
def test_the_message_of_clients_without_memory_names_the_cause(experiment: Experiment) -> None:
    with little_memory(600) as around:
        run = [*around.within, sys.executable, "-m", "flsim", "run", str(experiment.config), "--out", "lame"]
        run += ["--set", "system.shards=2"]
        done = subprocess.run(run, cwd=experiment.folder, capture_output=True, text=True, timeout=300)
    assert done.returncode in (1, 2), done.stderr  # a client or the check of the machine fails first, by chance
    *_, line = done.stderr.strip().splitlines()
    assert "because memory ran out" in line
    assert "(0.6 GB on this machine)" in line


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("RuntimeError: can't start new thread\n", "the system refuses further processes or threads"),
        (
            "what():  thread: Resource temporarily unavailable [system:11]",
            "the system refuses further processes or threads",
        ),
        ("OSError: [Errno 28] No space left on device: 'x'", "a disk is full"),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "there is not enough memory"),
        ("MemoryError\n", "there is not enough memory"),
        ("OSError: [Errno 24] Too many open files: '/dev/null'", "the system refuses further open files"),
        (
            "Too many workers, failed to create a file. Try setting `ulimit -n <num_files>` then restart Ray.",
            "the system refuses further open files",
        ),
    ],
)
def test_causes_in_logs_of_ray_are_reported(tmp_path: Path, said: str, cause: str) -> None:
    log = tmp_path / "worker.err"
    log.write_text("x" * 100_000 + said)
    assert str(causes.named_in(log, tmp_path / "none")).startswith(cause)
    log.write_text("a raylet has ended, and nothing says why")
    assert causes.named_in(log) is None


@pytest.mark.nightly
def test_the_least_limit_of_open_files_suffices(experiment: Experiment) -> None:
    run = [sys.executable, "-m", "flsim", "run", str(experiment.config), "--out", "whole", "--set", "system.shards=2"]
    subprocess.run(["prlimit", f"--nofile={FILES}", *run], cwd=experiment.folder, capture_output=True, check=True)
