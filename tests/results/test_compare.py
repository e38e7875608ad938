"""Paired statistics of two runs: laws and brute-force oracles. How often they are wrong: test_statistics.py."""

import math
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from flsim.base.errors import InputError
from flsim.results.compare import paired_exposure, paired_t_p, signed_rank_p, t_interval
from flsim.results.store import RunResults, read_run

MakeRun = Callable[..., Path]
Pair = Callable[[list[float], list[float]], tuple[RunResults, RunResults]]

A = [1.5, 3.0, 13.25, 13.25, 2.0, 7.0, 4.0, 9.0, 5.5]
B = [1.0, 3.0, 13.25, 10.0, 2.5, 3.0, 2.0, 4.0, 5.0]


@pytest.fixture
def pair(make_run: MakeRun) -> Pair:
    def make(a: list[float], b: list[float]) -> tuple[RunResults, RunResults]:
        one = make_run({20: {"exposure": a, "references": 10_000}}, name="a")
        other = make_run({10: {"exposure": b, "references": 10_000}}, name="b")
        return read_run(one), read_run(other)

    return make


def test_the_statistics_are_those_of_the_differences(pair: Pair) -> None:
    result = paired_exposure(*pair(A, B))
    differences = np.subtract(A, B)
    interval = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    assert result.n == 9
    assert (result.round_a, result.round_b) == (20, 10)
    assert result.mean_difference == pytest.approx(differences.mean())
    assert (result.ci_low, result.ci_high) == pytest.approx((interval.low, interval.high))
    assert result.p_t == pytest.approx(stats.ttest_rel(A, B).pvalue)
    assert result.p_wilcoxon == pytest.approx(sign_flips(differences))
    assert f"{result.mean_difference:+.2f} bits" in str(result)
    assert all(len(line) <= 80 for line in str(result).splitlines())


def test_exchanging_the_runs_changes_only_the_sign(pair: Pair) -> None:
    a, b = pair(A, B)
    there, back = paired_exposure(a, b), paired_exposure(b, a)
    assert back.mean_difference == -there.mean_difference
    assert (back.ci_low, back.ci_high) == pytest.approx((-there.ci_high, -there.ci_low))
    assert (back.p_wilcoxon, back.p_t) == pytest.approx((there.p_wilcoxon, there.p_t))


def test_canaries_are_joined_by_id_not_by_position(pair: Pair) -> None:
    a, b = pair(A, B)
    shuffled = RunResults(**{**vars(b), "roster": b.roster[::-1], "rows": b.rows.sample(frac=1, random_state=3)})
    there = paired_exposure(a, shuffled)
    assert (there.mean_difference, there.p_wilcoxon) == (
        paired_exposure(a, b).mean_difference,
        paired_exposure(a, b).p_wilcoxon,
    )


def test_equal_runs_differ_by_nothing(pair: Pair) -> None:
    result = paired_exposure(*pair(A, A))
    assert (result.mean_difference, result.ci_low, result.ci_high) == (0, 0, 0)
    assert (result.p_wilcoxon, result.p_t) == (1, 1)


def test_equal_differences_have_no_spread(pair: Pair) -> None:
    """All canaries 0.1 bits apart, each with its own rounding error: they must tie, and the t test has no noise."""
    result = paired_exposure(*pair([value + 0.1 for value in A], A))
    assert result.mean_difference == pytest.approx(0.1)
    assert result.ci_high - result.ci_low == pytest.approx(0, abs=1e-9)
    assert result.p_t == 0
    assert result.p_wilcoxon == pytest.approx(2 / 2**9)


def sign_flips(differences: NDArray[np.float64]) -> float:
    """Two-sided signed-rank p by trying all signs; zeros are ranked, then dropped (Pratt, 1959)."""
    ranks = stats.rankdata(np.abs(differences))[differences != 0]
    signs = np.array(list(product((-1, 1), repeat=len(ranks))))
    statistic = abs(float((ranks * np.sign(differences[differences != 0])).sum()))
    return float((np.abs(signs @ ranks) >= statistic - 1e-9).mean())


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=7))
def test_the_signed_rank_test_is_exact_on_few_canaries(differences: list[int]) -> None:
    values = np.array(differences, float)
    assert signed_rank_p(values) == pytest.approx(sign_flips(values))


HALVES = st.integers(-40, 40)


@given(st.lists(HALVES, min_size=2, max_size=8) | st.lists(HALVES, min_size=14, max_size=40))
def test_every_p_is_a_probability(differences: list[int]) -> None:
    """Halves of bits, so ties and zeros are common. Warnings are errors here."""
    values = np.array(differences) / 2
    for p in (signed_rank_p(values), paired_t_p(values)):
        assert 0 <= p <= 1
    low, high = t_interval(values)
    assert low <= values.mean() <= high


def test_one_value_has_no_interval() -> None:
    assert all(math.isnan(end) for end in t_interval(np.array([1.0])))


def test_runs_that_do_not_compare_are_refused(pair: Pair, make_run: MakeRun) -> None:
    a, b = pair(A, B)
    measured = {10: {"exposure": B, "references": 10_000}}
    others = {
        "planted different canaries, the first c00": make_run(measured, name="phrases", shift=1),
        "planted different canaries, the first c09": make_run(
            {10: {"exposure": [*B, *B], "references": 10_000}}, name="more", copies=2
        ),
        r"references \(10000 and 500\)": make_run({10: {"exposure": B, "references": 500}}, name="other-r"),
        r"references \(10000 and unknown\)": make_run({10: {"exposure": B}}, name="no-r"),
        "diverged": make_run(measured, name="diverged", status="diverged"),
        "not evaluated yet": make_run(name="new"),
        "exposure was not measured": make_run({10: {"rs": [1.0] * len(B), "references": 10_000}}, name="no-exposure"),
    }
    for message, folder in others.items():
        with pytest.raises(InputError, match=message):
            paired_exposure(a, read_run(folder))
    with pytest.raises(InputError, match="round 10 was not evaluated"):
        paired_exposure(a, b, round=10)


def test_one_canary_is_refused(make_run: MakeRun) -> None:
    single = {10: {"exposure": [1.0], "references": 100}}
    a, b = (read_run(make_run(single, name=name, grid=[(0.1, 1.0)])) for name in "ab")
    with pytest.raises(InputError, match="at least two"):
        paired_exposure(a, b)
