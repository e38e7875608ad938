"""Tests check that no measure accepts a model with weights that are not finite."""

import math
from collections.abc import Callable

import pytest
import torch
from memorization.oracle import LAYOUT, all_phrases, decide, random_model, rank

from flsim.base.errors import Diverged
from flsim.base.rng import stream
from flsim.measures.memorization.exposure import calibrated_rank, draw, mean_scores, space_exposure
from flsim.measures.memorization.score import Template, log_perplexity
from flsim.measures.memorization.search import beam_search, enumerate_space, shortest_path
from flsim.models.architectures import CIFGLanguageModel

BOS, CANARY, AMONG = torch.tensor([LAYOUT.bos]), torch.tensor((1, 2, 3, 4)), torch.tensor(all_phrases(4))
PHRASES = Template.words(LAYOUT, 4)


@pytest.mark.parametrize(
    "measure",
    [
        lambda model: log_perplexity(model, BOS, AMONG),
        lambda model: rank(model, BOS, CANARY, AMONG),
        lambda model: decide(model, BOS, CANARY, AMONG),
        lambda model: calibrated_rank(model, BOS, CANARY, AMONG, 1.0, mean_scores([random_model(1)], BOS, AMONG)),
        lambda model: beam_search(model, BOS, PHRASES, 5),
        lambda model: shortest_path(model, BOS, PHRASES),
        lambda model: enumerate_space(model, BOS, CANARY, PHRASES),
        lambda model: draw(model, BOS, PHRASES, {1.0: 1.0}, 5, stream(0, "none")),
        lambda model: space_exposure(model, BOS, CANARY, PHRASES, 1_000, 0),
    ],
)
def test_measuring_a_model_with_nan_is_an_error(measure: Callable[[CIFGLanguageModel], object]) -> None:
    """Every measure raises `Diverged`. NaN compares false with everything, so a naive rank would be 1."""
    for parameter in ("output_bias", "embedding", "gate_bias"):
        model = random_model(0)
        with torch.no_grad():
            model.get_parameter(parameter).view(-1)[-1] = math.nan
        with pytest.raises(Diverged, match="not finite"):
            measure(model)
