"""Exposures over the whole space by sampling, against enumeration of it. Seeds are fixed."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from memorization.spaces import layout_of, space_model, space_scores
from torch import Tensor

from flsim.base.rng import stream
from flsim.measures.memorization.enumeration import enumerate_space
from flsim.measures.memorization.exposure import Exposure
from flsim.measures.memorization.importance_sampling import draw, space_exposures
from flsim.measures.memorization.score import log_perplexity
from flsim.measures.memorization.template import Template
from flsim.models.language_model import LanguageModel

SCALES = (0.3, 0.6, 1.0, 1.5, 2.5)  # of weights: from nearly uniform to saturated


@dataclass
class Space:
    """All of words^length after one prefix."""

    model: LanguageModel
    words: int
    length: int

    def __post_init__(self) -> None:
        self.layout = layout_of(self.words)
        self.prefix = torch.tensor([self.layout.bos, 1])
        self.template = Template.words(self.layout, self.length)
        self.scores = space_scores(self.model, self.prefix, self.template)
        self.order = self.scores.argsort()

    def canary(self, position: int) -> Tensor:
        """The continuation with so many before it."""
        code = int(self.order[position])
        return torch.tensor([code // self.words**k % self.words + 1 for k in reversed(range(self.length))])

    def exposure(self, canary: Tensor) -> float:
        found = enumerate_space(self.model, self.prefix, canary, self.template)
        assert found is not None
        return found.exposure

    def estimate(self, canary: Tensor, samples: int, seed: int) -> Exposure:
        return space_exposures(self.model, self.prefix, canary[None], self.template, samples, seed)[0]


@pytest.mark.parametrize(("models", "least"), [(50, 46), pytest.param(200, 186, marks=pytest.mark.nightly)])
def test_intervals_cover_over_models_and_canaries(models: int, least: int) -> None:
    """Canaries from rank 1 to the last. Were coverage just 95%, so few of them had odds of at most 10%; it is above."""
    covered = 0
    for seed in range(models):
        space = Space(space_model(12, seed, SCALES[seed % 5]), 12, 3)
        position = (0, 1, 3, 10, 40, 150, 500, 864, 1500, 1727)[seed // 5 % 10]
        canary = space.canary(position)
        found = space.estimate(canary, 1_000, seed)
        covered += found.low - 1e-9 <= space.exposure(canary) <= found.high + 1e-9
    assert covered >= least


@pytest.mark.parametrize(
    "position", [30, *(pytest.param(position, marks=pytest.mark.nightly) for position in (1, 300, 864))]
)
def test_probability_is_unbiased(position: int) -> None:
    """200 draws: their mean has an error of s/14, beyond 4 of which once in 16,000."""
    space = Space(space_model(12, 2, 1.0), 12, 3)
    canary = space.canary(position)
    estimates = 2 ** -np.array([space.estimate(canary, 1_000, seed).bits for seed in range(200)])
    truth = 2 ** -space.exposure(canary)
    assert abs(estimates.mean() - truth) <= 4 * estimates.std() / 200**0.5


def memorizing_model(words: int, canary: Tensor) -> LanguageModel:
    """A model that was trained on one canary until it has a third of all probability."""
    model, target = space_model(words, 1, 0.5), torch.cat([torch.tensor([words + 2, 1]), canary])
    steps = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(300):
        loss = torch.nn.functional.cross_entropy(model(target[None, 1:-1])[0], target[2:], reduction="sum")
        if loss.item() < 1.1:
            break
        steps.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        steps.step()
    return model


def test_a_canary_of_rank_one_beyond_any_uniform_sample() -> None:
    """The issue's figure: 40^4 sequences, 20,000 samples, 0.9 of the model and 0.1 uniform; 21.3 bits to 1%.

    Counted among the samples, the canary's share of 1 / 40^4 is estimated: hits are binomial with q = 0.9 of the
    model's probability, so the relative error is sqrt((1 - q) / (q 20,000)). As it is known, no error is left.
    """
    canary = torch.tensor([7, 31, 2, 19])
    layout, model = layout_of(40), memorizing_model(40, canary)
    prefix = torch.tensor([layout.bos, 1])
    template = Template.words(layout, len(canary))
    exact = enumerate_space(model, prefix, canary, template)
    assert exact is not None
    assert exact.rank == 1
    assert exact.exposure == pytest.approx(21.288, abs=0.001)

    draws = draw(model, prefix, template, {0.0: 0.1, 1.0: 0.9}, 20_000, stream(0, "figure"))
    score = log_perplexity(model, prefix, canary[None])
    mixture = (draws.log_densities.exp() @ torch.tensor([0.1, 0.9]).double()).numpy()
    hits = (draws.scores <= score * (1 + 1e-12)).numpy()
    estimate = (hits / mixture).mean() / 40**4
    relative = (hits / mixture).std() / 20_000**0.5 / (hits / mixture).mean()
    assert relative < 0.015
    assert estimate * 40**4 == pytest.approx(1, abs=4 * relative)

    found = space_exposures(model, prefix, canary[None], template, 20_000, 0)[0]
    assert (found.bits, found.high) == pytest.approx((exact.exposure, exact.exposure))
    assert exact.exposure - 0.01 < found.low < exact.exposure


def test_densities_are_those_that_samples_are_drawn_with() -> None:
    """Powers 0, 1/2, 1 and 2 over 3^2 sequences, multiplied out here; counts by chi-square's mean 8, deviation 4."""
    layout, model, powers = layout_of(3), space_model(3, 4, 1.0), (0.0, 0.5, 1.0, 2.0)
    prefix = torch.tensor([layout.bos])
    state, log_probs = model.start(prefix[None])
    expected = torch.zeros(4, 3, 3, dtype=torch.float64)
    for first in range(3):
        after = model.step(state, torch.tensor([first + 1]))[1][0, 1:4]
        for k, power in enumerate(powers):
            expected[k, first] = (power * log_probs[0, 1:4]).softmax(0)[first] * (power * after).softmax(0)
    draws = draw(model, prefix, Template.words(layout, 2), dict.fromkeys(powers, 0.25), 40_000, stream(0, "densities"))
    assert draws.counts == (10_000,) * 4
    cells = (draws.words[:, 0] - 1) * 3 + draws.words[:, 1] - 1
    np.testing.assert_allclose(draws.log_densities.exp(), expected.reshape(4, 9).T[cells], rtol=1e-10)
    np.testing.assert_allclose(draws.scores, log_perplexity(model, prefix, draws.words), rtol=1e-12)
    for own, density in zip(torch.split(cells, 10_000), expected.reshape(4, 9), strict=True):
        counts = own.bincount(minlength=9)
        assert ((counts - 10_000 * density) ** 2 / (10_000 * density)).sum() < 8 + 5 * 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_pieces_change_nothing(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model, layout = space_model(12, 3, 1.0, dtype), layout_of(12)
    arguments = model, torch.tensor([layout.bos, 2]), Template.words(layout, 3), {0.0: 0.5, 1.0: 0.5}, 50
    whole = draw(*arguments, stream(0, "pieces"))
    monkeypatch.setattr("flsim.measures.memorization.score.CPU_FLOATS", 7 * 16)
    pieces = draw(*arguments, stream(0, "pieces"))
    assert torch.equal(pieces.words, whole.words)
    torch.testing.assert_close(pieces.log_densities, whole.log_densities, rtol=1e-5, atol=1e-5)


def test_one_draw_serves_all_canaries_of_a_prefix() -> None:
    space = Space(space_model(12, 5, 1.0), 12, 3)
    canaries = torch.stack([space.canary(position) for position in (0, 20, 900)])
    together = space_exposures(space.model, space.prefix, canaries, space.template, 9, 0)  # too few for a pilot
    assert together == [space.estimate(canary, 9, 0) for canary in canaries]


def test_another_key_is_another_draw() -> None:
    space = Space(space_model(12, 5, 1.0), 12, 3)
    arguments = space.model, space.prefix, space.canary(300)[None], space.template, 1_000, 0
    assert space_exposures(*arguments, "a") == space_exposures(*arguments, "a") != space_exposures(*arguments, "b")


def test_equal_scores_in_another_order_of_summation_are_ties() -> None:
    """Without the recurrence words are independent. Thrice the likeliest word, and once the second in its stead: of
    three orders, equally likely, one is the canary. So the event has 4 sequences, and not 2 or 3 as rounding has it."""
    layout = layout_of(12)
    for seed in range(10):
        model = space_model(12, seed, 1.0)
        with torch.no_grad():
            model.projection.zero_()
        best, second = (model.output_bias[1:13].argsort(descending=True)[:2] + 1).tolist()
        canary = torch.tensor([[best, second, best]])
        space = Template.words(layout, canary.shape[1])
        found = space_exposures(model, torch.tensor([layout.bos]), canary, space, 20_000, 0)[0]
        assert found.bits == pytest.approx(np.log2(12**3 / 4), abs=0.15)
        assert found.high - found.low < 0.3


@pytest.mark.parametrize("scale", SCALES)
def test_no_sample_of_the_event_is_heavier_than_the_heaviest(scale: float) -> None:
    """And for the score of the heaviest of all the limit is near, so that intervals are not needlessly wide."""
    model, layout = space_model(12, 8, scale), layout_of(12)
    shares = {0.0: 0.2, 0.5: 0.3, 1.0: 0.5}
    draws = draw(model, torch.tensor([layout.bos]), Template.words(layout, 3), shares, 2_000, stream(0, "heaviest"))
    weights, scores = draws.weights(), draws.scores.numpy()
    for bound in np.quantile(scores, [0, 0.1, 0.5, 0.9, 1]):
        assert weights[scores <= bound].max() <= draws.heaviest(bound) * (1 + 1e-9)
    assert draws.heaviest(scores.max()) <= 1 / 0.2 * (1 + 1e-9)
