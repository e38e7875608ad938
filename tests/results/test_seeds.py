"""Means over seeds: values computed by hand, excluded runs with reasons, and names of series."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from shown import over_seeds, to_latex, to_markdown

from flsim.base.errors import InputError
from flsim.results.rows import RunResults, read_run
from flsim.results.sweeps import by_series, distinctions, named_apart, sample
from flsim.results.tables import memorization_table
from flsim.show.table import to_csv

MakeRun = Callable[..., Path]
MakeSeries = Callable[..., list[RunResults]]


def test_means_and_intervals_over_seeds_equal_values_computed_by_hand(make_series: MakeSeries) -> None:
    """Mean exposures of levels 2, 4, 6 are 4, 6, 8, so 6. t at 97.5% with 2 degrees of freedom is 4.303.

    The pooled sample has 27 values. RS counts canaries i with level + i / 2 >= 4: 5, 9, 9; BS with >= 6: 1, 5, 9."""
    row = over_seeds(make_series([2, 4, 6])).iloc[0]
    assert (row["seeds"], row["given"], row["round"], row["epochs"], row["canaries"]) == (3, 3, 10, 10, 9)
    assert (row["series"], row["runs"], row["references"]) == ("iid", "iid-0, iid-1, iid-2", 10_000)
    assert (row["rs"], row["bs"]) == pytest.approx((23 / 3, 5))
    assert (row["rs_sd"], row["bs_sd"]) == pytest.approx((math.sqrt(16 / 3), 4))
    assert row["mean_exposure"] == 6
    half = 4.303 * 2 / math.sqrt(3)
    assert (row["seeds_low"], row["seeds_high"]) == pytest.approx((6 - half, 6 + half), abs=1e-3)
    pooled = [level + index / 2 for level in (2, 4, 6) for index in range(9)]
    half = 2.056 * float(np.std(pooled, ddof=1)) / math.sqrt(27)  # t at 97.5% with 26 degrees of freedom
    assert (row["canaries_low"], row["canaries_high"]) == pytest.approx((6 - half, 6 + half), abs=1e-3)
    assert (row["accuracy"], row["accuracy_sd"]) == pytest.approx((0.2, 0))
    assert (row["perplexity"], row["perplexity_sd"]) == (61, 1)


def test_short_and_long_training_are_different_series(make_series: MakeSeries) -> None:
    """Table 2 of Thakkar et al. (2020) has rows of 8,000 and of 800 rounds with equal settings."""
    long, other = make_series([1, 2], name="long", series="one"), make_series([3], name="other")
    short = make_series([4, 5], name="short", series="one", round=5)
    assert by_series([*long, *other, *short]) == [long, other, short]
    assert by_series([long[0], *other, short[1]]) == [[long[0], short[1]], other]  # lengths of other seeds may differ
    with pytest.raises(InputError, match="runs short-1 and short-1: equal settings and seed 1; exclude one of them"):
        by_series([*long, *short, short[1]])


def test_names_of_short_and_long_training_have_the_rounds(make_run: MakeRun) -> None:
    long, other, unlike = (
        make_run({1_000 + seed: {"accuracy": 0.2}}, name=name, series=name[:3], seed=seed)
        for name, seed in (("one", 0), ("one other", 1), ("two", 0))
    )
    setting, old = "IID, FedAvg, b_u = 16", make_run(name="old")
    several = {long: "one", other: "one", unlike: "two", old: str(old)}
    assert named_apart(several) == {
        path: {"setting": setting, "series": series} for path, series in several.items()
    }  # lengths of other seeds may differ
    short = make_run({500: {"accuracy": 0.2}}, name="short", series="one", seed=0)
    named = named_apart([long, short, unlike])
    assert [named[path]["series"] for path in (long, short, unlike)] == ["one, 1,000 rounds", "one, 500 rounds", "two"]
    assert [named[path]["setting"] for path in (short, unlike)] == [f"{setting}, 500 rounds", setting]


def test_one_seed_has_no_interval(make_series: MakeSeries) -> None:
    table = over_seeds(make_series([2]))
    row = table.iloc[0]
    assert (row["mean_exposure"], row["perplexity"]) == (4, 60)
    for column in ("seeds_low", "seeds_high", "rs_sd", "bs_sd", "accuracy_sd", "perplexity_sd"):
        assert row[column] is pd.NA
    written = [to_markdown(table), to_latex(table), to_csv(table)]
    assert not any("nan" in text.lower() or "<na>" in text.lower() for text in written)


def test_a_value_that_one_seed_lacks_is_blank_not_a_mean_of_others(make_series: MakeSeries, make_run: MakeRun) -> None:
    bare = read_run(make_run({10: {"rs": [1.0] * 9, "references": 10_000}}, name="bare", seed=7, series="iid"))
    row = over_seeds([*make_series([2, 4]), bare]).iloc[0]
    assert row["rs"] == pytest.approx((5 + 9 + 9) / 3)
    for column in ("bs", "mean_exposure", "seeds_low", "canaries_low", "accuracy", "perplexity", "epochs"):
        assert row[column] is pd.NA


@pytest.fixture
def troubled(make_series: MakeSeries, make_run: MakeRun) -> list[RunResults]:
    """Return two good seeds, and four: one diverged, one failed, one still runs, and one is not evaluated."""
    measured = {10: {"rs": [1.0] * 9, "exposure": [13.0] * 9, "references": 10_000}}
    common = {"series": "iid", "rounds_per_epoch": 1.0}
    others = [
        make_run(measured, name="wild", seed=2, status="diverged", reason="the update is not\nfinite", **common),
        make_run(measured, name="dead", seed=3, status="failed", reason="a client keeps failing", **common),
        make_run(measured, name="slow", seed=4, status="running", **common),
        make_run(name="new", seed=5, **common),
    ]
    return [*make_series([2, 4]), *map(read_run, others)]


def test_runs_that_are_not_averaged_are_named(troubled: list[RunResults]) -> None:
    table = over_seeds(troubled)
    row = table.iloc[0]
    assert (row["seeds"], row["given"], row["runs"], row["mean_exposure"]) == (2, 6, "iid-0, iid-1", 5)
    for reason in (
        "wild (diverged at round 10 of 10: the update is not finite)",
        "slow (running or killed at",
        "new (completed, ",
    ):
        assert reason in row["left_out"]
    shown = to_markdown(table)
    assert "|2/6|" in shown.replace(" ", "")
    assert " ".join(f"Excluded from {row['setting']}: {row['left_out']}".split()) in " ".join(shown.split())


def test_at_an_epoch_all_runs_that_were_evaluated_then_count(troubled: list[RunResults]) -> None:
    """The model of a failed or unfinished run at that epoch is valid; that of a diverged run is ignored."""
    row = over_seeds(troubled, epoch=10).iloc[0]
    assert row["runs"] == "iid-0, iid-1, dead, slow"
    assert row["left_out"].endswith("; new (completed, not evaluated at 10 epochs)")
    with pytest.raises(InputError, match="run iid-0: was not evaluated at 7 epochs; choose one of 10"):
        over_seeds(troubled, epoch=7)
    with pytest.raises(InputError, match="run iid-0: round 7 was not evaluated"):
        over_seeds(troubled, round=7)


def test_a_series_without_any_result_is_a_row_without_a_mean(troubled: list[RunResults]) -> None:
    table = over_seeds(troubled[2:])
    assert (table["seeds"].item(), table["given"].item()) == (0, 4)
    assert table["mean_exposure"].isna().all()
    assert "|0/4|" in to_markdown(table).replace(" ", "")


def test_runs_that_are_not_comparable_have_no_mean(make_series: MakeSeries, make_run: MakeRun) -> None:
    common = {"seed": 7, "series": "iid", "rounds_per_epoch": 1.0}
    others = {
        "last evaluated at rounds 10 and 20": make_run({20: {"references": 10_000}}, name="longer", **common),
        "9 and 18 canaries": make_run({10: {"references": 10_000}}, name="more", copies=2, **common),
        "different numbers of references": make_run({10: {"references": 500}}, name="other-r", **common),
    }
    iid = make_series([1, 2])
    for message, folder in others.items():
        with pytest.raises(InputError, match=message):
            sample([*iid, read_run(folder)])
    with pytest.raises(InputError, match="--round and --epoch"):
        sample(iid, round=10, epoch=10)


def told_apart(make_series: MakeSeries, *settings: Mapping[str, Any]) -> list[str]:
    [run] = make_series([1])
    runs = [replace(run, settings=of_run, label="A") for of_run in settings]
    assert memorization_table(runs)["setting"].tolist() == ["IID, A" + words for words in distinctions(runs)]
    return distinctions(runs)


def test_distinctions_are_the_values_of_settings_that_differ(make_series: MakeSeries) -> None:
    """Seeds, machines and the path of a corpus distinguish nothing. A table of runs has the same names."""
    common = {"model.architecture": "lstm", "canaries.count": 8}
    words = told_apart(
        make_series,
        {**common, "seed": 0, "data.corpus": "/a", "model.units": 15, "privacy.clip": 0.5, "canaries.insertions": [1]},
        {**common, "seed": 1, "data.corpus": "/b", "model.units": 30, "privacy.clip": 10.0, "canaries.insertions": [1]},
        {**common, "system.shards": 2, "model.units": 30, "canaries.insertions": [1, 10]},
    )
    assert words == [
        ", units 15, clip 0.5, insertions 1",
        ", units 30, clip 10, insertions 1",
        ", units 30, insertions 1 10",
    ]
