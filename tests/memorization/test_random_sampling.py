"""Tests compare ranks of Random Sampling with enumeration of every continuation."""

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memorization.oracle import LAYOUT, Noisy, Oracle, Phrase, all_phrases, decide, random_model, rank
from torch import Tensor

from flsim.base.rng import stream
from flsim.data.records import Layout
from flsim.measures.memorization import score
from flsim.measures.memorization.score import TIE, OutputBounds, log_perplexity, references
from flsim.models import architectures
from flsim.models.architectures import CIFGLanguageModel, ModelHParams
from flsim.models.language_model import LanguageModel, State, Stepper

PHRASES = all_phrases(4)
BOS = (LAYOUT.bos,)


def rank_of(model: LanguageModel, prefix: Phrase, phrase: Phrase, among: list[Phrase]) -> int:
    return rank(model, torch.tensor(prefix), torch.tensor(phrase), torch.tensor(among))


@settings(max_examples=30, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.0, 0.1, 1.0, 5.0, 50.0]),
    prefix=st.lists(st.integers(0, 7), max_size=3),
    chosen=st.lists(st.integers(0, 255), min_size=1, max_size=60),
    copies=st.integers(0, 3),
    rows=st.sampled_from([1, 2, 7, 1000]),
    summed=st.sampled_from([1, 3, 8]),
    wide=st.sampled_from([0.0, 0.5, math.inf]),
)
def test_rank_equals_brute_force(
    seed: int, scale: float, prefix: list[int], chosen: list[int], copies: int, rows: int, summed: int, wide: float
) -> None:
    """The rank is right for R in any order, with repetitions, with the canary, and for saturated models with ties."""
    model, p, canary = random_model(seed, scale), (*BOS, *prefix), PHRASES[seed % 256]
    among = [PHRASES[index] for index in chosen] + [canary] * copies
    oracle = Oracle(model)
    scores, own = oracle.scores(p, among), oracle.score(p, canary)
    slack = 1e-9 * (1 + own)  # the oracle's rounding could decide smaller differences
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score, "CPU_FLOATS", rows * LAYOUT.vocabulary_size)
        patch.setattr("flsim.measures.memorization.score.SUMMED", summed)
        patch.setattr("flsim.measures.memorization.score.WIDE", wide)
        found = rank_of(model, p, canary, among)
        assert decide(model, *map(torch.tensor, (p, canary, among))) == (found == 1)
    assert 1 + (scores <= own - slack).sum() <= found <= 1 + (scores <= own + slack).sum()
    assert found >= 1 + among.count(canary)


def test_equal_scores_in_another_order_of_summation_are_ties() -> None:
    """All 24 orders of four words are equally likely, because words are independent without the recurrence."""
    for seed in range(20):
        model = random_model(seed)
        with torch.no_grad():
            model.projection.zero_()
        assert rank_of(model, BOS, (1, 2, 3, 4), list(permutations((1, 2, 3, 4)))) == 24 + 1


def test_copies_of_the_canary_are_ties_with_any_rounding() -> None:
    """All 50 copies count as ties. Without this rule, rounding would score about half of them above the canary."""
    assert rank_of(Noisy(random_model(0), noise=1e-3), BOS, (1, 2, 3, 4), [(1, 2, 3, 4)] * 50) == 51


def test_a_reference_that_reaches_the_canarys_score_early_is_kept() -> None:
    """Word 1 costs 0 nats, other words 800. So 12 phrases cost 800, with any place of the other word, and one 0."""
    model = random_model(0, scale=0.0)
    with torch.no_grad():
        model.output_bias[1] = 800.0
    for canary in [phrase for phrase in PHRASES if phrase.count(1) == 3]:
        assert rank_of(model, BOS, canary, PHRASES) == 1 + 12 + 1


def test_the_first_reference_that_beats_the_canary_ends_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """`decide` reads only the 8 likeliest references by unigrams (8 x 3 states), the sample (4 x 3), the canary (3)."""
    monkeypatch.setattr("flsim.measures.memorization.score.LIKELY", (8,))
    monkeypatch.setattr("flsim.measures.memorization.score.TYPICAL", 4)
    model, among = Noisy(random_model(3)), torch.tensor(PHRASES)
    worst = among[int(np.argmax(Oracle(model.model).scores(BOS, PHRASES)))]
    others = among[(worst != among).any(1)]
    assert not decide(model, torch.tensor(BOS), worst, others)
    assert model.read <= 8 * 3 + 4 * 3 + 3
    model.read = 0
    assert rank(model, torch.tensor(BOS), worst, others) == 256
    assert model.read == 4 + 16 + 64 + 3


def test_references_are_words_drawn_uniformly_from_the_seed() -> None:
    """Counts of 4 words have the mean 40,000 / 4 and deviation 87. In 1 of 400,000 seeds, one deviates by 5 x 87."""
    drawn = references(3, 10_000, 4, LAYOUT)
    assert drawn.shape == (10_000, 4)
    assert drawn.dtype == torch.int64
    assert drawn.tolist() == sorted(drawn.tolist())
    counts = torch.bincount(drawn.flatten(), minlength=8)
    assert counts[[0, 5, 6, 7]].sum() == 0
    assert (counts[1:5] - 10_000).abs().max() < 5 * 87
    assert torch.equal(drawn, references(3, 10_000, 4, LAYOUT))
    assert not torch.equal(drawn, references(4, 10_000, 4, LAYOUT))


def test_more_references_contain_fewer_references_of_the_same_seed() -> None:
    few, many = (references(0, count, 5, Layout(1000)).tolist() for count in (100, 300))
    assert all(row in many for row in few)


V, D = 40, 6


def layer(seed: int, spread: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return E [V, D], b [V], and 5 outputs [5, D] that are close to each other."""
    rng = stream(seed, "test output layer")
    weight, bias = spread * rng.normal(size=(V, D)), spread * rng.normal(size=V)
    outputs = rng.normal(size=D) + 0.3 * rng.normal(size=(5, D))
    return torch.tensor(weight, dtype=dtype), torch.tensor(bias, dtype=dtype), torch.tensor(outputs, dtype=dtype)


def around(seed: int, spread: float, summed: int, dtype: torch.dtype) -> tuple[OutputBounds, Tensor, Tensor, Tensor]:
    weight, bias, outputs = layer(seed, spread, dtype)
    likely = (outputs @ weight.T + bias).softmax(1).mean(0)
    return OutputBounds(weight, bias, outputs, likely, summed), weight, bias, outputs


@settings(max_examples=60, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.0, 0.01, 0.3, 1.0, 5.0]),
    far=st.sampled_from([0.0, 1e-4, 0.1, 1.0, 10.0, 100.0]),
    summed=st.sampled_from([0, 1, 4, 20, V, 2 * V]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_bounds_contain_the_true_values(seed: int, spread: float, far: float, summed: int, dtype: torch.dtype) -> None:
    """Bounds and rounding contain log Z and logits, which numpy computes in float64 from the same numbers."""
    bounds, weight, bias, outputs = around(seed, spread, summed, dtype)
    reached = outputs + far * torch.from_numpy(stream(seed, "away").normal(size=outputs.shape)).to(dtype)
    logits = reached.double().numpy() @ weight.double().numpy().T + bias.double().numpy()
    truth = np.logaddexp.reduce(logits, axis=1)
    rounding = bounds.rounding(reached).numpy()
    low, high = bounds.log_sum_exp(reached)
    assert (low.numpy() - rounding <= truth).all()
    assert (truth <= high.numpy() + rounding).all()
    assert (np.abs(bounds.exact_log_sum_exp(reached).numpy() - truth) <= rounding).all()
    center = outputs.mean(0, keepdim=True)  # at the center, the bounds are tight
    exact = torch.logsumexp(center.double() @ weight.double().T + bias.double(), 1)
    for bound in bounds.log_sum_exp(center):
        torch.testing.assert_close(bound.double(), exact, rtol=1e-5, atol=1e-5)
    rows, words = (torch.from_numpy(ids.ravel()) for ids in np.indices(logits.shape))
    assert (bounds.logits_at_most(reached, rows, words).numpy() >= logits.ravel() - rounding[rows]).all()
    assert (np.abs(bounds.logits(reached, rows, words).numpy() - logits.ravel()) <= rounding[rows]).all()


def test_reduced_precision_of_products_is_allowed_for() -> None:
    """The rounding grows more than 1,000 times if torch may round float32 factors; else the bounds would be wrong."""
    bounds, _, _, outputs = around(3, 1.0, 4, torch.float32)
    precise = bounds.rounding(outputs)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert (bounds.rounding(outputs) > 1000 * precise).all()
    finally:
        torch.set_float32_matmul_precision(before)


class Plain:
    """A model with only the methods `start` and `step` of another one."""

    def __init__(self, model: LanguageModel) -> None:
        self.start, self.step = model.start, model.step


class Counting(CIFGLanguageModel):
    """A model that records the number of states of each of its steps."""

    def __init__(self, vocabulary_size: int, hparams: ModelHParams) -> None:
        super().__init__(vocabulary_size, hparams)
        self.stepped: list[int] = []

    def stepper(self) -> Stepper:
        step = super().stepper()

        def counted(state: State, rows: Tensor, tokens: Tensor) -> State:
            self.stepped.append(len(rows))
            return step(state, rows, tokens)

        return counted


def lively(model: CIFGLanguageModel, layout: Layout, seed: int, scale: float) -> CIFGLanguageModel:
    """Initialize a model with scaled output and biases of a Zipf law: its costs vary like a trained model's."""
    model.initialize(seed)
    rng = stream(seed, "test biases")
    with torch.no_grad():
        model.projection.mul_(scale)
        model.gate_bias.copy_(torch.from_numpy(rng.normal(size=tuple(model.gate_bias.shape))))
        model.output_bias[layout.first_word : layout.last_word + 1] = -torch.arange(1.0, layout.words + 1).log() / 2
    return model


@settings(max_examples=12, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.0, 1.0, 5.0, 20.0]),
    words=st.integers(1, 5),
    prefix=st.lists(st.integers(1, 36), max_size=2),
    summed=st.sampled_from([2, 16, 40]),
    likely=st.sampled_from([(1, 3), (200, 201), ()]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_bounds_give_the_rank_of_the_path_without_bounds(
    seed: int, scale: float, words: int, prefix: list[int], summed: int, likely: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Ranks and `decide` agree for references of one to five words, canaries in R or not, and any order of checks."""
    layout = Layout(40)
    model = lively(CIFGLanguageModel(40, ModelHParams(4, 7)), layout, seed, scale).to(dtype)
    among = references(seed, 300, words, layout)
    scores = log_perplexity(model, p := torch.tensor([layout.bos, *prefix]), among)
    order = scores.argsort()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flsim.measures.memorization.score.SUMMED", summed)
        patch.setattr("flsim.measures.memorization.score.LIKELY", likely)
        for place in (0, 1, 150, 299):
            canary, own = among[order[place]], scores[order[place]]
            near = 1e3 * TIE * torch.finfo(dtype).eps * (1 + own)  # rounding could decide smaller differences
            others = among[((scores - own).abs() > near) | (among == canary).all(1)]
            for r in (others, others[(others != canary).any(1)]):
                found = rank(model, p, canary, r)
                assert found == rank(Plain(model), p, canary, r)
                assert decide(model, p, canary, r) == decide(Plain(model), p, canary, r) == (found == 1)


def test_pieces_limit_the_states_in_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, states, model = Layout(1_000), 100, Counting(1_000, ModelHParams(12, 16))
    lively(model, layout, seed=1, scale=5.0)
    prefix, among = torch.tensor([layout.bos]), references(0, 1_000, 3, layout)
    canary = among[500]
    whole = rank(model, prefix, canary, among)
    model.stepped = []
    monkeypatch.setattr(score, "CPU_FLOATS", states * model.projection.shape[0])
    monkeypatch.setattr(architectures, "CPU_GATES", 30 * model.gate_bias.numel())
    assert rank(model, prefix, canary, among) == whole
    assert max(model.stepped) == states
