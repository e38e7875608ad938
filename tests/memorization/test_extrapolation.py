"""Extrapolated exposures against tensorflow-privacy's definitions, on the same numbers."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from flsim.base.errors import InputError
from flsim.base.rng import stream
from flsim.measures.memorization.exposure import extrapolate, fit


def by_maximum_likelihood(scores: list[float], references: Tensor) -> list[float]:
    """`compute_exposure_extrapolation` of tensorflow-privacy 0.9, privacy_tests/secret_sharer/exposures.py."""
    fitted = stats.skewnorm.fit(references.numpy())
    return [float(-np.log2(stats.skewnorm.cdf(score, *fitted))) for score in scores]


def skew_normal(seed: int, alpha: float, size: int) -> Tensor:
    return torch.from_numpy(
        stats.skewnorm.rvs(alpha, 40, 6, size=size, random_state=stream(seed, "skew normal scores"))
    )


@pytest.mark.parametrize(("alpha", "size"), [(-3, 9_000), (0, 200), (1.5, 9_000), (6, 200)])
def test_extrapolation_is_tensorflow_privacys(alpha: float, size: int) -> None:
    """To a simplex's precision in the fit, 1e-4 in the parameters; down to 2^-30, to where scipy's cdf is precise."""
    references = skew_normal(5, alpha, size)
    scores = np.quantile(references, [0, 0.01, 0.3, 0.9]).tolist()
    found = [extrapolate(score, references, 0).exposure.bits for score in scores]
    np.testing.assert_allclose(found, by_maximum_likelihood(scores, references), rtol=1e-3)


def test_a_large_sample_is_fitted_in_bins() -> None:
    """10,000 scores: as the fit of each of them, to a thousandth of a bit at 2^-30."""
    references = skew_normal(6, -2, 10_000)
    exact = fit(references.numpy())
    binned = extrapolate(16.0, references, 0).fitted
    at = np.array([40 - 4 * 6.0, 40 - 6.0])
    np.testing.assert_allclose(binned.log_cdf(at) / math.log(2), exact.log_cdf(at) / math.log(2), atol=1e-3)


@pytest.mark.nightly
def test_extrapolation_recovers_the_distribution_and_its_intervals_cover() -> None:
    """30 samples of a skew-normal: intervals cover at 4 scores, the farthest at 33 bits, and few fits are poor.

    Fewer than 26 of 30 have odds of 0.3% at a coverage of 95%, as have more than 2 of 30 poor ones at 1%.
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
def test_a_poor_fit_is_said(shape: str) -> None:
    rng = stream(0, "poor fits", shape)
    values = {
        "two clusters": np.concatenate([rng.normal(20, 1, 500), rng.normal(30, 1, 500)]),
        "heavy tail": rng.standard_t(2, 1_000),
    }[shape]
    found = extrapolate(1.0, torch.from_numpy(values), 0)
    assert found.p_value < 0.01


def test_beyond_a_hundred_bits() -> None:
    """Where scipy's cdf is 0: the tail of a nearly normal sample at 15 deviations, 0.5 * 15^2 / log 2 = 162 bits."""
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
def test_numbers_that_nothing_can_be_fitted_to(score: float, references: list[float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        extrapolate(score, torch.tensor(references, dtype=torch.float64), 0)
