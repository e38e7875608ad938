"""Real Flower on real Ray under faults: killed drivers and clients, failing evaluations, divergence."""

import json
import os
import re
import signal

import pytest
import torch
from helpers import (
    PRIVATE,
    Experiment,
    assert_same,
    assert_table_says_diverged,
    final_state,
    finish,
    rows,
    start,
    wait_for_round,
)


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
    assert_table_says_diverged(experiment, about["reason"])
