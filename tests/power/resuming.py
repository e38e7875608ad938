"""The command, repeated after a loss of power, in this process and without Ray.

Only the work of Ray is replaced: requests, evaluations and a sweep's runs are executed where they are submitted.
`python tests/power/resuming.py run ...` runs the command in this way; with NO_SYNC in the environment, nothing is ever
synced."""

import importlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from flsim import cli
from flsim.algorithms.checkpoint import digest_of, latest, load
from flsim.results.rows import read_run
from flsim.runs.folder import evaluate_checkpoint
from server import central as central_server
from server import sweep
from server.pool.grid import EvaluationInProcess
from server.sweep import JobEnd, SweepJob


class NodesHere:
    """A replacement of `server.cluster.start.Nodes` that checks nothing."""

    def __init__(self, run: Path, corpus: Path | str, is_local: bool) -> None:
        """Ask no node."""

    def check(self) -> None:
        """Check nothing: this process is the only node."""


def jobs_here(jobs: Sequence[SweepJob], *_: object) -> Iterator[JobEnd]:
    """Run the command of each job; replaces the part of `server.sweep.train_all` that hands jobs to Ray."""
    for job in jobs:
        code, said = command(*sweep._command(job)[3:])
        job.log.write_text(said)
        yield sweep._end_of(job, code, said)


@contextmanager
def without_ray() -> Iterator[None]:
    """Let runs in the block train and evaluate in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("server.central", "server.federated.rounds"):
            module: Any = importlib.import_module(name)
            patch.setattr(module, "cluster", lambda *_: nullcontext())
            patch.setattr(module, "nodes", lambda: [{"CPU": 64.0}])
            patch.setattr(module, "Nodes", NodesHere)
            patch.setattr(module, "say_where", lambda *_: None)
        patch.setattr("server.central.attempt", lambda run, gpus: central_server.train(run.path, gpus))
        patch.setattr("server.federated.rounds.ray_grid", lambda *_: nullcontext())  # rounds are trained in process
        patch.setattr("server.sweep.cluster", lambda *_: nullcontext())
        patch.setattr("server.sweep._as_resources_allow", jobs_here)
        patch.setattr(
            "server.central._service_of", lambda run, _: EvaluationInProcess(run.path.resolve(), evaluate_checkpoint)
        )
        yield


def command(*arguments: str | Path) -> tuple[int, str]:
    """Run a command in this process, and return its exit code and its standard error."""
    threads, err = torch.get_num_threads(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()), redirect_stderr(err):
        patch.setattr(sys, "argv", ["flsim", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
    torch.set_num_threads(threads)
    return int(stop.value.code or 0), err.getvalue()


def status(run: Path) -> str | None:
    """Return the status in run.json; None if there is no such file."""
    about = run / "run.json"
    return str(json.loads(about.read_text())["status"]) if about.exists() else None


def outcome(run: Path) -> dict[str, Any]:
    """Return what is equal in equal runs: the last state, all rows, the digest of every round, the status."""
    newest = latest(run / "checkpoints")
    assert newest is not None
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    kept = ("round", "loss", "users", "clip", "records", "digest")
    return {
        "state": digest_of(load(newest)[0]),
        "rows": read_run(run).rows.to_csv(),
        "rounds": [[line.get(name) for name in kept] for line in lines],
        "status": status(run),
        "half-written": sorted(path.name for name in (".*.partial-*", ".tmp*") for path in run.rglob(name)),
    }


if __name__ == "__main__":
    if "NO_SYNC" in os.environ:
        os.fsync = lambda fd: None
    with without_ray():
        code, said = command(*sys.argv[1:])
    sys.stderr.write(said)
    sys.exit(code)
