"""Utility against a loop over records, one at a time."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from populations import InMemory

from flsim.base.errors import Diverged
from flsim.data.vocabulary import Layout
from flsim.measures import prediction as module
from flsim.measures.prediction import Utility, utility
from flsim.models.architectures import ModelHParams
from flsim.models.cifg import CIFGLanguageModel

LAYOUT = Layout(12, record_words=6)


def some_users(seed: int, users: int = 7) -> list[list[list[int]]]:
    """Records of 0 to 6 words, OOV among them."""
    rng = np.random.default_rng(seed)
    return [
        [rng.integers(1, LAYOUT.oov, rng.integers(0, 7), endpoint=True).tolist() for _ in range(rng.integers(0, 9))]
        for _ in range(users)
    ]


def some_model(seed: int) -> CIFGLanguageModel:
    return CIFGLanguageModel(LAYOUT.vocabulary_size, ModelHParams(4, 6)).initialize(seed).double()


def naive(model: CIFGLanguageModel, users: list[list[list[int]]]) -> Utility:
    """One record at a time, one target at a time."""
    loss, tokens, correct_tokens, words, correct_words = 0.0, 0, 0, 0, 0
    for record in (record for user in users for record in user):
        sequence = [LAYOUT.bos, *record] + [LAYOUT.eos] * (len(record) < LAYOUT.record_words)
        logits = model(torch.tensor([sequence]))[0].detach().numpy()
        for scores, target in zip(logits[:-1], sequence[1:], strict=True):
            loss += float(np.log(np.exp(scores).sum()) - scores[target])
            correct = int(np.argmax(scores) == target)
            tokens += 1
            correct_tokens += correct
            if target not in (LAYOUT.oov, LAYOUT.eos):
                words += 1
                correct_words += correct
    return Utility(loss, tokens, correct_tokens, words, correct_words)


@settings(max_examples=8, derandomize=True)
@given(seed=st.integers(0, 10**6), pool=st.sampled_from([1, 40, 10**6]), logits=st.sampled_from([1, 200, 10**6]))
def test_equals_a_loop_over_records(seed: int, pool: int, logits: int) -> None:
    """Whatever is batched with what: empty records, full ones, OOV, users without records."""
    users, model = some_users(seed), some_model(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "POOL_WORDS", pool)
        patch.setattr(module, "LOGITS", logits)
        found, expected = utility(model, InMemory(LAYOUT, users)), naive(model, users)
    assert found.cross_entropy == pytest.approx(expected.cross_entropy, rel=1e-9)
    for name in ("tokens", "correct_tokens", "words", "correct_words"):
        assert getattr(found, name) == getattr(expected, name), name


def test_chosen_users_only() -> None:
    users, model = some_users(1), some_model(1)
    found, expected = utility(model, InMemory(LAYOUT, users), [4, 2]), naive(model, [users[2], users[4]])
    assert found.tokens == expected.tokens
    assert found.cross_entropy == pytest.approx(expected.cross_entropy)


def test_a_model_that_always_says_word_1() -> None:
    """Targets 1 1 2 EOS; 3 1 EOS; 1 OOV EOS: 4 of 6 words, 4 of 10 tokens."""
    model = CIFGLanguageModel(LAYOUT.vocabulary_size, ModelHParams(4, 6))
    with torch.no_grad():
        model.output_bias[1] = 1.0
    measured = utility(model, InMemory(LAYOUT, [[[1, 1, 2], [3, 1]], [[1, LAYOUT.oov]]]))
    assert (measured.accuracy, measured.accuracy_all_tokens) == (4 / 6, 4 / 10)
    # log-probabilities: 1 - log Z for word 1, -log Z for the other 11 tokens, with Z = e + 11
    assert measured.perplexity == pytest.approx((math.e + 11) / math.exp(4 / 10))


def test_long_records_are_not_padded_to_by_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 records of one word and 2 of 6, 60 positions a batch: at most 2 positions in 100 are padding."""
    monkeypatch.setattr(module, "LOGITS", 60 * LAYOUT.vocabulary_size)
    users = InMemory(LAYOUT, [[[1]] * 100 + [[1, 2, 3, 4, 5, 6]]] * 2)
    batches = list(module._batches(users, range(2)))
    assert max(part.inputs.size for part in batches) <= 60
    assert sum(int((part.targets == LAYOUT.pad).sum()) for part in batches) <= 32
    assert sum(int((part.targets != LAYOUT.pad).sum()) for part in batches) == 2 * (100 * 2 + 6)


def test_nothing_measured_is_not_a_number() -> None:
    nothing = utility(some_model(0), InMemory(LAYOUT, []))
    assert nothing == Utility()
    assert all(math.isnan(value) for value in (nothing.accuracy, nothing.accuracy_all_tokens, nothing.perplexity))


def test_perplexity_beyond_float64_is_infinite() -> None:
    assert Utility(cross_entropy=1e6, tokens=1).perplexity == math.inf


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    model = some_model(0)
    with torch.no_grad():
        model.output_bias[3] = value
    with pytest.raises(Diverged, match="cross-entropy is not finite"):
        utility(model, InMemory(LAYOUT, some_users(0)))
