"""Exposure over the whole space, against the equations of the model."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memorization.oracle import LAYOUT, Oracle, all_phrases, random_model

from flsim.data.vocabulary import Layout
from flsim.measures.memorization import score
from flsim.measures.memorization.score import Template
from flsim.measures.memorization.search import Enumeration, enumerate_space
from flsim.models.architectures import ModelHParams
from flsim.models.cifg import CIFGLanguageModel

BOS = (LAYOUT.bos,)
PHRASES = Template.words(LAYOUT, 4)
SCALES = st.sampled_from([0.0, 0.1, 1.0, 5.0, 50.0])
PREFIXES = st.lists(st.integers(0, 7), max_size=3)


@settings(max_examples=20, derandomize=True)
@given(st.integers(0, 10**6), SCALES, PREFIXES, st.integers(1, 4), st.sampled_from([1, 3, 1000]))
def test_rank_is_that_of_brute_force(seed: int, scale: float, prefix: list[int], length: int, rows: int) -> None:
    model, p, phrases = random_model(seed, scale), (*BOS, *prefix), all_phrases(length)
    canary, oracle = phrases[seed % len(phrases)], Oracle(model)
    scores, own = oracle.scores(p, phrases), oracle.score(p, canary)
    slack = 1e-9 * (1 + own)  # where scores differ by less, the oracle's own rounding could decide
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score, "CPU_FLOATS", rows * LAYOUT.vocabulary_size)
        found = enumerate_space(model, torch.tensor(p), torch.tensor(canary), Template.words(LAYOUT, length))
    assert found is not None
    assert found.space == 4**length
    assert max(1, (scores <= own - slack).sum()) <= found.rank <= (scores <= own + slack).sum()


def test_a_vast_space_is_ranked_exactly_where_the_canary_is_likely() -> None:
    """Words are independent: word 1 costs next to nothing, and each of 199 others the same. The canary has one of them,
    in the last place. As likely or likelier are (1, ..., 1), and all with one other word."""
    words, length = 200, 12
    layout, model = Layout(words + 4), CIFGLanguageModel(words + 4, ModelHParams(6, 8))
    with torch.no_grad():
        model.output_bias[:] = -20.0
        model.output_bias[1] = 0.0
    canary = torch.tensor([1] * (length - 1) + [17])
    found = enumerate_space(model, torch.tensor([layout.bos]), canary, Template.words(layout, length))
    assert found == Enumeration(1 + length * 199, words**length)
    # Of k words there are one without another word and k * 199 with one, from none to the canary's length less one.
    assert found.nodes == sum(1 + k * 199 for k in range(length))


def test_it_gives_up_after_as_many_sequences_as_it_may_read() -> None:
    """Nothing of a uniform model can be dropped: 4, 16, then 64 sequences are read."""
    arguments = random_model(0, scale=0.0), torch.tensor(BOS), torch.tensor((1, 2, 3, 4)), PHRASES
    found = enumerate_space(*arguments, most_read=84)
    assert found == Enumeration(256, 256)
    assert found.nodes == 85  # and the beginning without any word
    assert enumerate_space(*arguments, most_read=83) is None
