"""Controls: canaries that are drawn and measured, never planted, and change nothing of the others."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers import MakeCorpus, Trained

from flsim.canaries.in_corpus import Planted, plant_corpus
from flsim.canaries.planting import drawn_and_planted
from flsim.canaries.roster import is_drawn, read_canaries, write_roster
from flsim.canaries.spec import CanaryHParams
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
@pytest.mark.parametrize("seed", range(20))
def test_controls_change_nothing_of_the_planted_canaries(corpus: Corpus, settings: dict[str, Any], seed: int) -> None:
    plain = drawn_and_planted(corpus, CanaryHParams(**settings), seed)
    more = drawn_and_planted(corpus, CanaryHParams(**settings, controls=30), seed)
    assert [repr(canary) for canary in more.canaries[:8]] == [repr(canary) for canary in plain.canaries]
    assert more.overlay.records.tolist() == plain.overlay.records.tolist()
    assert more.overlay.canaries.tolist() == plain.overlay.canaries.tolist()
    assert not more.planned_insertions[8:].any()
    assert not more.sharers[8:].any()
    assert [canary.is_planted for canary in more.canaries] == [True] * 8 + [False] * 30
    assert len({canary.tokens for canary in more.canaries}) == len({canary.id for canary in more.canaries}) == 38


def test_a_corpus_keeps_its_controls(corpus: Corpus, tmp_path: Path) -> None:
    hparams = CanaryHParams(**EXACT, controls=3)
    planted = Planted.read(plant_corpus(corpus, tmp_path / "planted", hparams, 1))
    assert planted is not None
    assert planted.hparams == hparams
    assert [canary.is_planted for canary in planted.planting.canaries] == [True] * 8 + [False] * 3
    plain = plant_corpus(corpus, tmp_path / "plain", CanaryHParams(**EXACT), 1)
    assert "controls" not in json.loads((plain.path / "planted" / "planting.json").read_text())["canaries"]


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
