"""Tests compare exposure, extrapolation with skew-normal fits, and calibrated ranks with their definitions."""

import math
from math import e, log2

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memorization.oracle import LAYOUT, Oracle, Phrase, all_phrases, random_model
from scipy import stats
from scipy.special import log_ndtr, ndtr
from scipy.stats import skewnorm
from torch import Tensor

from flsim.base.errors import InputError
from flsim.base.rng import stream
from flsim.measures.memorization import score
from flsim.measures.memorization.exposure import SkewNormal, calibrated_rank, exposure, extrapolate, fit, mean_scores
from flsim.models.language_model import LanguageModel


@pytest.mark.parametrize("references", [1, 7, 2_000_000])
def test_exposure_of_the_best_and_of_the_worst_rank(references: int) -> None:
    assert exposure(1, references) == log2(references + 1)
    assert exposure(references + 1, references) == 0


def test_half_the_rank_is_one_bit_more() -> None:
    assert exposure(8, 99) == pytest.approx(exposure(16, 99) + 1)
    assert exposure(4, 7) == 1  # the canary is in the better half of 8 sequences


def test_mean_exposure_of_unseen_canaries_is_log2_e_bits() -> None:
    """Uniform ranks give the mean of -log2 u over u in (0, 1], log2 e. Steps of 1/n lower it by order log(n)/n."""
    n = 10_000
    mean = sum(exposure(rank, n - 1) for rank in range(1, n + 1)) / n
    assert mean == pytest.approx(log2(e), abs=log2(n) / n)


@pytest.mark.parametrize("rank", [0, 12])
def test_a_rank_out_of_range_is_an_error(rank: int) -> None:
    with pytest.raises(ValueError, match="from 1 to 11"):
        exposure(rank, 10)


def by_maximum_likelihood(scores: list[float], references: Tensor) -> list[float]:
    """Return exposures like tensorflow-privacy 0.9, `compute_exposure_extrapolation` in secret_sharer/exposures.py."""
    fitted = stats.skewnorm.fit(references.numpy())
    return [float(-np.log2(stats.skewnorm.cdf(score, *fitted))) for score in scores]


def skew_normal(seed: int, alpha: float, size: int) -> Tensor:
    return torch.from_numpy(
        stats.skewnorm.rvs(alpha, 40, 6, size=size, random_state=stream(seed, "skew normal scores"))
    )


@pytest.mark.parametrize(("alpha", "size"), [(-3, 9_000), (0, 200), (1.5, 9_000), (6, 200)])
def test_extrapolation_equals_that_of_tensorflow_privacy(alpha: float, size: int) -> None:
    """Exposures agree to 1e-3: a simplex fits parameters to 1e-4, and scipy's cdf is precise down to 2^-30."""
    references = skew_normal(5, alpha, size)
    scores = np.quantile(references, [0, 0.01, 0.3, 0.9]).tolist()
    found = [extrapolate(score, references, 0).exposure.bits for score in scores]
    np.testing.assert_allclose(found, by_maximum_likelihood(scores, references), rtol=1e-3)


def test_a_large_sample_is_fitted_in_bins() -> None:
    """Binning 10,000 scores changes exposures by at most a thousandth of a bit, also at probability 2^-30."""
    references = skew_normal(6, -2, 10_000)
    exact = fit(references.numpy())
    binned = extrapolate(16.0, references, 0).fitted
    at = np.array([40 - 4 * 6.0, 40 - 6.0])
    np.testing.assert_allclose(binned.log_cdf(at) / math.log(2), exact.log_cdf(at) / math.log(2), atol=1e-3)


@pytest.mark.nightly
def test_extrapolation_recovers_the_distribution_and_its_intervals_cover() -> None:
    """In 30 samples of a skew-normal, intervals cover the truth at 4 scores, the farthest at 33 bits.

    At 95% coverage, fewer than 26 of 30 cover with probability 1.6%. More than 2 of 30 p-values are below 0.01 in 0.3%.
    """
    at = [15.0, 25.0, 33.0, 36.0]
    truth = -stats.skewnorm.logcdf(np.array(at), -2, 40, 6) / math.log(2)
    covered, poor = np.zeros(4), 0
    for seed in range(30):
        found = [extrapolate(score, skew_normal(seed, -2, 500), seed) for score in at]
        covered += [one.exposure.low <= bits <= one.exposure.high for one, bits in zip(found, truth, strict=True)]
        poor += found[0].p_value < 0.01
    assert covered.min() >= 26
    assert poor <= 2


@pytest.mark.parametrize("shape", ["two clusters", "heavy tail"])
def test_a_poor_fit_has_a_low_p_value(shape: str) -> None:
    rng = stream(0, "poor fits", shape)
    values = {
        "two clusters": np.concatenate([rng.normal(20, 1, 500), rng.normal(30, 1, 500)]),
        "heavy tail": rng.standard_t(2, 1_000),
    }[shape]
    assert extrapolate(1.0, torch.from_numpy(values), 0).p_value < 0.01


def test_exposure_beyond_a_hundred_bits_is_finite() -> None:
    """Exposure is finite if scipy's cdf is 0: 15 deviations from a normal mean are 0.5 * 15^2 / log 2 = 162 bits."""
    found = extrapolate(40 - 15 * 6.0, skew_normal(3, 0, 20_000), 0).exposure
    assert 0 < found.low < found.bits < found.high < math.inf
    assert found.bits > 100


@pytest.mark.parametrize(
    ("score", "references", "message"),
    [
        (1.0, [1.0] * 19, "at least 20 references"),
        (1.0, [3.0] * 50, "score the same"),
        (1.0, [math.nan, *range(30)], "score of a reference is not finite"),
        (math.inf, list(range(30)), "the canary is not finite"),
    ],
)
def test_scores_that_no_distribution_fits_are_an_error(score: float, references: list[float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        extrapolate(score, torch.tensor(references, dtype=torch.float64), 0)


FAR = np.array([-38.0, -20.0, -8.0, -5.0, -4.3, -4.2, -3.0, -1.0, 0.0, 1.0, 8.0])


@pytest.mark.parametrize(
    ("alpha", "expected"), [(0, log_ndtr(FAR)), (1, 2 * log_ndtr(FAR)), (-1, log_ndtr(FAR) + np.log(2 - ndtr(FAR)))]
)
def test_log_cdf_equals_its_closed_form(alpha: float, expected: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
    """F(u; 1) is Phi(u)^2, because the density is 2 phi Phi. F(u; -a) is 1 - F(-u; a), so F(u; -1) is Phi (2 - Phi)."""
    found = SkewNormal(alpha, 30, 5).log_cdf(30 + 5 * FAR)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-12)


@settings(max_examples=50, derandomize=True)
@given(st.floats(-100, 100), st.floats(-30, 3))
def test_slope_of_the_log_is_density_over_distribution(alpha: float, u: float) -> None:
    """The slope of log F is density / F below 1e-5, also if quadrature replaces the formula. Above, F is scipy's."""
    distribution, step = SkewNormal(alpha, 0, 1), 1e-4 / (1 + abs(alpha)) ** 2 / (1 + abs(u))
    at = np.array([u - step, u, u + step])
    log_cdf = distribution.log_cdf(at)
    slope = np.exp(distribution.log_density(at)[1] - log_cdf[1])
    if np.exp(log_cdf).max() < 1e-5:
        assert (log_cdf[2] - log_cdf[0]) / (2 * step) == pytest.approx(slope, rel=1e-3)
    else:
        np.testing.assert_allclose(np.exp(log_cdf), skewnorm.cdf(at, alpha), rtol=1e-6)


@pytest.mark.parametrize(
    "alpha", [-8, 0, 2, *(pytest.param(alpha, marks=pytest.mark.nightly) for alpha in (-2, -0.3, 0.3, 8, 50))]
)
@pytest.mark.parametrize("size", [50, 3_000])
def test_no_other_parameters_are_likelier(alpha: float, size: int) -> None:
    """scipy's simplex finds no higher likelihood. For samples like a half-normal's, |alpha| stops at 1,000."""
    sample = skewnorm.rvs(alpha, 3, 2, size=size, random_state=stream(1, "skew normal"))
    found = fit(sample)
    theirs = skewnorm.logpdf(sample, *skewnorm.fit(sample)).sum()
    assert found.log_density(sample).sum() >= theirs - (1e-5 if abs(found.alpha) < 1_000 else 0.5)


PHRASES = all_phrases(4)
BOS = (LAYOUT.bos,)


def rank_of(
    model: LanguageModel, without: list[LanguageModel], prefix: Phrase, phrase: Phrase, among: list[Phrase]
) -> tuple[float, int]:
    p, s, r = torch.tensor(prefix), torch.tensor(phrase), torch.tensor(among)
    own = float(mean_scores(without, p, s[None]))
    return calibrated_rank(model, p, s, r, own, mean_scores(without, p, r))


@settings(max_examples=25, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.0, 0.1, 1.0, 5.0, 50.0]),
    models=st.integers(1, 3),
    prefix=st.lists(st.integers(0, 7), max_size=3),
    chosen=st.lists(st.integers(0, 255), min_size=1, max_size=60),
    copies=st.integers(0, 3),
    rows=st.sampled_from([1, 2, 7, 1000]),
)
def test_calibrated_rank_equals_its_definition(
    seed: int, scale: float, models: int, prefix: list[int], chosen: list[int], copies: int, rows: int
) -> None:
    model, p, canary = random_model(seed, scale), (*BOS, *prefix), PHRASES[seed % 256]
    without = [random_model(seed + 1 + k, scale) for k in range(models)]
    among = [PHRASES[index] for index in chosen] + [canary] * copies
    means = np.mean([Oracle(each).scores(p, [canary, *among]) for each in without], axis=0)
    scores = Oracle(model).scores(p, [canary, *among])
    own, others = (scores - means)[0], (scores - means)[1:]
    slack = 1e-9 * (1 + scores.max() + means.max())  # the oracle's rounding could decide smaller differences
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score, "CPU_FLOATS", rows * LAYOUT.vocabulary_size)
        found, rank = rank_of(model, list(without), p, canary, among)
    assert found == pytest.approx(own, abs=slack)
    assert 1 + (others <= own - slack).sum() <= rank <= 1 + (others <= own + slack).sum()
    assert rank >= 1 + among.count(canary)
