"""Calibrated ranks against their definition, by the equations of the models."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memorization.oracle import LAYOUT, Oracle, Phrase, all_phrases, random_model

from flsim.measures.memorization import score
from flsim.measures.memorization.exposure import calibrated_rank, mean_scores
from flsim.models.language_model import LanguageModel

PHRASES = all_phrases(4)
BOS = (LAYOUT.bos,)


def rank_of(
    model: LanguageModel, without: list[LanguageModel], prefix: Phrase, phrase: Phrase, among: list[Phrase]
) -> tuple[float, int]:
    p, s, r = torch.tensor(prefix), torch.tensor(phrase), torch.tensor(among)
    own = float(mean_scores(without, p, s[None]))
    return calibrated_rank(model, p, s, r, own, mean_scores(without, p, r))


@settings(max_examples=25, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.0, 0.1, 1.0, 5.0, 50.0]),
    models=st.integers(1, 3),
    prefix=st.lists(st.integers(0, 7), max_size=3),
    chosen=st.lists(st.integers(0, 255), min_size=1, max_size=60),
    copies=st.integers(0, 3),
    rows=st.sampled_from([1, 2, 7, 1000]),
)
def test_equals_the_definition(
    seed: int, scale: float, models: int, prefix: list[int], chosen: list[int], copies: int, rows: int
) -> None:
    model, p, canary = random_model(seed, scale), (*BOS, *prefix), PHRASES[seed % 256]
    without = [random_model(seed + 1 + k, scale) for k in range(models)]
    among = [PHRASES[index] for index in chosen] + [canary] * copies
    means = np.mean([Oracle(each).scores(p, [canary, *among]) for each in without], axis=0)
    scores = Oracle(model).scores(p, [canary, *among])
    own, others = (scores - means)[0], (scores - means)[1:]
    slack = 1e-9 * (1 + scores.max() + means.max())  # where they differ by less, the oracle's rounding could decide
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score, "CPU_FLOATS", rows * LAYOUT.vocabulary_size)
        found, rank = rank_of(model, list(without), p, canary, among)
    assert found == pytest.approx(own, abs=slack)
    assert 1 + (others <= own - slack).sum() <= rank <= 1 + (others <= own + slack).sum()
    assert rank >= 1 + among.count(canary)
