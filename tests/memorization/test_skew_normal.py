"""The skew-normal distribution against closed forms and scipy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_ndtr, ndtr
from scipy.stats import skewnorm

from flsim.base.rng import stream
from flsim.measures.memorization.exposure import SkewNormal, fit

FAR = np.array([-38.0, -20.0, -8.0, -5.0, -4.3, -4.2, -3.0, -1.0, 0.0, 1.0, 8.0])


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [(0, log_ndtr(FAR)), (1, 2 * log_ndtr(FAR)), (-1, log_ndtr(FAR) + np.log(2 - ndtr(FAR)))],
)
def test_tails_of_closed_form(alpha: float, expected: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
    """F(u; 1) is Phi(u)^2, since the density is 2 phi Phi; F(u; -a) is 1 - F(-u; a), so F(u; -1) is Phi (2 - Phi)."""
    found = SkewNormal(alpha, 30, 5).log_cdf(30 + 5 * FAR)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-12)


@settings(max_examples=50, derandomize=True)
@given(st.floats(-100, 100), st.floats(-30, 3))
def test_slope_of_the_log_is_density_over_distribution(alpha: float, u: float) -> None:
    """Also where the quadrature takes over from the formula."""
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
    """scipy's simplex ends no higher; where the sample is as from a half-normal, |alpha| stops at 1,000."""
    sample = skewnorm.rvs(alpha, 3, 2, size=size, random_state=stream(1, "skew normal"))
    found = fit(sample)
    theirs = skewnorm.logpdf(sample, *skewnorm.fit(sample)).sum()
    assert found.log_density(sample).sum() >= theirs - (1e-5 if abs(found.alpha) < 1_000 else 0.5)
