"""Audits from Python: those of run folders are the command's, and those of simulations are their runs'."""

import json
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


def test_rows_of_other_canaries_are_refused(trained_here: Trained) -> None:
    planted = api.plant(corpus_of(trained_here()), api.Canaries(**CANARIES))
    algorithm = api.FedAvg(6, local=LOCAL, shards=1)
    *_, last = api.simulate(planted, MODEL, algorithm, 2)
    measured, first = api.evaluate(last, planted, MODEL, references=200), planted.canaries[0].id
    for rows in (measured.replace({"canary": {first: "mine"}}), measured[measured["canary"] != first]):
        with pytest.raises(api.InputError, match="rows: these canaries are not in `planted`"):
            api.audit_simulation(last, planted, MODEL, algorithm, rows)
