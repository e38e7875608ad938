"""Controls and coins: canaries that are drawn and measured but not planted, or planted if their coin says so."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers import Flsim, MakeCorpus, Trained

from flsim.attacks.audit import coins
from flsim.canaries.planting import Planting, drawn_and_planted, plant
from flsim.canaries.population import is_drawn, read_canaries, write_roster
from flsim.canaries.spec import CanaryHParams, toss
from flsim.data.corpus import Corpus
from flsim.results.store import read_run
from flsim.results.tables import memorization_table

PROBABLE: dict[str, Any] = {"p_u": (0.2, 0.1), "p_e": (0.5,), "count": 4, "length": 2}
EXACT: dict[str, Any] = {"insertions": (1, 3), "count": 4, "length": 2}


@pytest.fixture
def corpus(make_corpus: MakeCorpus) -> Corpus:
    """Twelve words: phrases of two, of which the corpus has some, so that many canaries are drawn again."""
    return make_corpus([[[1, 2], [3, 4], [5]]] * 8, vocabulary_size=16)


@pytest.mark.parametrize("settings", [PROBABLE, EXACT], ids=["probabilities", "copies"])
def test_controls_change_nothing_of_the_planted_canaries(corpus: Corpus, settings: dict[str, Any]) -> None:
    plain = drawn_and_planted(corpus, CanaryHParams(**settings), 1)
    more = drawn_and_planted(corpus, CanaryHParams(**settings, controls=30), 1)
    assert [repr(canary) for canary in more.canaries[:8]] == [repr(canary) for canary in plain.canaries]
    assert more.overlay.records.tolist() == plain.overlay.records.tolist()
    assert more.overlay.canaries.tolist() == plain.overlay.canaries.tolist()
    assert not more.planned_insertions[8:].any()
    assert not more.sharers[8:].any()
    assert [canary.is_planted for canary in more.canaries] == [True] * 8 + [False] * 30
    assert len({canary.tokens for canary in more.canaries}) == len({canary.id for canary in more.canaries}) == 38


def test_no_record_drawn_is_never_planted_and_copies_that_were_removed_are_not(corpus: Corpus, tmp_path: Path) -> None:
    """Eight canaries expect one copy each, and a few have none; dropping all records does not change which."""
    planting = drawn_and_planted(corpus, CanaryHParams(p_u=(0.1,), p_e=(0.4,), count=8, length=2), 0)
    assert 0 < (planting.planned_insertions == 0).sum() < 8
    train = corpus.split("train")
    for folder, kept in (
        ("all", planting),
        ("none", planting.select(np.zeros(train.records, bool), train.user_offsets)),
    ):
        (tmp_path / folder).mkdir()
        write_roster(tmp_path / folder, kept, corpus.vocabulary)
        roster = pd.read_parquet(tmp_path / folder / "roster.parquet")
        assert is_drawn(roster).tolist() == (planting.planned_insertions > 0).tolist(), folder
        assert len(read_canaries(tmp_path / folder, corpus.vocabulary)) == 8


def test_a_run_measures_controls_and_counts_the_planted_alone(trained_here: Trained) -> None:
    """The rows of the planted canaries are those of a run without controls."""
    plain, more = (read_run(trained_here(*overrides)) for overrides in ((), ("canaries.controls=5",)))
    last = plain.evaluated[-1]
    assert len(more.roster) == len(plain.roster) + 5
    for metric in ("log_perplexity", "rank", "exposure", "rs", "bs"):
        ours, theirs = more.of_canaries(metric, last), plain.of_canaries(metric, last)
        assert ours is not None
        assert theirs is not None
        assert ours.loc[theirs.index].tolist() == theirs.tolist(), metric
    [without], [row] = (memorization_table([run]).to_dict("records") for run in (plain, more))
    assert row["controls"] == without.get("controls", 0) + 5
    assert row["false_positive_rate"] == 1 / (row["references"] + 1)
    assert all(row[name] == without[name] for name in ("canaries", "rs", "bs", "mean_exposure"))


# Coins: each canary is planted or not by a coin of its own, which changes nothing of the others.


COIN_PROBABLE: dict[str, Any] = {"p_u": (0.2, 0.1), "p_e": (0.5,), "count": 6, "length": 2}
COIN_EXACT: dict[str, Any] = {"insertions": (1, 2), "count": 6, "length": 2}
WITH_COINS = ("canaries.coins=true", "canaries.p_u=[0.1]", "canaries.p_e=[0.2]", "canaries.count=30")


@pytest.fixture
def crowded(make_corpus: MakeCorpus) -> Corpus:
    """Ten users of six records, so that canaries often claim the same record."""
    return make_corpus([[[1, 2], [3, 4], [5], [6, 7], [8], [9]]] * 10, vocabulary_size=40)


def holders(planting: Planting) -> dict[int, int]:
    return dict(zip(planting.overlay.records.tolist(), planting.overlay.canaries.tolist(), strict=True))


@pytest.mark.parametrize("settings", [COIN_PROBABLE, COIN_EXACT], ids=["probabilities", "copies"])
def test_a_coin_changes_only_the_records_that_its_canary_claims(crowded: Corpus, settings: dict[str, Any]) -> None:
    """Turn one coin after another: only records of the canary alone, or that others claim with it, change hands."""
    planting = drawn_and_planted(crowded, CanaryHParams(**settings, coins=True), 1)
    whole = plant(crowded.split("train"), tuple(replace(one, is_planted=True) for one in planting.canaries), 1)
    assert planting.planned_insertions.tolist() == whole.planned_insertions.tolist()
    assert [canary.coin for canary in planting.canaries] == [toss(1, index) for index in range(12)]
    before = holders(planting)
    for index, canary in enumerate(planting.canaries):
        assert canary.is_planted == canary.coin
        assert canary.is_planted or not planting.insertions[index]
        turned = list(planting.canaries)
        turned[index] = replace(canary, is_planted=not canary.is_planted, coin=not canary.coin)
        after = holders(plant(crowded.split("train"), tuple(turned), 1))
        changed = {record for record in {*before, *after} if before.get(record) != after.get(record)}
        assert all(index in (before.get(record), after.get(record)) for record in changed)


def test_coins_are_fair_and_of_their_own() -> None:
    """Heads are expected 2,000 times, with a standard deviation of 31.6; the bound is four, also for neighbours."""
    tossed = np.array([toss(3, index) for index in range(4_000)])
    assert abs(tossed.sum() - 2_000) < 127
    assert abs((tossed[1:] == tossed[:-1]).sum() - 2_000) < 127


def test_an_audit_guesses_the_coins(trained_here: Trained, flsim: Flsim, tmp_path: Path) -> None:
    """The guesses are counted again from the files: the tenth of canaries with the best ranks, and with the worst."""
    run = trained_here(*WITH_COINS)
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
    group = roster["planned_sharers"].max()
    assert (row["detected"], row["group"], row["n_in"] + row["n_out"]) == (right, group, len(ranks))
    assert row["low"] == pytest.approx(
        coins.epsilon_of_coins(len(ranks), 2 * number, int(right), 0.0, users=int(group))
    )
