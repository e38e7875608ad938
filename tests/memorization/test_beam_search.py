"""Beam search against enumeration, and against a naive beam, on exact tables."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memorization.oracle import LAYOUT, random_model
from memorization.table_model import VOCABULARY, Phrase, TableModel

from flsim.measures.memorization import score
from flsim.measures.memorization.score import Template
from flsim.measures.memorization.search import beam_search, beam_searches

BOS = (LAYOUT.bos,)


def test_special_tokens_are_never_put_in_but_their_probability_counts() -> None:
    """Of 8 equal tokens, those that are no words get e times the weight: -log Pr(word) = log(4 + 4e)."""
    model = random_model(0, scale=0.0)
    with torch.no_grad():
        model.output_bias[[LAYOUT.pad, LAYOUT.oov, LAYOUT.bos, LAYOUT.eos]] = 1.0
    tokens, scores = beam_search(model, torch.tensor(BOS), Template.words(LAYOUT, 3), 64)
    assert sorted(set(tokens.flatten().tolist())) == [1, 2, 3, 4]
    np.testing.assert_allclose(scores, 3 * math.log(4 + 4 * math.e), rtol=1e-12)


def naive(model: TableModel, prefix: Phrase, template: Template, width: int) -> list[tuple[float, Phrase]]:
    """Sets S_k of The Secret Sharer, section 5.3; Python's sort leaves ties in the order of beams, then of ids."""
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
    template=st.lists(st.sets(st.integers(0, 7), min_size=1).map(sorted), min_size=1, max_size=4).map(
        Template.from_positions
    ),
    width=st.sampled_from([1, 2, 5, 8, 30, 5000]),
    rows=st.sampled_from([1, 3, 16, 10_000]),
)
def test_many_prefixes_over_a_template_equal_a_naive_beam_of_each_whatever_the_pieces(
    seed: int, most: int, prefixes: list[list[int]], template: Template, width: int, rows: int
) -> None:
    """Exactly, ties included; as wide as the space it is the enumeration; no more is read at once than fits."""
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
