"""Every search over a space of thousands of secrets equals brute force, which scores each of them whole."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from memorization.oracle import LAYOUT as WORDS
from memorization.oracle import all_phrases, decide, random_model
from memorization.oracle import rank as rank_of
from networks import random_network

from flsim.base.errors import Diverged
from flsim.base.rng import stream
from flsim.data.vocabulary import Layout
from flsim.measures.memorization.beam_search import beam_search
from flsim.measures.memorization.calibrated import calibrated_rank, mean_scores
from flsim.measures.memorization.enumeration import enumerate_space
from flsim.measures.memorization.generation import generate
from flsim.measures.memorization.importance_sampling import space_exposures
from flsim.measures.memorization.random_sampling import RandomSampler
from flsim.measures.memorization.score import log_perplexity
from flsim.measures.memorization.shortest_path import shortest_path
from flsim.measures.memorization.template import Template
from flsim.models.cifg import CIFGLanguageModel
from flsim.models.hparams import ModelHParams

LAYOUT = Layout(40)  # of characters: ten of them are digits
DIGITS = range(LAYOUT.first_word, LAYOUT.first_word + 10)
DASH = LAYOUT.first_word + 10
SPACES = {
    "{d2}-{d1}": Template.from_positions([*[DIGITS] * 2, DASH, DIGITS]),
    "{d3}-{d2}": Template.from_positions([*[DIGITS] * 3, DASH, *[DIGITS] * 2]),
}
NETWORKS = (ModelHParams(6, 8, "lstm", layers=2), ModelHParams(6, 8, "gru"), ModelHParams(6, 8, "convolutional"))


@pytest.mark.parametrize("space", ["{d2}-{d1}", pytest.param("{d3}-{d2}", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.architecture)
def test_searches_over_all_secrets(space: str, network: ModelHParams) -> None:
    """float64 scores that differ by more than rounding, as random ones do. The text before a secret is known."""
    template, model = SPACES[space], random_network(network, 3, 0.5, LAYOUT)
    prefix = torch.tensor([LAYOUT.bos, 20, 21, 22])
    grids = np.meshgrid(*[np.array(ids) for ids in template.allowed], indexing="ij")
    every = torch.from_numpy(np.stack([grid.ravel() for grid in grids], axis=1))
    assert len(every) == template.space in (10**3, 10**5)
    scores = log_perplexity(model, prefix, every)
    order = scores.argsort()
    assert float(scores[order].diff().min()) > 0

    best = shortest_path(model, prefix, template)
    assert best.complete
    assert best.tokens == tuple(every[order[0]].tolist())
    assert best.score == pytest.approx(float(scores.min()), rel=1e-12)
    phrases, costs = beam_search(model, prefix, template, width=template.space)
    assert torch.equal(phrases, every[order])
    assert costs.tolist() == pytest.approx(scores[order].tolist(), rel=1e-12)

    for rank in (1, 2, 17, len(every) // 25, len(every)):
        secret = every[order[rank - 1]]
        others = torch.cat([every[order[: rank - 1]], every[order[rank:]]])
        exact = enumerate_space(model, prefix, secret, template, most_read=10**6)
        assert exact is not None
        assert exact.rank == RandomSampler(model, others).rank(prefix, secret).rank == rank
        assert RandomSampler(model, others).decide(prefix, secret) == (rank == 1)


BOS, CANARY, AMONG = torch.tensor([WORDS.bos]), torch.tensor((1, 2, 3, 4)), torch.tensor(all_phrases(4))
PHRASES = Template.words(WORDS, 4)


@pytest.mark.parametrize("parameter", ["output_bias", "embedding", "gate_bias"])
@pytest.mark.parametrize(
    "measure",
    [
        lambda model: log_perplexity(model, BOS, AMONG),
        lambda model: rank_of(model, BOS, CANARY, AMONG),
        lambda model: decide(model, BOS, CANARY, AMONG),
        lambda model: calibrated_rank(model, BOS, CANARY, AMONG, 1.0, mean_scores([random_model(1)], BOS, AMONG)),
        lambda model: beam_search(model, BOS, PHRASES, 5),
        lambda model: shortest_path(model, BOS, PHRASES),
        lambda model: enumerate_space(model, BOS, CANARY, PHRASES),
        lambda model: generate(model, BOS, PHRASES, 5, stream(0, "none")),
        lambda model: space_exposures(model, BOS, CANARY[None], PHRASES, 1_000, 0),
    ],
)
def test_a_model_with_nan_measures_nothing(measure: Callable[[CIFGLanguageModel], object], parameter: str) -> None:
    """NaN compares false with everything, so a naive rank would be 1."""
    model = random_model(0)
    with torch.no_grad():
        model.get_parameter(parameter).view(-1)[-1] = math.nan
    with pytest.raises(Diverged, match="not finite"):
        measure(model)
