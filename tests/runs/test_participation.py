"""The participation of canaries equals what training itself draws: its requests to clients and its batches."""

import json
from collections import Counter
from dataclasses import replace

import pandas as pd
import pytest
from helpers import PARTITION, Experiment

from flsim.runs.config import load
from flsim.runs.folder import Run, evaluate_checkpoint, participation

ROUNDS = 9
FEDERATED = f"{PARTITION}[training]\nrounds = 9\ncohort = 6\n"
CENTRAL = f'{PARTITION}[training]\nkind = "central"\nsteps = 60\nbatch_size = 9\n'
PRIVATE = ("privacy.mechanism='dp'", "privacy.clip=1", "privacy.noise_multiplier=1")
Met = Counter[tuple[int, str, int]]


def create(experiment: Experiment, config: str, *overrides: str) -> Run:
    experiment.config.write_text(config)
    settings = load(experiment.config, [f"data.corpus='{experiment.folder}/corpus'", "canaries.count=3", *overrides])
    return Run.create(settings, experiment.folder / "run")


def met(found: pd.DataFrame) -> Met:
    assert found.equals(found.sort_values(["round", "canary", "user"], ignore_index=True))
    return Counter(found.itertuples(index=False, name=None))


def copies(run: Run) -> Met:
    """Count the records that are a canary's phrase, by user and canary id, user after user."""
    ids = {canary.tokens: canary.id for canary in run.canaries}
    held: Met = Counter()
    for user in range(len(run.users)):
        for record in run.users[user]:
            if tuple(record.tolist()) in ids:
                held[user, ids[tuple(record.tolist())], 0] += 1
    return held


@pytest.mark.parametrize(("partition", "sampler"), [("iid", "fixed-size"), ("non-iid", "poisson")])
def test_participation_of_sharers_equals_the_requests_to_clients(
    experiment: Experiment, partition: str, sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(experiment.folder)
    run = create(experiment, FEDERATED, f"data.partition='{partition}'", f"training.sampler='{sampler}'")
    sharers = {(user, canary) for user, canary, _ in copies(run)}
    expected: Met = Counter()
    state, training = run.latest_state(), run.federated.training_of(run.users, run.rounds)
    for round_ in range(ROUNDS):
        requests = training.requests(replace(state, round=round_))
        asked = [user for request in requests for user in request.users.tolist()]
        expected.update((round_ + 1, canary, user) for user, canary in sharers if user in asked)
    assert expected
    assert met(participation(run, ROUNDS)) == expected
    assert met(participation(run, 4)) == Counter({key: count for key, count in expected.items() if key[0] <= 4})


@pytest.mark.parametrize(
    "overrides", [("data.partition='iid'",), ("data.partition='non-iid'",), PRIVATE], ids=["iid", "sequence", "lots"]
)
def test_participation_of_copies_equals_the_batches(
    experiment: Experiment, overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch has 22 steps, the last of 3 records, and the 60 steps end in the third epoch."""
    monkeypatch.chdir(experiment.folder)
    run = create(experiment, CENTRAL, *overrides)
    training = run.central.training_of(run.users, run.rounds)
    ids = {canary.tokens: canary.id for canary in run.canaries}
    expected: Counter[tuple[int, str]] = Counter()
    for step in range(60):
        for words in training.chunk(step, step + 1).records:
            if tuple(words.tolist()) in ids:
                expected[step + 1, ids[tuple(words.tolist())]] += 1
    found = participation(run, 60)
    assert expected
    assert Counter(zip(found["round"], found["canary"], strict=True)) == expected
    held = copies(run)
    assert {(row.user, row.canary, 0) for row in found.itertuples()} <= set(held)
    if not overrides[0].startswith("privacy"):  # each epoch reads each copy once
        assert Counter((row.user, row.canary, 0) for row in found[found["round"] <= 22].itertuples()) == held


def test_the_trace_command_has_the_participation(experiment: Experiment) -> None:
    """The run was evaluated after two rounds. Expected: the frame of `participation`. A figure is drawn, too."""
    experiment.config.write_text(FEDERATED + "[evaluation]\nreferences = 9\n")
    run = Run.create(load(experiment.config), experiment.folder / "run")
    state = run.latest_state()
    evaluate_checkpoint(run.path, run.save(replace(state, round=2)))
    found = participation(run, 2)
    rows = json.loads(experiment.call("trace", "run", "--json", "--canary", "c1", "--out", "trace.png").stdout)
    [row] = rows
    assert (row["canary"], row["round"]) == ("c1", 2)
    assert row["participations"] == (found["canary"] == "c1").sum()
    assert row["sharer_rounds"] == sorted(set(found.loc[found["canary"] == "c1", "round"]))
    assert (experiment.folder / "trace.png").read_bytes().startswith(b"\x89PNG")
    drawn = experiment.call("trace", "run", "--out", "trace.png").stdout
    assert drawn == (
        "The figure is trace.png (canaries: 4; evaluations: 1). Without --out, the command prints a row for each.\n"
    )
    refused = experiment.call("trace", "run", "--canary", "c9", check=False)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "run run: there is no canary c9; the canaries are c0 to c3" in refused.stderr


def test_a_run_without_any_copy_has_no_participation(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(experiment.folder)
    run = create(experiment, FEDERATED, "canaries.p_u=[1e-9]")
    found = participation(run, 2)
    assert (len(found), list(found.columns)) == (0, ["round", "canary", "user"])
