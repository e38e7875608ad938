"""Differences of two runs, and of two settings over seeds, at runs whose values and differences are known."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from helpers import Flsim
from results.levels import measured
from scipy import stats
from shown import over_seeds as by_series

from flsim.base.errors import InputError
from flsim.base.statistics import holm
from flsim.canaries.population import SCHEMA
from flsim.results.differences import (
    Comparison,
    Pair,
    at_equal_perplexity,
    at_perplexity,
    compare_runs,
    differences,
    lowest_in_both,
    pair_at_like_utility,
    planned,
    to_wide,
)
from flsim.results.rows import RunResults, read_run
from flsim.show.differences import compare_partitions, partitions_of, table_of_pairs

MakeRun = Callable[..., Path]
MakeSeries = Callable[..., list[RunResults]]
MakePair = Callable[[list[float], list[float]], tuple[RunResults, RunResults]]

BITS_A = [1.5, 3.0, 13.25, 13.25, 2.0, 7.0, 4.0, 9.0, 5.5]
BITS_B = [1.0, 3.0, 13.25, 10.0, 2.5, 3.0, 2.0, 4.0, 5.0]
GRID = [(0.01, 0.5), (0.01, 1.0), (1 / 5000, 1.0)]
# Three canaries in each configuration.
A = {"exposure": [3, 5, 4, 9, 8, 6, 14, 14, 14], "rs": [0, 0, 0, 1, 1, 0, 1, 1, 1], "bs": [0, 0, 0, 0, 0, 0, 1, 1, 0]}
B = {"exposure": [2, 4, 1, 4, 9, 2, 14, 13, 9], "rs": [0, 1, 0, 0, 0, 0, 1, 1, 0], "bs": [0] * 9}
MODEL = {"references": 10_000, "accuracy": 0.2, "perplexity": 60.0}
NON_IID = "Non-IID, FedAvg, b_u = 16"


# ----- two runs


@pytest.fixture
def pair(make_run: MakeRun) -> MakePair:
    def make(a: list[float], b: list[float]) -> tuple[RunResults, RunResults]:
        one = make_run({20: {"exposure": a, "references": 10_000}}, name="a")
        other = make_run({10: {"exposure": b, "references": 10_000}}, name="b")
        return read_run(one), read_run(other)

    return make


def over_all(a: RunResults, b: RunResults, **point: Any) -> "pd.Series[Any]":
    """Return the differences over all canaries of two runs as one row, with columns for each quantity."""
    return to_wide(compare_runs(a, b, **point).table).iloc[0]


def test_statistics_are_those_of_paired_differences_in_scipy(pair: MakePair) -> None:
    row = over_all(*pair(BITS_A, BITS_B))
    each = np.subtract(BITS_A, BITS_B)
    interval = stats.ttest_1samp(each, 0).confidence_interval(0.95)
    assert (row["n"], row["over"]) == (9, "canaries")
    assert (row["exposure_value_a"], row["exposure_value_b"]) == pytest.approx((np.mean(BITS_A), np.mean(BITS_B)))
    assert row["exposure_difference"] == pytest.approx(each.mean())
    assert (row["exposure_low"], row["exposure_high"]) == pytest.approx((interval.low, interval.high))
    assert row["exposure_p"] == pytest.approx(stats.ttest_rel(BITS_A, BITS_B).pvalue)
    assert row["exposure_ranks_p"] == pytest.approx(stats.wilcoxon(each, zero_method="pratt").pvalue)


def test_canaries_are_joined_by_id_not_by_position(pair: MakePair) -> None:
    a, b = pair(BITS_A, BITS_B)
    shuffled = RunResults(**{**vars(b), "roster": b.roster[::-1], "rows": b.rows.sample(frac=1, random_state=3)})
    assert over_all(a, shuffled).equals(over_all(a, b))


def test_equal_differences_have_no_spread(pair: MakePair) -> None:
    """All canaries differ by 0.1 bits, each with another rounding error: they must tie, and the t test has no noise."""
    row = over_all(*pair([value + 0.1 for value in BITS_A], BITS_A))
    assert row["exposure_difference"] == pytest.approx(0.1)
    assert row["exposure_high"] - row["exposure_low"] == pytest.approx(0, abs=1e-9)
    assert row["exposure_p"] == 0
    assert row["exposure_ranks_p"] == pytest.approx(2 / 2**9)


def test_runs_that_are_not_comparable_are_refused(pair: MakePair, make_run: MakeRun) -> None:
    a, b = pair(BITS_A, BITS_B)
    at_10 = {10: {"exposure": BITS_B, "references": 10_000}}
    twice = {10: {"exposure": [*BITS_B, *BITS_B], "references": 10_000}}
    others = {
        "planted different canaries, for example c00": make_run(at_10, name="phrases", shift=1),
        "planted different canaries, for example c09": make_run(twice, name="more", copies=2),
        r"references \(10000 and 500\)": make_run({10: {"exposure": BITS_B, "references": 500}}, name="other-r"),
        r"references \(10000 and unknown\)": make_run({10: {"exposure": BITS_B}}, name="no-r"),
        "diverged": make_run(at_10, name="diverged", status="diverged"),
        "not evaluated yet": make_run(name="new"),
        "exposure was not measured": make_run({10: {"rs": [1.0] * 9, "references": 10_000}}, name="no-exposure"),
    }
    for message, folder in others.items():
        with pytest.raises(InputError, match=message):
            compare_runs(a, read_run(folder))
    with pytest.raises(InputError, match="round 10 was not evaluated"):
        compare_runs(a, b, round=10)
    single = {10: {"exposure": [1.0], "references": 100}}
    one, other = (read_run(make_run(single, name=f"alone-{name}", grid=[(0.1, 1.0)])) for name in "ab")
    with pytest.raises(InputError, match="at least two"):
        compare_runs(one, other)


def compared(make_run: MakeRun, b: dict[str, object] | None = None, **about: object) -> Comparison:
    grid = {"grid": GRID, "copies": 3}
    one = make_run({20: A | MODEL}, name="a", rounds_per_epoch=2.0, **grid)
    other = make_run({20: (b or B) | MODEL | {"perplexity": 66.0}}, name="b", rounds_per_epoch=2.0, **grid, **about)
    return compare_runs(read_run(one), read_run(other))


def cells(text: str) -> list[list[str]]:
    """Return the cells of each line of a Markdown table."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


P_OF_CONFIGURATIONS = [stats.ttest_1samp(each, 0).pvalue for each in ([1, 1, 3], [5, -1, 4], [0, 1, 5])]


def test_all_canaries_and_each_configuration(make_run: MakeRun) -> None:
    table = to_wide(compared(make_run).table)
    assert table["row"].tolist() == ["all", "1/100, 50%", "1/100, 100%", "1/5K, 100%"]
    assert table["n"].tolist() == [9, 3, 3, 3]
    assert table["exposure_difference"].tolist() == pytest.approx([19 / 9, 5 / 3, 8 / 3, 2.0])
    assert table["rs_value_a"].tolist() == [5, 0, 2, 3]
    assert table["rs_value_b"].tolist() == [3, 1, 0, 2]
    assert table["rs_discordant_value_a"].tolist() == [3, 0, 2, 1]
    assert table["rs_discordant_value_b"].tolist() == [1, 1, 0, 0]
    assert table["rs_p"].tolist() == [0.625, 1, 0.5, 1]  # 2 (1 + 4) / 2^4, 1, 2 / 2^2, 1
    assert table["rs_p_holm"].tolist()[1:] == [1, 1, 1]
    assert table["exposure_p"].tolist()[1:] == pytest.approx(P_OF_CONFIGURATIONS)
    assert table["exposure_p_holm"].tolist()[1:] == pytest.approx(holm(P_OF_CONFIGURATIONS))
    assert pd.isna(table["exposure_p_holm"].iloc[0])
    low, high = stats.binomtest(3, 4).proportion_ci(method="exact")
    share = table.iloc[0][[f"rs_discordant_{name}" for name in ("difference", "low", "high")]].tolist()
    assert share == pytest.approx((0.75, low, high))
    assert pd.isna(table["bs_discordant_difference"].iloc[1])  # without discordant canaries there is no share


def test_two_runs_are_also_compared_at_equal_perplexity(flsim: Flsim, make_run: MakeRun) -> None:
    make_run({10: measured(2), 20: measured(3)}, name="a")
    make_run({10: measured(1), 20: measured(2)}, name="b")
    _, text, _ = flsim("compare", "a", "b")
    assert "58, the lowest perplexity that both reached (a at round 10, b at round 20)" in " ".join(text.split())
    make_run({20: measured(1)}, name="late")
    _, text, _ = flsim("compare", "a", "late")
    assert "Not compared at equal perplexity: run a: its first evaluation is already below" in " ".join(text.split())


def test_a_pair_with_one_seed_has_the_interval_of_two_runs_at_equal_perplexity(make_run: MakeRun) -> None:
    """Perplexity is equal at the end, so the difference at the end is the difference at equal perplexity."""
    a, b = (
        read_run(make_run({10: MODEL | {"exposure": bits}}, name=name, seed=0))
        for name, bits in (("a", BITS_A), ("b", BITS_B))
    )
    expected = stats.ttest_1samp(np.subtract(BITS_A, BITS_B), 0)
    pairs = [Pair("row", planned([a]), planned([b]))]
    for row in (to_wide(differences(pairs)).iloc[0], over_all(a, b)):
        assert row["like_exposure_p"] == pytest.approx(expected.pvalue)
        interval = (row["like_exposure_low"], row["like_exposure_high"])
        assert interval == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert "Eq. perp.: mean exposure" in table_of_pairs(differences(pairs), pairs).markdown()


def test_two_runs_without_canaries_are_compared_only_in_utility(flsim: Flsim, make_run: MakeRun) -> None:
    for name, perplexity in (("a", 60.0), ("b", 66.0)):
        folder = make_run({10: {"accuracy": 0.2, "perplexity": perplexity}}, name=name)
        pq.write_table(SCHEMA.empty_table(), folder / "planted" / "roster.parquet")
    code, text, printed = flsim("compare", "a", "b")
    assert (code, printed) == (0, "")
    assert text.endswith("Neither run has canaries, so only utility is compared.\n")
    assert [line[-1] for line in cells(text)] == ["Perp.", "----:", "60.0", "66.0"]
    said = json.loads(flsim("compare", "a", "b", "--json")[1])
    assert (said["b"]["perplexity"], said["rows"]) == (66, [])


# ----- two settings over seeds


def over_seeds(a: Sequence[RunResults], b: Sequence[RunResults], **point: Any) -> "pd.Series[Any]":
    return to_wide(differences([Pair("row", planned(a), planned(b))], **point)).iloc[0]


def test_runs_are_paired_by_seed_not_by_position(make_series: MakeSeries) -> None:
    a, b = make_series([2, 4, 3, 8]), make_series([1, 2, 3.5, 4.5], name="b")
    assert over_seeds(a[::-1], b).equals(over_seeds(a, b))
    some = over_seeds(a[:3], b[1:])
    assert (some["seeds"], some["exposure_difference"]) == (2, 0.75)


def test_one_seed_is_compared_over_its_canaries_and_equal_settings_differ_by_0(make_series: MakeSeries) -> None:
    row = over_seeds(make_series([2]), make_series([1], name="b"))
    assert (row["over"], row["exposure_difference"], row["like_exposure_difference"]) == ("canaries", 1, 1)
    assert row["like_exposure_p"] == row["exposure_p"]
    row = over_seeds(make_series([2, 3], name="c"), make_series([2, 3], name="d"))
    assert row[[f"exposure_{name}" for name in ("difference", "low", "high", "p")]].tolist() == [0, 0, 0, 1]


def test_series_that_are_not_comparable_have_a_reason(make_series: MakeSeries, make_run: MakeRun) -> None:
    a, b = make_series([1, 2]), make_series([2, 3], name="b")
    other = read_run(make_run({10: {"exposure": [1.0] * 9, "references": 10_000}}, name="c", seed=0, shift=7))
    for (of_a, of_b), point, why in (
        ((a[:1], b[1:]), {}, "the seeds [0] and [1] have no seed in common"),
        ((a, [b[0], b[0]]), {}, "runs b-0 and b-0: both have seed 0"),
        ((a, [read_run(make_run(name="old"))]), {}, "old (completed, not evaluated yet)"),
        ((a, b), {"epoch": 3}, "was not evaluated at 3 epochs"),
        ((a, [other]), {}, "planted different canaries"),
    ):
        row = over_seeds(of_a, of_b, **point)
        assert why in row["left_out"]
        assert "exposure_difference" not in row
    with pytest.raises(InputError, match="--round and --epoch"):
        over_seeds(a, b, round=10, epoch=10)


def test_a_seed_that_diverged_in_one_partition_is_dropped_from_both_and_counted(make_series: MakeSeries) -> None:
    """Differences are 2, 1 and 5 bits. Without the last pair, their mean is 1.5; its IID run would raise it."""
    iid = make_series([4, 4, 8], setting="IID, S", series="a")
    other = make_series([2, 3, 3], name="b", setting="Non-IID, S", series="b")
    wild = [*other[:2], replace(other[2], status="diverged", reason="the model of round 5 is not finite")]
    pairs = [Pair("row", planned(iid), planned(wild))]
    frame = differences(pairs)
    row = to_wide(frame).iloc[0]
    assert (row["seeds"], row["diverged_value_a"], row["diverged_value_b"]) == (2, 0, 1)
    assert row["exposure_difference"] == 1.5
    assert "b-2 (diverged" in row["left_out"]
    assert "|0/1|" in table_of_pairs(frame, pairs).markdown().replace(" ", "")
    assert by_series([*iid, *wild])["diverged"].tolist() == [0, 1]


# ----- partitions of the rows of a table


def of_partitions(runs: Sequence[RunResults]) -> dict[str, float]:
    """Return the exposure of IID minus that of non-IID, by label."""
    pairs, several = partitions_of(runs)
    assert not several
    wide = to_wide(differences(pairs))
    return dict(zip(wide["row"], wide["exposure_difference"].astype(float), strict=True))


def test_partitions_are_compared_if_nothing_else_differs(make_series: MakeSeries) -> None:
    runs = [
        *make_series([3, 4], name="a", setting="IID, FedAvg, b_u=16"),
        *make_series([1, 3], name="b", setting="Non-IID, FedAvg, b_u=16"),
        *make_series([3, 4], name="c", setting="IID, SGD, b_r=32"),
        *make_series([3, 4], name="d", setting="Non-IID, SGD, b_r=128"),
    ]
    assert of_partitions(runs) == {"FedAvg, b_u=16": 1.5}
    text = compare_partitions(runs)
    assert "+1.50" in text
    assert max(map(len, text.splitlines())) <= 80
    assert compare_partitions(runs[4:]) == ""
    again = make_series([3, 4], name="e", setting="IID, FedAvg, b_u=16")
    assert compare_partitions([*runs, *again]).startswith("FedAvg, b_u=16: several rows have this setting")


def of_settings(make_series: MakeSeries, name: str, levels: Sequence[float], **settings: object) -> list[RunResults]:
    """Return runs of one label that differ from other runs only in their settings."""
    partition = name.partition(" ")[0]
    known = {"data.partition": partition.lower()} | {key.replace("_", ".", 1): value for key, value in settings.items()}
    return [replace(run, settings=known) for run in make_series(levels, name, setting=f"{partition}, S")]


def test_partitions_are_compared_at_each_value_of_a_setting_that_no_name_has(make_series: MakeSeries) -> None:
    """A learning rate that only one partition was trained with has no line."""
    runs = [
        *of_settings(make_series, "IID 0.3", [3, 4], local_learning_rate=0.3),
        *of_settings(make_series, "IID 0.9", [4, 6], local_learning_rate=0.9),
        *of_settings(make_series, "IID 2", [20, 20], local_learning_rate=2.0),
        *of_settings(make_series, "Non-IID 0.9", [1, 4], local_learning_rate=0.9),
        *of_settings(make_series, "Non-IID 0.3", [2, 2], local_learning_rate=0.3),
    ]
    assert of_partitions(runs) == {"S, learning_rate 0.3": 1.5, "S, learning_rate 0.9": 2.5}
    begun = [*runs[:4], *runs[6:8]]  # Non-IID with one learning rate, as in a sweep that was killed
    for setting in [*by_series(runs)["setting"], *by_series(begun)["setting"]]:
        assert setting.removeprefix("Non-").startswith("IID, S, learning_rate")
    assert "S, learning_rate 0.9" in compare_partitions(begun)


def test_rows_with_different_tuned_learning_rates_are_still_twins(make_series: MakeSeries) -> None:
    runs = [
        *of_settings(make_series, "IID 15", [3, 4], model_units=15, local_learning_rate=0.3),
        *of_settings(make_series, "IID 30", [4, 6], model_units=30, local_learning_rate=0.5),
        *of_settings(make_series, "Non-IID 15", [2, 2], model_units=15, local_learning_rate=0.7),
        *of_settings(make_series, "Non-IID 30", [1, 4], model_units=30, local_learning_rate=0.8),
    ]
    assert of_partitions(runs) == {"S, units 15": 1.5, "S, units 30": 2.5}


def test_partitions_of_short_and_of_long_training_are_compared_separately(make_series: MakeSeries) -> None:
    levels = {"IID-10": [4, 5, 6], "Non-IID-10": [3, 4, 4], "IID-5": [2, 2, 3], "Non-IID-5": [2, 1, 1]}
    runs = []
    for name, of_seeds in levels.items():
        partition, _, length = name.rpartition("-")
        runs += make_series(of_seeds, name, int(length), setting=f"{partition}, S", series=partition)
    assert of_partitions(runs) == pytest.approx({"S, 10 rounds": 4 / 3, "S, 5 rounds": 1.0})


CANARIES = 9


@pytest.fixture
def make_curve(make_run: MakeRun) -> Callable[..., RunResults]:
    """Make a run from pairs of a cross-entropy and the exposure of canary 0; canary i has i bits more than canary 0."""

    def make(name: str, points: Sequence[tuple[float, float]], seed: int = 0, **about: object) -> RunResults:
        rounds = {}
        for place, (entropy, bits) in enumerate(points, 1):
            exposures = [bits + canary for canary in range(CANARIES)]
            rounds[10 * place] = {"perplexity": math.exp(entropy), "exposure": exposures, "references": 100.0}
        return read_run(make_run(rounds, name=name, seed=seed, series=name.partition("-")[0], **about))

    return make


def test_exposures_between_two_evaluations_are_interpolated(make_curve: Callable[..., RunResults]) -> None:
    """4.25 nats is a quarter of the way from 4.5 to 3.5 nats, between which exposure rises from 2 to 6 bits."""
    run = make_curve("a", [(5.0, 1.0), (4.5, 2.0), (3.5, 6.0)])
    round_, exposures = at_perplexity(run, math.exp(4.25))
    assert round_ == pytest.approx(22.5)
    assert exposures.to_numpy() == pytest.approx(3.0 + np.arange(CANARIES))
    at_an_evaluation = at_perplexity(run, math.exp(4.5))
    assert at_an_evaluation[0] == 20
    assert at_an_evaluation[1].to_numpy() == pytest.approx(2.0 + np.arange(CANARIES))
    twice = make_curve("b", [(5.0, 1.0), (4.0, 2.0), (4.6, 3.0), (3.8, 4.0)])
    assert at_perplexity(twice, math.exp(4.5))[0] == pytest.approx(15)  # the first of two crossings


def test_runs_that_differ_only_in_length_are_equal_at_equal_perplexity(make_curve: Callable[..., RunResults]) -> None:
    """Exposure is 3 (6 - nats) in both. At the end, one run has 4.5 bits more, because its training lasted longer."""
    long = make_curve("a", [(nats, 3 * (6 - nats)) for nats in (5.5, 4.7, 3.9, 3.5)])
    short = make_curve("b", [(nats, 3 * (6 - nats)) for nats in (5.7, 5.2, 5.0)])
    assert to_wide(compare_runs(long, short).table)["exposure_difference"].iloc[0] == pytest.approx(4.5)
    compared = pair_at_like_utility(long, short)
    assert compared.perplexity == pytest.approx(math.exp(5.0))
    assert compared.differences.mean() == pytest.approx(0, abs=1e-9)
    assert compared.rounds[1] == 30
    assert math.isnan(at_equal_perplexity({0: [(long, short)]})["p"])


def test_a_seed_without_a_common_perplexity_is_excluded_and_named(make_curve: Callable[..., RunResults]) -> None:
    """The first run of seed 3, of 3 and 4, or of all seeds begins below the lowest perplexity of the second."""
    a = [make_curve(f"a-{seed}", [(5, 1), (4, 5)], seed) for seed in range(5)]
    b = [make_curve(f"b-{seed}", [(5, 0), (4.5, 2 - seed)], seed) for seed in range(5)]
    late = [make_curve(f"late-{seed}", [(4, 5)], seed) for seed in range(5)]
    compared = at_equal_perplexity(
        {seed: [both] for seed, both in enumerate(zip([*a[:3], late[3], a[4]], b, strict=True))}
    )
    assert (compared["n"], compared["difference"]) == (4, pytest.approx(np.mean([1, 2, 3, 5])))
    assert compared["p"] == pytest.approx(stats.ttest_1samp([1, 2, 3, 5], 0).pvalue)
    assert compared["left_out"].startswith("seed 3 excluded: run late-3: ")
    two = at_equal_perplexity({seed: [both] for seed, both in enumerate(zip([*a[:3], *late[3:]], b, strict=True))})
    assert two["left_out"].startswith(
        "seeds 3, 4 excluded: run late-3: its first evaluation is already below perplexity 90.02"
    )
    assert "difference" not in at_equal_perplexity({3: [(late[3], b[3])]})


def test_runs_without_a_common_perplexity_are_refused_with_a_reason(make_curve: Callable[..., RunResults]) -> None:
    run = make_curve("a", [(5.0, 1.0), (4.0, 2.0)])
    with pytest.raises(InputError, match=r"run a: never reached perplexity 20\.09; its lowest is 54\.6"):
        at_perplexity(run, math.exp(3))
    with pytest.raises(InputError, match=r"run a: its first evaluation is already below perplexity 403\.4, at 148\.4"):
        at_perplexity(run, math.exp(6))
    with pytest.raises(InputError, match="run d: no evaluation has both perplexity and exposure"):
        lowest_in_both(run, make_curve("d", []))


def test_canaries_that_neither_run_planted_are_excluded(make_curve: Callable[..., RunResults]) -> None:
    """Only the first two canaries are planted, and the last one has another exposure in one of the runs."""
    a, b = make_curve("a", [(5, 1), (4, 5)]), make_curve("b", [(5, 1), (4, 3)])
    changed = a.rows["value"].where(a.rows["canary"] != a.roster["canary"].iloc[-1], 99.0)
    drawn = [3, 3] + [0] * (len(a.roster) - 2)
    runs = [replace(run, roster=run.roster.assign(planned_insertions=drawn)) for run in (a, b)]
    changed_rows = a.rows.assign(value=changed)
    assert pair_at_like_utility(replace(runs[0], rows=changed_rows), runs[1]).differences.mean() == 2.0
    assert pair_at_like_utility(replace(a, rows=changed_rows), b).differences.mean() != 2.0
