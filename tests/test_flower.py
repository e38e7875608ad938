"""Real Flower on real Ray: equal to the same rounds without them, whatever the shards, workers, nodes and faults."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest
import torch
from helpers import Experiment

from flsim import federated
from flsim.checkpoint import latest, load, model_of
from flsim.federated import ServerState
from flsim.results.store import read_run
from flsim.runs import Run, evaluate_checkpoint
from flsim.sampling import draw_cohort
from flsim.train.local import train_cohort
from flsim.train.update import UpdateSum


def final_params(run: Path) -> dict[str, torch.Tensor]:
    newest = latest(run / "checkpoints")
    assert newest is not None
    return load(newest)[0].params


def rows(run: Path) -> pd.DataFrame:
    return read_run(run).rows.drop(columns="run")


def assert_same(run: Path, other: Path) -> None:
    """Bit for bit: final parameters and every row."""
    mine, theirs = final_params(run), final_params(other)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    pd.testing.assert_frame_equal(rows(run), rows(other), check_exact=True)


def assert_close(run: Path, other: Path) -> None:
    """Up to float rounding: float32 parameters to 1e-6, values to 1e-5; ranks and counts exactly."""
    mine, theirs = final_params(run), final_params(other)
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-6, atol=1e-6)
    pd.testing.assert_frame_equal(rows(run), rows(other), rtol=1e-5)


def train_without_flower(run: Run, rounds: int) -> ServerState:
    """The paper's loop, plainly, in this process."""
    config, training, seed = run.federated, run.federated.training, run.config.seed
    state = federated.init(run.corpus.layout.vocabulary_size, config.model, seed, training, config.privacy)
    model = model_of(run.provenance)
    bounds = [len(run.users) * shard // config.system.shards for shard in range(config.system.shards + 1)]
    for round_ in range(rounds):
        model.load_state_dict(state.params)
        cohort = draw_cohort(seed, round_, len(run.users), training.cohort, training.sampler).tolist()
        total = UpdateSum.zero(state.params)
        for first, last in pairwise(bounds):
            members = [user for user in cohort if first <= user < last]
            total = total.merge(train_cohort(model, run.users, members, config.local, seed, round_, state.clip))
        state = federated.apply(state, total, training, config.privacy, seed, len(run.users))
    return state


def test_the_demo_ends_with_table_test_and_plot(experiment: Experiment) -> None:
    """The demo itself, cut short."""
    short = ["training.rounds=2", "canaries.count=2", "evaluation.references=100"]
    done = experiment.flsim("demo", "--out", "demo", *(part for text in short for part in ("--set", text)))
    lines = done.stdout.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:4]] == ["IID, FedAvg, b_u=40", "Non-IID, FedAvg, b_u=40"]
    assert lines[-1].endswith("two-sided")
    assert (experiment.folder / "demo" / "memorization.png").read_bytes().startswith(b"\x89PNG")
    table = pd.read_csv(experiment.folder / "demo" / "table.csv")
    assert table["canaries"].tolist() == [8, 8]
    assert table["status"].tolist() == ["completed"] * 2


@pytest.mark.parametrize("world", ["iid", "non-iid"])
def test_two_nodes_equal_the_same_rounds_without_flower(experiment: Experiment, world: str) -> None:
    path = experiment.run("run", f"data.world={world}")
    run = Run.open(path)
    expected = train_without_flower(run, 4)
    assert all(torch.equal(value, expected.params[name]) for name, value in final_params(path).items())
    stored = rows(path)
    assert sorted(stored["round"].unique()) == [2, 4]
    again = evaluate_checkpoint(path, path / "checkpoints" / "round-000004.safetensors")
    pd.testing.assert_frame_equal(rows(path), stored, check_exact=True)  # evaluating twice adds nothing
    assert len(again) == (stored["round"] == 4).sum()
    log = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    assert [entry["round"] for entry in log] == [1, 2, 3, 4]
    assert [entry["users"] for entry in log] == [6] * 4
    assert json.loads((path / "run.json").read_text())["status"] == "completed"


def test_the_seed_decides_everything_and_shards_and_workers_nothing(experiment: Experiment) -> None:
    first = experiment.run("first")
    assert_same(first, experiment.run("again"))
    assert_close(first, experiment.run("shards1", "system.shards=1"))
    assert_close(first, experiment.run("shards5", "system.shards=5"))
    one_worker = experiment.run("worker1", f"system.cpus_per_client={os.cpu_count()}")
    assert_close(first, one_worker)
    workers = {
        w for line in (one_worker / "rounds.jsonl").read_text().splitlines() for w in json.loads(line)["workers"]
    }
    assert len(workers) == 1
    other = experiment.run("other", "seed=1")
    assert not rows(first)["value"].equals(rows(other)["value"])


@pytest.fixture
def two_ray_nodes() -> Iterator[str]:
    """A cluster of two one-CPU nodes on loopback, started as a user would; its address."""
    ray = str(Path(sys.executable).with_name("ray"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = ["--num-cpus=1", "--node-ip-address=127.0.0.1", "--block"]
    nodes = []

    def start(*options: str) -> None:
        process = subprocess.Popen(
            [ray, "start", *options, *common],
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        nodes.append(process)
        assert process.stdout is not None
        assert any("Ray runtime started" in line for line in process.stdout)

    try:
        start("--head", f"--port={port}", "--include-dashboard=false")
        start(f"--address=127.0.0.1:{port}")
        yield f"127.0.0.1:{port}"
    finally:
        for process in reversed(nodes):
            process.terminate()
            process.communicate(timeout=60)


def test_a_cluster_that_runs_already_is_joined_and_both_its_nodes_train(
    experiment: Experiment, two_ray_nodes: str
) -> None:
    joined = experiment.run("joined", options=["--address", two_ray_nodes])
    assert_same(joined, experiment.run("alone"))
    log = (joined / "rounds.jsonl").read_text().splitlines()
    nodes = {worker.split("/")[0] for line in log for worker in json.loads(line)["workers"]}
    assert len(nodes) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--address", "127.0.0.1:9"], "--address 127.0.0.1:9: no Ray cluster answers there"),
        (["--set", "system.cpus_per_client=4096"], "a client needs 4096 CPUs and 0 GPUs; no Ray node has them"),
    ],
)
def test_without_machines_to_run_on_no_run_is_left(experiment: Experiment, options: list[str], message: str) -> None:
    done = experiment.flsim("run", experiment.config, "--out", "new", *options, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(f"flsim: {message}")
    assert not (experiment.folder / "new").exists()


def start(experiment: Experiment, *options: str) -> subprocess.Popen[bytes]:
    """A run in the background; what it says goes to a file, since Ray's processes may outlive it and hold a pipe."""
    command = [sys.executable, "-m", "flsim", "run", str(experiment.config), *options]
    with (experiment.folder / "said").open("wb") as said:
        return subprocess.Popen(
            command,
            cwd=experiment.folder,
            stdout=subprocess.DEVNULL,
            stderr=said,
            # A shell's background job ignores Ctrl-C, and so would its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )


def finish(experiment: Experiment, process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """Exit code and what was said."""
    code = process.wait(timeout=120)
    return code, (experiment.folder / "said").read_text()


def wait_for_round(run: Path, round_: int) -> list[str]:
    """Wait until a round is logged; the processes that trained it."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        if (run / "rounds.jsonl").exists():
            lines = (run / "rounds.jsonl").read_text().splitlines()
            if len(lines) >= round_:
                return [str(worker) for worker in json.loads(lines[round_ - 1])["workers"]]
        time.sleep(0.02)
    raise AssertionError(f"round {round_} did not come")


def test_a_killed_driver_resumes_to_the_same_bits(experiment: Experiment) -> None:
    options = ("--set", "training.rounds=30", "--set", "evaluation.every=10")
    whole = experiment.run("whole", *options[1::2])
    broken = experiment.folder / "broken"
    process = start(experiment, "--out", "broken", *options)
    wait_for_round(broken, 12)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert json.loads((broken / "run.json").read_text())["status"] == "running"
    experiment.flsim("run", experiment.config, "--out", "broken", *options, "--resume")
    assert_same(broken, whole)


PRIVATE = (  # every part of a state: noise, a clip that adapts, moments, ledger; cohorts of any size
    "training.sampler='poisson'",
    "training.server_optimizer='adam'",
    "training.server_learning_rate=0.01",
    "privacy.mechanism='dp'",
    "privacy.clip=0.5",
    "privacy.noise_multiplier=0.8",
    "privacy.target_quantile=0.5",
    "privacy.count_noise=2",
)


def final_state(run: Path) -> ServerState:
    newest = latest(run / "checkpoints")
    assert newest is not None
    state, _ = load(newest)
    assert isinstance(state, ServerState)
    return state


def test_a_private_run_killed_and_resumed_spends_its_budget_once(experiment: Experiment) -> None:
    """Model, moments, clip, ledger, epsilons and log, against the run that nothing happened to."""
    options = [part for text in (*PRIVATE, "training.rounds=24", "evaluation.every=12") for part in ("--set", text)]
    options += ["--set", "system.checkpoint_every=5"]
    whole = experiment.run("whole", *options[1::2])
    broken = experiment.folder / "broken"
    process = start(experiment, "--out", "broken", *options)
    wait_for_round(broken, 13)  # beyond the checkpoint of round 12, before the next
    process.send_signal(signal.SIGKILL)
    process.wait()
    with (broken / "rounds.jsonl").open("a") as log:
        log.write('{"round": 99, "lo')  # a line cut short
    experiment.flsim("run", experiment.config, "--out", "broken", *options, "--resume")
    assert_same(broken, whole)
    mine, theirs = final_state(broken), final_state(whole)
    assert (mine.round, mine.clip, mine.ledger) == (theirs.round, theirs.clip, theirs.ledger)
    assert [entry.rounds for entry in mine.ledger.entries] == [24]
    for moment in ("m", "v"):
        assert all(torch.equal(mine.moments[moment][name], value) for name, value in theirs.moments[moment].items())
    assert set(rows(whole)["metric"]) >= {"epsilon poisson-rdp", "delta"}
    logs = [[json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()] for run in (broken, whole)]
    assert [entry["round"] for entry in logs[0]] == list(range(1, 25))
    for name in ("loss", "users", "examples", "clip", "clipped", "update_norm", "epsilon"):
        assert [entry[name] for entry in logs[0]] == [entry[name] for entry in logs[1]]
    assert len({entry["users"] for entry in logs[0]}) > 1
    assert len({entry["clip"] for entry in logs[0]}) > 1


def test_a_private_run_equals_the_paper_s_loop_whatever_the_shards(experiment: Experiment) -> None:
    """Expected cohort 1: about a third of the rounds are of nobody, and still add noise and spend."""
    settings = (*PRIVATE, "training.cohort=1", "privacy.count_noise=0.5", "training.rounds=8", "evaluation.every=8")
    path = experiment.run("run", *settings)
    expected = train_without_flower(Run.open(path), 8)
    state = final_state(path)
    assert all(torch.equal(value, expected.params[name]) for name, value in state.params.items())
    assert (state.clip, state.ledger) == (expected.clip, expected.ledger)
    users = [json.loads(line)["users"] for line in (path / "rounds.jsonl").read_text().splitlines()]
    assert 0 in users
    assert max(users) > 1
    overrides = [part for text in (*settings, "system.shards=5", "privacy.delta=0.05") for part in ("--set", text)]
    said = " ".join(experiment.flsim("run", experiment.config, "--out", "other", *overrides).stderr.split())
    assert "privacy.delta 0.05 is not below 1 / 24 users" in said
    assert "other: user-level privacy after poisson sampling, delta 0.05: epsilon " in said
    other = experiment.folder / "other"
    for name, value in final_params(path).items():
        torch.testing.assert_close(final_params(other)[name], value, rtol=1e-6, atol=1e-6)
    assert final_state(other).ledger == state.ledger
    assert final_state(other).clip == pytest.approx(state.clip, rel=1e-12)


def test_a_killed_client_is_replaced_and_changes_nothing(experiment: Experiment) -> None:
    options = ("--set", "training.rounds=30", "--set", "evaluation.every=30")
    whole = experiment.run("whole", *options[1::2])
    process = start(experiment, "--out", "hurt", *options)
    workers = wait_for_round(experiment.folder / "hurt", 5)
    os.kill(int(workers[0].split("/")[1]), signal.SIGKILL)
    code, said = finish(experiment, process)
    assert code == 0, said
    assert_same(experiment.folder / "hurt", whole)


def test_a_failed_evaluation_does_not_stop_training_and_is_made_up_for(experiment: Experiment) -> None:
    """The test users' text is away while the run trains."""
    options = ("--set", "training.rounds=30", "--set", "evaluation.every=10")
    whole = experiment.run("whole", *options[1::2])
    process = start(experiment, "--out", "lame", *options)
    lame, tokens = experiment.folder / "lame", experiment.folder / "corpus" / "test" / "tokens.u16"
    wait_for_round(lame, 2)
    tokens.rename(experiment.folder / "away")
    code, said = finish(experiment, process)
    assert code == 1
    assert "round-000010.safetensors could not be evaluated; `flsim run --resume` tries again" in said
    assert len((lame / "rounds.jsonl").read_text().splitlines()) == 30
    (experiment.folder / "away").rename(tokens)
    experiment.flsim("run", experiment.config, "--out", "lame", *options, "--resume")
    assert_same(lame, whole)
    assert json.loads((lame / "run.json").read_text())["status"] == "completed"


def test_ctrl_c_leaves_cleanly_and_resumes(experiment: Experiment) -> None:
    options = ("--set", "training.rounds=400", "--set", "evaluation.every=400")
    process = start(experiment, "--out", "stopped", *options)
    wait_for_round(experiment.folder / "stopped", 3)
    process.send_signal(signal.SIGINT)
    code, said = finish(experiment, process)
    assert code == 1
    assert said.splitlines()[-1].startswith("flsim: interrupted; `flsim run --resume` continues")
    assert json.loads((experiment.folder / "stopped" / "run.json").read_text())["status"] == "failed"


def test_a_client_that_keeps_failing_fails_the_run(experiment: Experiment) -> None:
    """The settings are changed under the clients' feet; nothing is averaged away."""
    process = start(experiment, "--out", "broken", "--set", "training.rounds=4000", "--set", "system.retries=1")
    workers = wait_for_round(experiment.folder / "broken", 3)
    config = experiment.folder / "broken" / "config.toml"
    config.write_text(config.read_text().replace("batch_size = 4", "batch_size = 5"))
    for worker in workers:  # those that take their place read the settings again
        os.kill(int(worker.split("/")[1]), signal.SIGKILL)
    code, said = finish(experiment, process)
    assert code == 1
    assert re.search(r"^flsim: round \d+: shard [01] failed 2 times, last with: ", said, re.MULTILINE)
    about = json.loads((experiment.folder / "broken" / "run.json").read_text())
    assert about["status"] == "failed"
    assert "failed 2 times" in about["reason"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["training.server_learning_rate=1e-30"],
        ["privacy.mechanism='dp'", "privacy.clip=0.5", "privacy.noise_multiplier=1"],
    ],
    ids=["plain", "private"],
)
def test_a_diverging_run_stops_with_the_round_and_the_last_good_checkpoint(
    experiment: Experiment, overrides: list[str]
) -> None:
    """Clipped updates cannot overflow the model: there it is the users whose own updates are not finite."""
    settings = [part for text in ("local.learning_rate=1e30", *overrides) for part in ("--set", text)]
    failed = experiment.flsim("run", experiment.config, "--out", "run", *settings, check=False)
    assert failed.returncode == 1
    line = failed.stderr.strip().splitlines()[-1]
    assert line.startswith("flsim: round ")
    assert re.search(r"not finite with [1-6] of 6 users", line)
    assert "last good checkpoint: " in line
    about = json.loads((experiment.folder / "run" / "run.json").read_text())
    assert about["status"] == "diverged"
    table = experiment.flsim("table", "run", "--format", "csv").stdout.splitlines()
    assert table[1].endswith("diverged")
