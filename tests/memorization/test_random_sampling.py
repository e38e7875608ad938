"""The rank against enumeration of every continuation."""

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memorization.oracle import LAYOUT, Noisy, Oracle, Phrase, all_phrases, decide, random_model, rank

from flsim.data.vocabulary import Layout
from flsim.measures.memorization import score
from flsim.measures.memorization.random_sampling import references
from flsim.models.cifg import CIFGLanguageModel
from flsim.models.language_model import LanguageModel

PHRASES = all_phrases(4)
BOS = (LAYOUT.bos,)


def rank_of(model: LanguageModel, prefix: Phrase, phrase: Phrase, among: list[Phrase]) -> int:
    return rank(model, torch.tensor(prefix), torch.tensor(phrase), torch.tensor(among))


@settings(max_examples=60, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.0, 0.1, 1.0, 5.0, 50.0]),
    prefix=st.lists(st.integers(0, 7), max_size=3),
    chosen=st.lists(st.integers(0, 255), min_size=1, max_size=60),
    copies=st.integers(0, 3),
    rows=st.sampled_from([1, 2, 7, 1000]),
    summed=st.sampled_from([1, 3, 8]),
    wide=st.sampled_from([0.0, 0.5, math.inf]),
)
def test_equals_brute_force(
    seed: int, scale: float, prefix: list[int], chosen: list[int], copies: int, rows: int, summed: int, wide: float
) -> None:
    """R in any order, with repetitions and with the canary in it; saturated models too, whose scores coincide.

    However few of the words a bound on log Z sums, and whether wide bounds are replaced by log Z or left open.
    """
    model, p, canary = random_model(seed, scale), (*BOS, *prefix), PHRASES[seed % 256]
    among = [PHRASES[index] for index in chosen] + [canary] * copies
    oracle = Oracle(model)
    scores, own = oracle.scores(p, among), oracle.score(p, canary)
    slack = 1e-9 * (1 + own)  # where scores differ by less, the oracle's own rounding could decide
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score, "CPU_FLOATS", rows * LAYOUT.vocabulary_size)
        patch.setattr("flsim.measures.memorization.random_sampling.SUMMED", summed)
        patch.setattr("flsim.measures.memorization.random_sampling.WIDE", wide)
        found = rank_of(model, p, canary, among)
        assert decide(model, *map(torch.tensor, (p, canary, among))) == (found == 1)
    assert 1 + (scores <= own - slack).sum() <= found <= 1 + (scores <= own + slack).sum()
    assert found >= 1 + among.count(canary)


def test_equal_scores_in_another_order_of_summation_are_ties() -> None:
    """Without the recurrence's output, words are independent: all 24 orders of four words are equally likely."""
    for seed in range(20):
        model = random_model(seed)
        with torch.no_grad():
            model.projection.zero_()
        assert rank_of(model, BOS, (1, 2, 3, 4), list(permutations((1, 2, 3, 4)))) == 24 + 1


def test_the_canary_itself_is_a_tie_whatever_the_rounding() -> None:
    """Half of its 50 copies would else score above it."""
    assert rank_of(Noisy(random_model(0), noise=1e-3), BOS, (1, 2, 3, 4), [(1, 2, 3, 4)] * 50) == 51


def model_that_repeats_word_1() -> CIFGLanguageModel:
    """Word 1 costs exactly 0 nats everywhere, any other token 800."""
    model = random_model(0, scale=0.0)
    with torch.no_grad():
        model.output_bias[1] = 800.0
    return model


def test_a_memorized_canary_costs_next_to_nothing() -> None:
    """A reference is read no further than to where it leaves the canary: (1), (1, 1), (1, 1, 1), once each."""
    counted = Noisy(model_that_repeats_word_1())
    others = [phrase for phrase in PHRASES if phrase != (1, 1, 1, 1)]
    assert rank_of(counted, BOS, (1, 1, 1, 1), others) == 1
    assert counted.read == 3 + 3  # and the canary's own words but the last


def test_a_reference_that_has_spent_just_the_canarys_score_is_kept() -> None:
    """All that differ from (1, 1, 1, 1) in one word cost 800 nats, wherever it is; those before it cost less."""
    in_one_word = [phrase for phrase in PHRASES if phrase.count(1) == 3]
    assert len(in_one_word) == 4 * 3
    for canary in in_one_word:
        assert rank_of(model_that_repeats_word_1(), BOS, canary, PHRASES) == 1 + 12 + 1


def test_shared_first_words_are_read_once() -> None:
    """The least likely canary drops nothing: 4 first words, 16 pairs and 64 triples, and its own 3 words."""
    model = random_model(2)
    worst = PHRASES[int(np.argmax(Oracle(model).scores(BOS, PHRASES)))]
    counted = Noisy(model)
    others = [phrase for phrase in PHRASES if phrase != worst]
    assert rank_of(counted, BOS, worst, others * 2) == 1 + 2 * 255
    assert counted.read <= 2 * (4 + 16 + 64) + 3
    counted.read = 0
    assert rank_of(counted, BOS, worst, sorted(others * 2)) == 1 + 2 * 255
    assert counted.read == 4 + 16 + 64 + 3


def test_references_are_words_drawn_uniformly_from_the_seed() -> None:
    """Each of 4 words: 40,000 / 4 expected, standard deviation 87; beyond 5 of them once in 400,000 seeds."""
    drawn = references(3, 10_000, 4, LAYOUT)
    assert drawn.shape == (10_000, 4)
    assert drawn.dtype == torch.int64
    counts = torch.bincount(drawn.flatten(), minlength=8)
    assert counts[[0, 5, 6, 7]].sum() == 0
    assert (counts[1:5] - 10_000).abs().max() < 5 * 87
    assert torch.equal(drawn, references(3, 10_000, 4, LAYOUT))
    assert not torch.equal(drawn, references(4, 10_000, 4, LAYOUT))


def test_references_are_in_lexicographic_order() -> None:
    rows = references(0, 500, 3, Layout(30)).tolist()
    assert rows == sorted(rows)


def test_more_references_contain_the_fewer() -> None:
    few, many = (references(0, count, 5, Layout(1000)).tolist() for count in (100, 300))
    assert all(row in many for row in few)
