"""Log-perplexity against the equations."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memorization.oracle import LAYOUT, Oracle, all_phrases, random_model
from memorization.table_model import VOCABULARY, TableModel

from flsim.measures.memorization import score
from flsim.measures.memorization.score import log_perplexity

PHRASES = all_phrases(4)


@settings(max_examples=30, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.0, 0.1, 1.0, 5.0, 50.0]),
    prefix=st.lists(st.integers(0, 7), max_size=4),
    length=st.integers(1, 4),
)
def test_equals_the_equations(seed: int, scale: float, prefix: list[int], length: int) -> None:
    model, p, phrases = random_model(seed, scale), (LAYOUT.bos, *prefix), all_phrases(length)
    scores = log_perplexity(model, torch.tensor(p), torch.tensor(phrases))
    assert scores.dtype == torch.float64
    np.testing.assert_allclose(scores, Oracle(model).scores(p, phrases), rtol=1e-9, atol=1e-9)


def test_a_model_in_float32_is_summed_in_float64() -> None:
    """Its log-probabilities carry a rounding of about 1e-7 each; the sum of four adds none."""
    model = random_model(3, dtype=torch.float32)
    scores = log_perplexity(model, torch.tensor([LAYOUT.bos]), torch.tensor(PHRASES))
    assert scores.dtype == torch.float64
    np.testing.assert_allclose(scores, Oracle(model).scores((LAYOUT.bos,), PHRASES), rtol=1e-5)


@pytest.mark.parametrize(
    ("gigabytes", "share", "expected"),
    [
        (140, 1.0, 2**28),  # 12.9 GB in a step, and no more however large the GPU is
        (140, 0.05, 2**27),  # 7.0 GB: 6.4 of them
        (8, 6e-9, 1),  # 48 bytes
    ],
)
def test_pieces_on_a_gpu_fit_the_share_of_its_memory(
    gigabytes: float, share: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """48 bytes for each float, and as many floats as a power of two."""
    about = SimpleNamespace(total_memory=int(gigabytes * 1e9))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: share)
    floats = score.floats_at_once(torch.device("cuda", 0))
    assert floats == expected
    assert 48 * floats <= gigabytes * share * 1e9
    assert score.floats_at_once(torch.device("cpu")) == 2**22


@settings(max_examples=30, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    prefix=st.lists(st.integers(0, 7), max_size=4),
    phrases=st.integers(1, 6).flatmap(
        lambda length: st.lists(st.lists(st.integers(0, 7), min_size=length, max_size=length), min_size=1, max_size=12)
    ),
    rows=st.integers(1, 5),
)
def test_no_more_is_read_at_once_than_memory_is_for(
    seed: int, prefix: list[int], phrases: list[list[int]], rows: int
) -> None:
    model = TableModel(seed, 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score, "CPU_FLOATS", rows * VOCABULARY)
        scores = log_perplexity(model, torch.tensor([0, *prefix]), torch.tensor(phrases))
    assert scores.tolist() == [model.score((0, *prefix), tuple(phrase)) for phrase in phrases]
    assert model.largest <= rows
