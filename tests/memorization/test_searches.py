"""Tests compare beam search, enumeration and shortest paths with naive versions, on tables of exact costs."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memorization.oracle import LAYOUT, Oracle, all_phrases, random_model
from memorization.table_model import VOCABULARY, Phrase, TableModel

from flsim.data.records import Layout
from flsim.measures.memorization import score
from flsim.measures.memorization import search as module
from flsim.measures.memorization.score import Template
from flsim.measures.memorization.search import Enumeration, beam_search, beam_searches, enumerate_space, shortest_path
from flsim.models.architectures import CIFGLanguageModel, ModelHParams

BOS = (LAYOUT.bos,)
TOKENS = range(VOCABULARY)
allowed = st.sets(st.sampled_from(TOKENS), min_size=1).map(sorted).map(tuple) | st.just(tuple(TOKENS))
templates = st.lists(allowed, min_size=1, max_size=4).map(tuple).map(Template)


def test_special_tokens_are_never_inserted_but_their_probability_counts() -> None:
    """The cost of a word is log(4 + 4e), because the 4 special tokens of 8 have e times the weight of a word."""
    model = random_model(0, scale=0.0)
    with torch.no_grad():
        model.output_bias[[LAYOUT.pad, LAYOUT.oov, LAYOUT.bos, LAYOUT.eos]] = 1.0
    tokens, scores = beam_search(model, torch.tensor(BOS), Template.words(LAYOUT, 3), 64)
    assert sorted(set(tokens.flatten().tolist())) == [1, 2, 3, 4]
    np.testing.assert_allclose(scores, 3 * math.log(4 + 4 * math.e), rtol=1e-12)


def naive(model: TableModel, prefix: Phrase, template: Template, width: int) -> list[tuple[float, Phrase]]:
    """Return the sets S_k of The Secret Sharer, section 5.3. Python's sort keeps ties in order of beams, then ids."""
    beams: list[Phrase] = [()]
    for ids in template.allowed:
        longer = [(*beam, word) for beam in beams for word in ids]
        beams = sorted(longer, key=lambda phrase: model.score(prefix, phrase))[:width]
    return [(model.score(prefix, beam), beam) for beam in beams]


@settings(max_examples=40, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    most=st.sampled_from([0, 1, 4, 40]),
    prefixes=st.integers(1, 3).flatmap(
        lambda length: st.lists(
            st.lists(st.integers(0, 7), min_size=length, max_size=length), min_size=1, max_size=6, unique_by=tuple
        )
    ),
    template=templates,
    width=st.sampled_from([1, 2, 5, 8, 30, 5000]),
    rows=st.sampled_from([1, 3, 16, 10_000]),
)
def test_beam_searches_of_many_prefixes_equal_a_naive_beam_of_each(
    seed: int, most: int, prefixes: list[list[int]], template: Template, width: int, rows: int
) -> None:
    """Results are equal, ties included, in any pieces. A beam as wide as the space enumerates it. Memory is limited."""
    model = TableModel(seed, most)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score, "CPU_FLOATS", rows * VOCABULARY)
        tokens, scores = beam_searches(model, torch.tensor(prefixes), template, width)
    assert tokens.shape == (len(prefixes), min(width, template.space), template.length)
    assert model.largest <= rows
    for prefix, found, costs in zip(prefixes, tokens.tolist(), scores.tolist(), strict=True):
        beams = list(zip(costs, map(tuple, found), strict=True))
        assert beams == naive(model, tuple(prefix), template, width)
        if width >= template.space:
            assert sorted(beams) == model.ranking(tuple(prefix), template)


PHRASES = Template.words(LAYOUT, 4)
SCALES = st.sampled_from([0.0, 0.1, 1.0, 5.0, 50.0])
PREFIXES = st.lists(st.integers(0, 7), max_size=3)


@settings(max_examples=20, derandomize=True)
@given(st.integers(0, 10**6), SCALES, PREFIXES, st.integers(1, 4), st.sampled_from([1, 3, 1000]))
def test_enumerated_rank_equals_brute_force(seed: int, scale: float, prefix: list[int], length: int, rows: int) -> None:
    model, p, phrases = random_model(seed, scale), (*BOS, *prefix), all_phrases(length)
    canary, oracle = phrases[seed % len(phrases)], Oracle(model)
    scores, own = oracle.scores(p, phrases), oracle.score(p, canary)
    slack = 1e-9 * (1 + own)  # the oracle's rounding could decide smaller differences
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score, "CPU_FLOATS", rows * LAYOUT.vocabulary_size)
        found = enumerate_space(model, torch.tensor(p), torch.tensor(canary), Template.words(LAYOUT, length))
    assert found is not None
    assert found.space == 4**length
    assert max(1, (scores <= own - slack).sum()) <= found.rank <= (scores <= own + slack).sum()


def test_a_likely_canary_is_ranked_exactly_in_a_vast_space() -> None:
    """Words are independent: word 1 costs almost nothing, and 199 others cost the same. The canary ends in one of them.
    Phrases as likely or likelier are (1, ..., 1), and all phrases with one other word."""
    words, length = 200, 12
    layout, model = Layout(words + 4), CIFGLanguageModel(words + 4, ModelHParams(6, 8))
    with torch.no_grad():
        model.output_bias[:] = -20.0
        model.output_bias[1] = 0.0
    canary = torch.tensor([1] * (length - 1) + [17])
    found = enumerate_space(model, torch.tensor([layout.bos]), canary, Template.words(layout, length))
    assert found == Enumeration(1 + length * 199, words**length)
    # Read: for each k below the canary's length, the phrase of k words 1, and k * 199 phrases with one other word.
    assert found.nodes == sum(1 + k * 199 for k in range(length))


def test_enumeration_stops_at_its_limit_of_sequences() -> None:
    """A uniform model allows no pruning: enumeration reads 4, 16, then 64 sequences, 84 in all."""
    arguments = random_model(0, scale=0.0), torch.tensor(BOS), torch.tensor((1, 2, 3, 4)), PHRASES
    found = enumerate_space(*arguments, most_read=84)
    assert found == Enumeration(256, 256)
    assert found.nodes == 85  # with the empty beginning
    assert enumerate_space(*arguments, most_read=83) is None


prefixes = st.lists(st.sampled_from(TOKENS), min_size=1, max_size=3)


@settings(max_examples=30, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    most=st.sampled_from([0, 1, 4, 40]),
    prefix=prefixes,
    template=templates,
    rows=st.sampled_from([1, 3, 500]),
    children=st.sampled_from([1, 3, 32]),
)
def test_the_shortest_path_equals_the_best_of_enumeration_in_any_batch(
    seed: int, most: int, prefix: list[int], template: Template, rows: int, children: int
) -> None:
    """Score and tokens are equal. Of ties, the result is the first in lexicographic order."""
    model = TableModel(seed, most)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score, "CPU_FLOATS", rows * VOCABULARY)
        patch.setattr(module, "CHILDREN", children)
        found = shortest_path(model, torch.tensor(prefix), template)
    assert (found.score, found.tokens) == model.ranking(tuple(prefix), template)[0]
    assert found.complete
    assert found.bound == found.score


@settings(max_examples=30, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    most=st.sampled_from([1, 4, 40]),
    prefix=prefixes,
    template=templates,
    nodes=st.integers(1, 60),
    frontier=st.sampled_from([1, 2, 5, 1000]),
)
def test_a_limited_search_reports_a_true_score_bound_and_completeness(
    seed: int, most: int, prefix: list[int], template: Template, nodes: int, frontier: int
) -> None:
    """With any limits, every sequence costs at least `bound`. A search is `complete` exactly if `score` equals it."""
    model = TableModel(seed, most)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHILDREN", 2)
        patch.setattr(module, "BEAMS", 1)
        patch.setattr(module, "FRONTIER", frontier)
        found = shortest_path(model, torch.tensor(prefix), template, nodes)
    ranking = model.ranking(tuple(prefix), template)
    scores = {phrase: cost for cost, phrase in ranking}
    assert found.nodes <= nodes
    assert scores[found.tokens] == found.score
    assert ranking[0][0] >= found.bound
    assert found.complete == (found.bound == found.score)


def test_each_limit_leaves_some_searches_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Either limit makes some searches incomplete, so the test above covers more than complete searches."""
    template = Template((tuple(TOKENS),) * 4)
    monkeypatch.setattr(module, "BEAMS", 1)
    for nodes, frontier in ((9, 1_000), (1_000, 2)):
        monkeypatch.setattr(module, "FRONTIER", frontier)
        outcomes = [shortest_path(TableModel(seed, 40), torch.tensor([0]), template, nodes) for seed in range(12)]
        assert not all(found.complete for found in outcomes)
        assert all(found.bound < found.score for found in outcomes if not found.complete)
        assert any(found.bound > 0 for found in outcomes if not found.complete)


def test_a_likely_canary_is_extracted_after_few_nodes() -> None:
    """At most exp(P) beginnings of each length are as likely as the answer, and batches at most double this number."""
    template, nodes = Template.words(LAYOUT, 6), []
    for seed in range(15):
        found = shortest_path(random_model(seed, 2.0), torch.tensor([LAYOUT.bos]), template)
        assert found.complete
        assert found.nodes <= 2 * 6 * math.exp(found.score) + 1
        nodes.append(found.nodes)
    assert min(nodes) == 6  # one evaluation for each word
    assert sum(nodes) / len(nodes) < 4**6 / 50
