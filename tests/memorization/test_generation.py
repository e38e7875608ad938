"""Generative sampling against the distribution that it should draw from, in closed form."""

from collections import Counter

import numpy as np
import pytest
import torch
from memorization.oracle import LAYOUT, Oracle, random_model
from scipy.stats import chisquare

from flsim.base.rng import stream
from flsim.measures.memorization import generation, score
from flsim.measures.memorization.generation import generate
from flsim.measures.memorization.template import Template
from flsim.models.cifg import CIFGLanguageModel

BOS = torch.tensor([LAYOUT.bos])
Phrase = tuple[int, ...]


def probabilities(model: CIFGLanguageModel, template: Template) -> dict[Phrase, float]:
    """Return Pr(id) of each sequence that fits the template after BOS, normalized, by the definition."""
    oracle = Oracle(model)
    made: dict[Phrase, float] = {(): 1.0}
    for ids in template.allowed:
        longer = {}
        for beginning, before in made.items():
            weights = np.exp(-oracle.costs((LAYOUT.bos, *beginning))[list(ids)])
            for word, weight in zip(ids, weights / weights.sum(), strict=True):
                longer[*beginning, word] = before * float(weight)
        made = longer
    return made


@pytest.mark.parametrize(
    "template",
    [Template.words(LAYOUT, 3), Template.tokens(LAYOUT, 2), Template.from_positions([[1, 2, 5], 4, [0, 3]])],
)
def test_samples_have_the_distribution(template: Template) -> None:
    """Chi-square over all sequences that can be: one fixed draw each, that fails by chance once in 10,000."""
    model = random_model(2)
    sampled = generate(model, BOS, template, 20_000, stream(0, "samples"))
    assert sampled.shape == (20_000, template.length)
    counted = Counter(map(tuple, sampled.tolist()))
    expected = probabilities(model, template)
    assert set(counted) <= {phrase for phrase, probability in expected.items() if probability}
    often = [phrase for phrase, probability in expected.items() if probability * 20_000 > 5]
    rest = 1 - sum(expected[phrase] for phrase in often)
    observed = [*(counted[phrase] for phrase in often), 20_000 - sum(counted[phrase] for phrase in often)]
    shares = [*(expected[phrase] for phrase in often), rest]
    if not rest * 20_000 > 5:
        observed, shares = observed[:-1], [share / (1 - rest) for share in shares[:-1]]
    total = sum(observed)
    assert chisquare(observed, [share * total for share in shares]).pvalue > 1e-4


def test_pieces_change_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    model, template = random_model(5), Template.tokens(LAYOUT, 4)
    whole = generate(model, BOS, template, 500, stream(0, "pieces"))
    monkeypatch.setattr(score, "CPU_FLOATS", 5 * LAYOUT.vocabulary_size)
    monkeypatch.setattr(generation, "PIECE", 60)
    assert torch.equal(generate(model, BOS, template, 500, stream(0, "pieces")), whole)


def test_what_has_no_weight_is_never_drawn_even_by_the_extreme_numbers() -> None:
    """0 and the largest number below 1, of rows that begin and end with nothing."""
    summed = torch.tensor([[0.0, 0.3, 0.3, 1.0, 1.0], [0.0, 0.0, 0.7, 0.7, 0.7]], dtype=torch.float64)
    numbers = torch.tensor([0.0, 1 - 2**-53, 0.0, 1 - 2**-53, 0.3, 0.29], dtype=torch.float64)
    rows = torch.tensor([0, 0, 1, 1, 0, 0])
    assert generation._invert(summed, rows, numbers).tolist() == [1, 3, 2, 2, 3, 1]
