"""Ranks and ties where the costs of references are exact, and the memory that references take."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from memorization.oracle import LAYOUT, all_phrases, random_model
from memorization.table_model import TableModel

from flsim.measures.memorization import random_sampling
from flsim.measures.memorization.exposure import calibrated_rank
from flsim.measures.memorization.score import count_at_most


@pytest.mark.parametrize(("factor", "expected"), [(0.75, 2), (1.25, 1)])
def test_ties_are_within_eight_units_of_the_four_scores(factor: float, expected: int) -> None:
    """P(r) - m exceeds d by a share of 8 units of rounding of P(r) + m + P(s) + mean, which is about 2,000 nats."""
    model, prefix = TableModel(3, 6), torch.tensor([7])
    canary, reference = torch.tensor([1, 3]), torch.tensor([[2, 5]])
    own, cost = model.score((7,), (1, 3)), model.score((7,), (2, 5))
    mean = 1_000.0
    excess = factor * 8 * torch.finfo(torch.float64).eps * (own + mean + cost + mean)
    means = torch.tensor([cost - (own - mean) - excess], dtype=torch.float64)
    found = calibrated_rank(model, prefix, canary, reference, mean, means)
    assert found == (own - mean, expected)


def test_references_at_their_bound_count() -> None:
    """Costs are multiples of 1/4, so that equal scores are equal."""
    model, continuations = TableModel(3, 6), torch.tensor([*product((1, 2, 4), (0, 3, 5), (1, 6))])
    state, log_probs = model.start(torch.tensor([[7]]))
    scores = torch.tensor([model.score((7,), tuple(words)) for words in continuations.tolist()], dtype=torch.float64)
    assert count_at_most(model, state, log_probs, continuations, scores) == len(scores)
    assert count_at_most(model, state, log_probs, continuations, scores - 0.25) == 0
    for bound in (2.0, 3.0):
        bounds_ = torch.full_like(scores, bound)
        found = count_at_most(model, state, log_probs, continuations, bounds_)
        assert found == int((scores <= bound).sum())


def test_references_are_sifted_where_the_model_tells_its_logits() -> None:
    model, prefix, among = random_model(7), torch.tensor([LAYOUT.bos]), torch.tensor(all_phrases(3))
    plain: Any = SimpleNamespace(start=model.start, step=model.step)
    cases = (model, among, True), (plain, among, False), (model, among[:0], False)
    for one, references, is_sifted in cases:
        canary = random_sampling._Canary(random_sampling.RandomSampler(one, references), prefix, among[9])
        assert (canary.sifter is not None) == is_sifted


def test_references_are_drawn_and_sorted_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two copies of 8 bytes for each word."""
    asked: list[int] = []
    monkeypatch.setattr(random_sampling, "refuse_beyond_memory", lambda size, *words: asked.append(size))
    random_sampling.refuse_too_many(1_000, 5)
    assert asked == [2 * 8 * 1_000 * 5]
