"""Branches of shards: decided when a run begins, kept, and added in the same order wherever training runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import PRIVATE, TINY, Experiment, assert_same, final_state, killed_and_whole

import flsim
from flsim.algorithms.checkpoint import digest_of
from flsim.base.errors import InputError
from flsim.runs.config import DataHParams, FederatedConfig, SystemHParams, TrainingHParams, load
from flsim.runs.folder import Run
from server.federated.rounds import with_shards

TREE = ("training.cohort=18", "system.shards=7", "system.branch=3")


def system(shards: int | None = None, branch: int | None = None) -> FederatedConfig:
    settings = SystemHParams(shards=shards, branch=branch)
    return FederatedConfig(DataHParams(Path("corpus")), training=TrainingHParams(cohort=500), system=settings)


@pytest.mark.parametrize(
    ("shards", "branch", "processes", "expected"),
    [
        (None, None, 63, None),
        (None, None, 64, 8),
        (None, None, 65, 9),
        (100, None, 2, 10),
        (100, 0, 2, 0),
        (2, 5, 2, 5),
        (None, 5, 2, 5),
    ],
)
def test_large_runs_have_branches_unless_the_settings_say_otherwise(
    shards: int | None, branch: int | None, processes: int, expected: int | None
) -> None:
    decided = system(shards, branch).with_shards(processes, users=1_000)
    assert (decided.system.branch, decided.system.known_branch) == (expected, expected or 0)
    assert decided.system.shards == (shards or processes)
    assert decided.digest == system().digest


def test_a_negative_branch_is_refused() -> None:
    with pytest.raises(InputError, match="branch must not be negative, found -1"):
        SystemHParams(branch=-1)


def large(experiment: Experiment) -> Run:
    """A run of one shard for each of its 24 users, which has branches of 3 if that were large."""
    experiment.config.write_text(TINY.replace("shards = 1\n", "shards = 24\n").replace("cohort = 6", "cohort = 24"))
    return Run.create(load(experiment.config), experiment.folder / "run")


def test_a_run_keeps_its_branches_and_one_that_had_none_gets_none(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flsim.algorithms.summation.TREE_FROM", 24)
    run = large(experiment)
    assert "branch =" not in (run.path / "config.toml").read_text()
    run.log_round(round=1, loss=1.0)  # by a version without branches
    before = (run.path / "config.toml").read_bytes()
    assert with_shards(run, 24) == run
    assert (run.path / "config.toml").read_bytes() == before
    (run.path / "rounds.jsonl").unlink()
    decided = with_shards(run, 24)
    assert decided.federated.system.branch == 5  # sqrt(24) is 4.9
    decided.record()
    again = Run.reopen(load(experiment.config), run.path)
    assert with_shards(again, 24).federated.system.branch == Run.open(run.path).federated.system.branch == 5
    flat = load(experiment.config, ["system.branch=0"])
    assert with_shards(Run.reopen(flat, run.path), 24).federated.system.branch == 0


def test_small_runs_have_the_configuration_that_they_had_before_branches(experiment: Experiment) -> None:
    experiment.config.write_text(TINY)
    run = Run.create(load(experiment.config), experiment.folder / "run")
    before = (run.path / "config.toml").read_bytes()
    assert with_shards(run, 24) == run
    assert (run.path / "config.toml").read_bytes() == before
    assert b"branch =" not in before


def digests(run: Path) -> list[str]:
    return [json.loads(line)["digest"] for line in (run / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.nightly
def test_two_processes_one_process_and_no_process_add_in_the_same_order(experiment: Experiment) -> None:
    two = experiment.run("two", *TREE)
    one = experiment.run("one", *TREE, options=["--cpus", "1"])
    assert_same(one, two)
    assert digests(one) == digests(two)
    run = Run.open(two)
    training = run.federated.training_of(run.users, run.rounds)
    torch.set_num_threads(1)
    states = [*training.states(training.first_state(), run.rounds)]
    assert [digest_of(state) for state in states] == digests(two)

    planted = flsim.plant(run.corpus, run.config.canaries, seed=run.config.seed)
    algorithm = flsim.FedAvg(18, local=run.federated.local, shards=7, branch=3)
    *_, simulated = flsim.simulate(planted, run.config.model, algorithm, run.rounds, seed=run.config.seed)
    assert digest_of(simulated) == digests(two)[-1]


def test_branches_change_the_bits_of_sums_of_clipped_updates(experiment: Experiment) -> None:
    """Sums of float32 numbers times whole weights are mostly exact in float64; those of clipped ones are not."""
    run = Run.create(load(experiment.config, [*TREE, *PRIVATE, "privacy.clip=0.01"]), experiment.folder / "run")
    training = run.federated.training_of(run.users, run.rounds)
    state = training.first_state()
    requests = training.requests(state)
    assert len(requests) == 7
    replies = [*training.send_in_process()(requests)]
    totals = [replace(training, branch=branch).sum_of(requests, replies, state)[0] for branch in (3, 0, 7)]
    assert not all(torch.equal(value, totals[1].delta[name]) for name, value in totals[0].delta.items())
    assert all(torch.equal(value, totals[2].delta[name]) for name, value in totals[1].delta.items())


@pytest.mark.nightly
def test_a_run_with_branches_that_is_killed_and_resumed_changes_nothing(experiment: Experiment) -> None:
    killed, whole = killed_and_whole(experiment, "training.rounds=12", *TREE, workers=2)
    assert_same(killed, whole)
    assert digests(killed) == digests(whole)
    assert final_state(killed).round == 12
