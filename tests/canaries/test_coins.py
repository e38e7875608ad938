"""Coins: each canary is planted or not by a coin of its own, which changes nothing of the others."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers import Flsim, MakeCorpus, Trained

from flsim.attacks.audit import coins
from flsim.canaries.in_corpus import Planted, plant_corpus
from flsim.canaries.planting import Planting, drawn_and_planted, plant
from flsim.canaries.spec import CanaryHParams, toss
from flsim.data.corpus import Corpus

PROBABLE: dict[str, Any] = {"p_u": (0.2, 0.1), "p_e": (0.5,), "count": 6, "length": 2}
EXACT: dict[str, Any] = {"insertions": (1, 2), "count": 6, "length": 2}
COINS = ("canaries.coins=true", "canaries.p_u=[0.1]", "canaries.p_e=[0.2]", "canaries.count=30")


@pytest.fixture
def corpus(make_corpus: MakeCorpus) -> Corpus:
    """Ten users of six records, so that canaries often claim the same record."""
    return make_corpus([[[1, 2], [3, 4], [5], [6, 7], [8], [9]]] * 10, vocabulary_size=40)


def holders(planting: Planting) -> dict[int, int]:
    return dict(zip(planting.overlay.records.tolist(), planting.overlay.canaries.tolist(), strict=True))


@pytest.mark.parametrize("settings", [PROBABLE, EXACT], ids=["probabilities", "copies"])
@pytest.mark.parametrize("seed", range(10))
def test_a_coin_changes_only_the_records_that_its_canary_claims(
    corpus: Corpus, settings: dict[str, Any], seed: int
) -> None:
    """Turn one coin after another: only records of the canary alone, or that others claim with it, change hands."""
    planting = drawn_and_planted(corpus, CanaryHParams(**settings, coins=True), seed)
    whole = plant(corpus.split("train"), tuple(replace(one, is_planted=True) for one in planting.canaries), seed)
    assert planting.planned_insertions.tolist() == whole.planned_insertions.tolist()
    assert [canary.coin for canary in planting.canaries] == [toss(seed, index) for index in range(12)]
    before = holders(planting)
    for index, canary in enumerate(planting.canaries):
        assert canary.is_planted == canary.coin
        assert canary.is_planted or not planting.insertions[index]
        turned = list(planting.canaries)
        turned[index] = replace(canary, is_planted=not canary.is_planted, coin=not canary.coin)
        after = holders(plant(corpus.split("train"), tuple(turned), seed))
        changed = {record for record in {*before, *after} if before.get(record) != after.get(record)}
        assert all(index in (before.get(record), after.get(record)) for record in changed)


def test_coins_are_fair_and_of_their_own() -> None:
    """Heads are expected 2,000 times, with a standard deviation of 31.6; the bound is four, also for neighbours."""
    tossed = np.array([toss(3, index) for index in range(4_000)])
    assert abs(tossed.sum() - 2_000) < 127
    assert abs((tossed[1:] == tossed[:-1]).sum() - 2_000) < 127


def test_a_corpus_keeps_its_coins(corpus: Corpus, tmp_path: Path) -> None:
    hparams = CanaryHParams(**EXACT, coins=True)
    planted = Planted.read(plant_corpus(corpus, tmp_path / "planted", hparams, 1))
    assert planted is not None
    assert planted.hparams == hparams
    assert [canary.coin for canary in planted.planting.canaries] == [toss(1, index) for index in range(12)]
    plain = plant_corpus(corpus, tmp_path / "plain", CanaryHParams(**EXACT), 1)
    assert "coins" not in json.loads((plain.path / "planted" / "planting.json").read_text())["canaries"]
    assert "coin" not in pd.read_parquet(plain.path / "planted" / "roster.parquet")


@pytest.mark.parametrize("partition", ["iid", "non-iid"])
def test_an_audit_guesses_the_coins(trained_here: Trained, flsim: Flsim, tmp_path: Path, partition: str) -> None:
    """The guesses are counted again from the files: the tenth of canaries with the best ranks, and with the worst."""
    run = trained_here(*COINS, f"data.partition='{partition}'")
    roster = pd.read_parquet(run / "planted" / "roster.parquet")
    roster = roster[roster["coin"].notna() & (roster["planned_insertions"] > 0)]
    rows = pd.read_parquet(sorted((run / "rows").glob("*.parquet"))[-1])
    ranks = rows[rows["metric"] == "rank"].set_index("canary")["value"].loc[roster["canary"]].to_numpy()
    order, tossed = np.argsort(-ranks, kind="stable"), roster["coin"].to_numpy(bool)
    number = round(0.1 * len(ranks))
    right = tossed[order[-number:]].sum() + (~tossed[order[:number]]).sum()
    code, _, err = flsim("audit", run, "--format", "csv", "--out", tmp_path / "audit.csv")
    assert code == 0, err
    (row,) = pd.read_csv(tmp_path / "audit.csv").query("method == 'epsilon, coins'").to_dict("records")
    group = roster["planned_sharers" if partition == "non-iid" else "planned_insertions"].max()
    assert (row["detected"], row["group"], row["n_in"] + row["n_out"]) == (right, group, len(ranks))
    assert row["low"] == pytest.approx(
        coins.epsilon_of_coins(len(ranks), 2 * number, int(right), 0.0, users=int(group))
    )
