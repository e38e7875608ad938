"""Shortest paths against enumeration: on exact tables, ties included, and on the model."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from memorization.oracle import LAYOUT, Oracle, random_model
from memorization.table_model import CELLS, VOCABULARY, TableModel

from flsim.base.errors import Diverged
from flsim.measures.memorization import score
from flsim.measures.memorization import shortest_path as module
from flsim.measures.memorization.beam_search import beam_searches
from flsim.measures.memorization.shortest_path import ShortestPathHParams, shortest_path
from flsim.measures.memorization.template import Template

TOKENS = range(VOCABULARY)
templates = st.lists(
    st.one_of(st.sampled_from(TOKENS), st.sets(st.sampled_from(TOKENS), min_size=1).map(sorted), st.just(list(TOKENS))),
    min_size=1,
    max_size=4,
).map(Template.from_positions)
prefixes = st.lists(st.sampled_from(TOKENS), min_size=1, max_size=3)


@settings(max_examples=150, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    most=st.sampled_from([0, 1, 4, 40]),
    prefix=prefixes,
    template=templates,
    count=st.sampled_from([1, 2, 7, 5000]),
    rows=st.sampled_from([1, 3, 500]),
    children=st.sampled_from([1, 3, 32]),
)
def test_the_k_best_are_those_of_enumeration_whatever_the_batch(
    seed: int, most: int, prefix: list[int], template: Template, count: int, rows: int, children: int
) -> None:
    """Scores, tokens, and the lexicographic order of ties, exactly; and the bound is that of what is left."""
    model = TableModel(seed, most)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score, "CPU_FLOATS", rows * VOCABULARY)
        patch.setattr(module, "CHILDREN", children)
        found = shortest_path(model, torch.tensor(prefix), template, ShortestPathHParams(count=count))
    ranking = model.ranking(tuple(prefix), template)
    assert list(zip(found.scores, found.tokens, strict=True)) == ranking[:count]
    assert found.complete
    assert found.final == min(count, len(ranking))
    assert found.bound <= (ranking[count][0] if count < len(ranking) else math.inf)
    assert found.bound >= found.scores[-1]


@settings(max_examples=150, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    most=st.sampled_from([1, 4, 40]),
    prefix=prefixes,
    template=templates,
    count=st.sampled_from([1, 3]),
    nodes=st.integers(1, 60),
    frontier=st.sampled_from([1, 2, 5, 1000]),
)
def test_whatever_the_limits_what_is_said_is_true(
    seed: int, most: int, prefix: list[int], template: Template, count: int, nodes: int, frontier: int
) -> None:
    """The first `final` answers are the best; every other sequence costs at least the bound; incomplete is said."""
    model = TableModel(seed, most)
    limits = ShortestPathHParams(count=count, nodes=nodes, frontier=frontier)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHILDREN", 2)
        patch.setattr(module, "BEAMS", 1)
        found = shortest_path(model, torch.tensor(prefix), template, limits)
    ranking = model.ranking(tuple(prefix), template)
    scores = {phrase: cost for cost, phrase in ranking}
    assert found.nodes <= nodes
    assert [scores[phrase] for phrase in found.tokens] == list(found.scores)
    assert len(found.tokens) == len(set(found.tokens)) == min(count, len(ranking))
    assert found.scores[: found.final] == tuple(cost for cost, _ in ranking[: found.final])
    assert all(cost >= found.bound for phrase, cost in scores.items() if phrase not in found.tokens)
    assert found.complete == (found.final == len(found.tokens))


def test_limits_do_leave_searches_unfinished() -> None:
    """And so the law above is not only about complete ones: both limits, one at a time."""
    template = Template.from_positions([list(TOKENS)] * 4)
    for limits in (ShortestPathHParams(count=3, nodes=9), ShortestPathHParams(count=3, frontier=2)):
        outcomes = [shortest_path(TableModel(seed, 40), torch.tensor([0]), template, limits) for seed in range(30)]
        assert not all(found.complete for found in outcomes)
        assert all(found.bound < found.scores[-1] for found in outcomes if not found.complete)
        assert any(found.bound > 0 for found in outcomes if not found.complete)


@settings(max_examples=60, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.1, 1.0, 3.0, 10.0]),
    prefix=st.lists(st.integers(0, 7), max_size=3),
    template=templates,
    count=st.sampled_from([1, 5]),
)
def test_equals_enumeration_by_the_equations(
    seed: int, scale: float, prefix: list[int], template: Template, count: int
) -> None:
    model, p = random_model(seed, scale), (LAYOUT.bos, *prefix)
    phrases = list(product(*template.allowed))
    scores = Oracle(model).scores(p, phrases)
    order = np.argsort(scores, kind="stable")
    found = shortest_path(model, torch.tensor(p), template, ShortestPathHParams(count=count))
    assert found.complete
    np.testing.assert_allclose(found.scores, scores[order][:count], rtol=1e-9, atol=1e-9)
    assume(np.diff(scores[order][: count + 1]).min(initial=1.0) > 1e-8)
    assert list(found.tokens) == [phrases[index] for index in order[:count]]


def test_a_likely_canary_is_extracted_after_few_nodes() -> None:
    """At most exp(P) beginnings of each length are as likely as the answer, and batches at most double that."""
    template, nodes = Template.words(LAYOUT, 6), []
    for seed in range(40):
        found = shortest_path(random_model(seed, 2.0), torch.tensor([LAYOUT.bos]), template)
        assert found.complete
        assert found.nodes <= 2 * 6 * math.exp(found.scores[0]) + 1
        nodes.append(found.nodes)
    assert min(nodes) == 6  # one evaluation for each word
    assert sum(nodes) / len(nodes) < 4**6 / 50


def test_a_uniform_model_shows_its_first_sequence_and_takes_the_whole_tree() -> None:
    """Every sequence ties, so all 1 + 4 + 16 nodes that are not whole have to be looked at."""
    found = shortest_path(random_model(0, 0.0), torch.tensor([LAYOUT.bos]), Template.words(LAYOUT, 3))
    assert found.tokens == ((1, 1, 1),)
    assert found.nodes == 21
    assert found.complete


def test_beam_search_misses_what_the_shortest_path_finds() -> None:
    """A trap: five beams are ahead after one token, at 0, and end at 8; the one that is behind, at 4, ends there."""
    model, first = (
        TableModel(0, 0),
        [0, 1, 2, 3, 4, 6],
    )  # token 0 leads to row 1, token 5 back to it
    model.table[:] = 8
    model.table[1], model.table[1, 3] = 0, 4
    model.table[(3 * 1 + 5 * 3 + 1) % CELLS] = 0
    prefix, template = torch.tensor([0]), Template.from_positions([first, TOKENS])
    assert beam_searches(model, prefix[None], template, 5)[1].tolist() == [[8] * 5]
    found = shortest_path(model, prefix, template)
    assert (found.tokens, found.scores) == (((3, 0),), (4,))
    assert found.complete


def test_a_float32_model_gives_the_same_sequences() -> None:
    for seed in range(10):
        found, exact = (
            shortest_path(random_model(seed, dtype=dtype), torch.tensor([LAYOUT.bos]), Template.words(LAYOUT, 4))
            for dtype in (torch.float32, torch.float64)
        )
        assert found.tokens == exact.tokens
        np.testing.assert_allclose(found.scores, exact.scores, rtol=1e-5)


def test_values_that_are_not_finite_are_refused() -> None:
    model = random_model(0)
    with torch.no_grad():
        model.gate_bias[0] = math.nan
    with pytest.raises(Diverged, match="not finite"):
        shortest_path(model, torch.tensor([LAYOUT.bos]), Template.words(LAYOUT, 2))
