"""Work of evaluators in tests: it logs process and checkpoint, and fails, waits or exits by the checkpoint's name."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from flsim.base.errors import Diverged
from flsim.results.rows import Evaluation
from server.pool.grid import EvaluationService

TIMEOUT = 300.0  # seconds; on an idle machine, each wait in these tests takes a few seconds at most


def note(folder: Path, line: str) -> None:
    with (folder / "log").open("a") as file:
        file.write(line + "\n")


def log(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "log").read_text().splitlines()]


def names(folder: Path) -> list[str]:
    return [line[0] for line in log(folder)]


def niceness() -> int:
    return os.nice(0)


def wait_for(path: Path, look: Callable[[], object] = lambda: None) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} never came"
        look()
        time.sleep(0.01)


def work(run: Path, checkpoint: Path) -> None:
    """Log checkpoint and process in the run's parent folder; then fail, wait or exit by the checkpoint's name."""
    name, folder = checkpoint.name, run.parent
    note(folder, f"{name} {os.getpid()} {os.nice(0)} {torch.get_num_threads()}")
    (folder / f"{name}.started").touch()
    if (folder / f"{name}.wait").exists():
        wait_for(folder / f"{name}.go")
    if name == "nan":
        raise Diverged("round 3: 1 of 8 values of parameter embedding are not finite")
    if name == "bad":
        raise KeyError("no such\ncorpus")
    if name == "hungry" and names(folder).count(name) < 2:
        raise MemoryError("too\nlarge")
    if name == "starved" and names(folder).count(name) < 2:
        torch.empty(1 << 50)
    if name == "dies":
        os._exit(1)


def freeze(_run: Path, _checkpoint: Path) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def outcomes_of(ended: Sequence[Evaluation]) -> list[tuple[str, str, int]]:
    return [(one.checkpoint, one.outcome, one.attempt) for one in ended]


def poll_until(service: EvaluationService) -> list[tuple[str, str, int]]:
    """Return the outcomes of the first poll that finds ended evaluations."""
    deadline = time.monotonic() + TIMEOUT
    while not (ended := service.poll()):
        assert time.monotonic() < deadline, "no evaluation ended"
    return outcomes_of(ended)
