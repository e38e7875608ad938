"""Tests compare log-perplexity with the equations, and cover templates, sizes of pieces and contexts."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memorization.oracle import LAYOUT, Oracle, all_phrases, random_model
from memorization.table_model import VOCABULARY, TableModel

from flsim.data.records import Layout
from flsim.measures.memorization import score
from flsim.measures.memorization.score import Template, cheapest, context_sampling, log_perplexity

PHRASES = all_phrases(4)


@settings(max_examples=30, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.0, 0.1, 1.0, 5.0, 50.0]),
    prefix=st.lists(st.integers(0, 7), max_size=4),
    length=st.integers(1, 4),
)
def test_log_perplexity_equals_the_equations(seed: int, scale: float, prefix: list[int], length: int) -> None:
    model, p, phrases = random_model(seed, scale), (LAYOUT.bos, *prefix), all_phrases(length)
    scores = log_perplexity(model, torch.tensor(p), torch.tensor(phrases))
    assert scores.dtype == torch.float64
    np.testing.assert_allclose(scores, Oracle(model).scores(p, phrases), rtol=1e-9, atol=1e-9)


def test_scores_of_a_float32_model_are_summed_in_float64() -> None:
    """Each log-probability has a rounding error of about 1e-7. The sum of four adds none."""
    model = random_model(3, dtype=torch.float32)
    scores = log_perplexity(model, torch.tensor([LAYOUT.bos]), torch.tensor(PHRASES))
    assert scores.dtype == torch.float64
    np.testing.assert_allclose(scores, Oracle(model).scores((LAYOUT.bos,), PHRASES), rtol=1e-5)


@pytest.mark.parametrize(
    ("gigabytes", "share", "expected"),
    [
        (140, 1.0, 2**28),  # 12.9 GB in a step, the limit for a GPU of any size
        (140, 0.05, 2**27),  # 6.4 GB of a share of 7.0 GB
        (8, 6e-9, 1),  # 48 bytes
    ],
)
def test_pieces_on_a_gpu_fit_the_share_of_its_memory(
    gigabytes: float, share: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of floats is a power of two, and each float needs 48 bytes."""
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
def test_sequences_read_at_once_fit_the_memory_limit(
    seed: int, prefix: list[int], phrases: list[list[int]], rows: int
) -> None:
    model = TableModel(seed, 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score, "CPU_FLOATS", rows * VOCABULARY)
        scores = log_perplexity(model, torch.tensor([0, *prefix]), torch.tensor(phrases))
    assert scores.tolist() == [model.score((0, *prefix), tuple(phrase)) for phrase in phrases]
    assert model.largest <= rows


def test_a_template_has_allowed_ids_by_position_and_their_product_as_space() -> None:
    layout = Layout(8, name="fedjax")  # PAD, BOS, EOS, words 3 to 6, OOV
    assert Template.words(layout, 2).allowed == ((3, 4, 5, 6), (3, 4, 5, 6))
    made = Template(((4,), (3, 6), (2,)))
    assert (made.length, made.space) == (3, 2)
    assert [ids.tolist() for ids in made.on(torch.device("cpu"))] == [[4], [3, 6], [2]]
    assert Template.words(Layout(10_000), 4).space == 9_996**4


@settings(max_examples=40, derandomize=True)
@given(
    costs=st.integers(1, 9).flatmap(
        lambda columns: st.lists(
            st.lists(st.sampled_from([0.0, 0.5, 1.0, 7.0, float("inf")]), min_size=columns, max_size=columns),
            min_size=1,
            max_size=5,
        )
    ),
    count=st.integers(1, 12),
)
def test_cheapest_is_the_start_of_a_stable_sort(costs: list[list[float]], count: int) -> None:
    found, columns = cheapest(torch.tensor(costs), count)
    expected, order = torch.tensor(costs).sort(dim=1, stable=True)
    assert torch.equal(found, expected[:, :count])
    assert torch.equal(columns, order[:, :count])


Secret = tuple[tuple[int, ...], tuple[int, ...]]  # tokens, and positions of the secret
secrets = st.integers(1, 5).flatmap(
    lambda length: st.tuples(
        st.lists(st.sampled_from([1, 2, 3, 4, LAYOUT.eos]), min_size=length, max_size=length).map(tuple),
        st.sets(st.integers(0, length - 1), min_size=1, max_size=3).map(lambda chosen: tuple(sorted(chosen))),
    )
)


@settings(max_examples=30, derandomize=True)
@given(seed=st.integers(0, 10**6), scale=st.sampled_from([0.0, 0.1, 1.0, 5.0]), secret=secrets)
def test_ranks_equal_enumeration_in_every_context(
    seed: int, scale: float, secret: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    tokens, positions = secret
    model, r = random_model(seed, scale), all_phrases(len(positions))
    oracle, first, last = Oracle(model), positions[0], positions[-1]
    measured = context_sampling(model, tokens, positions, torch.tensor(r), LAYOUT.bos)
    assert set(measured) == {(before, after) for before in range(first + 1) for after in (0, len(tokens) - 1 - last)}
    for (before, after), found in measured.items():
        prefix, whole = (LAYOUT.bos, *tokens[first - before : first]), tokens[first : last + 1 + after]
        others = [list(whole) for _ in r]
        for words, other in zip(r, others, strict=True):
            for position, word in zip(positions, words, strict=True):
                other[position - first] = word
        own, scores = oracle.score(prefix, whole), oracle.scores(prefix, [tuple(other) for other in others])
        assert found.log_perplexity == pytest.approx(own, rel=1e-9, abs=1e-9)
        assert found.references == len(r)
        close = abs(scores - own) <= 1e-9 * (1 + own)
        assert 1 + np.sum((scores <= own) & ~close) <= found.rank <= 1 + np.sum((scores <= own) | close)
        same = np.array([tuple(other) == whole for other in others])
        if not np.any(close & ~same):
            assert found.rank == 1 + np.sum((scores <= own) | same)
