"""The number of shards: that of the settings, or of the client processes when a run begins, which the run keeps."""

from dataclasses import replace
from pathlib import Path

import pytest
from helpers import TINY, Experiment, assert_same

from flsim.runs.config import DataHParams, FederatedConfig, SystemHParams, TrainingHParams, load
from flsim.runs.folder import Run
from server.federated.launch import say_what_stays_idle
from server.federated.rounds import with_shards
from server.pool.grid import ClientShare


def settings(cohort: int = 500, shards: int | None = None) -> FederatedConfig:
    return FederatedConfig(
        DataHParams(Path("corpus")), training=TrainingHParams(cohort=cohort), system=SystemHParams(shards=shards)
    )


@pytest.mark.parametrize(
    ("processes", "users", "cohort", "shards", "expected"),
    [
        (1, 1000, 500, None, 1),
        (2, 1000, 500, None, 2),
        (64, 1000, 500, None, 64),
        (64, 1000, 500, 3, 3),
        (64, 1000, 5, None, 5),  # no shard without a user in any round
        (64, 4, 500, None, 4),
        (2, 1000, 1, None, 2),  # as it was before the number followed the processes
    ],
)
def test_a_shard_for_each_process_unless_the_settings_say_otherwise(
    processes: int, users: int, cohort: int, shards: int | None, expected: int
) -> None:
    decided = settings(cohort, shards).with_shards(processes, users)
    assert decided.system.shards == decided.system.known_shards == expected
    assert decided.digest == settings(cohort, shards).digest
    assert settings(cohort, shards).system.known_shards == (shards or 2)


def test_the_run_keeps_the_number_whatever_resumes_it(experiment: Experiment) -> None:
    experiment.config.write_text(TINY.replace("shards = 1\n", ""))
    run = Run.create(load(experiment.config), experiment.folder / "run")
    assert "shards" not in (run.path / "config.toml").read_text()
    decided = with_shards(run, 3)
    assert "shards" not in (run.path / "config.toml").read_text()  # training records it, once the run is locked
    decided.record()
    assert decided.federated.system.shards == 3
    for processes in (5, 1):
        again = with_shards(Run.reopen(load(experiment.config), run.path), processes)
        assert again.federated.system.shards == Run.open(run.path).federated.system.shards == 3
    asked = replace(settings(shards=4), canaries=run.config.canaries)
    assert asked.resuming(run.config) == asked


def test_a_run_with_rounds_and_without_a_number_has_two(experiment: Experiment) -> None:
    experiment.config.write_text(TINY.replace("shards = 1\n", ""))
    run = Run.create(load(experiment.config), experiment.folder / "run")
    run.log_round(round=1, loss=1.0)
    assert with_shards(run, 5).federated.system.shards == 2


@pytest.mark.nightly
def test_any_number_of_processes_serves_the_shards_to_the_same_bits(experiment: Experiment) -> None:
    """Three cores when it began, one when it was resumed; the same as three shards that the settings say."""
    experiment.config.write_text(TINY.replace("shards = 1\n", ""))
    whole = experiment.run("whole", "system.shards=3")
    run = experiment.run("run", "training.rounds=2", options=["--cpus", "3"])
    assert Run.open(run).federated.system.shards == 3
    experiment.run("run", options=["--cpus", "1", "--resume"])
    assert Run.open(run).federated.system.shards == 3
    assert_same(run, whole)


def test_idle_gpus_and_idle_cores_of_the_option_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    def message(share: ClientShare, shards: int, *nodes: dict[str, float], cpus: int | None = None) -> str:
        say_what_stays_idle("one", share, shards, nodes, cpus)
        return capsys.readouterr().err

    gpus = {"CPU": 64.0, "GPU": 8.0}
    assert message(ClientShare(1, 0.95), 2, gpus) == (
        "one: 8 client processes have room, and 2 work at once, as system.shards = 2; 6 GPUs stay idle; a new run with "
        "system.shards = 8 would use all\n"
    )
    assert "7 GPUs stay idle" in message(ClientShare(1, 0.95), 2, gpus, {"CPU": 4.0, "GPU": 1.0})
    assert message(ClientShare(1, 0.95), 8, gpus) == ""
    assert message(ClientShare(1, 0.4), 1, {"CPU": 4.0, "GPU": 1.0}) == ""  # two runs may share a GPU
    assert message(ClientShare(1), 2, {"CPU": 8.0}) == ""  # cores are there for other programs too
    assert message(ClientShare(1), 2, {"CPU": 8.0}, cpus=8) == (
        "one: 8 client processes have room, and 2 work at once, as system.shards = 2; a new run with system.shards = 8 "
        "would use all\n"
    )
