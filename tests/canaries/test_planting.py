"""Planting fits its Binomial expectations, resolves collisions fairly, and never loses a record."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import populations
import pytest
from helpers import MakeCorpus
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from flsim.base.errors import InputError
from flsim.canaries.planting import Planting, draw_canaries, occurring, plant
from flsim.canaries.population import Population, make_twin, open_population, write_population
from flsim.canaries.spec import Canary, CanaryHParams, configurations
from flsim.data.corpus import Split
from flsim.data.vocabulary import Layout


def split_of(users: int, records: int, words: int = 8, vocabulary_size: int = 1_000, seed: int = 0) -> Split:
    """A split in memory: every user has `records` records of `words` random words."""
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
    """90 canaries. P-values are uniform: each Kolmogorov-Smirnov test rejects falsely once in 10,000 seeds (fixed)."""
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
    """Uniform on [0, 1] exactly, though the law is discrete."""
    return float(law.cdf(value) - np.random.default_rng(seed).random() * law.pmf(value))


def test_a_contested_record_goes_to_each_claimant_equally_often() -> None:
    """Two canaries claim all 20,000 records: Binomial(20,000, 1/2), two-sided p above 1e-4 (fixed seed)."""
    planting = plant(split_of(1_000, 20, words=1), canaries_of((1.0, 1.0), (1.0, 1.0)), seed=5)
    assert planting.planned_insertions.tolist() == [20_000, 20_000]
    assert planting.insertions.sum() == 20_000
    assert stats.binomtest(int(planting.insertions[0]), 20_000, 0.5).pvalue > 1e-4


def test_a_phrase_that_occurs_is_drawn_again(make_corpus: MakeCorpus) -> None:
    """The canary drawn first is put into the corpus, in each split in turn; the second draw must differ."""
    clean = make_corpus([[[1, 2]]], vocabulary_size=200, name="clean")
    hparams = CanaryHParams(p_u=(0.5,), p_e=(0.5,), count=1)
    first = draw_canaries(clean, hparams, seed=0)[0].tokens
    for split in ("train", "test", "heldout"):
        users = {"train": [[[1, 2]]], split: [[[3, *first, 4], [5]]]}
        corpus = make_corpus(vocabulary_size=200, name=split, **users)
        second = draw_canaries(corpus, hparams, seed=0)[0].tokens
        assert second != first


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
    taken = make_corpus([[[1, 2]]], vocabulary_size=6, name="taken")  # one of the four: only drawing again finds out
    with pytest.raises(InputError, match="fewer than 4 different phrases"):
        draw_canaries(taken, four, seed=0)
    short = make_corpus([[[1]]], record_words=4, vocabulary_size=100, name="short")
    with pytest.raises(InputError, match=r"canaries of 5 words would be cut, because records .* have at most 4"):
        draw_canaries(short, CanaryHParams(p_u=(0.5,), p_e=(0.5,), count=1), seed=0)
    assert Counter(Counter(configurations(CanaryHParams())).values()) == {10: 9}, "the grid of the paper"


def test_canary_words_are_uniform_over_the_vocabularys_words(make_corpus: MakeCorpus) -> None:
    """Chi-squared over 8 words and 5,000 draws, rejected falsely once in 10,000 (fixed seed); no special tokens."""
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
