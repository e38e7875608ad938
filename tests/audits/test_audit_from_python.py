"""Audits from Python: those of run folders are the command's, and those of simulations are their runs'."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers import TESTED, Flsim, Trained

import flsim as api
from flsim.attacks.audit.audit import COLUMNS

CANARIES: dict[str, Any] = {"p_u": (0.2,), "p_e": (0.5, 1.0), "count": 2}
MODEL = api.Model(embedding=8, units=12)
LOCAL = api.LocalSGD(batch_size=4)
NAMES = ["run", "setting"]


def simulated(corpus: Path, algorithm: Any, partition: Any, rounds: int, **canaries: Any) -> pd.DataFrame:
    """Simulate and evaluate the settings of `helpers.TINY`, and audit the last state."""
    planted = api.plant(corpus, api.Canaries(**CANARIES | canaries), partition=partition)
    *_, last = api.simulate(planted, MODEL, algorithm, rounds)
    measured = api.evaluate(last, planted, MODEL, references=200)
    return api.audit_simulation(last, planted, MODEL, algorithm, measured)


def corpus_of(run: Path) -> Path:
    return run.parent / "corpus"


@pytest.mark.parametrize("partition", ["iid", "non-iid"])
def test_a_simulation_is_audited_as_its_run(trained_here: Trained, partition: str) -> None:
    """A DP run with canary users: every row, with groups, ledger, cosines and coins."""
    run = trained_here(*TESTED, f"data.partition='{partition}'")
    privacy = api.Privacy("dp", clip=0.5, noise_multiplier=0.8)
    users = api.CanaryUsers(60, canary_coins=True)
    algorithm = api.FedAvg(6, sampler="poisson", local=LOCAL, privacy=privacy, canary_users=users, shards=1)
    of_run = api.audit(run)
    assert {"epsilon", "trade-off", "epsilon, canary users by coins"} <= set(of_run["method"])
    of_simulation = simulated(corpus_of(run), algorithm, partition, 4)
    pd.testing.assert_frame_equal(of_simulation.drop(columns=NAMES), of_run.drop(columns=NAMES), check_exact=True)
    assert set(of_simulation["run"]) == {"simulation"}


def test_a_simulation_with_coins_and_without_noise(trained_here: Trained) -> None:
    run = trained_here("canaries.coins=true", "canaries.count=10", "canaries.p_u=[0.05]")
    of_run = api.audit(run)
    assert "epsilon, coins" in set(of_run["method"])
    algorithm = api.FedAvg(6, local=LOCAL, shards=1)
    of_simulation = simulated(corpus_of(run), algorithm, "non-iid", 4, count=10, coins=True, p_u=(0.05,))
    pd.testing.assert_frame_equal(of_simulation.drop(columns=NAMES), of_run.drop(columns=NAMES), check_exact=True)


def test_dp_sgd_protects_records(trained_here: Trained) -> None:
    run = trained_here()
    training = api.CentralSGD(batch_size=8, learning_rate=0.5)
    algorithm = api.Central(training, api.Privacy("dp", clip=0.5, noise_multiplier=1.0))
    rows = simulated(corpus_of(run), algorithm, "non-iid", 3)
    assert set(rows["unit"]) == {"record"}
    (row,) = rows[rows["method"] == "epsilon, GDP"].to_dict("records")
    records = api.open_corpus(corpus_of(run)).split("train").records
    assert row["delta"] == 1 / (10 * records)


def test_canary_users_are_audited_without_ranks(trained_here: Trained) -> None:
    """Continued from a state, their vectors are in the change since then."""
    corpus = corpus_of(trained_here())
    planted = api.plant(corpus, api.Canaries(count=0))
    plain, clip = api.FedAvg(6, local=LOCAL, shards=1), api.Privacy("clip", clip=0.5)
    *_, first = api.simulate(planted, MODEL, plain, 1)
    tested = api.FedAvg(6, local=LOCAL, privacy=clip, canary_users=api.CanaryUsers(20), shards=1)
    *_, last = api.simulate(planted, MODEL, tested, 3, start=first)
    (row, _) = api.audit_simulation(last, planted, MODEL, tested, start=first).to_dict("records")
    assert (row["method"], row["n_in"], row["estimate"] > 0) == ("epsilon, canary users", 20, True)
    rows = api.evaluate(first, planted, MODEL, references=200)
    with pytest.raises(api.InputError, match="some rows are not of round 3"):
        api.audit_simulation(last, planted, MODEL, tested, rows, start=first)


def test_rows_of_folders_are_those_of_the_command(trained_here: Trained, flsim: Flsim) -> None:
    run, other = trained_here(), trained_here("canaries.count=0")
    table = api.audit(run, other, threshold=3)
    assert list(table.columns) == list(COLUMNS)
    printed = json.loads(flsim("audit", run, "--threshold", 3, "--json")[1])["runs"][0]["rows"]
    assert [row["method"] for row in printed] == table["method"].tolist()
    assert [row["low"] for row in printed] == pytest.approx(table["low"].tolist())
    with pytest.raises(api.InputError, match="--round and --epoch"):
        api.audit(run, round=4, epoch=1.0)


def test_what_is_not_of_one_planting_is_refused(trained_here: Trained) -> None:
    """Bounds of one canary's ranks with another one's coin and sharers would hold for neither."""
    corpus = corpus_of(trained_here())
    planted = api.plant(corpus, api.Canaries(**CANARIES))
    algorithm = api.FedAvg(6, local=LOCAL, shards=1)
    *_, last = api.simulate(planted, MODEL, algorithm, 2)
    measured = api.evaluate(last, planted, MODEL, references=200)

    def audited(planted: Any, rows: Any = measured) -> pd.DataFrame:
        return api.audit_simulation(last, planted, MODEL, algorithm, rows)

    assert len(audited(planted))
    roster, mine = planted.roster, api.plant(corpus, api.Canaries(**CANARIES | {"p_u": (0.1,)}), seed=1)
    for name, changed in {
        "canary": roster.assign(canary=[f"m{index}" for index in range(len(roster))]),
        "tokens": mine.roster,
        "is_planted": roster.assign(is_planted=False),
        "coin": roster.assign(coin=True),
        "insertions": roster.assign(insertions=roster["insertions"] - 1),
        "sharers": roster.assign(sharers=1),
    }.items():
        with pytest.raises(api.InputError, match=rf"belong to different plantings \(.*{name}"):
            audited(replace(planted, roster=changed))
    for other in ({"canaries": mine.canaries}, {"canaries": planted.canaries[:1]}, {"users": mine.users}):
        with pytest.raises(api.InputError, match="belong to different plantings"):
            audited(replace(planted, **other))
    for rows in (
        measured.assign(canary=measured["canary"].replace(roster["canary"][0], "mine")),
        measured[measured["canary"] != roster["canary"][0]],
    ):
        with pytest.raises(api.InputError, match="rows: these canaries are not in `planted`"):
            audited(planted, rows)


@pytest.mark.parametrize(
    "canaries",
    [
        {"windows": ((1, 2), (3, 4)), "count": 1},
        {"p_u": api.Canaries.p_u, "p_e": api.Canaries.p_e, "injections": (2,), "injection_copies": 3},
    ],
    ids=["windows", "injections"],
)
def test_every_kind_of_planting_is_one(trained_here: Trained, canaries: dict[str, Any]) -> None:
    """Canaries of pseudo-users have other counts than were planned."""
    rows = simulated(corpus_of(trained_here()), api.FedAvg(6, local=LOCAL, shards=1), "iid", 4, **canaries)
    assert len(rows)
