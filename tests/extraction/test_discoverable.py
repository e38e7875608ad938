"""Tests of discoverable extraction compare p_z with its definition, and cover ties and greedy text."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from membership.before_model import LAYOUT as WIDE
from membership.before_model import untrained
from memorization.oracle import LAYOUT, Oracle, random_model

from flsim.attacks.extraction.extract import Scheme, discover, next_words
from flsim.base.errors import Diverged
from flsim.data.records import Records
from flsim.measures.memorization.score import Template
from flsim.measures.memorization.search import beam_search
from flsim.models.language_model import TrainableModel

PREFIX = (2, 4)
SUFFIXES = list(product(range(LAYOUT.vocabulary_size), repeat=2))
SCHEMES = [Scheme(top_k=0), Scheme(top_k=3), Scheme(1.7, 5), Scheme(0.6, 0, 0.8), Scheme(1.3, 6, 0.5), Scheme(top_k=1)]


def log_probs_of_suffixes(model: TrainableModel, scheme: Scheme) -> dict[tuple[int, ...], float]:
    strings = Records.from_lists([[*PREFIX, *suffix] for suffix in SUFFIXES])
    return dict(zip(SUFFIXES, discover(model, strings, len(PREFIX), scheme, LAYOUT)[1].tolist(), strict=True))


def kept_by(costs: np.ndarray, scheme: Scheme) -> dict[int, float]:
    """Return the probability of each token that a scheme may draw: sort, cut and divide, one token at a time."""
    ranked = sorted(range(len(costs)), key=lambda token: (costs[token], token))[: scheme.top_k or None]
    weights = {token: math.exp(-(costs[token] - costs.min()) / scheme.temperature) for token in ranked}
    kept, before = dict[int, float](), 0.0
    for token in ranked:
        if scheme.top_p == 1 or before < scheme.top_p:
            kept[token] = weights[token]
        before += weights[token] / math.fsum(weights.values())
    return {token: weight / math.fsum(kept.values()) for token, weight in kept.items()}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_p_z_equals_its_definition_and_sums_to_one(scheme: Scheme) -> None:
    model = random_model(1, 1.5)
    measured, oracle = log_probs_of_suffixes(model, scheme), Oracle(model)
    assert math.fsum(map(math.exp, measured.values())) == pytest.approx(1)
    first = kept_by(oracle.costs((LAYOUT.bos, *PREFIX)), scheme)
    for (one, other), log_prob in measured.items():
        second = kept_by(oracle.costs((LAYOUT.bos, *PREFIX, one)), scheme)
        assert math.exp(log_prob) == pytest.approx(first.get(one, 0) * second.get(other, 0), rel=1e-9)


@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=7),  # many ties
    st.sampled_from([0.5, 1.0, 2.0]),
    st.integers(0, 8),
    st.sampled_from([0.05, 0.31, 0.62, 0.97, 1.0]),
)
def test_ties_go_to_the_lower_id(heights: list[int], temperature: float, top_k: int, top_p: float) -> None:
    scheme, count = Scheme(temperature, top_k, top_p), len(heights)
    logits = torch.tensor(heights, dtype=torch.float64).repeat(count, 1)
    likeliest, log_probs = next_words(logits, torch.arange(count), scheme)
    assert likeliest.tolist() == [token == heights.index(max(heights)) for token in range(count)]
    kept = kept_by(-np.array(heights, np.float64), scheme)
    assert log_probs.exp().tolist() == pytest.approx([kept.get(token, 0.0) for token in range(count)])


def test_the_tail_of_a_vocabulary_is_kept_if_top_p_is_1() -> None:
    """The last tokens are kept although cumulative shares round to 1 before them."""
    logits = torch.tensor([[0.0, -30.0, -60.0]], dtype=torch.float64)
    _, log_prob = next_words(logits, torch.tensor([2]), Scheme(top_k=0, top_p=1.0))
    assert float(log_prob) == pytest.approx(-60)


@pytest.mark.parametrize("architecture", ["cifg", "transformer", "hf"])
def test_greedy_extraction_in_one_pass_equals_generation(architecture: str) -> None:
    """Strings that the model wrote are greedy, and the same strings with one changed word are not."""
    model = untrained(architecture, seed=3)
    rng = np.random.default_rng(0)
    prefixes = rng.integers(WIDE.first_word, WIDE.last_word, (12, 3), endpoint=True)
    strings, expected = list[list[int]](), list[bool]()
    for prefix in prefixes.tolist():
        start = torch.tensor([WIDE.bos, *prefix])
        (written,) = beam_search(model, start, Template((tuple(range(WIDE.vocabulary_size)),) * 4), 1)[0].tolist()
        changed = [*written[:2], (written[2] + 1) % WIDE.vocabulary_size, written[3]]
        strings += [[*prefix, *written], [*prefix, *changed], [*prefix, *written[:2]]]
        expected += [True, False, True]
    is_greedy, log_probs = discover(model, Records.from_lists(strings), 3, Scheme(top_k=1), WIDE)
    assert is_greedy.tolist() == expected
    assert log_probs.tolist() == [0.0 if drawn else -math.inf for drawn in expected]


def test_a_model_with_nan_is_refused() -> None:
    model = untrained()
    with torch.no_grad():
        model.get_parameter("output_bias").fill_(math.nan)
    with pytest.raises(Diverged, match="not finite"):
        discover(model, Records.from_lists([[3, 4]]), 1, Scheme(), WIDE)
