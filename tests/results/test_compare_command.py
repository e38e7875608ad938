"""`flsim compare` as it is typed, on hand-made run and sweep folders."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pandas as pd
import pytest
from helpers import Flsim
from results.levels import beside_of, measured
from scipy import stats
from shown import read_typed

from flsim.base.statistics import holm, sign_flip_p
from flsim.results.differences import COLUMNS, differences, same_names, twins
from flsim.results.sweeps import read_sweep

MakeSweep = Callable[..., Path]
Levels = Mapping[tuple[str, str], Sequence[float | None]]
PUBLISHED = {
    ("fedavg", "iid"): {"data": "IID", "rs": 65, "bs": 58, "canaries": 90},
    ("fedavg", "non-iid"): {"data": "Non-IID", "rs": 26, "bs": 2, "canaries": 90},
}


@pytest.fixture
def make_sweep(sweep_of: MakeSweep) -> MakeSweep:
    """Write a sweep's folder: (grid, partition) -> a level for each seed, None where its run has not begun."""

    def make(levels: Levels, name: str = "sweep", **about: object) -> Path:
        rounds = {
            key: [None if level is None else {10: measured(level), 20: measured(level + 1)} for level in each]
            for key, each in levels.items()
        }
        return sweep_of(rounds, name, PUBLISHED, **about)

    return make


def count(level: float, least: float) -> int:
    return sum(level + index / 2 >= least for index in range(9))


IID, NON_IID = [2.0, 3.0, 4.0], [1.0, 1.5, 3.5]
TWO: Levels = {
    ("fedavg", "iid"): IID,
    ("fedavg", "non-iid"): NON_IID,
    ("central", "iid"): [2.0, 3.0, 2.5],
    ("central", "non-iid"): [2.0, 3.5, 1.5],
}


def test_twins_over_seeds(make_sweep: MakeSweep) -> None:
    table = beside_of(twins(read_sweep(make_sweep(TWO))))
    first, second = (row for _, row in table.iterrows())
    differences = [[1, 1.5, 0.5], [0, -0.5, 1]]
    tests = [stats.ttest_1samp(each, 0) for each in differences]
    interval = tests[0].confidence_interval(0.95)
    assert (first["row"], first["seeds"], first["over"], first["canaries_value_a"]) == (
        "fedavg cohort=40",
        3,
        "seeds",
        9,
    )
    assert first["exposure_difference"] == pytest.approx(1)
    assert (first["exposure_low"], first["exposure_high"]) == pytest.approx((interval.low, interval.high))
    assert table["exposure_p"].tolist() == pytest.approx([test.pvalue for test in tests])
    assert table["exposure_p_holm"].tolist() == pytest.approx(holm([test.pvalue for test in tests]))
    counts = [(count(a + 1, 4), count(b + 1, 4)) for a, b in zip(IID, NON_IID, strict=True)]
    assert (first["rs_value_a"], first["rs_value_b"]) == pytest.approx(
        [sum(each) / 3 for each in zip(*counts, strict=True)]
    )
    assert first["rs_p"] == sign_flip_p([a - b for a, b in counts])
    spread = stats.ttest_1samp([a - b for a, b in counts], 0).confidence_interval(0.95)
    assert (first["rs_low"], first["rs_high"]) == pytest.approx((spread.low, spread.high))
    assert (first["perplexity_value_a"], first["perplexity_value_b"]) == pytest.approx((56, 57))
    assert (first["published_rs_value_a"], first["published_bs_value_b"]) == (65, 2)
    assert pd.isna(second["published_rs_value_a"])


def test_what_is_not_there_is_left_out_and_said(make_sweep: MakeSweep, flsim: Flsim) -> None:
    levels: Levels = {
        ("fedavg", "iid"): [2.0, 3.0, 4.0],
        ("fedavg", "non-iid"): [1.0, None, 3.5],
        ("central", "iid"): [2.0],
        ("central", "non-iid"): [None],
        ("alone", "iid"): [2.0],
    }
    table = beside_of(twins(read_sweep(make_sweep(levels))))
    assert table["row"].tolist() == ["fedavg cohort=40", "central cohort=40"]
    assert table["seeds"].iloc[0] == 2
    assert table.iloc[1][["seeds", "exposure_p", "rs_value_a", "exposure_p_holm"]].isna().all()
    assert table["exposure_p_holm"].iloc[0] == table["exposure_p"].iloc[0]  # a row without a test does not count
    code, shown, _ = flsim("compare", "sweep")
    assert code == 0
    assert "Excluded from central cohort=40: central-non-iid-seed0 (not started)" in shown


def test_unfinished_runs_wait_unless_a_round_is_named(make_sweep: MakeSweep) -> None:
    pairs = twins(read_sweep(make_sweep(TWO, status="running", reason="stopped")))
    assert "exposure_p" not in beside_of(pairs)
    assert "fedavg-iid-seed0 (running at round 20 of 20: stopped)" in beside_of(pairs)["left_out"].iloc[0]
    assert beside_of(pairs, round=10)["exposure_difference"].tolist() == pytest.approx([1, 1 / 6])
    assert beside_of(pairs, epoch=10)["epochs_value_a"].tolist() == [10, 10]


def test_two_sweeps_are_matched_by_name(make_sweep: MakeSweep, flsim: Flsim) -> None:
    make_sweep(TWO)
    make_sweep({key: [level - 0.5 for level in levels[:2] if level] for key, levels in list(TWO.items())[:3]}, "other")
    table = beside_of(same_names(*(read_sweep(Path(name)) for name in ("sweep", "other"))))
    assert table["row"].tolist() == [
        "fedavg partition=iid cohort=40",
        "fedavg partition=non-iid cohort=40",
        "central partition=iid cohort=40",
    ]
    assert table["exposure_difference"].tolist() == pytest.approx([0.5] * 3)
    assert "published_rs_value_a" not in table  # both stand for the same row
    code, shown, _ = flsim("compare", "sweep", "other")
    assert (code, shown.splitlines()[0]) == (0, "sweep (a) minus other (b)")
    assert "Non-IID, fedavg, b_u=40" in shown


def test_every_format_has_the_same_table(make_sweep: MakeSweep, flsim: Flsim, tmp_path: Path) -> None:
    table = differences(twins(read_sweep(make_sweep({key: levels[:2] for key, levels in TWO.items()}))))
    csv = flsim("compare", "sweep", "--format", "csv")[1]
    pd.testing.assert_frame_equal(read_typed(csv, COLUMNS), table)
    assert flsim("compare", "sweep", "--format", "parquet", "--out", "table.parquet") == (0, "", "")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "table.parquet"), table)
    said = json.loads(flsim("compare", "sweep", "--json")[1])
    assert (said["compared"], said["a"], said["b"]) == ("partitions", "IID", "non-IID")
    assert [row["p_holm"] for row in said["rows"]] == table["p_holm"].astype(object).where(
        table["p_holm"].notna(), None
    ).tolist()
    assert r"\toprule" in flsim("compare", "sweep", "--format", "latex")[1]
    assert flsim("compare", "sweep", "--out", "table.md") == (0, "", "")
    assert (tmp_path / "table.md").read_text() == flsim("compare", "sweep")[1]


def test_what_does_not_compare_is_one_line(make_sweep: MakeSweep, flsim: Flsim) -> None:
    make_sweep(TWO)
    make_sweep({("other", "iid"): [2.0]}, "one-partition")
    run, other = "sweep/runs/fedavg-iid-seed0", "sweep/runs/fedavg-iid-seed1"
    for arguments, message in (
        ([run], "comparing needs two runs or a sweep"),
        ([run, other], "planted different canaries"),
        ([run, "sweep"], "a run and a sweep are not comparable"),
        (["sweep", run], "a run and a sweep are not comparable"),
        (["one-partition"], "no row of this sweep has both partitions"),
        (["sweep", "one-partition"], "no run has the same name in both"),
        (["nowhere"], "nowhere: not a run folder"),
        ([run, run, "--round", "7"], "round 7 was not evaluated"),
        (["sweep", "--round", "10", "--epoch", "10"], "--round and --epoch: both set a point in training"),
        (["sweep", "--round", "7"], "sweep: there is no comparison: run fedavg-iid-seed0: round 7 was not evaluated"),
        (["sweep", "--out", "missing/file"], "missing/file: the folder missing does not exist; create it first"),
        (["sweep", "--json", "--format", "csv"], "--json and --format csv: choose one of them"),
        (["sweep", "--format", "parquet"], "cannot be printed"),
        (["sweep", "sweep", "sweep"], "unexpected extra argument"),
    ):
        code, shown, said = flsim("compare", *arguments)
        assert (code, shown) == (2, ""), arguments
        assert message in said
        assert said.count("\n") == 1


def test_equal_differences_of_counts_have_no_interval(make_sweep: MakeSweep) -> None:
    """Three seeds, each two canaries more: whole numbers are often equal, which does not make them certain."""
    levels: Levels = {("fedavg", "iid"): [2.0, 2.0, 2.0], ("fedavg", "non-iid"): [1.0, 1.0, 1.0]}
    row = beside_of(twins(read_sweep(make_sweep(levels)))).iloc[0]
    assert row["rs_difference"] == 2
    assert "rs_low" not in row
    assert row["rs_p"] == 2 / 2**3
