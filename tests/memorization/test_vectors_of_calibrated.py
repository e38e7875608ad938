"""Ties of calibrated scores, where the cost of a reference is exact."""

import pytest
import torch
from memorization.table_model import TableModel

from flsim.memorization.calibrated import calibrated_rank


@pytest.mark.parametrize(("factor", "rank"), [(0.75, 2), (1.25, 1)])
def test_ties_are_within_eight_units_of_the_four_scores(factor: float, rank: int) -> None:
    """P(r) - m exceeds d by a share of 8 units of rounding of P(r) + m + P(s) + mean, which is about 2,000 nats."""
    model, prefix = TableModel(3, 6), torch.tensor([7])
    canary, reference = torch.tensor([1, 3]), torch.tensor([[2, 5]])
    own, cost = model.score((7,), (1, 3)), model.score((7,), (2, 5))
    mean = 1_000.0
    excess = factor * 8 * torch.finfo(torch.float64).eps * (own + mean + cost + mean)
    means = torch.tensor([cost - (own - mean) - excess], dtype=torch.float64)
    found = calibrated_rank(model, prefix, canary, reference, mean, means)
    assert (found.score, found.rank, found.references) == (own - mean, rank, 1)
