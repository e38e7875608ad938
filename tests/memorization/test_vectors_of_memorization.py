"""Exposures, samples of a space and fits at inputs whose values follow from their definition."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from memorization.table_model import TableModel
from scipy.stats import gamma, skewnorm

from flsim.base.rng import stream
from flsim.measures.memorization import (
    beam_search,
    extrapolation,
    importance_sampling,
    shortest_path,
)
from flsim.measures.memorization.score import nats
from flsim.measures.memorization.template import Template, cheapest


def test_extrapolated_bits_are_the_tail_of_the_fit() -> None:
    sample = torch.from_numpy(skewnorm.rvs(3, 50, 4, size=500, random_state=stream(1, "vectors")))
    found = extrapolation.extrapolate({"a": 48.0}, sample, 0)
    fitted = found.fitted
    cdf = skewnorm.cdf(48.0, fitted.alpha, fitted.location, fitted.scale)
    assert found.exposures["a"].bits == pytest.approx(-math.log2(cdf), rel=1e-5)
    assert found.exposures["a"].low < found.exposures["a"].bits < found.exposures["a"].high
    assert 0.05 < found.p_value <= 1  # the sample is of a skew-normal law
    assert (round(found.p_value * 101) / 101) == pytest.approx(found.p_value)


@pytest.mark.parametrize("alpha", [-3.0, 0.0, 0.7, 20.0])
def test_skew_normal_densities_are_scipys(alpha: float) -> None:
    found, x = extrapolation.SkewNormal(alpha, 30, 5), np.array([15.0, 22.0, 30.0, 31.0, 44.0])
    np.testing.assert_allclose(found.log_density(x), skewnorm.logpdf(x, alpha, 30, 5), rtol=1e-9)
    np.testing.assert_allclose(found.cdf(x), skewnorm.cdf(x, alpha, 30, 5), atol=1e-9)


@pytest.mark.parametrize("alpha", [-4.0, 2.0])
def test_fits_are_stationary(alpha: float) -> None:
    """The mean log-likelihood, of counts as of repetitions, has no slope in any parameter."""
    sample = skewnorm.rvs(alpha, 7, 2, size=400, random_state=stream(2, "vectors")).round(1)
    values, counts = np.unique(sample, return_counts=True)
    for found in (extrapolation.fit(sample), extrapolation.fit(values, counts.astype(float))):
        at = np.array([found.alpha, found.location, found.scale])
        for place, step in enumerate([1e-3, 1e-4, 1e-4]):
            ends = [skewnorm.logpdf(sample, *(at + sign * step * np.eye(3)[place])).mean() for sign in (-1, 1)]
            assert (ends[1] - ends[0]) / 2 / step == pytest.approx(0, abs=1e-4)
    again = extrapolation.fit(sample, start=found)
    assert (again.alpha, again.location, again.scale) == pytest.approx(tuple(at), rel=1e-3)


DENSITIES = np.log(np.array([[0.5, 0.1], [0.25, 0.25], [0.125, 0.5], [0.25, 0.0625]]))


def draws_of(counts: tuple[int, int] = (1, 3)) -> importance_sampling.Draws:
    """Return four samples of a space of 8 with these densities under two proposals, of powers 0.5 and 2."""
    words, scores = torch.arange(4)[:, None], torch.tensor([1.0, 2.0, 3.0, 4.0]).double()
    return importance_sampling.Draws(words, scores, torch.from_numpy(DENSITIES), counts, (0.5, 2.0), math.log(8))


def test_weights_are_uniform_densities_over_the_mixture() -> None:
    draws, shares = draws_of(), np.array([0.25, 0.75])
    mixture = np.exp(DENSITIES) @ shares
    assert draws.shares.tolist() == shares.tolist()
    np.testing.assert_allclose(draws.weights(), 1 / 8 / mixture, rtol=1e-12)
    np.testing.assert_allclose(draws.ratios(), np.exp(DENSITIES) / mixture[:, None], rtol=1e-12)


def test_best_shares_minimize_the_second_moment() -> None:
    """A search over all shares finds none better; then a fifth of the default is mixed in, and 1% dropped."""
    pilot = draws_of((2, 2))
    events = np.array([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    weights, densities = pilot.weights(), np.exp(DENSITIES)

    def moment(share: float) -> float:
        mixture = densities @ [share, 1 - share]
        means = events[:2] @ weights / 4
        return float(((events[:2] / means[:, None] ** 2) @ (weights * (1 / 8) / mixture)).sum())

    grid = np.linspace(0, 1, 10_001)
    best = grid[np.argmin([moment(share) for share in grid])]
    found = importance_sampling.best_shares(pilot, events, {0.0: 0.1, 1.0: 0.9})
    expected = {0.5: 0.8 * best, 2.0: 0.8 * (1 - best)}
    kept = {power: share for power, share in expected.items() if share > 0.01} | {0.0: 0.02, 1.0: 0.18}
    assert list(found) == sorted(kept)
    assert found == pytest.approx({power: share / sum(kept.values()) for power, share in kept.items()}, abs=1e-3)
    assert sum(found.values()) == pytest.approx(1)
    assert importance_sampling.best_shares(pilot, events[2:], {0.0: 1.0}) == {0.0: 1.0}


def test_estimates_have_fays_and_feuers_interval() -> None:
    """Fay and Feuer (1997): gamma quantiles matched to the mean and variance, above with one more heaviest weight."""
    draws = replace(draws_of(), counts=(2, 2, 2))
    weighted, heaviest, tail = np.array([0.01, 0.0, 0.03, 0.005, 0.0, 0.0]), 0.04, 0.025
    found = importance_sampling._estimate(draws, weighted, heaviest)
    total, squares = 0.045, 0.01**2 + 0.03**2 + 0.005**2
    low = gamma.ppf(tail, total**2 / squares, scale=squares / total)
    most, spread = total + heaviest, squares + heaviest**2
    high = gamma.isf(tail, most**2 / spread, scale=spread / most)
    assert found.bits == pytest.approx(-math.log2(1 / 8 + total))
    assert found.high == pytest.approx(-math.log2(1 / 8 + low))
    assert found.low == pytest.approx(-math.log2(min(1, 1 / 8 + high)))
    nothing = importance_sampling._estimate(draws, np.zeros(6), heaviest)
    assert (nothing.bits, nothing.high) == pytest.approx((3, 3))
    whole = importance_sampling._estimate(draws, np.full(6, 0.5), heaviest)
    assert whole.bits == 0


def test_costs_are_not_below_zero_and_the_cheapest_come_first() -> None:
    assert nats(torch.tensor([-2.0, 0.0, 1e-7])).tolist() == [2, 0, 0]
    costs, columns = cheapest(torch.tensor([[3.0, 1.0, 2.0, 1.0], [0.0, 0.0, 0.0, 5.0]]), 3)
    assert (costs.tolist(), columns.tolist()) == ([[1, 1, 2], [0, 0, 0]], [[1, 3, 2], [0, 1, 2]])
    assert cheapest(torch.tensor([[3.0, 1.0]]), 9)[1].tolist() == [[1, 0]]


def test_a_search_that_reads_nothing_has_the_answer_of_five_beams() -> None:
    """Four or six beams give other answers for some of these tables."""
    prefix, template, others = torch.tensor([7]), Template(((0, 1, 2, 3, 4, 5, 6, 7),) * 4), {4: 0, 6: 0}
    for seed in range(40):
        model = TableModel(seed, 40)
        scores = {width: float(beam_search.beam_search(model, prefix, template, width)[1].min()) for width in (4, 5, 6)}
        found = shortest_path.shortest_path(model, prefix, template, nodes=0)
        assert (found.score, found.nodes) == (scores[5], 0)
        for width in others:
            others[width] += scores[width] != scores[5]
    assert all(others.values())
