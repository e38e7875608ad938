"""Central runs on a real Ray cluster of two CPUs: simultaneous runs, killed runs, and runs that do not fit."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers import CENTRAL, Experiment, final_state
from raynodes import free_port, started
from stepping import same
from test_central_run import LONG, log_of, settings, wait_for_step
from waiting import hear_ctrl_c, wait_until

from flsim.base.errors import InputError
from flsim.runs.config import CentralSystemHParams
from flsim.runs.folder import Run
from flsim.runs.recovery import TRAINED
from flsim.training.central import init, train_central
from flsim.training.update import State
from server.central import process_gpu_shares, refuse_what_does_not_fit

DEADLINE = 240.0


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Start a cluster as a user does, with two CPUs and a GPU that does not exist, and yield its address."""
    port = free_port()
    options = ["--num-cpus=2", "--num-gpus=1", "--node-ip-address=127.0.0.1", "--include-dashboard=false"]
    with started("--head", f"--port={port}", *options):
        yield f"127.0.0.1:{port}"


@dataclass
class Started:
    """A run in a background process."""

    path: Path
    process: subprocess.Popen[bytes]

    @property
    def output(self) -> str:
        return self.path.with_suffix(".said").read_text()

    def finish(self) -> tuple[int, str]:
        return self.process.wait(timeout=DEADLINE), self.output


Begin = Callable[..., Started]


@pytest.fixture
def begin(experiment: Experiment, address: str) -> Iterator[Begin]:
    """Return a function that starts `flsim run` on the cluster in the background."""
    experiment.config.write_text(CENTRAL)
    begun = []

    def begin(name: str, *overrides: str, options: Sequence[str] = ()) -> Started:
        path = experiment.folder / name
        command = [sys.executable, "-m", "flsim", "run", str(experiment.config), "--out", name, "--address", address]
        with path.with_suffix(".said").open("wb") as said:
            process = subprocess.Popen(
                [*command, *settings(*overrides), *options],
                cwd=experiment.folder,
                stdout=subprocess.DEVNULL,
                stderr=said,
                preexec_fn=hear_ctrl_c,
            )
        begun.append(process)
        return Started(path, process)

    yield begin
    for process in begun:
        process.kill()
        process.wait()


def trainer_of(run: Path) -> int:
    """Return the id of the process that trains a run and writes its files."""
    host, process = (run / TRAINED).read_text().split("/")
    assert host == socket.gethostname()
    return int(process)


def trained_in_one_go(path: Path) -> State:
    """Return the run's last state, trained in this process without interruption."""
    run = Run.open(path)
    start = init(run.corpus.layout.vocabulary_size, run.config.model, run.config.seed)
    ((state, _),) = train_central(start, run.central.training_of(run.users, run.rounds), run.rounds)
    return state


@pytest.mark.nightly
def test_a_run_reports_that_it_waits_and_trains_after_another_is_interrupted(begin: Begin) -> None:
    """The second run waits for a CPU, because the first run has no end and holds both until it is interrupted."""
    first = begin("first", "system.threads=2", *LONG)
    wait_for_step(first.path, 14)
    second = begin("second")
    wait_until(lambda: "second: waiting for 1 CPU\n" in second.output)
    assert not (second.path / "rounds.jsonl").exists()
    first.process.send_signal(signal.SIGINT)
    code, said = first.finish()
    assert code == 130
    assert said.splitlines()[-1].startswith("flsim: interrupted; `flsim run --resume` continues")
    assert second.finish()[0] == 0, second.output
    assert same(final_state(second.path), trained_in_one_go(second.path))


@pytest.mark.slow
def test_a_killed_training_continues_from_its_newest_checkpoint(begin: Begin) -> None:
    """A run that is killed once without retries and once with retries equals an uninterrupted run."""
    long = ("training.steps=1500", "evaluation.every=1500")
    run = begin("run", "system.retries=0", *long)
    wait_for_step(run.path, 35)
    os.kill(trainer_of(run.path), signal.SIGKILL)
    code, said = run.finish()
    assert code == 1
    assert said.splitlines()[-1].startswith("flsim: training failed 1 times, last with: its process died")
    assert json.loads((run.path / "run.json").read_text())["status"] == "failed"
    kept = final_state(run.path).round
    again = begin("run", *long, options=["--resume"])
    wait_for_step(run.path, kept + 70)
    os.kill(trainer_of(run.path), signal.SIGKILL)
    code, said = again.finish()
    assert code == 0, said
    assert said.count("run: training restarts from the newest checkpoint: its process died") == 1
    assert "Traceback" not in said
    assert same(final_state(run.path), trained_in_one_go(run.path))
    assert [line["round"] for line in log_of(run.path)] == [*range(7, 1500, 7), 1500]


def test_a_process_fills_a_gpu_together_with_its_evaluators() -> None:
    assert process_gpu_shares(CentralSystemHParams()) == (0.0, 0.0)
    assert process_gpu_shares(CentralSystemHParams(device="cuda")) == (0.95, 0.05)
    two = CentralSystemHParams(device="cuda", evaluators=2, gpus_for_evaluation=0.25)
    assert process_gpu_shares(two) == (0.5, 0.25)
    assert process_gpu_shares(CentralSystemHParams(device="cuda", gpus=0.2)) == (0.2, 0.05)
    assert process_gpu_shares(CentralSystemHParams(device="cuda", evaluators=20)) == (0.95, 0.0025)
    assert process_gpu_shares(CentralSystemHParams(device="cuda", gpus_for_evaluation=1)) == (1.0, 1)


@pytest.mark.parametrize(
    ("system", "nodes", "message"),
    [
        (CentralSystemHParams(threads=3), [{"CPU": 2.0}, {"CPU": 2.0}], "training needs 3 CPUs, but no Ray node has"),
        (CentralSystemHParams(device="cuda"), [{"CPU": 2.0}], 'system.device is "cuda", but no Ray node has a GPU'),
        (
            CentralSystemHParams(device="cuda", threads=2),
            [{"CPU": 1.0, "GPU": 1.0}, {"CPU": 8.0}],
            "needs 2 CPUs and 0.95 GPUs, but no Ray node",
        ),
    ],
)
def test_what_never_fits_is_refused(system: CentralSystemHParams, nodes: list[dict[str, float]], message: str) -> None:
    gpus, _ = process_gpu_shares(system)
    with pytest.raises(InputError, match=message):
        refuse_what_does_not_fit(system, gpus, nodes)
    refuse_what_does_not_fit(system, gpus, [{"CPU": 4.0, "GPU": 2.0}])
