"""Ranks in every context against enumeration by the equations."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memorization.oracle import LAYOUT, Oracle, all_phrases, random_model

from flsim.measures.memorization.context import context_sampling

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
