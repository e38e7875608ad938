"""Tests compare built-in networks with their equations, steps with complete reading, and attacks with brute force."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from memorization.oracle import LAYOUT, Oracle, all_phrases, decide, rank
from networks import ALL, OTHERS, Equations, name_of, random_network

from flsim.base.errors import InputError
from flsim.measures.memorization.score import Template
from flsim.measures.memorization.search import beam_search, enumerate_space, shortest_path
from flsim.models import language_model
from flsim.models.architectures import BUILT_IN, CIFGLanguageModel, ModelHParams, build, restore, weights_of
from flsim.models.language_model import loss_sum, predictions, quantized

BOS = (LAYOUT.bos,)
tokens_strategy = st.lists(st.integers(0, LAYOUT.vocabulary_size - 1), min_size=1, max_size=9)
every = pytest.mark.parametrize("hparams", ALL, ids=name_of)
others = pytest.mark.parametrize("hparams", OTHERS, ids=name_of)


@every
@settings(max_examples=10)
@given(seed=st.integers(0, 1_000), tokens=tokens_strategy, scale=st.sampled_from([0.1, 1.0, 3.0]))
def test_the_model_equals_its_equations(hparams: ModelHParams, seed: int, tokens: list[int], scale: float) -> None:
    model = random_network(hparams, seed, scale)
    oracle = Equations(model) if hparams in OTHERS else Oracle(model)
    expected = [-oracle.costs(tuple(tokens[: time + 1])) for time in range(len(tokens))]
    found = model(torch.tensor([tokens])).log_softmax(-1)[0].detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@every
@settings(max_examples=10)
@given(seed=st.integers(0, 1_000), rows=st.lists(tokens_strategy, min_size=1, max_size=4), data=st.data())
def test_start_and_step_equal_reading_the_complete_sequence(
    hparams: ModelHParams, seed: int, rows: list[list[int]], data: st.DataObject
) -> None:
    """Steps begin at any place, with any choice and order of rows. Reading in small pieces gives equal results."""
    time = min(map(len, rows))
    tokens = torch.tensor([row[:time] for row in rows])
    model = random_network(hparams, seed)
    log_probs = model(tokens).log_softmax(-1)
    first = data.draw(st.integers(1, time))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language_model, "FLOATS", data.draw(st.sampled_from((1, 2**26))))
        state, found = model.start(tokens[:, :first])
        torch.testing.assert_close(found, log_probs[:, first - 1], rtol=0, atol=1e-10)
        chosen = torch.tensor(data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=5)))
        state = tuple(part[chosen] for part in state)
        for place in range(first, time):
            state, found = model.step(state, tokens[chosen, place])
            assert {len(part) for part in state} == {len(chosen)}
            torch.testing.assert_close(found, log_probs[chosen, place], rtol=0, atol=1e-10)


@every
@settings(max_examples=10)
@given(seed=st.integers(0, 1_000), tokens=tokens_strategy, data=st.data())
def test_logits_depend_only_on_the_past(
    hparams: ModelHParams, seed: int, tokens: list[int], data: st.DataObject
) -> None:
    model, changed = random_network(hparams, seed), data.draw(st.integers(0, len(tokens) - 1))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.startswith("filters.") and name.endswith(".bias"):
                value.add_(30)  # no ReLU of the first layer is closed, which would hide the token
    other = [*tokens[:changed], *((token + 1) % LAYOUT.vocabulary_size for token in tokens[changed:])]
    one, two = (model(torch.tensor([each]))[0] for each in (tokens, other))
    torch.testing.assert_close(one[:changed], two[:changed], rtol=0, atol=1e-10)
    assert not torch.allclose(one[changed], two[changed])


@every
@settings(max_examples=10)
@given(rows=st.lists(tokens_strategy, min_size=1, max_size=4), padding=st.integers(0, 3))
def test_padding_and_other_records_have_no_effect(hparams: ModelHParams, rows: list[list[int]], padding: int) -> None:
    """Losses and gradients of a padded batch equal the sums over its single records."""
    model = random_network(hparams, 1)
    inputs, targets = torch.zeros(2, len(rows), 9 + padding, dtype=torch.int64)
    parts = []
    for row, tokens in enumerate(rows):
        tokens = [token or 1 for token in tokens]
        inputs[row, : len(tokens)] = targets[row, : len(tokens)] = torch.tensor(tokens)
        parts.append(loss_sum(model, torch.tensor([tokens]), torch.tensor([tokens])))
    total, count = loss_sum(model, inputs, targets)
    alone = torch.stack([loss for loss, _ in parts]).sum()
    assert count == sum(found for _, found in parts)
    torch.testing.assert_close(total, alone, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(predictions(model, inputs, targets)[1].sum(), alone, rtol=1e-10, atol=1e-10)
    for ours, theirs in zip(*(torch.autograd.grad(it, list(model.parameters())) for it in (total, alone)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)


@every
def test_initialization_depends_only_on_the_seed(hparams: ModelHParams) -> None:
    """Draws of torch's global generator have no effect. Gains are 1, and biases are 0."""
    torch.empty(5).normal_()
    models = [build(30, hparams).initialize(seed) for seed in (0, 0, 1)]
    first, again, other = (torch.cat([p.flatten() for p in model.parameters()]) for model in models)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    for name, value in models[0].named_parameters():
        if value.dim() == 1:
            assert value.eq(float("norm" in name and "weight" in name)).all(), name
        else:
            assert value.ne(0).any(), name


@every
def test_embeddings_are_tied_and_a_copy_is_the_same_model(hparams: ModelHParams) -> None:
    model = random_network(hparams, 3)
    sizes = (LAYOUT.vocabulary_size, hparams.embedding)
    assert [name for name, value in model.named_parameters() if value.shape == sizes] == ["embedding"]
    copy = restore({name: value.detach() for name, value in model.named_parameters()}, hparams, LAYOUT.vocabulary_size)
    assert type(copy) is BUILT_IN[hparams.architecture]
    read = torch.tensor([[6, 1, 2]])
    assert torch.equal(copy(read), model(read))
    assert all(len(set(value.flatten().tolist())) <= 4 for value in quantized(model, 2).parameters())
    assert torch.equal(copy(read), model(read))


@every
def test_dropout_masks_the_inputs_and_the_outputs_of_the_network(hparams: ModelHParams) -> None:
    """Factors of 1 change nothing. With 0 after the network, only the bias counts; with 0 before it, no input does."""
    model = random_network(hparams, 3)
    inputs, other, targets = torch.tensor([[6, 1, 2, 3], [6, 3, 2, 1], [1, 2, 3, 7]])[:, None]
    kept = torch.ones(2, 1, 4, hparams.embedding, dtype=torch.float64)
    assert torch.equal(loss_sum(model, inputs, targets, dropout_mask=kept)[0], loss_sum(model, inputs, targets)[0])
    after = loss_sum(model, inputs, targets, dropout_mask=kept * torch.tensor([1.0, 0.0])[:, None, None, None])[0]
    torch.testing.assert_close(after, -model.output_bias.log_softmax(0)[targets].sum())
    before = kept * torch.tensor([0.0, 1.0])[:, None, None, None]
    assert torch.equal(*(loss_sum(model, read, targets, dropout_mask=before)[0] for read in (inputs, other)))


@others
@settings(max_examples=5)
@given(seed=st.integers(0, 1_000), prefix=st.lists(st.integers(1, 4), max_size=2), pick=st.integers(0, 63))
@example(seed=980, prefix=[], pick=0)  # a score of 1e-8, which rounds by 1e-13, like logits of 100
def test_attacks_equal_brute_force(hparams: ModelHParams, seed: int, prefix: list[int], pick: int) -> None:
    """Ranks in references and in the space, beam search and shortest path agree, over all 64 phrases of three words."""
    model, phrases, p = random_network(hparams, seed), all_phrases(3), (*BOS, *prefix)
    oracle = Equations(model)
    scores, canary = oracle.scores(p, phrases), phrases[pick]
    slack = 1e-9 * (1 + scores[pick])
    assume(np.sum(abs(scores - scores[pick]) < slack) == 1)  # else the oracle's own rounding would decide
    place = 1 + int((scores < scores[pick]).sum())
    prefixed, continuation = torch.tensor(p), torch.tensor(canary)
    rest = torch.tensor([phrase for phrase in phrases if phrase != canary])
    assert rank(model, prefixed, continuation, rest) == place
    assert decide(model, prefixed, continuation, rest) == (place == 1)
    found = enumerate_space(model, prefixed, continuation, Template.words(LAYOUT, 3))
    assert found is not None
    assert found.rank == place
    path = shortest_path(model, prefixed, Template.words(LAYOUT, 3))
    assert path.complete
    assert path.score == pytest.approx(scores.min(), rel=1e-9, abs=1e-12)
    beams, beam_scores, closest = oracle.beam(p, 3, 4)
    if closest > slack:
        assert path.tokens == phrases[scores.argmin()]
        tokens, found_scores = beam_search(model, prefixed, Template.words(LAYOUT, 3), 4)
        assert [tuple(row) for row in tokens.tolist()] == beams
        np.testing.assert_allclose(found_scores.numpy(), beam_scores, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"layers": 2}, 'architecture "cifg" has one layer, found layers = 2'),
        ({"embedding": 10, "architecture": "transformer"}, "a multiple of heads, found embedding = 10 and heads = 4"),
        ({"heads": 2, "architecture": "lstm"}, 'heads is for architecture "transformer", found "lstm"; remove it'),
        ({"layers": 16, "architecture": "convolutional"}, "the receptive field has 131,071 tokens, more than 65,536"),
        ({"architecture": "rnn"}, "architecture must be one of cifg, lstm, gru, transformer, convolutional, hf, found"),
    ],
)
def test_bad_settings_are_refused(settings_: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        ModelHParams(**settings_)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("architecture", "layers", "units", "embedding"),
    [("gru", 2, 235, 120), ("lstm", 2, 200, 127), ("convolutional", 1, 436, 127), ("convolutional", 4, 122, 127)],
)
def test_the_networks_of_table_1_have_620_thousand_parameters(
    architecture: str, layers: int, units: int, embedding: int
) -> None:
    """Numbers are within 5,000 of Carlini et al. (2019), table 1, with their layers and units, for 50 characters.

    The model of Thakkar et al. has V D + D 3H + D 3H + 3H + H D + V, with V = 10,000, D = 96, H = 670.
    """
    assert weights_of(10_000, ModelHParams()) == 1_422_250
    hparams = ModelHParams(embedding, units, architecture, layers=layers)
    if architecture == "convolutional":
        hparams = replace(hparams, filter_width=10)
    assert abs(weights_of(54, hparams) - 620_000) <= 5_000


def test_building_a_model_sets_cudnn_to_float32_and_determinism(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    build(LAYOUT.vocabulary_size, OTHERS[0])
    assert not torch.backends.cudnn.allow_tf32
    assert torch.backends.cudnn.deterministic


# Tests of quantized weights cover the number of values, their errors, and the unchanged trained model.


def model(scale: float = 1.0) -> CIFGLanguageModel:
    made = CIFGLanguageModel(50, ModelHParams(6, 9)).initialize(0).double()
    with torch.no_grad():
        made.embedding.mul_(scale)
        made.embedding[7] = 0.0
    return made


@settings(max_examples=30)
@given(bits=st.integers(2, 16), scale=st.sampled_from((1e-3, 1.0, 100.0)))
def test_quantized_weights_are_evenly_spaced_and_at_most_half_a_step_off(bits: int, scale: float) -> None:
    """The ends may be half a step off, because 0 must be one of the values. The float32 step misses the last of 2^bits
    values by at most 2^bits 2^-24 steps, and the quotient adds the same error."""
    made = model(scale)
    rounding = 2.0 ** (bits - 23)
    for name, value in quantized(made, bits).state_dict().items():
        trained = made.state_dict()[name]
        step = float(trained.max().clamp(min=0) - trained.min().clamp(max=0)) / (2**bits - 1)
        assert len(set(value.flatten().tolist())) <= 2**bits
        assert float((value - trained).abs().max()) <= step * (0.5 + rounding)
        if step:
            places = value / step
            torch.testing.assert_close(places, places.round(), rtol=0, atol=rounding)
    assert not quantized(made, bits).embedding[7].any()


def test_quantization_does_not_change_the_trained_model() -> None:
    made = model()
    before = {name: value.clone() for name, value in made.named_parameters()}
    coarse = quantized(made, 2).state_dict()
    assert all(torch.equal(value, before[name]) for name, value in made.named_parameters())
    assert len(set(coarse["projection"].flatten().tolist())) <= 4 < len(set(made.projection.flatten().tolist()))
    assert coarse["output_bias"].eq(0).all()  # all biases are equal, so the step is 0
