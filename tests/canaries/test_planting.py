"""Planting fits its binomial expectations, resolves collisions fairly, and never loses a record."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import populations
import pytest
from helpers import Flsim, MakeCorpus, Trained
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from flsim.attacks.audit import bounds
from flsim.base.errors import InputError
from flsim.canaries.planting import Planting, draw_canaries, drawn_and_planted, occurring, plant
from flsim.canaries.population import (
    Population,
    is_drawn,
    make_twin,
    open_population,
    read_canaries,
    write_population,
    write_roster,
)
from flsim.canaries.spec import Canary, CanaryHParams, configurations, expected_share, toss
from flsim.data.corpus import Corpus, Split
from flsim.data.records import Layout
from flsim.results.rows import read_run
from flsim.results.tables import memorization_table


def split_of(users: int, records: int, words: int = 8, vocabulary_size: int = 1_000, seed: int = 0) -> Split:
    """Return a split in memory: every user has `records` records of `words` random words."""
    tokens = np.random.default_rng(seed).integers(1, vocabulary_size - 4, users * records * words, endpoint=True)
    return Split(
        Layout(vocabulary_size),
        tokens.astype(np.uint16),
        np.arange(users * records + 1) * words,
        np.arange(users + 1) * records,
        Path("nowhere"),
    )


def canaries_of(*pairs: tuple[float, float], length: int = 5) -> tuple[Canary, ...]:
    return tuple(Canary(f"c{i}", tuple(range(1 + i, 1 + i + length)), p_u, p_e) for i, (p_u, p_e) in enumerate(pairs))


def population_of(split: Split, planting: Planting) -> Population:
    return Population(split, tuple(np.array(c.tokens, np.uint16) for c in planting.canaries), planting.overlay)


def test_sharers_and_insertions_fit_their_binomial_expectations() -> None:
    """P-values of 90 canaries are uniform. Each Kolmogorov-Smirnov test fails falsely once in 10,000 seeds (fixed)."""
    users, records = 10_000, 50
    grid = [(p_u, p_e) for p_u in (0.02, 0.006, 0.002) for p_e in (0.01, 0.1, 1.0) for _ in range(10)]
    planting = plant(split_of(users, records, words=1), canaries_of(*grid), seed=1)
    sharer_p, insertion_p = [], []
    for index, (p_u, p_e) in enumerate(grid):
        sharer_p.append(randomized_cdf(stats.binom(users, p_u), planting.planned_sharers[index], index))
        if p_e < 1:
            draws = planting.planned_sharers[index] * records
            insertion_p.append(randomized_cdf(stats.binom(draws, p_e), planting.planned_insertions[index], index))
        else:
            assert planting.planned_insertions[index] == planting.planned_sharers[index] * records
    assert stats.kstest(sharer_p, "uniform").pvalue > 1e-4
    assert stats.kstest(insertion_p, "uniform").pvalue > 1e-4


def randomized_cdf(law: stats.rv_discrete, value: int, seed: int) -> float:
    """Return a distribution function at a value, randomized: exactly uniform on [0, 1], though the law is discrete."""
    return float(law.cdf(value) - np.random.default_rng(seed).random() * law.pmf(value))


def test_a_contested_record_goes_to_each_claimant_equally_often() -> None:
    """Each of two canaries gets Binomial(20,000, 1/2) of the records that both claim: two-sided p > 1e-4, one seed."""
    planting = plant(split_of(1_000, 20, words=1), canaries_of((1.0, 1.0), (1.0, 1.0)), seed=5)
    assert planting.planned_insertions.tolist() == [20_000, 20_000]
    assert planting.insertions.sum() == 20_000
    assert stats.binomtest(int(planting.insertions[0]), 20_000, 0.5).pvalue > 1e-4


def test_the_expected_share_counts_a_contested_record_once() -> None:
    """A user's share is at most 1; therefore, the mean of 4,000 users has a standard error below 0.008 (fixed seed)."""
    hparams = CanaryHParams(p_u=(0.3, 0.6), p_e=(0.5,), count=2)
    expected = expected_share(hparams, 80_000)
    assert expected == pytest.approx(1 - (1 - 0.15) ** 2 * (1 - 0.3) ** 2)
    planting = plant(split_of(4_000, 20, words=1), canaries_of((0.3, 0.5), (0.3, 0.5), (0.6, 0.5), (0.6, 0.5)), seed=3)
    assert planting.insertions.sum() / 80_000 == pytest.approx(expected, abs=0.03)


def test_a_phrase_that_occurs_is_drawn_again(make_corpus: MakeCorpus) -> None:
    """The canary drawn first is put into the corpus, in each split in turn; the second draw must differ."""
    clean = make_corpus([[[1, 2]]], vocabulary_size=200, name="clean")
    hparams = CanaryHParams(p_u=(0.5,), p_e=(0.5,), count=1)
    first = draw_canaries(clean, hparams, seed=0)[0].tokens
    for split in ("train", "test", "heldout"):
        users = {"train": [[[1, 2]]], split: [[[3, *first, 4], [5]]]}
        corpus = make_corpus(vocabulary_size=200, name=split, **users)
        assert draw_canaries(corpus, hparams, seed=0)[0].tokens != first


@settings(max_examples=50)
@given(
    records=st.lists(st.lists(st.integers(1, 3), max_size=8), min_size=1, max_size=20),
    phrases=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple), max_size=5),
    words=st.integers(1, 200),
)
def test_occurring_equals_a_search_record_by_record(
    records: list[list[int]], phrases: list[tuple[int, ...]], words: int
) -> None:
    split = populations.split_of([records], vocabulary_size=8)
    naive = {p for p in phrases for r in records if any(tuple(r[i : i + len(p)]) == p for i in range(len(r)))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flsim.canaries.planting.AT_ONCE", words)
        assert occurring(split, phrases) == naive


def test_canaries_of_a_small_vocabulary_are_distinct_or_refused(make_corpus: MakeCorpus) -> None:
    corpus = make_corpus([[[1]]], vocabulary_size=6)  # two words: four phrases of two
    four = CanaryHParams(p_u=(0.5,), p_e=(0.5,), count=4, length=2)
    assert len({canary.tokens for canary in draw_canaries(corpus, four, seed=0)}) == 4
    with pytest.raises(InputError, match="fewer than 5 different phrases"):
        draw_canaries(corpus, CanaryHParams(p_u=(0.5,), p_e=(0.5,), count=5, length=2), seed=0)
    taken = make_corpus([[[1, 2]]], vocabulary_size=6, name="taken")  # has one of the four; only a redraw reveals this
    with pytest.raises(InputError, match="fewer than 4 different phrases"):
        draw_canaries(taken, four, seed=0)
    short = make_corpus([[[1]]], record_words=4, vocabulary_size=100, name="short")
    with pytest.raises(InputError, match=r"canaries of 5 words would be cut, because records .* have at most 4"):
        draw_canaries(short, CanaryHParams(p_u=(0.5,), p_e=(0.5,), count=1), seed=0)
    assert Counter(Counter(configurations(CanaryHParams())).values()) == {10: 9}, "the grid of the paper"


def test_canary_words_are_uniform_over_the_vocabularys_words(make_corpus: MakeCorpus) -> None:
    """Chi-squared over 8 words and 5,000 draws fails falsely once in 10,000 (fixed seed); no special token is drawn."""
    corpus = make_corpus([[[1]]], vocabulary_size=12)
    hparams = CanaryHParams(p_u=(0.5,), p_e=(0.5,), count=1_000, length=5)
    counts = Counter(token for canary in draw_canaries(corpus, hparams, seed=0) for token in canary.tokens)
    assert set(counts) == set(range(1, 9))
    assert stats.chisquare(list(counts.values())).pvalue > 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"p_e": (1.5,)}, r"p_e must be at most 1, found 1\.5"),
        ({"p_u": (0.0,)}, "p_u must be above 0"),
        ({"p_u": (0.1, 0.1)}, "p_u must list different"),
        ({"p_e": ()}, "p_e must list at least 1"),
    ],
)
def test_bad_specs_are_refused(change: dict[str, tuple[float, ...]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        CanaryHParams(**change)  # type: ignore[arg-type]


@pytest.mark.parametrize("partition", ["iid", "non-iid"])
def test_a_population_reads_back_as_written(
    make_corpus: MakeCorpus, random_users: Callable[..., list[list[list[int]]]], tmp_path: Path, partition: str
) -> None:
    corpus = make_corpus(random_users(12, 6, 96), vocabulary_size=100)
    planting = plant(corpus.split("train"), canaries_of((0.5, 0.5), (0.3, 1.0)), seed=1)
    write_population(tmp_path, corpus, planting, partition, seed=1)  # type: ignore[arg-type]
    population, canaries = open_population(tmp_path, corpus)
    assert canaries == planting.canaries
    expected = population_of(corpus.split("train"), planting)
    if partition == "iid":
        twin, overlay = make_twin(expected.split, planting, 1)
        expected = Population(expected.split, expected.phrases, overlay, twin)
    for user in range(12):
        np.testing.assert_array_equal(population[user].tokens, expected[user].tokens)
        np.testing.assert_array_equal(population[user].offsets, expected[user].offsets)
    other = make_corpus([[[2]]], name="other")
    with pytest.raises(InputError, match="changed after canaries were planted"):
        open_population(tmp_path, other)


PROBABLE: dict[str, Any] = {"p_u": (0.2, 0.1), "p_e": (0.5,), "count": 4, "length": 2}
EXACT: dict[str, Any] = {"insertions": (1, 3), "count": 4, "length": 2}


@pytest.fixture
def corpus(make_corpus: MakeCorpus) -> Corpus:
    """Make a corpus of twelve words. It has some phrases of two words; therefore, many canaries are drawn again."""
    return make_corpus([[[1, 2], [3, 4], [5]]] * 8, vocabulary_size=16)


@pytest.mark.parametrize("settings", [PROBABLE, EXACT], ids=["probabilities", "copies"])
def test_controls_do_not_change_the_planted_canaries(corpus: Corpus, settings: dict[str, Any]) -> None:
    plain = drawn_and_planted(corpus, CanaryHParams(**settings), 1)
    more = drawn_and_planted(corpus, CanaryHParams(**settings, controls=30), 1)
    assert [repr(canary) for canary in more.canaries[:8]] == [repr(canary) for canary in plain.canaries]
    assert more.overlay.records.tolist() == plain.overlay.records.tolist()
    assert more.overlay.canaries.tolist() == plain.overlay.canaries.tolist()
    assert not more.planned_insertions[8:].any()
    assert not more.sharers[8:].any()
    assert [canary.is_planted for canary in more.canaries] == [True] * 8 + [False] * 30
    assert len({canary.tokens for canary in more.canaries}) == len({canary.id for canary in more.canaries}) == 38


def test_only_canaries_without_a_drawn_record_count_as_never_planted(corpus: Corpus, tmp_path: Path) -> None:
    """Each of eight canaries expects one copy, and a few have none; dropping all records does not change which ones."""
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


def test_a_run_measures_controls_and_counts_only_planted_canaries(trained_here: Trained) -> None:
    """The rows of the planted canaries equal those of a run without controls."""
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


# Coins: a separate coin decides whether each canary is planted, and does not change the other canaries.

COIN_PROBABLE: dict[str, Any] = {"p_u": (0.2, 0.1), "p_e": (0.5,), "count": 6, "length": 2}
COIN_EXACT: dict[str, Any] = {"insertions": (1, 2), "count": 6, "length": 2}
WITH_COINS = ("canaries.coins=true", "canaries.p_u=[0.1]", "canaries.p_e=[0.2]", "canaries.count=30")


@pytest.fixture
def crowded(make_corpus: MakeCorpus) -> Corpus:
    """Make ten users of six records; therefore, canaries often claim the same record."""
    return make_corpus([[[1, 2], [3, 4], [5], [6, 7], [8], [9]]] * 10, vocabulary_size=40)


def holders(planting: Planting) -> dict[int, int]:
    return dict(zip(planting.overlay.records.tolist(), planting.overlay.canaries.tolist(), strict=True))


@pytest.mark.parametrize("settings", [COIN_PROBABLE, COIN_EXACT], ids=["probabilities", "copies"])
def test_a_coin_changes_only_the_records_that_its_canary_claims(crowded: Corpus, settings: dict[str, Any]) -> None:
    """If one coin is turned, only records that its canary holds before or after the change get another holder."""
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


def test_coins_are_fair_and_independent_of_neighbours() -> None:
    """4,000 coins have 2,000 heads on average, with standard deviation 31.6; the bound is four standard deviations."""
    tossed = np.array([toss(3, index) for index in range(4_000)])
    assert abs(tossed.sum() - 2_000) < 127
    assert abs((tossed[1:] == tossed[:-1]).sum() - 2_000) < 127


def test_an_audit_guesses_the_coins(trained_here: Trained, flsim: Flsim, tmp_path: Path) -> None:
    """The right guesses are counted again from the files: for the tenths of canaries with the best and worst ranks."""
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
        bounds.epsilon_of_coins(len(ranks), 2 * number, int(right), 0.0, users=int(group))
    )
