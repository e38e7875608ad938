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
from flsim.models.language_model import LanguageModel

PHRASES = all_phrases(4)
BOS = (LAYOUT.bos,)


def rank_of(model: LanguageModel, prefix: Phrase, phrase: Phrase, among: list[Phrase]) -> int:
    return rank(model, torch.tensor(prefix), torch.tensor(phrase), torch.tensor(among))


@settings(max_examples=30, derandomize=True)
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
    """R in any order, with repetitions and with the canary in it; saturated models too, whose scores coincide."""
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


def test_a_reference_that_has_spent_just_the_canarys_score_is_kept() -> None:
    """Word 1 costs 0 nats and any other 800, so 12 phrases cost 800, wherever the other word is, and one less."""
    model = random_model(0, scale=0.0)
    with torch.no_grad():
        model.output_bias[1] = 800.0
    for canary in [phrase for phrase in PHRASES if phrase.count(1) == 3]:
        assert rank_of(model, BOS, canary, PHRASES) == 1 + 12 + 1


def test_the_first_reference_that_beats_the_canary_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the 8 references that unigrams rank first beats the canary: 8 x 3 states, the sample's, the canary's."""
    monkeypatch.setattr("flsim.measures.memorization.random_sampling.LIKELY", (8,))
    monkeypatch.setattr("flsim.measures.memorization.random_sampling.TYPICAL", 4)
    model, among = Noisy(random_model(3)), torch.tensor(PHRASES)
    worst = among[int(np.argmax(Oracle(model.model).scores(BOS, PHRASES)))]
    others = among[(worst != among).any(1)]
    assert not decide(model, torch.tensor(BOS), worst, others)
    assert model.read <= 8 * 3 + 4 * 3 + 3
    model.read = 0
    assert rank(model, torch.tensor(BOS), worst, others) == 256
    assert model.read == 4 + 16 + 64 + 3


def test_references_are_words_drawn_uniformly_from_the_seed() -> None:
    """Each of 4 words: 40,000 / 4 expected, standard deviation 87; beyond 5 of them once in 400,000 seeds."""
    drawn = references(3, 10_000, 4, LAYOUT)
    assert drawn.shape == (10_000, 4)
    assert drawn.dtype == torch.int64
    assert drawn.tolist() == sorted(drawn.tolist())
    counts = torch.bincount(drawn.flatten(), minlength=8)
    assert counts[[0, 5, 6, 7]].sum() == 0
    assert (counts[1:5] - 10_000).abs().max() < 5 * 87
    assert torch.equal(drawn, references(3, 10_000, 4, LAYOUT))
    assert not torch.equal(drawn, references(4, 10_000, 4, LAYOUT))


def test_more_references_contain_the_fewer() -> None:
    few, many = (references(0, count, 5, Layout(1000)).tolist() for count in (100, 300))
    assert all(row in many for row in few)
