"""Tests compare exposures, samples of a space and fits with values that follow from their definitions."""

import math
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from memorization.oracle import LAYOUT, all_phrases, random_model
from memorization.table_model import TableModel
from scipy.stats import gamma, skewnorm

from flsim.base.rng import stream
from flsim.measures.memorization import exposure, score, search
from flsim.measures.memorization.exposure import calibrated_rank
from flsim.measures.memorization.score import Template, cheapest, count_at_most, nats


def test_binned_samples_keep_their_counts_and_places() -> None:
    sample = np.linspace(0, 8_192, 20_000)
    centers, counts = exposure._binned(sample)
    assert (len(centers), counts.sum()) == (8_192, 20_000)
    assert centers[:2].tolist() == [0.5, 1.5]
    assert (counts @ centers) / 20_000 == pytest.approx(sample.mean(), rel=1e-6)


def test_intervals_of_extrapolation_are_percentiles_of_refits(monkeypatch: pytest.MonkeyPatch) -> None:
    bits_of_refits = np.random.default_rng(0).normal(9, 1, (100, 1))
    monkeypatch.setattr(exposure, "_bootstrap", lambda *arguments: (0.25, bits_of_refits))
    sample = torch.from_numpy(skewnorm.rvs(3, 50, 4, size=100, random_state=stream(1, "vectors")))
    found = exposure.extrapolate(48.0, sample, 0)
    low, high = np.quantile(bits_of_refits, [0.025, 0.975])
    assert (found.exposure.low, found.exposure.high) == pytest.approx((low, high))
    assert found.p_value == 0.25


@pytest.mark.parametrize("alpha", [-4.0, 2.0])
def test_fits_are_stationary(alpha: float) -> None:
    """The mean log-likelihood has slope 0 in each parameter, for a fit of the values and a fit of their counts."""
    sample = skewnorm.rvs(alpha, 7, 2, size=400, random_state=stream(2, "vectors")).round(1)
    values, counts = np.unique(sample, return_counts=True)
    for found in (exposure.fit(sample), exposure.fit(values, counts.astype(float))):
        at = np.array([found.alpha, found.location, found.scale])
        for place, step in enumerate([1e-3, 1e-4, 1e-4]):
            ends = [skewnorm.logpdf(sample, *(at + sign * step * np.eye(3)[place])).mean() for sign in (-1, 1)]
            assert (ends[1] - ends[0]) / 2 / step == pytest.approx(0, abs=1e-4)
    again = exposure.fit(sample, start=found)
    assert (again.alpha, again.location, again.scale) == pytest.approx(tuple(at), rel=1e-3)


DENSITIES = np.log(np.array([[0.5, 0.1], [0.25, 0.25], [0.125, 0.5], [0.25, 0.0625]]))

LARGE = 600 * math.log(2)  # of a space in which the squares of weights have no float64


def draws_of(counts: tuple[int, int] = (1, 3)) -> exposure.Draws:
    """Return four samples of a space of 8 with these densities under two proposals, of powers 0.5 and 2."""
    words, scores = torch.arange(4)[:, None], torch.tensor([1.0, 2.0, 3.0, 4.0]).double()
    return exposure.Draws(words, scores, torch.from_numpy(DENSITIES), counts, (0.5, 2.0), math.log(8))


def test_weights_are_uniform_densities_over_the_mixture() -> None:
    draws, shares = draws_of(), np.array([0.25, 0.75])
    mixture = np.exp(DENSITIES) @ shares
    assert draws.shares.tolist() == shares.tolist()
    np.testing.assert_allclose(draws.weights(), 1 / 8 / mixture, rtol=1e-12)
    np.testing.assert_allclose(draws.ratios(), np.exp(DENSITIES) / mixture[:, None], rtol=1e-12)


def test_the_heaviest_weight_has_the_greatest_normalizers() -> None:
    """Z_b is exp(-b score) / density, so the least density at a bound is exp(-b bound) / max Z_b."""
    draws = draws_of()
    normalizers = [
        max(math.exp(-power * score) / density for score, density in zip((1, 2, 3, 4), column, strict=True))
        for power, column in zip((0.5, 2.0), np.exp(DENSITIES).T, strict=True)
    ]
    mixture = sum(
        share * math.exp(-power * 2.5) / normalizer
        for share, power, normalizer in zip((0.25, 0.75), (0.5, 2.0), normalizers, strict=True)
    )
    assert draws.heaviest(2.5) == pytest.approx(1 / 8 / mixture, rel=1e-9)


def test_densities_of_proposals_sum_to_one_over_the_space() -> None:
    """Each word has probability proportional to exp(-b cost) among the allowed ones."""
    model, template = TableModel(3, 6), Template(((1, 2, 4), (0, 3, 5, 6)))
    prefix, powers = torch.tensor([7, 2]), (0.0, 0.5, 2.0)
    drawn = exposure.draw(model, prefix, template, dict.fromkeys(powers, 1 / 3), 600, np.random.default_rng(0))
    assert (drawn.counts, drawn.powers) == ((200, 200, 200), powers)
    assert drawn.log_space == pytest.approx(math.log(12))
    found = {
        tuple(words): (nats_of_words, densities)
        for words, nats_of_words, densities in zip(
            drawn.words.tolist(), drawn.scores.tolist(), drawn.log_densities.tolist(), strict=True
        )
    }
    assert set(found) == set(product(*template.allowed))
    for (first, second), (nats_of_words, densities) in found.items():
        assert nats_of_words == pytest.approx(model.score((7, 2), (first, second)))
        for power, density in zip(powers, densities, strict=True):
            expected = 1.0
            for given, word, allowed in (((7, 2), first, (1, 2, 4)), ((7, 2, first), second, (0, 3, 5, 6))):
                odds = {other: math.exp(-power * model.score(given, (other,))) for other in allowed}
                expected *= odds[word] / sum(odds.values())
            assert math.exp(density) == pytest.approx(expected, rel=1e-6)
    assert exposure.draw(model, prefix, template, {0.0: 0.001, 1.0: 0.999}, 100, np.random.default_rng(0)).counts == (
        *(2, 100),
    )


def test_events_are_samples_as_likely_as_a_canary_and_not_the_canary() -> None:
    """Samples 0 to 3 have scores of 1 to 4 nats; a score at the bound is in the event."""
    for canary, bound, event in ((1, 3.0, [1, 0, 1, 0]), (7, 2.5, [1, 1, 0, 0]), (3, 0.5, [0, 0, 0, 0])):
        assert exposure._event(draws_of(), torch.tensor([canary]), bound).tolist() == event


def test_best_shares_minimize_the_second_moment() -> None:
    """Shares equal the best of a grid, mixed with a fifth of the default shares, without shares of at most 1%."""
    pilot = draws_of((2, 2))
    events = np.array([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    weights, densities = pilot.weights(), np.exp(DENSITIES)

    def moment(share: float) -> float:
        mixture = densities @ [share, 1 - share]
        means = events[:2] @ weights / 4
        return float(((events[:2] / means[:, None] ** 2) @ (weights * (1 / 8) / mixture)).sum())

    grid = np.linspace(0, 1, 10_001)
    best = grid[np.argmin([moment(share) for share in grid])]
    found = exposure.best_shares(pilot, events, {0.0: 0.1, 1.0: 0.9})
    expected = {0.5: 0.8 * best, 2.0: 0.8 * (1 - best)}
    kept = {power: share for power, share in expected.items() if share > 0.01} | {0.0: 0.02, 1.0: 0.18}
    assert list(found) == sorted(kept)
    assert found == pytest.approx({power: share / sum(kept.values()) for power, share in kept.items()}, abs=1e-3)
    assert sum(found.values()) == pytest.approx(1)
    assert exposure.best_shares(pilot, events[2:], {0.0: 1.0}) == {0.0: 1.0}
    assert exposure.best_shares(replace(pilot, log_space=LARGE), events, {0.0: 0.1, 1.0: 0.9}) == pytest.approx(found)


def test_estimates_have_the_interval_of_fay_and_feuer() -> None:
    """Limits are gamma quantiles with matched mean and variance; the upper adds a heaviest weight (Fay, Feuer 1997)."""
    draws = replace(draws_of(), counts=(2, 2, 2))
    weighted, heaviest, tail = np.array([0.01, 0.0, 0.03, 0.005, 0.0, 0.0]), 0.04, 0.025
    found = exposure._estimate(draws, weighted, heaviest)
    total, squares = 0.045, 0.01**2 + 0.03**2 + 0.005**2
    low = gamma.ppf(tail, total**2 / squares, scale=squares / total)
    most, spread = total + heaviest, squares + heaviest**2
    high = gamma.isf(tail, most**2 / spread, scale=spread / most)
    assert found.bits == pytest.approx(-math.log2(1 / 8 + total))
    assert found.high == pytest.approx(-math.log2(1 / 8 + low))
    assert found.low == pytest.approx(-math.log2(min(1, 1 / 8 + high)))
    nothing = exposure._estimate(draws, np.zeros(6), heaviest)
    assert (nothing.bits, nothing.high) == pytest.approx((3, 3))
    large = exposure._estimate(replace(draws, log_space=LARGE), 2.0**-600 * weighted, 2.0**-600 * heaviest)
    assert large.bits == pytest.approx(600 - math.log2(1.045))
    whole = exposure._estimate(draws, np.full(6, 0.5), heaviest)
    assert whole.bits == 0


def test_remainders_of_the_exponential() -> None:
    """`_phi` is (exp x - 1 - x) / x^2. The expected value is its series if |x| is at most 1."""
    x = torch.tensor([-50.0, -2.0, -9.9e-4, -1e-5, 0.0, 1e-4, 1e-3, 1.01e-3, 3.0]).double()
    series = [sum(value**power / math.factorial(power + 2) for power in range(12)) for value in x.tolist()]
    exact = [(math.exp(value) - 1 - value) / value**2 if abs(value) > 1 else 0.0 for value in x.tolist()]
    expected = [far if abs(value) > 1 else near for value, near, far in zip(x.tolist(), series, exact, strict=True)]
    np.testing.assert_allclose(score._phi(x).numpy(), expected, rtol=1e-9)


def test_a_quarter_of_the_summed_words_are_far_words() -> None:
    likely, far = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.04, 0.01]), torch.tensor([1.0, 1.0, 1.0, 1.0, 2.0, 3.0])
    assert score._most_telling(likely, far, 4).tolist() == [0, 1, 2, 5]
    assert score._most_telling(likely, far, 3).tolist() == [0, 1, 2]
    assert score._most_telling(likely, far, 100).tolist() == [0, 1, 2, 3, 4, 5]


def test_costs_are_not_below_zero_and_the_cheapest_come_first() -> None:
    assert nats(torch.tensor([-2.0, 0.0, 1e-7])).tolist() == [2, 0, 0]
    costs, columns = cheapest(torch.tensor([[3.0, 1.0, 2.0, 1.0], [0.0, 0.0, 0.0, 5.0]]), 3)
    assert (costs.tolist(), columns.tolist()) == ([[1, 1, 2], [0, 0, 0]], [[1, 3, 2], [0, 1, 2]])
    assert cheapest(torch.tensor([[3.0, 1.0]]), 9)[1].tolist() == [[1, 0]]


def test_defaults_are_those_of_the_pages() -> None:
    assert exposure.RESAMPLES == 100
    assert search.Enumeration(3, 8).nodes == 0
    assert search.Enumeration(3, 8).exposure == pytest.approx(math.log2(8 / 3))
    assert (exposure.KEPT, exposure.LEAST, exposure.FEWEST) == (0.2, 0.01, 20)


def test_refits_center_on_the_fit() -> None:
    """Refits of a million values center on the fit, although bins are 0.012 standard deviations wide."""
    fitted = exposure.SkewNormal(2.0, 50.0, 4.0)
    sample = skewnorm.rvs(2, 50, 4, size=1_000_000, random_state=stream(6, "vectors"))
    at = np.array([46.0, 48.0])
    p, resampled = exposure._bootstrap(fitted, sample, at, 12, 0)
    assert resampled.shape == (12, 2)
    assert resampled.mean(0) == pytest.approx(exposure._bits(fitted, at), abs=0.012)
    assert p * 13 == pytest.approx(round(p * 13))
    assert 1 / 13 < p <= 1  # some of the 12 refits are as far off as the sample, which has this distribution


def test_pilots_have_equal_shares_of_all_powers(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, draw = [], exposure.draw

    def recorded(*arguments: Any) -> exposure.Draws:
        sizes.append(arguments[3:5])
        return draw(*arguments)

    monkeypatch.setattr(exposure, "draw", recorded)
    model, template = TableModel(3, 6), Template(((1, 2, 4), (0, 3, 5, 6)))
    exposure.space_exposure(model, torch.tensor([7]), torch.tensor([1, 3]), template, 200, 0)
    assert sizes[0] == (dict.fromkeys((0.0, 0.25, 0.5, 0.75, 1.0, 1.5), 1 / 6), 20)
    assert sizes[1][1] == 200


def test_shares_without_a_pilot_are_a_tenth_of_uniform_samples_and_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    shares, draw = [], exposure.draw

    def recorded(*arguments: Any) -> exposure.Draws:
        shares.append(arguments[3])
        return draw(*arguments)

    monkeypatch.setattr(exposure, "draw", recorded)
    template = Template(((1, 2, 4), (0, 3, 5, 6)))
    exposure.space_exposure(TableModel(3, 6), torch.tensor([7]), torch.tensor([1, 3]), template, 9, 0)
    assert shares == [{0.0: 0.1, 1.0: 0.9}]


def test_a_search_without_nodes_returns_the_best_of_five_beams() -> None:
    """A search with 0 nodes equals a beam search of width 5. Widths 4 and 6 differ for some of these tables."""
    prefix, template, others = torch.tensor([7]), Template(((0, 1, 2, 3, 4, 5, 6, 7),) * 4), {4: 0, 6: 0}
    for seed in range(40):
        model = TableModel(seed, 40)
        scores = {width: float(search.beam_search(model, prefix, template, width)[1].min()) for width in (4, 5, 6)}
        found = search.shortest_path(model, prefix, template, nodes=0)
        assert (found.score, found.nodes) == (scores[5], 0)
        for width in others:
            others[width] += scores[width] != scores[5]
    assert all(others.values())


@pytest.mark.parametrize(("factor", "expected"), [(0.75, 2), (1.25, 1)])
def test_ties_differ_by_at_most_eight_rounding_units_of_the_four_scores(factor: float, expected: int) -> None:
    """P(r) - m exceeds d by `factor` times 8 rounding units of P(r) + m + P(s) + mean, about 2,000 nats."""
    model, prefix = TableModel(3, 6), torch.tensor([7])
    canary, reference = torch.tensor([1, 3]), torch.tensor([[2, 5]])
    own, cost = model.score((7,), (1, 3)), model.score((7,), (2, 5))
    mean = 1_000.0
    excess = factor * 8 * torch.finfo(torch.float64).eps * (own + mean + cost + mean)
    means = torch.tensor([cost - (own - mean) - excess], dtype=torch.float64)
    assert calibrated_rank(model, prefix, canary, reference, mean, means) == (own - mean, expected)


def test_references_at_their_bound_count() -> None:
    """References whose score equals their bound count. Costs are multiples of 1/4, so scores are exact."""
    model, continuations = TableModel(3, 6), torch.tensor([*product((1, 2, 4), (0, 3, 5), (1, 6))])
    state, log_probs = model.start(torch.tensor([[7]]))
    scores = torch.tensor([model.score((7,), tuple(words)) for words in continuations.tolist()], dtype=torch.float64)
    assert count_at_most(model, state, log_probs, continuations, scores) == len(scores)
    assert count_at_most(model, state, log_probs, continuations, scores - 0.25) == 0
    for bound in (2.0, 3.0):
        bounds_ = torch.full_like(scores, bound)
        assert count_at_most(model, state, log_probs, continuations, bounds_) == int((scores <= bound).sum())


def test_references_are_sifted_if_the_model_has_the_methods_for_bounds() -> None:
    model, prefix, among = random_model(7), torch.tensor([LAYOUT.bos]), torch.tensor(all_phrases(3))
    plain: Any = SimpleNamespace(start=model.start, step=model.step)
    cases = (model, among, True), (plain, among, False), (model, among[:0], False)
    for one, references, is_sifted in cases:
        canary = score._Canary(score.RandomSampler(one, references), prefix, among[9])
        assert (canary.sifter is not None) == is_sifted


def test_references_are_drawn_and_sorted_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory check counts two copies of 8 bytes for each word."""
    asked: list[int] = []
    monkeypatch.setattr(score, "refuse_beyond_memory", lambda size, *words: asked.append(size))
    score.refuse_too_many(1_000, 5)
    assert asked == [2 * 8 * 1_000 * 5]
