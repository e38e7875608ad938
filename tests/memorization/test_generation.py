"""Generative sampling against the distribution that it should draw from, in closed form."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memorization.oracle import LAYOUT, Oracle, random_model
from numpy.typing import NDArray
from scipy.stats import chisquare

from flsim.base.errors import Diverged, InputError
from flsim.base.rng import stream
from flsim.measures.memorization import generation, score
from flsim.measures.memorization.generation import GenerationHParams, generate, generative_sampling, sampling_nats
from flsim.measures.memorization.template import Template
from flsim.models.cifg import CIFGLanguageModel

BOS = torch.tensor([LAYOUT.bos])
Phrase = tuple[int, ...]


def distribution(oracle: Oracle, so_far: Phrase, ids: Phrase, hparams: GenerationHParams) -> NDArray[np.float64]:
    """Pr(id)^(1/T), of the `top_k` likeliest that fit, normalized: by the definition."""
    weights = np.exp(-oracle.costs(so_far)[list(ids)] / hparams.temperature)
    weights[np.argsort(-weights, kind="stable")[hparams.top_k or len(ids) :]] = 0
    return np.asarray(weights / weights.sum())


def probabilities(model: CIFGLanguageModel, template: Template, hparams: GenerationHParams) -> dict[Phrase, float]:
    """Of every sequence of the template after BOS."""
    oracle = Oracle(model)
    made: dict[Phrase, float] = {(): 1.0}
    for ids in template.allowed:
        made = {
            (*beginning, word): before * float(share)
            for beginning, before in made.items()
            for word, share in zip(ids, distribution(oracle, (LAYOUT.bos, *beginning), ids, hparams), strict=True)
        }
    return made


settings_of_sampling = pytest.mark.parametrize(
    ("template", "temperature", "top_k"),
    [
        (Template.words(LAYOUT, 3), 1.0, None),
        (Template.tokens(LAYOUT, 2), 1.0, None),
        (Template.tokens(LAYOUT, 2), 0.5, 3),
        (Template.from_positions([[1, 2, 5], 4, [0, 3]]), 3.0, 2),
    ],
)


@settings_of_sampling
@pytest.mark.parametrize("pieces", [True, False])
def test_samples_have_the_distribution(
    template: Template, temperature: float, top_k: int | None, pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chi-square over all sequences that can be: one fixed draw each, that fails by chance once in 10,000."""
    if pieces:
        monkeypatch.setattr(score, "CPU_FLOATS", 3 * LAYOUT.vocabulary_size)
        monkeypatch.setattr(generation, "PIECE", 1000)
    model, hparams = random_model(2), GenerationHParams(20_000, temperature, top_k)
    sampled = generate(model, BOS, template, hparams, stream(0, "samples"))
    assert sampled.shape == (20_000, template.length)
    counted = Counter(map(tuple, sampled.tolist()))
    expected = probabilities(model, template, hparams)
    assert set(counted) <= {phrase for phrase, probability in expected.items() if probability}
    often = [phrase for phrase, probability in expected.items() if probability * 20_000 > 5]
    rest = 1 - sum(expected[phrase] for phrase in often)
    observed = [*(counted[phrase] for phrase in often), 20_000 - sum(counted[phrase] for phrase in often)]
    shares = [*(expected[phrase] for phrase in often), rest]
    if not rest * 20_000 > 5:
        observed, shares = observed[:-1], [share / (1 - rest) for share in shares[:-1]]
    total = sum(observed)
    assert chisquare(observed, [share * total for share in shares]).pvalue > 1e-4


@settings_of_sampling
def test_the_probability_of_a_sample_is_that_of_the_definition(
    template: Template, temperature: float, top_k: int | None
) -> None:
    model, hparams = random_model(3), GenerationHParams(1, temperature, top_k)
    for phrase, probability in probabilities(model, template, hparams).items():
        found = sampling_nats(model, BOS, torch.tensor(phrase), template, hparams)
        assert found == pytest.approx(-math.log(probability) if probability else math.inf, rel=1e-9, abs=1e-9)


@settings(max_examples=30, derandomize=True)
@given(seed=st.integers(0, 10**6), phrase=st.lists(st.integers(0, 7), min_size=1, max_size=5))
def test_without_options_it_is_the_log_perplexity(seed: int, phrase: list[int]) -> None:
    model, template = random_model(seed), Template.tokens(LAYOUT, len(phrase))
    found = sampling_nats(model, BOS, torch.tensor(phrase), template, GenerationHParams(1))
    assert found == pytest.approx(Oracle(model).score((LAYOUT.bos,), tuple(phrase)), rel=1e-9, abs=1e-12)


def test_the_wait_for_the_canary_is_geometric() -> None:
    """Over 400 draws its mean is 1 / probability, within four standard errors; hits are counted from the first."""
    model, template, waits = random_model(1), Template.words(LAYOUT, 2), []
    canary = torch.tensor([2, 3])
    for key in range(400):
        found = generative_sampling(model, BOS, canary, template, GenerationHParams(600), stream(0, "wait", key))
        assert found.first is not None
        sampled = generate(model, BOS, template, GenerationHParams(600), stream(0, "wait", key)).tolist()
        assert found.first == sampled.index([2, 3]) + 1
        assert found.hits == sampled.count([2, 3])
        waits.append(found.first)
    expected = 1 / probabilities(model, template, GenerationHParams(1))[2, 3]
    assert found.expected == pytest.approx(expected, rel=1e-9)
    assert 3 < expected < 30  # so that 600 samples never missed it: (1 - 1/30)^600 = 1e-9
    deviation = math.sqrt(1 - 1 / expected) * expected
    assert abs(np.mean(waits) - expected) < 4 * deviation / math.sqrt(len(waits))


def test_a_canary_that_cannot_come_never_does() -> None:
    for template, top_k in ((Template.from_positions([[1, 2], [1, 2]]), None), (Template.words(LAYOUT, 2), 1)):
        model, hparams = random_model(0, 0.0), GenerationHParams(500, top_k=top_k)
        found = generative_sampling(model, BOS, torch.tensor([1, 4]), template, hparams, stream(0, "never"))
        assert (found.hits, found.first, found.nats, found.expected) == (0, None, math.inf, math.inf)


def test_low_temperatures_and_one_choice_are_greedy() -> None:
    model, template = random_model(9), Template.words(LAYOUT, 4)
    greedy = generate(model, BOS, template, GenerationHParams(50, top_k=1), stream(0, "a"))
    cold = generate(model, BOS, template, GenerationHParams(50, temperature=1e-6), stream(0, "b"))
    assert torch.equal(greedy, greedy[:1].expand(50, -1))
    assert torch.equal(cold, greedy)


def test_pieces_change_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    model, template, hparams = random_model(5), Template.tokens(LAYOUT, 4), GenerationHParams(500)
    whole = generate(model, BOS, template, hparams, stream(0, "pieces"))
    monkeypatch.setattr(score, "CPU_FLOATS", 5 * LAYOUT.vocabulary_size)
    monkeypatch.setattr(generation, "PIECE", 60)
    assert torch.equal(generate(model, BOS, template, hparams, stream(0, "pieces")), whole)


def test_what_has_no_weight_is_never_drawn_even_by_the_extreme_numbers() -> None:
    """0 and the largest number below 1, of rows that begin and end with nothing."""
    summed = torch.tensor([[0.0, 0.3, 0.3, 1.0, 1.0], [0.0, 0.0, 0.7, 0.7, 0.7]], dtype=torch.float64)
    numbers = torch.tensor([0.0, 1 - 2**-53, 0.0, 1 - 2**-53, 0.3, 0.29], dtype=torch.float64)
    rows = torch.tensor([0, 0, 1, 1, 0, 0])
    assert generation._invert(summed, rows, numbers).tolist() == [1, 3, 2, 2, 3, 1]


def test_values_that_are_not_finite_are_refused() -> None:
    model = random_model(0)
    with torch.no_grad():
        model.gate_bias[0] = math.nan
    with pytest.raises(Diverged, match="not finite"):
        generate(model, BOS, Template.words(LAYOUT, 2), GenerationHParams(5), stream(0, "none"))


@pytest.mark.parametrize("options", [{"samples": 0}, {"temperature": 0.0}, {"temperature": math.inf}, {"top_k": 0}])
def test_options_that_make_no_sense_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        GenerationHParams(**options)  # type: ignore[arg-type]
