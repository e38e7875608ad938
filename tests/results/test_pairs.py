"""Comparison at equal perplexity: by hand, and by runs whose exposure is a function of their cross-entropy."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from flsim.base.errors import InputError
from flsim.results.differences import compare_runs, to_wide
from flsim.results.pairs import at_perplexity, left_out_text, like_utility, lowest_in_both, of_mean
from flsim.results.store import RunResults, read_run

MakeRun = Callable[..., Path]
CANARIES = 9


@pytest.fixture
def make_curve(make_run: MakeRun) -> Callable[..., RunResults]:
    """Make a run by its evaluations: a cross-entropy and the exposure of canary 0, over which canary i has i bits."""

    def make(name: str, points: Sequence[tuple[float, float]], seed: int = 0, **about: object) -> RunResults:
        rounds = {
            10 * (place + 1): {
                "perplexity": math.exp(entropy),
                "exposure": [bits + canary for canary in range(CANARIES)],
                "references": 100.0,
            }
            for place, (entropy, bits) in enumerate(points)
        }
        return read_run(make_run(rounds, name=name, seed=seed, series=name.partition("-")[0], **about))

    return make


def test_exposures_between_two_evaluations(make_curve: Callable[..., RunResults]) -> None:
    """At 4.25 nats, a quarter of the way from 4.5 to 3.5 nats, where exposure rises from 2 to 6 bits."""
    run = make_curve("a", [(5.0, 1.0), (4.5, 2.0), (3.5, 6.0)])
    round_, exposures = at_perplexity(run, math.exp(4.25))
    assert round_ == pytest.approx(22.5)
    assert exposures.to_numpy() == pytest.approx(3.0 + np.arange(CANARIES))
    at_an_evaluation = at_perplexity(run, math.exp(4.5))
    assert at_an_evaluation[0] == 20
    assert at_an_evaluation[1].to_numpy() == pytest.approx(2.0 + np.arange(CANARIES))


def test_it_is_the_first_time_that_a_run_reached_it(make_curve: Callable[..., RunResults]) -> None:
    run = make_curve("a", [(5.0, 1.0), (4.0, 2.0), (4.6, 3.0), (3.8, 4.0)])
    assert at_perplexity(run, math.exp(4.5))[0] == pytest.approx(15)


def test_runs_that_differ_in_length_only_do_not_differ_at_like_utility(make_curve: Callable[..., RunResults]) -> None:
    """Exposure is 3 (6 - nats) in both. At the end, one has 4.5 bits more, as its training lasted longer."""
    long = make_curve("a", [(nats, 3 * (6 - nats)) for nats in (5.5, 4.7, 3.9, 3.5)])
    short = make_curve("b", [(nats, 3 * (6 - nats)) for nats in (5.7, 5.2, 5.0)])
    assert to_wide(compare_runs(long, short).table)["exposure_difference"].iloc[0] == pytest.approx(4.5)
    compared = like_utility([long], [short])
    assert compared.pairs[0].perplexity == pytest.approx(math.exp(5.0))
    assert compared.differences == pytest.approx([0], abs=1e-9)
    assert compared.pairs[0].rounds[1] == 30
    assert math.isnan(of_mean(compared.differences)["p"])


def test_over_seeds_it_is_the_t_test_of_their_differences(make_curve: Callable[..., RunResults]) -> None:
    """b has 1, 2 and 4 bits less than a at the same cross-entropy, and is trained further or less."""
    lost = (1.0, 2.0, 4.0)
    a = [make_curve(f"a-{seed}", [(5, 1), (4, 5)], seed) for seed in range(3)]
    b = [
        make_curve(f"b-{seed}", [(5, 1 - bits), (4 - seed / 2, 5 + 2 * seed - bits)], seed)
        for seed, bits in enumerate(lost)
    ]
    compared = like_utility(a, b)
    expected = stats.ttest_1samp(lost, 0)
    interval = expected.confidence_interval(0.95)
    assert compared.differences == pytest.approx(lost)
    mean = of_mean(compared.differences)
    assert (mean["low"], mean["high"], mean["p"]) == pytest.approx((interval.low, interval.high, expected.pvalue))
    back = like_utility(b, a)
    assert [pair.perplexity for pair in back.pairs.values()] == [pair.perplexity for pair in compared.pairs.values()]
    assert back.differences == pytest.approx([-bits for bits in lost])


def test_a_seed_without_a_common_perplexity_is_left_out_and_named(make_curve: Callable[..., RunResults]) -> None:
    """IID runs of seeds 3 and 4 begin below the lowest perplexity of the others; seed 3 alone, then every seed."""
    a = [make_curve(f"a-{seed}", [(5, 1), (4, 5)], seed) for seed in range(5)]
    b = [make_curve(f"b-{seed}", [(5, 0), (4.5, 2 - seed)], seed) for seed in range(5)]
    late = [make_curve(f"late-{seed}", [(4, 5)], seed) for seed in range(5)]
    compared = like_utility([*a[:3], late[3], a[4]], b)
    assert [*compared.pairs] == [0, 1, 2, 4]
    assert compared.differences == pytest.approx([1, 2, 3, 5])
    why = "run late-3: its first evaluation is below perplexity 90.02 already, at 54.6; evaluate it earlier"
    assert {*compared.left_out} == {3}
    assert left_out_text(compared.left_out).startswith(f"seed 3 left out: {why}")
    two = left_out_text(like_utility([*a[:3], *late[3:]], b).left_out)
    assert two.startswith(f"seeds 3, 4 left out: {why}, with a smaller evaluation.every; run late-4: its first")
    with pytest.raises(InputError, match="no seed can be compared; seed 3: run late-3: its first evaluation is below"):
        like_utility(late[3:], b)


@given(st.lists(st.integers(1, 60), min_size=2, max_size=6, unique=True), st.floats(0, 1))
def test_interpolated_values_lie_between_their_neighbours(tenths: list[int], share: float) -> None:
    entropies = [tenth / 10 for tenth in sorted(tenths, reverse=True)]
    target = entropies[-1] + share * (entropies[0] - entropies[-1])
    bits = [10 - entropy for entropy in entropies]
    run = _Curve(entropies, bits)
    round_, exposures = at_perplexity(run, math.exp(target))  # type: ignore[arg-type]
    assert exposures["c"] == pytest.approx(10 - target)
    assert 0 <= round_ <= len(entropies) - 1


def test_what_cannot_be_compared_says_why(make_curve: Callable[..., RunResults]) -> None:
    run = make_curve("a", [(5.0, 1.0), (4.0, 2.0)])
    with pytest.raises(InputError, match=r"run a: never reached perplexity 20\.09; its lowest is 54\.6"):
        at_perplexity(run, math.exp(3))
    with pytest.raises(InputError, match=r"run a: its first evaluation is below perplexity 403\.4 already, at 148\.4"):
        at_perplexity(run, math.exp(6))
    with pytest.raises(InputError, match="run c: diverged"):
        lowest_in_both(run, make_curve("c", [(5.0, 1.0)], status="diverged"))
    with pytest.raises(InputError, match="run d: no evaluation has both perplexity and exposure"):
        lowest_in_both(run, make_curve("d", []))


class _Curve:
    """The evaluations of a run in memory, for a property that many runs have."""

    name, status = "curve", "completed"

    def __init__(self, entropies: Sequence[float], bits: Sequence[float]) -> None:
        self._entropies, self._bits = entropies, bits
        self.evaluated = list(range(len(entropies)))

    def of_model(self, metric: str, round_: int) -> float:
        assert metric == "perplexity"
        return math.exp(self._entropies[round_])

    def of_canaries(self, metric: str, round_: int) -> "pd.Series[float]":
        assert metric == "exposure"
        return pd.Series({"c": self._bits[round_]})


def test_canaries_that_neither_run_planted_are_left_out(make_curve: Callable[..., RunResults]) -> None:
    """Canaries have values of their own, and all but the first two are planted nowhere."""
    a, b = make_curve("a", [(5, 1), (4, 5)]), make_curve("b", [(5, 1), (4, 3)])
    changed = a.rows["value"].where(a.rows["canary"] != a.roster["canary"].iloc[-1], 99.0)
    drawn = [3, 3] + [0] * (len(a.roster) - 2)
    runs = [replace(run, roster=run.roster.assign(planned_insertions=drawn)) for run in (a, b)]
    assert like_utility([replace(runs[0], rows=a.rows.assign(value=changed))], [runs[1]]).differences == [2.0]
    assert like_utility([replace(a, rows=a.rows.assign(value=changed))], [b]).differences != [2.0]
