"""LiRA and RMIA against published vectors, and against their formulas point by point."""

from statistics import fmean

import numpy as np
import pytest

from flsim.attacks.membership import lira

# tensorflow/privacy, privacy_tests/membership_inference_attack/advanced_mia_test.py at commit 03035d5, class TestLira:
# statistics of the target, and those of shadow models with ("in") and without ("out") each of four samples. Small
# values are members there, so that signs differ from ours; "in" alone is minus the log-density.
TARGET = np.array([1.0, 0, 0, 0])
SHADOWS = ([-1.0, 1], [0.0, 2], [0.0, 20])
IN = [1.41893853, 1.41893853, 3.72152363]
IN_FIXED = [2.69682468, 2.69682468, 4.15270703, 2.87983121]


def test_published_densities_of_three_samples() -> None:
    scores = np.array(SHADOWS).T
    everywhere = np.ones(scores.shape, bool)
    mean, deviation = lira._normal(scores, everywhere, fixed_variance=False)
    density = lira._log_density(TARGET[:3], mean, deviation)
    np.testing.assert_allclose(-density, IN, rtol=1e-7)


def test_published_densities_with_one_variance() -> None:
    """The fourth sample has no shadow scores there, and takes the mean of the others, 22 / 6."""
    mean, deviation = lira._normal(np.array(SHADOWS).T, np.ones((2, 3), bool), fixed_variance=True)
    density = lira._log_density(TARGET[:3], mean, deviation)
    published_deviation = np.std([value - fmean(part) for part in SHADOWS for value in part])
    assert deviation == pytest.approx([published_deviation] * 3)
    np.testing.assert_allclose(-density, IN_FIXED[:3], rtol=1e-7)
    last = lira._log_density(TARGET[3:], np.array([22 / 6]), deviation[:1])
    np.testing.assert_allclose(-last, IN_FIXED[3:], rtol=1e-7)
