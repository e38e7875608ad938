"""Helpers for tests of faults: a run that lasts long enough for an interruption, and faults to inject."""

import inspect
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen, run

import psutil
import pytest
from helpers import PRIVATE, Experiment, assert_same, finish, start, wait_for_round
from waiting import wait_until

import clients.app
from flsim.algorithms.checkpoint import digest_of, latest, load

SETTINGS = (*PRIVATE, "training.rounds=30", "evaluation.every=10", "system.checkpoint_every=5", "system.shards=2")
OPTIONS = tuple(part for text in SETTINGS for part in ("--set", text))
FURTHER = 5  # rounds


def assert_equal_runs(broken: Path, whole: Path) -> None:
    """Check that parameters, moments, clip, ledger, rows and the digests of all rounds are equal, bit for bit."""
    assert_same(broken, whole)
    (mine, _), (theirs, _) = (load(latest(run / "checkpoints") or run) for run in (broken, whole))
    assert (mine.round, mine.ledger) == (theirs.round, theirs.ledger)
    assert getattr(mine, "clip", None) == getattr(theirs, "clip", None)  # central runs have no adaptive clip
    assert digest_of(mine) == digest_of(theirs)
    assert digests(broken) == digests(whole)
    assert json.loads((broken / "run.json").read_text())["status"] == "completed"


def digests(run: Path) -> list[tuple[int, str]]:
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    return [(line["round"], line["digest"]) for line in lines]


def events(run: Path) -> list[str]:
    """Return the names of the events in a run's log; none if the log does not exist yet."""
    if not (run / "log.jsonl").exists():
        return []
    return [json.loads(line)["event"] for line in (run / "log.jsonl").read_text().splitlines()]


def resume(experiment: Experiment, out: str, *options: str) -> str:
    """Resume a run, train it to its end, and return what the command printed to stderr."""
    go_on(experiment)
    return experiment.flsim("run", experiment.config, "--out", out, *OPTIONS, *options, "--resume").stderr


def begin(experiment: Experiment, out: str, *overrides: str, until_round: int) -> tuple["Popen[bytes]", list[int]]:
    """Start a run whose clients wait for `go_on` soon after `until_round`; return its process and its clients' ids."""
    sick_client(experiment, most=until_round + FURTHER)
    process = start(experiment, "--out", out, *OPTIONS, *(part for text in overrides for part in ("--set", text)))
    workers = wait_for_round(experiment.folder / out, until_round)
    return process, [int(worker.split("/")[1]) for worker in workers]


def go_on(experiment: Experiment) -> None:
    """Let the waiting clients continue."""
    (experiment.folder / "go_on").touch()


def ended(experiment: Experiment, process: "Popen[bytes]") -> tuple[int, str]:
    """Wait for the end of a run, and return its exit code and the last line that it printed."""
    code, printed = finish(experiment, process)
    return code, " ".join(printed.strip().splitlines()[-1].split())


def of_run(process: "Popen[bytes]", name: str) -> list[psutil.Process]:
    """Return the processes of a run whose command line contains a name."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if name in " ".join(child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


@contextmanager
def small_disk(path: Path, megabytes: int) -> Iterator[Path]:
    """Mount a real filesystem of a few MB."""
    path.mkdir()
    mounted = run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no small filesystem can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield path
    finally:
        run(["umount", "--lazy", str(path)], check=True)


def fill(folder: Path) -> Path:
    """Fill a filesystem, and return the file that occupies the space."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            while True:
                try:
                    if not file.write(b"0" * size):
                        break
                except OSError:
                    break
    return filler


def nothing(users: list[int]) -> None:
    """Do nothing, in place of a fault."""


def sick_client(
    experiment: Experiment, harm: Callable[[list[int]], None] = nothing, most: float = float("inf")
) -> None:
    """Write a client app that calls `harm` with the users of each request, and then trains as the real client app.

    From round `most` on, clients wait for `go_on`. They do not start while the experiment's folder has a file
    `none_starts`. Python and Ray import this app, because the folder in which a run starts comes first on the path.
    """
    real = Path(clients.app.__file__).resolve()
    package = experiment.folder / "clients"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "app.py").write_text(
        f"""
import importlib.util, os, signal, sys, time
from pathlib import Path
from flwr.clientapp import ClientApp
from flsim.algorithms.wire import decode_request

spec = importlib.util.spec_from_file_location("real_client", {str(real)!r})
real = importlib.util.module_from_spec(spec)
spec.loader.exec_module(real)
HERE = Path({str(experiment.folder)!r})
while (HERE / "none_starts").exists():
    time.sleep(0.05)

{inspect.getsource(harm)}

app = ClientApp()

@app.train()
def train(message, context):
    request, _ = decode_request(message.content)
    while request.round >= float("{most}") and not (HERE / "go_on").exists():
        time.sleep(0.02)
    {harm.__name__}(request.users.tolist())
    return real.train(message, context)
"""
    )


def wait_for(path: Path, pattern: str, seconds: float = 120) -> None:
    """Wait until the text of a file matches a pattern."""
    wait_until(lambda: path.exists() and bool(re.search(pattern, path.read_text())), seconds)


def kill(pid: int, with_signal: signal.Signals = signal.SIGKILL) -> None:
    os.kill(pid, with_signal)
