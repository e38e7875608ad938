"""Scores of one record: published formulas by their own authors' lines, vectors by hand, and laws."""

import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from flsim.attacks.membership import scores


def test_min_k_of_ten_tokens_is_the_mean_of_the_lowest_two() -> None:
    log_probs = np.array([[-3.0, -10, -1, -7, -2, -9, -4, -6, -5, -8]])
    assert scores.lowest_share(log_probs, np.array([10])) == pytest.approx(-9.5)


@pytest.mark.parametrize("tokens", range(1, 41))
def test_min_k_takes_a_fifth_of_the_tokens_and_at_least_one(tokens: int) -> None:
    values = np.arange(tokens, dtype=np.float64)[None]
    count = max(1, tokens // 5)
    assert scores.lowest_share(values, np.array([tokens])) == pytest.approx((count - 1) / 2)


def test_standardized_log_probabilities_of_three_words() -> None:
    """p = (.5, .25, .25): mu = .5 ln .5 + .5 ln .25 = -1.5 ln 2, and log p is mu + ln 2 / 2 or mu - ln 2 / 2."""
    log_probs = np.log([[0.5, 0.25, 0.25]])
    mean, deviation = np.full((1, 3), -1.0397207708), np.full((1, 3), 0.3465735903)
    np.testing.assert_allclose(scores.standardized(log_probs, mean, deviation), [[1, -1, -1]], atol=1e-9)
    assert (scores.standardized(log_probs, log_probs, np.zeros((1, 3))) == 0).all()  # one possible word, or all equal


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


def test_zlib_divides_the_sum_by_the_bytes_of_the_compressed_text() -> None:
    texts = ["to be or not to be", "é"]
    log_probs = np.array([[-1.0, -2.0, -3.0], [-4.0, 9.0, 9.0]])
    expected = [-6 / len(zlib.compress(b"to be or not to be")), -4 / len(zlib.compress("é".encode()))]
    np.testing.assert_allclose(scores.per_compressed_byte(log_probs, np.array([3, 1]), texts), expected)


def test_reference_and_neighbours_are_differences() -> None:
    log_probs, of_reference = np.array([[-1.0, -2.0], [-3.0, 0.0]]), np.array([[-2.0, -2.5], [-1.0, 5.0]])
    np.testing.assert_allclose(scores.against_reference(log_probs, of_reference, np.array([2, 1])), [1.5, -2.0])
    # Losses: 2 of the record; 3 and 5 of its neighbours, 4 on average.
    np.testing.assert_allclose(scores.against_neighbours(np.array([-2.0]), np.array([[-3.0, -5.0]])), [2.0])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 2**32 - 1))
def test_what_lies_behind_the_end_of_a_record_does_not_count(lengths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    values, sizes = -rng.exponential(size=(len(lengths), 9)), np.array(lengths)
    other = np.where(np.arange(9) < sizes[:, None], values, rng.normal(size=values.shape) * 100)
    for score in (scores.mean_log_probability, scores.lowest_share):
        np.testing.assert_array_equal(score(values, sizes), score(other, sizes))
        of_one = [float(score(values[i : i + 1, :n], sizes[i : i + 1])[0]) for i, n in enumerate(lengths)]
        np.testing.assert_allclose(score(values, sizes), of_one)


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_a_quantile_regression_minimizes_the_pinball_loss(level: float) -> None:
    rng = np.random.default_rng(1)
    features = rng.normal(size=(200, 2))
    values = features @ [1.0, -2.0] + 3 + rng.normal(size=200)
    design = np.column_stack([np.ones(200), features])

    def pinball(weights: np.ndarray) -> float:
        residuals = values - design @ weights
        return float(np.maximum(level * residuals, (level - 1) * residuals).mean())

    fitted = scores.quantile_fit(features, values, level)
    assert all(pinball(fitted) <= pinball(fitted + 0.05 * rng.normal(size=3)) for _ in range(500))
    # An optimum passes through as many points as it has coefficients; the rest splits by the level.
    assert (values < design @ fitted - 1e-9).sum() <= level * 200 <= (values < design @ fitted + 1e-9).sum()


def test_a_quantile_regression_without_features_is_a_quantile() -> None:
    values = np.arange(1.0, 101.0)
    assert 90 <= scores.quantile_fit(np.zeros((100, 0)), values, 0.9)[0] <= 91


def test_a_logistic_regression_of_one_bit_is_its_log_odds_ratio() -> None:
    """30 of 40 members have the bit, 10 of 40 others: the odds ratio is 9."""
    features = np.repeat([1.0, 0, 1, 0], [30, 10, 10, 30])[:, None]
    is_member = np.arange(80) < 40
    assert scores.logistic_fit(features, is_member, penalty=0.0)[0] == pytest.approx(np.log(9), abs=1e-4)
