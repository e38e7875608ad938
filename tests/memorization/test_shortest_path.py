"""Shortest paths against enumeration on exact tables, ties included."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memorization.oracle import LAYOUT, random_model
from memorization.table_model import VOCABULARY, TableModel

from flsim.measures.memorization import score
from flsim.measures.memorization import search as module
from flsim.measures.memorization.score import Template
from flsim.measures.memorization.search import shortest_path

TOKENS = range(VOCABULARY)
templates = st.lists(
    st.one_of(st.sampled_from(TOKENS), st.sets(st.sampled_from(TOKENS), min_size=1).map(sorted), st.just(list(TOKENS))),
    min_size=1,
    max_size=4,
).map(Template.from_positions)
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
def test_the_best_is_that_of_enumeration_whatever_the_batch(
    seed: int, most: int, prefix: list[int], template: Template, rows: int, children: int
) -> None:
    """Score and tokens, of ties the first in lexicographic order, exactly."""
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
def test_whatever_the_limits_what_is_said_is_true(
    seed: int, most: int, prefix: list[int], template: Template, nodes: int, frontier: int
) -> None:
    """A complete answer is the best; every sequence costs at least the bound; incomplete is said."""
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


def test_limits_do_leave_searches_unfinished(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so the law above is not only about complete ones: both limits, one at a time."""
    template = Template.from_positions([list(TOKENS)] * 4)
    monkeypatch.setattr(module, "BEAMS", 1)
    for nodes, frontier in ((9, 1_000), (1_000, 2)):
        monkeypatch.setattr(module, "FRONTIER", frontier)
        outcomes = [shortest_path(TableModel(seed, 40), torch.tensor([0]), template, nodes) for seed in range(12)]
        assert not all(found.complete for found in outcomes)
        assert all(found.bound < found.score for found in outcomes if not found.complete)
        assert any(found.bound > 0 for found in outcomes if not found.complete)


def test_a_likely_canary_is_extracted_after_few_nodes() -> None:
    """At most exp(P) beginnings of each length are as likely as the answer, and batches at most double that."""
    template, nodes = Template.words(LAYOUT, 6), []
    for seed in range(15):
        found = shortest_path(random_model(seed, 2.0), torch.tensor([LAYOUT.bos]), template)
        assert found.complete
        assert found.nodes <= 2 * 6 * math.exp(found.score) + 1
        nodes.append(found.nodes)
    assert min(nodes) == 6  # one evaluation for each word
    assert sum(nodes) / len(nodes) < 4**6 / 50
