"""LiRA and RMIA against published vectors, and against their formulas point by point."""

import math
from statistics import NormalDist, fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from flsim.attacks.membership import lira, rmia

Floats = NDArray[np.float64]
# tensorflow/privacy, privacy_tests/membership_inference_attack/advanced_mia_test.py at commit 03035d5, class TestLira:
# statistics of the target, and those of shadow models with ("in") and without ("out") each of four samples. Small
# values are members there, so that signs differ from ours; "in" alone is minus the log-density.
TARGET = np.array([1.0, 0, 0, 0])
SHADOWS = ([-1.0, 1], [0.0, 2], [0.0, 20])
IN = [1.41893853, 1.41893853, 3.72152363]
IN_FIXED = [2.69682468, 2.69682468, 4.15270703, 2.87983121]


def masked(points: list[tuple[list[float], list[float]]]) -> tuple[Floats, NDArray[np.bool_]]:
    """Return shadow scores [S, N] and masks of points, each with its scores by IN and by OUT models, as many each."""
    scores = np.array([[*in_, *out] for in_, out in points]).T
    is_in = np.array([[True] * len(in_) + [False] * len(out) for in_, out in points]).T
    return scores, is_in


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


def test_equal_sides_say_nothing() -> None:
    """With the same statistics on both sides the published scores of "both" are 0."""
    scores, is_in = masked([(part, part) for part in SHADOWS])
    for fixed in (False, True):
        np.testing.assert_allclose(lira.online(TARGET[:3], scores, is_in, fixed), np.zeros(3), atol=1e-12)


MEASURED = st.lists(st.floats(-5, 5), min_size=2, max_size=4)


@given(st.data(), st.integers(1, 4), st.booleans())
def test_both_attacks_are_their_formulas(data: st.DataObject, count: int, fixed: bool) -> None:
    """Points have their own coins; means, deviations and laws are those of the standard library."""
    shadows = data.draw(st.integers(4, 7))
    in_masks = data.draw(
        st.lists(st.lists(st.booleans(), min_size=shadows, max_size=shadows), min_size=count, max_size=count)
    )
    is_in = np.array(in_masks).T
    is_in[:2], is_in[2:4] = True, False
    rng = np.random.Generator(np.random.PCG64(data.draw(st.integers(0, 999))))
    scores, phi = rng.normal(size=(shadows, count)), rng.normal(size=count)
    online = lira.online(phi, scores, is_in, fixed)
    offline = lira.offline(phi, scores, is_in, fixed)
    laws = {}
    for side in (True, False):
        values = [scores[is_in[:, point] == side, point] for point in range(count)]
        residuals = np.concatenate([part - part.mean() for part in values])
        shared = math.sqrt(fmean(residuals**2))
        laws[side] = [NormalDist(part.mean(), shared if fixed else part.std()) for part in values]
    for point in range(count):
        inside, outside = laws[True][point], laws[False][point]
        ratio = (
            (phi[point] - outside.mean) ** 2 / (2 * outside.variance)
            - (phi[point] - inside.mean) ** 2 / (2 * inside.variance)
            + math.log(outside.stdev / inside.stdev)
        )
        assert online[point] == pytest.approx(ratio, rel=1e-6, abs=1e-6)
        assert offline[point] == pytest.approx(outside.cdf(phi[point]), abs=1e-9)


def test_offline_is_one_sided_and_few_models_share_a_variance() -> None:
    scores = np.array([[0.0, 5], [1, 5.5], [2, 6]])
    nobody = np.zeros((3, 2), bool)
    low, middle, high = (lira.offline(np.array([phi, 5.5]), scores, nobody)[0] for phi in (-9.0, 1.0, 9.0))
    assert low < 1e-6 < middle == 0.5 < 1 - 1e-6 < high
    assert (lira.offline(np.zeros(2), scores, nobody) == lira.offline(np.zeros(2), scores, nobody, True)).all()
    many = np.tile(scores, (22, 1))
    nobody = np.zeros(many.shape, bool)
    assert (lira.offline(np.zeros(2), many, nobody) == lira.offline(np.zeros(2), many, nobody, False)).all()


def test_rmia_of_one_point_by_hand() -> None:
    """p_bar = 1.3 / 2 x .4 + .35 = .61 and .675; ratios .8 / .61 and .5 / .675; the point is above the population."""
    ratios = rmia.offline_ratios(np.array([0.8, 0.5]), np.array([[0.4, 0.5]]), np.zeros((1, 2), bool), 0.3)
    np.testing.assert_allclose(ratios, [0.8 / 0.61, 0.5 / 0.675])
    assert rmia.scores(ratios[:1], ratios[1:]).tolist() == [1.0]
    assert rmia.scores(ratios[1:], ratios[:1]).tolist() == [0.0]
    assert rmia.scores(ratios[:1], ratios[1:], gamma=2).tolist() == [0.0]


@given(st.integers(1, 6), st.integers(1, 5), st.floats(0.5, 2), st.integers(0, 999))
def test_rmia_is_its_double_loop(points: int, others: int, gamma: float, seed: int) -> None:
    rng = np.random.Generator(np.random.PCG64(seed))
    ratios, population = rng.random(points), rng.random(others)
    expected = [fmean([x / z > gamma for z in population]) for x in ratios]
    np.testing.assert_allclose(rmia.scores(ratios, population, gamma), expected, rtol=1e-12)


@given(st.integers(2, 6), st.integers(0, 999))
def test_out_models_are_chosen_by_their_masks(shadows: int, seed: int) -> None:
    """Any number of models may be out, and scores of IN models change nothing offline; online all count."""
    rng = np.random.Generator(np.random.PCG64(seed))
    target, references = rng.random(3), rng.random((shadows, 3))
    is_in = rng.random((shadows, 3)) < 0.5
    is_in[0] = False
    out = [references[~is_in[:, point], point].mean() for point in range(3)]
    changed = np.where(is_in, rng.random((shadows, 3)), references)
    for values in (references, changed):
        np.testing.assert_allclose(rmia.offline_ratios(target, values, is_in, a=1.0), target / out)
    np.testing.assert_allclose(rmia.online_ratios(target, references), target / references.mean(axis=0))
