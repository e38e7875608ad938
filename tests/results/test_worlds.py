"""Settings compared seed by seed: by hand, by law, and how often the test is wrong on simulated exposures.

The simulations are seeded, so they pass or fail for good; under another seed each fails with the odds it states.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from flsim.base.errors import InputError
from flsim.base.rng import stream
from flsim.results import seeds_table
from flsim.results.compare import paired_exposure, paired_t_p
from flsim.results.compare_pairs import compare_pairs
from flsim.results.compare_pairs_text import to_markdown
from flsim.results.store import RunResults, read_run
from flsim.results.sweep_pairs import Pair
from flsim.results.sweeps import SweepRun
from flsim.results.twins import compare_worlds
from flsim.results.worlds import paired_over_seeds, t_test_over_seeds

MakeRun = Callable[..., Path]
MakeSeries = Callable[..., list[RunResults]]
SIMULATIONS = 2_000
NON_IID = "Non-IID, FedAvg, b_u = 16"


def test_the_figures_are_those_of_the_seeds_differences(make_series: MakeSeries) -> None:
    """Levels differ by 1, 2, -0.5 and 3.5 bits, and so does each canary."""
    a, b = make_series([2, 4, 3, 8]), make_series([1, 2, 3.5, 4.5], name="b", setting=NON_IID)
    result = paired_over_seeds(a, b)
    differences = [1, 2, -0.5, 3.5]
    expected = stats.ttest_1samp(differences, 0)
    interval = expected.confidence_interval(0.95)
    assert result.differences == pytest.approx(differences)
    assert result.differences == tuple(paired_exposure(*pair).mean_difference for pair in zip(a, b, strict=True))
    assert (result.a, result.b, result.seeds, result.unpaired) == (a[0].setting, NON_IID, (0, 1, 2, 3), ())
    assert result.mean_difference == 1.5
    assert (result.ci_low, result.ci_high, result.p) == pytest.approx((interval.low, interval.high, expected.pvalue))
    assert result.agreeing == 3
    assert str(result) == "+1.50 (-1.18 to +4.18), p = 0.17, 3 of 4 seeds"


def test_exchanging_the_settings_changes_only_the_sign(make_series: MakeSeries) -> None:
    a, b = make_series([2, 4, 3, 8]), make_series([1, 2, 3.5, 4.5], name="b")
    there, back = paired_over_seeds(a, b), paired_over_seeds(b, a)
    assert back.mean_difference == -there.mean_difference
    assert (back.ci_low, back.ci_high, back.p) == pytest.approx((-there.ci_high, -there.ci_low, there.p))
    assert back.agreeing == there.agreeing == 3


def test_runs_are_paired_by_seed_not_by_position(make_series: MakeSeries) -> None:
    a, b = make_series([2, 4, 3, 8]), make_series([1, 2, 3.5, 4.5], name="b")
    assert paired_over_seeds(a[::-1], b) == paired_over_seeds(a, b)
    some = paired_over_seeds(a[:3], b[1:])
    assert (some.seeds, some.unpaired, some.differences) == ((1, 2), (0, 3), (2, -0.5))
    assert str(some).endswith("1 of 2 seeds; no pair of 0, 3")


def test_one_seed_has_a_difference_and_no_test(make_series: MakeSeries) -> None:
    result = paired_over_seeds(make_series([2]), make_series([1], name="b"))
    assert result.mean_difference == 1
    assert all(math.isnan(value) for value in (result.ci_low, result.ci_high, result.p))
    assert str(result) == "+1.00 (one seed: no interval), 1 of 1 seeds"


def test_equal_settings_differ_by_nothing(make_series: MakeSeries) -> None:
    result = paired_over_seeds(make_series([2, 3]), make_series([2, 3], name="b"))
    assert (result.mean_difference, result.ci_low, result.ci_high, result.p) == (0, 0, 0, 1)


@given(st.lists(st.floats(-20, 20).map(lambda bits: round(bits, 2)), min_size=2, max_size=8))
def test_the_interval_leaves_zero_out_where_p_is_below_5_percent(differences: list[float]) -> None:
    mean, low, high, p = t_test_over_seeds(np.array(differences))
    assert low <= mean <= high
    assert 0 <= p <= 1
    if abs(p - 0.05) > 1e-6 and np.ptp(differences) > 0:
        assert (p < 0.05) == (not low <= 0 <= high)


def test_series_that_do_not_compare_are_refused(make_series: MakeSeries, make_run: MakeRun) -> None:
    a, b = make_series([1, 2]), make_series([2, 3], name="b")
    with pytest.raises(InputError, match=r"no seed has a run of both: \[0\] and \[1\]"):
        paired_over_seeds(a[:1], b[1:])
    with pytest.raises(InputError, match="runs b-0 and b-0: both of seed 0"):
        paired_over_seeds(a, [b[0], b[0]])
    with pytest.raises(InputError, match="run old: an older run, which does not say its seed"):
        paired_over_seeds(a, [read_run(make_run(name="old"))])
    with pytest.raises(InputError, match="run a-0: was not evaluated at 3 epochs"):
        paired_over_seeds(make_series([1], name="a"), b, epoch=3)
    with pytest.raises(InputError, match="--round and --epoch"):
        paired_over_seeds(a, b, round=10, epoch=10)
    other = read_run(make_run({10: {"exposure": [1.0] * 9, "references": 10_000}}, name="c", seed=0, shift=7))
    with pytest.raises(InputError, match="planted different canaries"):
        paired_over_seeds(a, [other])


def test_worlds_are_compared_where_nothing_else_differs(make_series: MakeSeries) -> None:
    runs = [
        *make_series([3, 4], name="a", setting="IID, FedAvg, b_u=16"),
        *make_series([1, 3], name="b", setting="Non-IID, FedAvg, b_u=16"),
        *make_series([3, 4], name="c", setting="IID, SGD, b_r=32"),
        *make_series([3, 4], name="d", setting="Non-IID, SGD, b_r=128"),
    ]
    *heading, line, _, at_equal_perplexity = compare_worlds(runs).splitlines()
    assert line == "FedAvg, b_u=16: +1.50 (-4.85 to +7.85), p = 0.2, 2 of 2 seeds"
    assert at_equal_perplexity == "FedAvg, b_u=16: +1.50 (-4.85 to +7.85), p = 0.2, 2 seeds"  # at an equal one already
    assert max(map(len, [*heading, line])) <= 80
    assert compare_worlds(runs[4:]) == ""
    again = make_series([3, 4], name="e", setting="IID, FedAvg, b_u=16")
    assert " ".join(compare_worlds([*runs, *again]).split()).endswith(
        "b_u=16: not compared, since several rows have this setting; show fewer runs"
    )


def of_settings(make_series: MakeSeries, name: str, levels: Sequence[float], **settings: object) -> list[RunResults]:
    """Runs of one label, which tell only by their settings what they were trained with."""
    world = name.partition(" ")[0]
    known = {"data.world": world.lower()} | {key.replace("_", ".", 1): value for key, value in settings.items()}
    return [replace(run, settings=known) for run in make_series(levels, name, setting=f"{world}, S")]


def test_worlds_are_compared_at_each_value_of_a_setting_that_no_name_has(make_series: MakeSeries) -> None:
    """A rate that one world alone was trained at has no line, and no part in another one's ceiling."""
    runs = [
        *of_settings(make_series, "IID 0.3", [3, 4], local_learning_rate=0.3),
        *of_settings(make_series, "IID 0.9", [4, 6], local_learning_rate=0.9),
        *of_settings(make_series, "IID 2", [20, 20], local_learning_rate=2.0),
        *of_settings(make_series, "Non-IID 0.9", [1, 4], local_learning_rate=0.9),
        *of_settings(make_series, "Non-IID 0.3", [2, 2], local_learning_rate=0.3),
    ]
    text = compare_worlds(runs)
    assert "S, learning_rate 0.3: +1.50 (" in text
    assert "S, learning_rate 0.9: +2.50 (" in text
    assert "not compared" not in text
    assert "learning_rate 2" not in text
    assert "ceiling" not in text
    for setting in seeds_table.seeds_table(runs)["setting"]:
        assert setting.removeprefix("Non-").startswith("IID, S, learning_rate")


def test_rates_that_a_search_chose_for_each_row_leave_rows_twins(make_series: MakeSeries) -> None:
    runs = [
        *of_settings(make_series, "IID 15", [3, 4], model_units=15, local_learning_rate=0.3),
        *of_settings(make_series, "IID 30", [4, 6], model_units=30, local_learning_rate=0.5),
        *of_settings(make_series, "Non-IID 15", [2, 2], model_units=15, local_learning_rate=0.7),
        *of_settings(make_series, "Non-IID 30", [1, 4], model_units=30, local_learning_rate=0.8),
    ]
    text = compare_worlds(runs)
    assert "S, units 15: +1.50 (" in text
    assert "S, units 30: +2.50 (" in text


def test_worlds_of_short_and_of_long_training_are_compared_each(make_series: MakeSeries) -> None:
    levels = {"IID-10": [4, 5, 6], "Non-IID-10": [3, 4, 4], "IID-5": [2, 2, 3], "Non-IID-5": [2, 1, 1]}
    runs = []
    for name, of_seeds in levels.items():
        world, _, length = name.rpartition("-")
        runs += make_series(of_seeds, name, int(length), setting=f"{world}, S", series=world)
    text = compare_worlds(runs)
    assert "S, 10 rounds: +1.33" in text  # 1, 1 and 2 bits
    assert "S, 5 rounds: +1.00" in text  # 0, 1 and 2 bits
    assert "not compared" not in text


def test_worlds_that_do_not_compare_say_why(make_series: MakeSeries, make_run: MakeRun) -> None:
    """The table beside them is still a table: a diverged run has no pair, and older runs have no seed."""
    iid = make_series([3, 4], name="a", setting="IID, S")
    wild = read_run(
        make_run({10: {"rs": [1.0] * 9}}, name="b", setting="Non-IID, S", status="diverged", seed=0, series="b")
    )
    assert "S: not compared: no seed is left; diverged, so dropped from both: seed 0 in Non-IID, S; lower" in " ".join(
        compare_worlds([*iid, wild]).split()
    )
    old = read_run(make_run({10: {"rs": [1.0] * 9}}, name="c", setting="Non-IID, S"))
    assert "S: not compared: run c: an older run" in compare_worlds([*iid, old])


def simulated(
    index: int, effect: float, seeds: int = 5, canaries: int = 48
) -> list[np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """Differences of exposure, [canaries] of each seed: what training does to both models, and the ceiling."""
    rng = stream(0, "paired", int(10 * effect), index)
    found = []
    for _ in range(seeds):
        level = rng.uniform(0, 16, canaries)
        a, b = (
            np.minimum(level + shift + rng.normal(0, 0.5) + rng.normal(0, 1.5, canaries), 14.3) for shift in (effect, 0)
        )
        found.append(np.asarray(a - b))
    return found


def test_false_positives_are_as_rare_as_promised() -> None:
    """No effect, p < 0.05: in 5% of simulations; bounds 3.5 standard errors off, 1 in 2,000 under another seed.

    The t test over all canaries pooled is wrong several times as often: training moves a model's canaries together.
    """
    over_seeds, pooled = [], []
    for index in range(SIMULATIONS):
        differences = simulated(index, 0.0)
        over_seeds.append(t_test_over_seeds(np.array([each.mean() for each in differences]))[3] < 0.05)
        pooled.append(paired_t_p(np.concatenate(differences)) < 0.05)
    assert abs(np.mean(over_seeds) - 0.05) < 3.5 * math.sqrt(0.05 * 0.95 / SIMULATIONS)
    assert np.mean(pooled) > 0.2


def test_a_real_difference_is_found() -> None:
    """Two bits, of which the ceiling leaves 1.7, against 0.7 a seed: nearly always."""
    found = [t_test_over_seeds(np.array([each.mean() for each in simulated(index, 2.0)])) for index in range(200)]
    assert np.mean([p < 0.05 for _, _, _, p in found]) > 0.8
    assert np.mean([mean > 0 for mean, *_ in found]) == 1


def diverge(run: RunResults) -> RunResults:
    return replace(run, status="diverged", reason="the model of round 5 is not finite")


def test_a_seed_that_diverged_in_one_world_is_dropped_from_both_and_counted(make_series: MakeSeries) -> None:
    """Differences are 2, 1 and 5 bits. Without the last pair their mean is 1.5; the IID survivor would raise it."""
    iid = make_series([4, 4, 8], setting="IID, S", series="a")
    other = make_series([2, 3, 3], name="b", setting="Non-IID, S", series="b")
    wild = [*other[:2], diverge(other[2])]
    result = paired_over_seeds(iid, wild)
    assert result.seeds == (0, 1)
    assert result.mean_difference == 1.5
    assert (result.diverged_a, result.diverged_b, result.unpaired) == ((), (2,), ())
    assert str(result).endswith("; diverged, so dropped from both: seed 2 in Non-IID, S")
    assert str(result) in " ".join(compare_worlds([*iid, *wild]).split())
    over_seeds = seeds_table.seeds_table([*iid, *wild])
    assert over_seeds["diverged"].tolist() == [0, 1]
    lines = seeds_table.to_markdown(over_seeds).splitlines()
    assert [line.split("|")[3].strip() for line in (lines[0], *lines[2:4])] == ["Div.", "0", "1"]
    entries = [[SweepRun(run.name, "g", seed, {}, None, run) for seed, run in enumerate(runs)] for runs in (iid, wild)]
    pairs = [Pair("row", *entries)]
    table = compare_pairs(pairs)
    [row] = table.to_dict("records")
    assert (row["seeds"], row["diverged_a"], row["diverged_b"], row["mean_difference"]) == (2, 0, 1, 1.5)
    text = to_markdown(table, pairs)
    assert "|0/1|" in text.replace(" ", "")
    assert "dropped from both" in " ".join(text.split())


@pytest.mark.parametrize("effect", [0.0, 3.0])
def test_intervals_over_seeds_hold_where_one_side_diverges(effect: float) -> None:
    """The effect is expected in 1,900 of 2,000 intervals, with a standard deviation of 9.7; the bounds are four.

    A seed has a level of its own, common to both worlds, and its run in b diverges where the level is high. Pairs of
    what is left are of eight seeds less three. The mean over all of a less that over the survivors of b is biased.
    """
    rng = stream(0, "one side diverges", int(effect))
    held, rejected, naive = 0, 0, []
    for _ in range(SIMULATIONS):
        levels, differences = rng.normal(10, 3, 8), rng.normal(effect, 1, 8)
        kept = levels < np.sort(levels)[5]
        _, low, high, p = t_test_over_seeds(differences[kept])
        held += low <= effect <= high
        rejected += p < 0.05
        naive.append((levels + differences).mean() - levels[kept].mean())
    assert abs(held - 1_900) <= 39
    assert rejected == SIMULATIONS - held if effect == 0 else rejected > 1_900
    assert np.mean(naive) > effect + 1
