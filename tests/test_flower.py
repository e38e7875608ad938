"""Real Flower on real Ray: equal to the same rounds without them, whatever the shards, workers, nodes and faults."""

import json
import os
import re
import signal
from itertools import pairwise

import pytest
import torch
from helpers import (
    PRIVATE,
    Experiment,
    Trained,
    assert_close,
    assert_same,
    final_params,
    final_state,
    finish,
    start,
    wait_for_round,
)
from power.resuming import without_ray

from flsim.algorithms import fedavg
from flsim.algorithms.checkpoint import model_of
from flsim.algorithms.rounds import engine_of
from flsim.privacy.sampling import draw_cohort
from flsim.runs import config
from flsim.runs.folder import Run
from flsim.training.update import State, UpdateSum


def train_without_flower(run: Run, rounds: int) -> State:
    """The paper's loop, plainly, in this process."""
    config, training, seed = run.federated, run.federated.training, run.config.seed
    state = fedavg.init(run.corpus.layout.vocabulary_size, config.model, seed, training, config.privacy)
    engine = engine_of(config.system.engine, model_of(run.provenance), run.corpus.layout, config.local)
    bounds = [len(run.users) * shard // config.system.known_shards for shard in range(config.system.known_shards + 1)]
    for round_ in range(rounds):
        cohort = draw_cohort(seed, round_, len(run.users), training.cohort, training.sampler).tolist()
        total = UpdateSum.zero(state.params)
        for first, last in pairwise(bounds):
            members = [user for user in cohort if first <= user < last]
            total = total.merge(engine.train(state.params, run.users, members, seed, round_, state.clip))
        size = run.corpus.layout.vocabulary_size
        state, _ = fedavg.step(
            state, total, training, config.privacy, seed=seed, population=len(run.users), vocabulary_size=size
        )
    return state


def test_the_seed_decides_everything_and_shards_and_workers_nothing(experiment: Experiment, trained: Trained) -> None:
    first = trained()
    shards = Run.open(first).federated.system.known_shards
    assert_same(first, experiment.run("again", f"system.shards={shards}", options=["--in-process"]))
    assert_close(first, experiment.run("shards5", "system.shards=5", options=["--in-process"]))
    other = train_without_flower(Run.create(config.load(experiment.config, ["seed=1"]), experiment.folder / "other"), 4)
    assert not any(torch.equal(value, other.params[name]) for name, value in final_params(first).items())


@pytest.mark.slow
def test_a_private_run_equals_the_paper_s_loop_whatever_the_shards(experiment: Experiment) -> None:
    """Expected cohort 1: about a third of the rounds are of nobody, and still add noise and spend."""
    settings = (*PRIVATE, "training.cohort=1", "privacy.count_noise=0.5", "training.rounds=8", "evaluation.every=8")
    path = experiment.run("run", *settings, "system.shards=2")
    expected = train_without_flower(Run.open(path), 8)
    state = final_state(path)
    assert all(torch.equal(value, expected.params[name]) for name, value in state.params.items())
    assert (state.clip, state.ledger) == (expected.clip, expected.ledger)
    users = [json.loads(line)["users"] for line in (path / "rounds.jsonl").read_text().splitlines()]
    assert 0 in users
    assert max(users) > 1
    overrides = [part for text in (*settings, "system.shards=5", "privacy.delta=0.05") for part in ("--set", text)]
    done = experiment.call("run", experiment.config, "--out", "other", "--in-process", *overrides)
    messages = " ".join(done.stderr.split())
    assert "privacy.delta 0.05 is not below 1 / 24 users" in messages
    assert "other: user-level privacy after poisson sampling, delta 0.05: epsilon " in messages
    other = experiment.folder / "other"
    for name, value in final_params(path).items():
        torch.testing.assert_close(final_params(other)[name], value, rtol=1e-6, atol=1e-6)
    assert final_state(other).ledger == state.ledger
    assert final_state(other).clip == pytest.approx(state.clip, rel=1e-12)


def test_without_machines_to_run_on_no_run_is_left(experiment: Experiment) -> None:
    options = ("--set", "system.cpus_per_client=4096")
    with without_ray():
        done = experiment.call("run", experiment.config, "--out", "new", *options, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "4096 CPUs" in done.stderr.splitlines()[-1]
    assert not (experiment.folder / "new").exists()


# Runs that cannot go on say why: clients that all fail, models that are not finite. Other faults: tests/faults.


@pytest.mark.nightly
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
    assert "none of its users is the single cause" in about["reason"]
