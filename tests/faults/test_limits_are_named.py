"""Limits on processes and memory, a temporary folder that is no good: a line says which, and what to do."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from fault_injection import little_memory
from faulty import fill, kill, of_run, small_disk
from helpers import Experiment, finish, start
from waiting import wait_until

from server.cluster import causes
from server.cluster.start import FILES


def refused(experiment: Experiment, *prefix: str) -> str:
    """The one line of a run that does not start, with what its command line begins with."""
    command = [*prefix, sys.executable, "-m", "flsim", "run", str(experiment.config), "--out", "lame"]
    done = subprocess.run(command, cwd=experiment.folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    return line


def test_a_limit_of_processes_is_named(experiment: Experiment) -> None:
    """The command runs as another user, since root has no limit; that user may read and write all the same."""
    rights = "+dac_override,+fowner"
    user = ["setpriv", "--securebits", "+no_setuid_fixup", "--reuid", "54321", "--clear-groups"]
    user += ["--inh-caps", rights, "--ambient-caps", rights]
    done = subprocess.run([*user, sys.executable, "-c", ""], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no command can be run as another user here: {done.stderr.strip()}")
    line = refused(experiment, "prlimit", "--nproc=100", *user)
    assert "300 threads" in line
    assert "`ulimit -u` is 100" in line


def test_a_limit_of_open_files_is_named(experiment: Experiment) -> None:
    """Ray's raylet would end while clients start."""
    assert refused(experiment, "prlimit", "--nofile=64") == (
        "flsim: Ray's processes need 100 open files each, and `ulimit -n` is 64: there would be too many open "
        "files; raise the limit (`ulimit -n 1024`), or run without Ray (--in-process)"
    )


def test_a_temporary_folder_without_room_is_named(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_disk(experiment.folder / "small", megabytes=1) as disk:
        fill(disk)
        monkeypatch.setenv("TMPDIR", str(disk))
        line = refused(experiment)
    assert line.startswith(f"flsim: {disk}")
    assert line.endswith("make room there, or set RAY_TMPDIR to another folder")


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("tiny.toml", "Ray cannot use it (Not a directory); set RAY_TMPDIR to another folder"),
        ("x" * 80, "is too long a path for its sockets; set RAY_TMPDIR to a shorter one, such as /tmp"),
    ],
)
def test_a_temporary_folder_that_ray_cannot_use_is_named(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, folder: str, reason: str
) -> None:
    monkeypatch.setenv("TMPDIR", str(experiment.folder / folder))
    line = refused(experiment)
    assert str(experiment.folder / folder / "ray") in line
    assert line.endswith(reason)


def test_a_process_of_rays_that_ends_while_ray_starts_ends_the_command(experiment: Experiment) -> None:
    """Ray itself would wait for half a minute, and raise an exception of no kind."""
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
def test_clients_without_memory_say_so(experiment: Experiment) -> None:
    with little_memory(600) as around:
        run = [*around.within, sys.executable, "-m", "flsim", "run", str(experiment.config), "--out", "lame"]
        run += ["--set", "system.shards=2"]
        done = subprocess.run(run, cwd=experiment.folder, capture_output=True, text=True, timeout=300)
    assert done.returncode in (1, 2), done.stderr  # by chance a client dies first, or what looks at the machine
    *_, line = done.stderr.strip().splitlines()
    assert "the kernel has killed for want of memory" in line
    assert "(0.6 GB there); run fewer processes at once (system.shards, system.evaluators), or give them more" in line


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("RuntimeError: can't start new thread\n", "no further process or thread may be started"),
        (
            "what():  thread: Resource temporarily unavailable [system:11]",
            "no further process or thread may be started",
        ),
        ("OSError: [Errno 28] No space left on device: 'x'", "a disk is full"),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "there is not enough memory"),
        ("MemoryError\n", "there is not enough memory"),
        ("OSError: [Errno 24] Too many open files: '/dev/null'", "no further file may be opened"),
        (
            "Too many workers, failed to create a file. Try setting `ulimit -n <num_files>` then restart Ray.",
            "no further file may be opened",
        ),
    ],
)
def test_what_logs_say_is_said_again(tmp_path: Path, said: str, cause: str) -> None:
    log = tmp_path / "worker.err"
    log.write_text("x" * 100_000 + said)
    assert str(causes.named_in(log, tmp_path / "none")).startswith(cause)
    log.write_text("a raylet has ended, and nothing says why")
    assert causes.named_in(log) is None


@pytest.mark.nightly
def test_the_least_limit_of_open_files_suffices(experiment: Experiment) -> None:
    run = [sys.executable, "-m", "flsim", "run", str(experiment.config), "--out", "whole", "--set", "system.shards=2"]
    subprocess.run(["prlimit", f"--nofile={FILES}", *run], cwd=experiment.folder, capture_output=True, check=True)
