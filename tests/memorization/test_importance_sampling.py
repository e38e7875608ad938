"""Tests compare exposures over a complete space, estimated from samples, with enumeration. Seeds are fixed."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from flsim.base.rng import stream
from flsim.data.records import Layout
from flsim.measures.memorization.exposure import Exposure, draw, space_exposure
from flsim.measures.memorization.score import Template, log_perplexity
from flsim.measures.memorization.search import enumerate_space
from flsim.models.architectures import CIFGLanguageModel, ModelHParams
from flsim.models.language_model import LanguageModel

SCALES = (0.3, 0.6, 1.0, 1.5, 2.5)  # of weights: from nearly uniform to saturated


def space_model(words: int, seed: int, scale: float, dtype: torch.dtype = torch.float64) -> CIFGLanguageModel:
    """Return a model with weights and biases from a normal distribution with this standard deviation."""
    model = CIFGLanguageModel(words + 4, ModelHParams(6, 8)).to(dtype)
    rng = stream(seed, "space model")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(scale * rng.normal(size=tuple(parameter.shape))))
    return model


@dataclass
class Space:
    """The space of all continuations of `length` words after one prefix."""

    model: LanguageModel
    words: int
    length: int

    def __post_init__(self) -> None:
        self.layout = Layout(self.words + 4)
        self.prefix = torch.tensor([self.layout.bos, 1])
        self.template = Template.words(self.layout, self.length)
        every = torch.cartesian_prod(*self.template.on(self.prefix.device))
        self.order = log_perplexity(self.model, self.prefix, every).argsort()

    def canary(self, position: int) -> Tensor:
        """Return the continuation at this position, from 0, in the order of scores."""
        code = int(self.order[position])
        return torch.tensor([code // self.words**k % self.words + 1 for k in reversed(range(self.length))])

    def exposure(self, canary: Tensor) -> float:
        found = enumerate_space(self.model, self.prefix, canary, self.template)
        assert found is not None
        return found.exposure

    def estimate(self, canary: Tensor, samples: int, seed: int) -> Exposure:
        return space_exposure(self.model, self.prefix, canary, self.template, samples, seed)


@pytest.mark.parametrize(("models", "least"), [(50, 46), pytest.param(200, 186, marks=pytest.mark.nightly)])
def test_intervals_cover_over_models_and_canaries(models: int, least: int) -> None:
    """Ranks are from 1 to the last. At 95% coverage, fewer than `least` cover in about 10% of cases; it is higher."""
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
def test_estimated_probability_is_unbiased(position: int) -> None:
    """The mean of 80 estimates has a standard error of s/9. It deviates by more than 4 of these once in 16,000."""
    space = Space(space_model(12, 2, 1.0), 12, 3)
    canary = space.canary(position)
    estimates = 2 ** -np.array([space.estimate(canary, 1_000, seed).bits for seed in range(80)])
    truth = 2 ** -space.exposure(canary)
    assert abs(estimates.mean() - truth) <= 4 * estimates.std() / 80**0.5


def test_drawing_in_pieces_changes_no_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    model, layout = space_model(12, 3, 1.0, torch.float32), Layout(16)
    arguments = model, torch.tensor([layout.bos, 2]), Template.words(layout, 3), {0.0: 0.5, 1.0: 0.5}, 50
    whole = draw(*arguments, stream(0, "pieces"))
    monkeypatch.setattr("flsim.measures.memorization.score.CPU_FLOATS", 7 * 16)
    pieces = draw(*arguments, stream(0, "pieces"))
    assert torch.equal(pieces.words, whole.words)
    torch.testing.assert_close(pieces.log_densities, whole.log_densities, rtol=1e-5, atol=1e-5)


def test_equal_scores_in_another_order_of_summation_are_ties() -> None:
    """The event has 4 sequences: three times the likeliest word, and the three orders of the canary's words, because
    words are independent without the recurrence. Rounding would exclude orders, and leave 2 or 3 sequences."""
    layout = Layout(16)
    for seed in range(10):
        model = space_model(12, seed, 1.0)
        with torch.no_grad():
            model.projection.zero_()
        best, second = (model.output_bias[1:13].argsort(descending=True)[:2] + 1).tolist()
        canary = torch.tensor([best, second, best])
        space = Template.words(layout, len(canary))
        found = space_exposure(model, torch.tensor([layout.bos]), canary, space, 20_000, 0)
        assert found.bits == pytest.approx(np.log2(12**3 / 4), abs=0.15)
        assert found.high - found.low < 0.3


@pytest.mark.parametrize("scale", SCALES)
def test_no_sample_of_the_event_is_heavier_than_the_heaviest(scale: float) -> None:
    """The limit is also close to 1 / 0.2 at the greatest score, therefore intervals are not unnecessarily wide."""
    model, layout = space_model(12, 8, scale), Layout(16)
    shares = {0.0: 0.2, 0.5: 0.3, 1.0: 0.5}
    draws = draw(model, torch.tensor([layout.bos]), Template.words(layout, 3), shares, 2_000, stream(0, "heaviest"))
    weights, scores = draws.weights(), draws.scores.numpy()
    for bound in np.quantile(scores, [0, 0.1, 0.5, 0.9, 1]):
        assert weights[scores <= bound].max() <= draws.heaviest(bound) * (1 + 1e-9)
    assert draws.heaviest(scores.max()) <= 1 / 0.2 * (1 + 1e-9)
