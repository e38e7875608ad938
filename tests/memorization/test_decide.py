"""`decide` is `rank` == 1, and stops where it can."""

import numpy as np
import pytest
import torch
from memorization.oracle import LAYOUT, Noisy, Oracle, all_phrases, decide, random_model, rank

from flsim.measures.memorization.random_sampling import RandomSampler

BOS = torch.tensor([LAYOUT.bos])
PHRASES = all_phrases(4)
AMONG = torch.tensor(PHRASES)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_only_the_very_best_of_all_continuations_is_memorized(scale: float, dtype: torch.dtype) -> None:
    """Among all others; of a uniform model none is, as all tie."""
    model = random_model(11, scale, dtype)
    sampler = {index: RandomSampler(model, AMONG[torch.arange(256) != index]) for index in range(0, 256, 7)}
    best = int(np.argmin(Oracle(model).scores((LAYOUT.bos,), PHRASES)))
    sampler[best] = RandomSampler(model, AMONG[torch.arange(256) != best])
    decided = {index: one.decide(BOS, AMONG[index]) for index, one in sampler.items()}
    assert decided == {index: scale > 0 and index == best for index in sampler}


def test_the_first_reference_that_beats_the_canary_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the 8 likeliest by what words tend to cost, one beats the worst: 8 x 3 states, the sample's, the canary's."""
    monkeypatch.setattr("flsim.measures.memorization.random_sampling.LIKELY", (8,))
    monkeypatch.setattr("flsim.measures.memorization.random_sampling.TYPICAL", 4)
    model = Noisy(random_model(3))
    worst = AMONG[int(np.argmax(Oracle(model.model).scores((LAYOUT.bos,), PHRASES)))]
    others = AMONG[(worst != AMONG).any(1)]
    assert not decide(model, BOS, worst, others)
    assert model.read <= 8 * 3 + 4 * 3 + 3
    model.read = 0
    assert rank(model, BOS, worst, others) == 256
    assert model.read == 4 + 16 + 64 + 3
