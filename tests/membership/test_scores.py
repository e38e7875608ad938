"""Scores of one record: published formulas by their own authors' lines, vectors by hand, and laws."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from flsim.attacks.membership import scores


def test_loss_min_k_and_min_k_plus_plus_are_those_of_their_authors() -> None:
    """The lines of run.py in zjysteven/mink-plus-plus at 5596c65, on random logits of 23 tokens over 50 words."""
    rng = np.random.default_rng(0)
    logits, input_ids = torch.from_numpy(rng.normal(size=(23, 50)) * 3), torch.from_numpy(rng.integers(50, size=23))
    probs, log_probs = functional.softmax(logits, dim=-1), functional.log_softmax(logits, dim=-1)
    token_log_probs = log_probs.gather(dim=-1, index=input_ids.unsqueeze(-1)).squeeze(-1)
    mu = (probs * log_probs).sum(-1)
    sigma = (probs * torch.square(log_probs)).sum(-1) - torch.square(mu)
    k_length = int(len(token_log_probs) * 0.2)
    mink = np.mean(np.sort(token_log_probs.numpy())[:k_length])
    mink_plus = np.mean(np.sort(((token_log_probs - mu) / sigma.sqrt()).numpy())[:k_length])
    ll = -functional.cross_entropy(logits, input_ids)

    own, lengths = token_log_probs.numpy()[None], np.array([23])
    z = scores.standardized(own, mu.numpy()[None], sigma.sqrt().numpy()[None])
    assert scores.mean_log_probability(own, lengths) == pytest.approx(float(ll))
    assert scores.lowest_share(own, lengths) == pytest.approx(mink)
    assert scores.lowest_share(z, lengths) == pytest.approx(mink_plus)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 2**32 - 1))
def test_what_lies_behind_the_end_of_a_record_does_not_count(lengths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    values, sizes = -rng.exponential(size=(len(lengths), 9)), np.array(lengths)
    other = np.where(np.arange(9) < sizes[:, None], values, rng.normal(size=values.shape) * 100)
    for score in (scores.mean_log_probability, scores.lowest_share):
        np.testing.assert_array_equal(score(values, sizes), score(other, sizes))
        of_one = [float(score(values[i : i + 1, :n], sizes[i : i + 1])[0]) for i, n in enumerate(lengths)]
        np.testing.assert_allclose(score(values, sizes), of_one)
