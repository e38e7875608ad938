"""Helpers that many test files share: small experiments, commands, comparisons of runs, and refusals."""

import csv
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import product
from pathlib import Path

import pandas as pd
import pytest
import torch
from waiting import hear_ctrl_c

from flsim import cli
from flsim.algorithms.checkpoint import latest, load
from flsim.data.corpus import Corpus
from flsim.results.rows import read_run
from flsim.runs.config import load as load_config
from flsim.runs.folder import Run, evaluate_checkpoint
from flsim.training.update import State

MakeCorpus = Callable[..., Corpus]
Trained = Callable[..., Path]
Flsim = Callable[..., tuple[int, str, str]]


@dataclass(frozen=True)
class Experiment:
    """A corpus and a configuration that train in a second, and the command line to train them."""

    folder: Path

    @property
    def config(self) -> Path:
        return self.folder / "tiny.toml"

    def flsim(self, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the real command in its own process."""
        done = subprocess.run(
            [sys.executable, "-m", "flsim", *map(str, arguments)], cwd=self.folder, capture_output=True, text=True
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    def call(self, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the command in this process, which is faster, if it needs no processes of Ray."""
        out, err = StringIO(), StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.chdir(self.folder)
            patch.setattr("sys.argv", ["flsim", *map(str, arguments)])
            with pytest.raises(SystemExit) as stop:
                cli.main()
        done = subprocess.CompletedProcess(["flsim"], int(stop.value.code or 0), out.getvalue(), err.getvalue())
        assert not check or done.returncode == 0, done.stderr
        return done

    def run(self, name: str, *overrides: str, options: Sequence[str] = ()) -> Path:
        """Train with the given overrides, in a new process if training needs Ray, and return the run folder."""
        settings = [part for override in overrides for part in ("--set", override)]
        run = self.call if "--in-process" in options else self.flsim
        run("run", self.config, "--out", name, *settings, *options)
        return self.folder / name


def final_state(run: Path) -> State:
    newest = latest(run / "checkpoints")
    assert newest is not None
    state, _ = load(newest)
    return state


def final_params(run: Path) -> dict[str, torch.Tensor]:
    newest = latest(run / "checkpoints")
    assert newest is not None
    return load(newest)[0].params


def rows(run: Path) -> pd.DataFrame:
    return read_run(run).rows.drop(columns="run")


def assert_same(run: Path, other: Path) -> None:
    """Check that final parameters and all rows are equal, bit for bit."""
    mine, theirs = final_params(run), final_params(other)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    pd.testing.assert_frame_equal(rows(run), rows(other), check_exact=True)


def assert_table_says_diverged(experiment: Experiment, reason: str) -> None:
    """Check that the table shows the status, the reason, and no measurements."""
    (row,) = csv.DictReader(experiment.call("table", "run", "--format", "csv").stdout.splitlines())
    assert (row["status"], row["reason"]) == ("diverged", reason)
    assert row["rs"] == row["mean_exposure"] == row["perplexity"] == ""


def assert_close(run: Path, other: Path) -> None:
    """Check that runs are equal up to rounding: parameters to 1e-6, and rows to a relative 1e-5."""
    mine, theirs = final_params(run), final_params(other)
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-6, atol=1e-6)
    pd.testing.assert_frame_equal(rows(run), rows(other), rtol=1e-5)


def start(
    experiment: Experiment, *options: str, within: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a run in the background; the words `within` come before its command. Its stderr goes to the file `said`."""
    command = [*within, sys.executable, "-m", "flsim", "run", str(experiment.config), *options]
    with (experiment.folder / "said").open("wb") as output:
        return subprocess.Popen(
            command,
            cwd=experiment.folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=output,
            preexec_fn=hear_ctrl_c,
        )


def finish(experiment: Experiment, process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """Return exit code and stderr. Two commands that start Ray at once take 200 s under a load of 15 on two cores."""
    code = process.wait(timeout=300)
    return code, (experiment.folder / "said").read_text()


def wait_for_round(run: Path, round_: int) -> list[str]:
    """Wait until a round is logged, and return the names of the client processes that trained it."""
    until = time.monotonic() + 400
    while time.monotonic() < until:
        if (run / "rounds.jsonl").exists():
            lines = (run / "rounds.jsonl").read_text().splitlines()
            if len(lines) >= round_:
                return [str(worker) for worker in json.loads(lines[round_ - 1])["workers"]]
        time.sleep(0.02)
    raise AssertionError(f"round {round_} did not come")


def killed_and_whole(experiment: Experiment, *overrides: str, workers: int = 1) -> tuple[Path, Path]:
    """Return the folders of a run on Ray, killed in its fifth round and resumed, and of a complete run without Ray."""
    options = tuple(part for override in overrides for part in ("--set", override))
    killed = experiment.folder / "killed"
    process = start(experiment, "--out", killed.name, *options)
    assert len(wait_for_round(killed, 4)) == workers
    process.kill()
    process.wait()
    experiment.flsim("run", experiment.config, "--out", killed.name, *options, "--resume")
    return killed, experiment.run("whole", *overrides, options=["--in-process"])


PARTITION = """
[data]
corpus = "corpus"
[canaries]
p_u = [0.2]
p_e = [0.5, 1.0]
count = 2
[model]
embedding = 8
units = 12
"""
TINY = f"""{PARTITION}[training]
rounds = 4
cohort = 6
[local]
batch_size = 4
[evaluation]
every = 2
references = 200
[system]
checkpoint_every = 1
shards = 1
"""
CENTRAL = f"""{PARTITION}[training]
kind = "central"
steps = 40
batch_size = 9
optimizer = "adam"
learning_rate = 0.01
[evaluation]
every = 20
references = 200
[system]
checkpoint_every = 7
"""

TESTED = (  # a private run with canary users; coins exclude about half of these users
    "training.sampler='poisson'",
    "privacy.mechanism='dp'",
    "privacy.clip=0.5",
    "privacy.noise_multiplier=0.8",
    "audit.update_canaries=60",
    "audit.canary_coins=true",
)


def train_here(experiment: Experiment, overrides: Sequence[str]) -> Path:
    """Train and evaluate the experiment in this process, without Ray, and return the folder `run`."""
    run = Run.create(load_config(experiment.config, overrides), experiment.folder / "run")
    go_on_here(run)
    return run.path


def go_on_here(run: Run) -> None:
    """Train and evaluate a run from its newest checkpoint to its end, in this process."""
    for state in run.training().states(run.latest_state(), run.rounds, run.is_saved_at):
        saved = run.save(state)
        if run.is_evaluated_at(state.round):
            evaluate_checkpoint(run.path, saved)
    run.mark("completed")


PRIVATE = (  # all parts of a state: noise, an adaptive clip, moments, a ledger; cohort sizes vary
    "training.sampler='poisson'",
    "training.server_optimizer='adam'",
    "training.server_learning_rate=0.01",
    "privacy.mechanism='dp'",
    "privacy.clip=0.5",
    "privacy.noise_multiplier=0.8",
    "privacy.target_quantile=0.5",
    "privacy.count_noise=2",
)


def assert_refused(folder: Path, arguments: Sequence[str], message: str) -> None:
    """Check that a command fails with one line and exit code 2, and creates or removes no file in the folder."""
    before = sorted(folder.rglob("*"))
    done = Experiment(folder).call(*arguments, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert message in done.stderr
    assert sorted(folder.rglob("*")) == before


def refusal(flsim: Flsim, *arguments: object) -> str:
    """Return the error message of a command that fails with exit code 2: one line, after lines of progress."""
    code, out, err = flsim(*arguments)
    refusals = [line for line in err.splitlines() if line.startswith("flsim: ")]
    assert (code, out, refusals) == (2, "", err.splitlines()[-1:]), err
    return refusals[0]


def enumerated(probabilities: Sequence[float], successes: int) -> float:
    """Return the probability of at least `successes` successes, as the sum over all outcomes."""
    outcomes = product((0, 1), repeat=len(probabilities))
    return sum(
        math.prod(p if hit else 1 - p for p, hit in zip(probabilities, outcome, strict=True))
        for outcome in outcomes
        if sum(outcome) >= successes
    )
