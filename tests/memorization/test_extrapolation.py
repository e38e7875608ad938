"""Interpolated and extrapolated exposures against tensorflow-privacy's definitions, on the same numbers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memorization.spaces import layout_of, space_model, space_scores
from scipy import stats
from torch import Tensor

from flsim.base.errors import InputError
from flsim.base.rng import stream
from flsim.measures.memorization.exposure import exposure, exposure_interval
from flsim.measures.memorization.extrapolation import (
    ExtrapolationHParams,
    _binned,
    _numbers,
    extrapolate,
    fit,
    interpolate,
)
from flsim.measures.memorization.template import Template

QUICK = ExtrapolationHParams(resamples=100)


def by_sorting(scores: list[float], references: list[float]) -> list[float]:
    """`compute_exposure_interpolation` of tensorflow-privacy 0.9 (privacy_tests/secret_sharer/exposures.py) is this:

    canaries and references are sorted together, references first where they tie; rank = 1 + references in front;
    exposure = log2 #references - log2 rank.
    """
    line = sorted([(score, 1, name) for name, score in enumerate(scores)] + [(score, 0, -1) for score in references])
    found, in_front = [0.0] * len(scores), 0
    for _, is_canary, name in line:
        if is_canary:
            found[name] = math.log2(len(references)) - math.log2(in_front + 1)
        else:
            in_front += 1
    return found


def by_maximum_likelihood(scores: list[float], references: Tensor) -> list[float]:
    """`compute_exposure_extrapolation`, ibidem: -log2 of scipy's skew-normal cdf at scipy's fit."""
    fitted = stats.skewnorm.fit(references.numpy())
    return [float(-np.log2(stats.skewnorm.cdf(score, *fitted))) for score in scores]


def skew_normal(seed: int, alpha: float, size: int) -> Tensor:
    return torch.from_numpy(
        stats.skewnorm.rvs(alpha, 40, 6, size=size, random_state=stream(seed, "skew normal scores"))
    )


SCORES = st.one_of(st.integers(0, 5).map(float), st.floats(0, 100))  # with many ties


def test_interpolated_exposures_of_tensorflow_privacy() -> None:
    """tensorflow/privacy at 0caa10f, privacy_tests/secret_sharer/exposures_test.py: references score 1, 2, ..., 16."""
    scores = {"least": 0.0, "less": 0.1, "most": 20.0, "fourth": 3.5}
    bits = {name: one.bits for name, one in interpolate(scores, torch.arange(1.0, 17.0)).items()}
    expected = {"least": 4.0, "less": 4.0, "most": 4 - math.log2(17), "fourth": 4 - math.log2(4)}
    assert bits == pytest.approx(expected, abs=1e-12)


@settings(max_examples=100, derandomize=True)
@given(st.lists(SCORES, min_size=1, max_size=8), st.lists(SCORES, min_size=1, max_size=30))
def test_interpolation_is_tensorflow_privacys_and_keeps_names(scores: list[float], references: list[float]) -> None:
    named = {f"canary {k}": score for k, score in enumerate(scores)}
    found = interpolate(named, torch.tensor(references, dtype=torch.float64))
    assert list(found) == list(named)
    assert [each.bits for each in found.values()] == by_sorting(scores, references)


def test_interpolation_is_the_rank_among_r_but_for_a_constant() -> None:
    """And its interval is the rank's."""
    references = torch.arange(1, 101, dtype=torch.float64)
    found = interpolate({"a": 0.5, "b": 10.0, "c": 1000.0}, references, space=10**6)
    for name, rank in {"a": 1, "b": 11, "c": 101}.items():
        assert found[name].bits == pytest.approx(exposure(rank, 100) - math.log2(1.01))
        assert (found[name].low, found[name].high) == exposure_interval(rank, 100, 10**6)


@pytest.mark.parametrize("alpha", [-3, 0, 1.5, 6])
@pytest.mark.parametrize("size", [200, 20_000])
def test_extrapolation_is_tensorflow_privacys_and_keeps_names(alpha: float, size: int) -> None:
    """To a simplex's precision in the fit, 1e-4 in the parameters; down to 2^-30, to where scipy's cdf is precise."""
    references = skew_normal(5, alpha, size)
    scores = np.quantile(references, [0, 0.01, 0.3, 0.9]).tolist()
    named = dict(zip("zyxw", scores, strict=True))
    found = extrapolate(named, references, QUICK, 0)
    assert list(found.exposures) == list(named)
    expected = by_maximum_likelihood(scores, references)
    np.testing.assert_allclose([each.bits for each in found.exposures.values()], expected, rtol=1e-3)


def test_a_large_sample_is_fitted_in_bins() -> None:
    """40,000 scores: as the fit of each of them, to a thousandth of a bit at 2^-30."""
    references = skew_normal(6, -2, 40_000)
    exact = fit(references.numpy())
    binned = extrapolate({}, references, QUICK, 0).fitted
    at = np.array([40 - 4 * 6.0, 40 - 6.0])
    np.testing.assert_allclose(binned.log_cdf(at) / math.log(2), exact.log_cdf(at) / math.log(2), atol=1e-3)


def test_more_references_bring_exposures_nearer_to_their_limit_on_an_enumerated_space() -> None:
    """All of 20^4 continuations: their exact ranks, and fits to 500 and to 20,000 of their scores, thirty of each.

    At 2 and 4 bits, where scores are nearly skew-normal, fits are right within their sampling error of 1 / sqrt(n); the
    error of the assumption, which no number of references takes away, is below a tenth of a bit there.
    """
    layout = layout_of(20)
    model, space = space_model(20, 0, 0.6), Template.words(layout, 4)
    scores = space_scores(model, torch.tensor([layout.bos, 1]), space).numpy()
    ordered = np.sort(scores)
    exact = np.array([2.0, 4.0])
    at = ordered[(len(ordered) * 2**-exact).astype(int)]
    rng, errors = stream(0, "fits of a space"), {}
    for size in (500, 20_000):
        samples = [torch.from_numpy(rng.choice(scores, size)) for _ in range(8)]
        bits = [fit(*_binned(_numbers(sample, 20))).log_cdf(at) / -math.log(2) for sample in samples]
        errors[size] = np.array(bits) - exact
    assert errors[20_000].std(axis=0).max() < errors[500].std(axis=0).min() / 2
    assert abs(errors[20_000].mean(axis=0)).max() < 0.1


@pytest.mark.nightly
def test_extrapolation_recovers_the_distribution_and_its_intervals_cover() -> None:
    """30 samples of a skew-normal: intervals cover at 4 scores, the farthest at 33 bits, and few fits are poor.

    Fewer than 26 of 30 have odds of 0.3% at a coverage of 95%, as have more than 2 of 30 poor ones at 1%.
    """
    at = {"far": 15.0, "out": 25.0, "low": 33.0, "middle": 36.0}
    truth = -stats.skewnorm.logcdf(np.array(list(at.values())), -2, 40, 6) / math.log(2)
    covered, poor = np.zeros(4), 0
    for seed in range(30):
        found = extrapolate(at, skew_normal(seed, -2, 500), QUICK, seed)
        covered += [each.low <= bits <= each.high for each, bits in zip(found.exposures.values(), truth, strict=True)]
        poor += found.poor
    assert covered.min() >= 26
    assert poor <= 2


@pytest.mark.parametrize("shape", ["two clusters", "uniform", "heavy tail"])
def test_a_poor_fit_is_said(shape: str) -> None:
    rng = stream(0, "poor fits", shape)
    values = {
        "two clusters": np.concatenate([rng.normal(20, 1, 500), rng.normal(30, 1, 500)]),
        "uniform": rng.uniform(10, 50, 1_000),
        "heavy tail": rng.standard_t(2, 1_000),
    }[shape]
    found = extrapolate({"a": 1.0}, torch.from_numpy(values), QUICK, 0)
    assert found.poor
    assert found.statistic > 0.03  # the sample of a perfect fit is beyond it once in 100: 0.8 / sqrt(1000) is typical


def test_the_statistic_is_the_largest_distance() -> None:
    """Between the fit and the sample's steps, before and after each."""
    references = skew_normal(2, 1, 300)
    found = extrapolate({}, references, QUICK, 0)
    ordered = references.sort().values.numpy()
    cdf = stats.skewnorm.cdf(ordered, found.fitted.alpha, found.fitted.location, found.fitted.scale)
    steps = np.arange(301) / 300
    assert found.statistic == pytest.approx(max(abs(cdf - steps[1:]).max(), abs(cdf - steps[:-1]).max()), abs=1e-9)


def test_beyond_a_hundred_bits() -> None:
    """Where scipy's cdf is 0: the tail of a nearly normal sample at 15 deviations, 0.5 * 15^2 / log 2 = 162 bits."""
    found = extrapolate({"a": 40 - 15 * 6.0}, skew_normal(3, 0, 20_000), QUICK, 0).exposures["a"]
    assert 0 < found.low < found.bits < found.high < math.inf
    assert found.bits > 100


@pytest.mark.parametrize(
    ("scores", "references", "message"),
    [
        ({"a": 1.0}, [1.0] * 19, "at least 20 references"),
        ({"a": 1.0}, [3.0] * 50, "score the same"),
        ({"a": 1.0}, [math.nan, *range(30)], "score of a reference is not finite"),
        ({"a": math.inf}, list(range(30)), "canary a is not finite"),
    ],
)
def test_numbers_that_nothing_can_be_fitted_to(scores: dict[str, float], references: list[float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        extrapolate(scores, torch.tensor(references, dtype=torch.float64), QUICK, 0)
