"""Agreement with published values, against definitions: exact intervals, pairs counted one by one, all permutations."""

import math
from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flsim.base.statistics import differ_by_more_than_chance, share_interval
from flsim.results.against_published import order, size

CANARIES = 48
VALUES = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12)


def test_size_is_where_the_published_share_lies() -> None:
    low, high = share_interval(20, CANARIES)  # 41.7%: 27.6 to 56.8
    found = [size(low, high, published) for published in (0.2, low, 0.4, high, 0.6)]
    assert found == ["higher", "same", "same", "same", "lower"]


@given(VALUES)
def test_pairs_and_tau_are_those_counted_one_by_one(values: list[tuple[int, int]]) -> None:
    """Tau-b is (concordant - discordant) over the root of the product of pairs untied in each (Kendall, 1945)."""
    ours, theirs = zip(*values, strict=True)
    found = order(ours, theirs)
    half = {True: 1.0, False: 0.0}
    pairs: list[tuple[int, int, float]] = []
    for i, j in combinations(range(len(values)), 2):
        a, b = ours[i] - ours[j], theirs[i] - theirs[j]
        if b:
            pairs.append((i, j, 0.5 if a == 0 else half[(a > 0) == (b > 0)]))
    assert found.pairs == len(pairs)
    assert found.agreeing == sum(agrees for *_, agrees in pairs)
    for row, share in enumerate(found.of_rows):
        of_row = [agrees for i, j, agrees in pairs if row in (i, j)]
        assert share == pytest.approx(sum(of_row) / len(of_row)) if of_row else math.isnan(share)
    concordant = sum(agrees == 1 for *_, agrees in pairs) - sum(agrees == 0 for *_, agrees in pairs)
    untied = sum(ours[i] != ours[j] for i, j in combinations(range(len(values)), 2))
    if pairs and untied:
        assert found.tau == pytest.approx(concordant / math.sqrt(len(pairs) * untied))
        assert 0 <= found.p <= 1
    else:
        assert math.isnan(found.tau)
        assert math.isnan(found.p)


def test_p_is_the_share_of_orders_as_far_from_none() -> None:
    """Without ties exact: of all 120 orders of five rows those with a tau as large."""
    ours = [3.0, 1.0, 2.0, 5.0, 4.0]
    found = order(ours, range(5))
    taus = [order(other, range(5)).tau for other in permutations(range(5))]
    assert found.p == pytest.approx(np.mean([abs(tau) >= abs(found.tau) - 1e-9 for tau in taus]))


def test_only_clear_pairs_are_counted_as_clear() -> None:
    """Counts of 54 and 52 of 90 canaries differ by chance, and 20 from both by more."""
    theirs = [54, 52, 20]
    clear = np.array([[False, False, True], [False, False, True], [True, True, False]])
    assert [
        [differ_by_more_than_chance((one, other), (90, 90)) for other in theirs] for one in theirs
    ] == clear.tolist()
    judged = order([1, 2, 0], theirs, clear)
    assert (judged.pairs, judged.agreeing, judged.clear_pairs, judged.clear_agreeing) == (3, 2, 2, 2)
    assert judged.of_rows == (1, 1, 1)
    alike = order([1, 2], theirs[:2], clear[:2, :2])
    assert (alike.pairs, alike.clear_pairs) == (1, 0)
    assert np.isnan(alike.of_rows).all()
