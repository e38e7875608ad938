"""Ranks in every context against enumeration by the equations."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memorization.oracle import LAYOUT, Oracle, all_phrases, random_model

from flsim.measures.memorization.context import Context, Secret, context_sampling

secrets = st.integers(1, 5).flatmap(
    lambda length: st.builds(
        Secret,
        st.lists(st.sampled_from([1, 2, 3, 4, LAYOUT.eos]), min_size=length, max_size=length).map(tuple),
        st.sets(st.integers(0, length - 1), min_size=1, max_size=3).map(lambda chosen: tuple(sorted(chosen))),
    )
)


def test_the_four_rows_of_the_table() -> None:
    """A canary 1 2 3 4 2 whose secret is 3 4: what is read and what is scored, for two references."""
    secret = Secret((1, 2, 3, 4, 2), (2, 3))
    words = torch.tensor([[3, 4], [1, 1]])
    placed = {context: secret.place(words, context, 9) for context in secret.contexts}
    assert {context: (prefix.tolist(), scored.tolist()) for context, (prefix, scored) in placed.items()} == {
        Context(0, 0): ([9], [[3, 4], [1, 1]]),
        Context(1, 0): ([9, 2], [[3, 4], [1, 1]]),
        Context(2, 0): ([9, 1, 2], [[3, 4], [1, 1]]),
        Context(0, 1): ([9], [[3, 4, 2], [1, 1, 2]]),
        Context(1, 1): ([9, 2], [[3, 4, 2], [1, 1, 2]]),
        Context(2, 1): ([9, 1, 2], [[3, 4, 2], [1, 1, 2]]),
    }


@settings(max_examples=30, derandomize=True)
@given(seed=st.integers(0, 10**6), scale=st.sampled_from([0.0, 0.1, 1.0, 5.0]), secret=secrets)
def test_ranks_equal_enumeration_in_every_context(seed: int, scale: float, secret: Secret) -> None:
    model, r = random_model(seed, scale), all_phrases(len(secret.positions))
    oracle, first, last = Oracle(model), secret.positions[0], secret.positions[-1]
    measured = context_sampling(model, secret, torch.tensor(r), LAYOUT.bos)
    after = len(secret.tokens) - 1 - last
    assert set(measured) == {Context(prefix, suffix) for prefix in range(first + 1) for suffix in (0, after)}
    for context, found in measured.items():
        prefix = (LAYOUT.bos, *secret.tokens[first - context.prefix : first])
        whole = secret.tokens[first : last + 1 + context.suffix]
        others = [list(whole) for _ in r]
        for words, other in zip(r, others, strict=True):
            for position, word in zip(secret.positions, words, strict=True):
                other[position - first] = word
        own, scores = oracle.score(prefix, whole), oracle.scores(prefix, [tuple(other) for other in others])
        assert found.log_perplexity == pytest.approx(own, rel=1e-9, abs=1e-9)
        assert found.references == len(r)
        close = abs(scores - own) <= 1e-9 * (1 + own)
        assert 1 + np.sum((scores <= own) & ~close) <= found.rank <= 1 + np.sum((scores <= own) | close)
        same = np.array([tuple(other) == whole for other in others])
        if not np.any(close & ~same):
            assert found.rank == 1 + np.sum((scores <= own) | same)
