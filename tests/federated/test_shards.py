"""Shards and branches are decided when a run begins, kept, and added in the same order on any machines."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import PRIVATE, TINY, Experiment, assert_same, final_state, killed_and_whole

from flsim.algorithms.summation import TreeSum
from flsim.runs.config import DataHParams, FederatedConfig, SystemHParams, TrainingHParams, load
from flsim.runs.folder import Run
from server.federated.rounds import say_what_stays_idle, with_shards
from server.pool.grid import ClientShare

GPUS = {"CPU": 64.0, "GPU": 8.0}
TREE = ("training.cohort=18", "system.shards=7", "system.branch=3")


def settings(cohort: int = 500, shards: int | None = None, branch: int | None = None) -> FederatedConfig:
    system = SystemHParams(shards=shards, branch=branch)
    return FederatedConfig(DataHParams(Path("corpus")), training=TrainingHParams(cohort=cohort), system=system)


@pytest.mark.parametrize(
    ("processes", "users", "cohort", "shards", "expected"),
    [
        (1, 1000, 500, None, 1),
        (2, 1000, 500, None, 2),
        (64, 1000, 500, None, 64),
        (64, 1000, 500, 3, 3),
        (64, 1000, 5, None, 5),  # no shard without a user in any round
        (64, 4, 500, None, 4),
        (2, 1000, 1, None, 2),  # two shards also if a cohort has one user
    ],
)
def test_a_shard_for_each_process_unless_the_settings_say_otherwise(
    processes: int, users: int, cohort: int, shards: int | None, expected: int
) -> None:
    decided = settings(cohort, shards=shards).with_shards(processes, users)
    assert decided.system.shards == decided.system.known_shards == expected
    assert decided.digest == settings(cohort, shards=shards).digest
    assert settings(cohort, shards=shards).system.known_shards == (shards or 2)


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
    decided = settings(shards=shards, branch=branch).with_shards(processes, users=1_000)
    assert (decided.system.branch, decided.system.known_branch) == (expected, expected or 0)
    assert decided.system.shards == (shards or processes)
    assert decided.digest == settings().digest


def large(experiment: Experiment) -> Run:
    """Return a run of one shard for each of its 24 users."""
    experiment.config.write_text(TINY.replace("shards = 1\n", "shards = 24\n").replace("cohort = 6", "cohort = 24"))
    return Run.create(load(experiment.config), experiment.folder / "run")


def test_runs_keep_their_branches_and_begun_runs_without_branches_get_none(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flsim.algorithms.summation.TREE_FROM", 24)
    run = large(experiment)
    assert "branch =" not in (run.path / "config.toml").read_text()
    run.log_round(round=1, loss=1.0)  # the run has begun without branches
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


def digests(run: Path) -> list[str]:
    return [json.loads(line)["digest"] for line in (run / "rounds.jsonl").read_text().splitlines()]


def test_a_run_keeps_its_number_of_shards_with_any_number_of_processes(experiment: Experiment) -> None:
    experiment.config.write_text(TINY.replace("shards = 1\n", ""))
    run = Run.create(load(experiment.config), experiment.folder / "run")
    assert "shards" not in (run.path / "config.toml").read_text()
    decided = with_shards(run, 3)
    assert "shards" not in (run.path / "config.toml").read_text()  # training records the number after it locks the run
    decided.record()
    assert decided.federated.system.shards == 3
    for processes in (5, 1):
        again = with_shards(Run.reopen(load(experiment.config), run.path), processes)
        assert again.federated.system.shards == Run.open(run.path).federated.system.shards == 3
    asked = replace(settings(shards=4), canaries=run.config.canaries)
    assert asked.resuming(run.config) == asked


@pytest.mark.parametrize(
    ("share", "shards", "nodes", "cpus", "idle"),
    [
        (ClientShare(1, 0.95), 2, [GPUS], None, "6 GPUs stay idle"),
        (ClientShare(1, 0.95), 2, [GPUS, {"CPU": 4.0, "GPU": 1.0}], None, "7 GPUs stay idle"),
        (ClientShare(1, 0.95), 8, [GPUS], None, ""),
        (ClientShare(1, 0.4), 1, [{"CPU": 4.0, "GPU": 1.0}], None, ""),  # two runs may share a GPU
        (ClientShare(1), 2, [{"CPU": 8.0}], None, ""),  # other programs may use cores
        (ClientShare(1), 2, [{"CPU": 8.0}], 8, "system.shards = 8 would use all"),
    ],
)
def test_idle_gpus_and_idle_cores_of_the_option_are_reported(
    share: ClientShare,
    shards: int,
    nodes: list[dict[str, float]],
    cpus: int | None,
    idle: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    say_what_stays_idle("one", share, shards, nodes, cpus)
    said = capsys.readouterr().err
    assert bool(said) == bool(idle)
    assert idle in said


def test_branches_change_the_bits_of_sums_of_clipped_updates(experiment: Experiment) -> None:
    """Sums of float32 numbers times integer weights are mostly exact in float64; sums of clipped updates are not."""
    run = Run.create(load(experiment.config, [*TREE, *PRIVATE, "privacy.clip=0.01"]), experiment.folder / "run")
    training = run.federated.training_of(run.users, run.rounds)
    state = training.first_state()
    requests = training.requests(state)
    assert len(requests) == 7
    replies = [*training.send_in_process()(requests)]
    totals = [total for branch in (3, 0, 7) if (total := TreeSum.of_replies(replies, requests, branch).total)]
    assert not all(torch.equal(value, totals[1].delta[name]) for name, value in totals[0].delta.items())
    assert all(torch.equal(value, totals[2].delta[name]) for name, value in totals[1].delta.items())


@pytest.mark.nightly
def test_a_run_with_branches_that_is_killed_and_resumed_has_equal_bits(experiment: Experiment) -> None:
    killed, whole = killed_and_whole(experiment, "training.rounds=12", *TREE, workers=2)
    assert_same(killed, whole)
    assert digests(killed) == digests(whole)
    assert final_state(killed).round == 12


def test_a_begun_run_without_a_number_of_shards_has_two(experiment: Experiment) -> None:
    experiment.config.write_text(TINY.replace("shards = 1\n", ""))
    run = Run.create(load(experiment.config), experiment.folder / "run")
    run.log_round(round=1, loss=1.0)
    assert with_shards(run, 5).federated.system.shards == 2
