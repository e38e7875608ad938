"""`flsim table`, `flsim plot` and `flsim compare` with the arguments of the command line."""

import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers import Flsim
from results.levels import beside_of, measured, write_sweep
from scipy import stats
from shown import from_csv, read_typed

from flsim.base.statistics import holm, sign_flip_p
from flsim.results.differences import COLUMNS, differences, same_names, twins
from flsim.results.published import ROW_OF_QUESTION, matching, published_rows
from flsim.results.rows import RunResults
from flsim.results.sweeps import read_sweep

MakeRun = Callable[..., Path]
MakeSeries = Callable[..., list[RunResults]]


@pytest.fixture
def names(make_series: MakeSeries) -> list[str]:
    iid = make_series([3, 4], name="iid", setting="IID, FedAvg, b_u=16")
    non_iid = make_series([1, 3], name="non-iid", setting="Non-IID, FedAvg, b_u=16")
    return [run.name for run in (*iid, *non_iid)]


def test_a_table_over_seeds_in_every_format(flsim: Flsim, names: list[str], tmp_path: Path) -> None:
    code, shown, printed = flsim("table", *names, "--over-seeds", "--epoch", "10")
    assert (code, printed) == (0, "")
    assert "+1.50" in shown
    assert "6.35" in shown  # half the interval, from -4.85 to 7.85
    _, csv, _ = flsim("table", *names, "--over-seeds", "--format", "csv")
    assert pd.read_csv(io.StringIO(csv))["mean_exposure"].tolist() == [5.5, 4]
    assert flsim("table", *names, "--over-seeds", "--format", "parquet", "--out", "table.parquet") == (0, "", "")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "table.parquet"), from_csv(csv))
    assert r"\toprule" in flsim("table", *names, "--over-seeds", "--format", "latex")[1]


def test_means_over_seeds_are_the_default_of_text_and_not_of_files(flsim: Flsim, names: list[str]) -> None:
    """If some setting has two seeds, text has means over seeds, and CSV has one line per run."""
    assert flsim("table", *names) == flsim("table", *names, "--over-seeds")
    assert flsim("table", names[0], *names[2:])[1].count("IID, FedAvg, ") == 2
    assert flsim("table", *names, "--format", "csv")[1].count("\n") == 1 + len(names)
    text = flsim("table", *names, "--each-seed")[1]
    assert all(f"|{name}|" in text.replace(" ", "") for name in names)


def test_seeds_without_a_mean_are_shown_singly_with_the_reason(flsim: Flsim, make_series: MakeSeries) -> None:
    make_series([3], name="a", setting="IID, FedAvg, b_u=16", series="s", round=10)
    make_series([3], name="b", setting="IID, FedAvg, b_u=16", series="s", round=20, seed=1)
    code, text, printed = flsim("table", "a-0", "b-0")
    assert (code, printed) == (0, "")
    assert all(f"|{name}" in text.replace(" ", "") for name in ("a-0", "b-0"))
    assert "No means over seeds: runs a-0 and b-0: last evaluated at rounds 10 and 20" in " ".join(text.split())
    assert flsim("table", "a-0", "b-0", "--over-seeds")[0] == 2


@pytest.fixture
def sweep(make_run: MakeRun, tmp_path: Path) -> str:
    """Write the folder of a sweep of three runs with rows of Thakkar et al., Table 1; two runs have begun."""
    planned = []
    for partition, count in (("IID", 6), ("Non-IID", 2), ("later", 0)):
        name = f"fedavg-{partition.lower()}-seed0"
        row = {"data": "IID" if partition == "later" else partition, "optimizer": "FedAvg", "batch_size": 500}
        published = matching(published_rows("thakkar2020.csv", "1"), row)
        assert published is not None
        for question in ROW_OF_QUESTION:  # as in sweep files without these fields
            del published[question]
        planned.append({"name": name, "grid": "fedavg", "seed": 0, "axes": {}, "published": published})
        if count:
            bits = [float(count + index) for index in range(9)]
            found = {"rs": [float(index < count) for index in range(9)], "exposure": bits, "references": 1000.0}
            about = {"setting": f"{partition}, FedAvg, b_u=4", "seed": 0, "series": partition}
            make_run({10: found}, name=f"table1/runs/{name}", **about)
    write_sweep(tmp_path / "table1", planned)
    return "table1"


def test_a_sweep_against_the_paper_in_every_format(flsim: Flsim, sweep: str, tmp_path: Path) -> None:
    marked = ["table", sweep, "--against", "paper"]
    code, shown, printed = flsim(*marked)
    assert (code, printed) == (0, "table1: 1 of 3 runs have not started; repeat `flsim sweep` to train them\n")
    assert max(map(len, shown.splitlines())) <= 80
    assert "RS, Table 1: 1 of 1 pairs of rows whose published difference exceeds chance" in " ".join(shown.split())
    unmarked = flsim("table", sweep)[1]
    assert ("Paper" in unmarked, "pairs of rows" in unmarked) == (True, False)
    table = from_csv(flsim(*marked, "--over-seeds", "--format", "csv")[1])
    assert table["published_rs"].tolist() == [66, 21]
    assert "rs_size" not in table
    assert table["published_references"].tolist() == [2_000_000] * 2
    assert "Sizes are not compared: |R| is 1,000 here and 2,000,000 in the paper" in " ".join(shown.split())
    assert table["rs_twin"].tolist() == ["yes", "yes"]
    flsim(*marked, "--over-seeds", "--format", "parquet", "--out", "table.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "table.parquet"), table)


def test_errors_of_commands_are_one_line(flsim: Flsim, names: list[str], tmp_path: Path) -> None:
    for arguments, message in (
        (["table", *names, "--epoch", "10", "--round", "10"], "--round and --epoch: both set a point in training"),
        (["table", *names, "iid-0", "--over-seeds"], "iid-0: named twice, directly or through its sweep; name it once"),
        (["table", *names, "--out", "missing/table.md"], "missing/table.md: the folder missing does not exist; create"),
        (["table", *names, "--out", "."], ".: this is a folder; name a file in it"),
        (["table", *names, "--format", "parquet"], "cannot be printed"),
        (["table", *names, "--out", "x.png"], "x.png: --format md writes .md or .txt; use this suffix, or"),
        (["compare", "iid-0", "iid-1", "--out", "x.csv"], "x.csv: --format md writes .md or .txt"),
        (["compare", "iid-0", "iid-1", "--json", "--out", "x.csv"], "x.csv: --json writes .json"),
        (["canaries", "iid-0", "--format", "csv", "--out", "x.tex"], "x.tex: --format csv writes .csv"),
        (["audit", "iid-0", "--format", "parquet", "--out", "x.md"], "x.md: --format parquet writes .parquet"),
        (["table", *names, "--against", "paper"], "no run has a published row; name the folder of a sweep"),
        (["plot", *names, "--out", "figure.jpg"], ".png, .svg and .pdf"),
        (["plot", "nowhere", "--out", "figure.png"], "nowhere: not a run folder"),
    ):
        code, shown, printed = flsim(*arguments)
        assert (code, shown) == (2, "")
        assert message in printed
        assert printed.count("\n") == 1
    assert not list(tmp_path.glob("figure*"))


def test_names_without_a_run_are_excluded_and_reported(flsim: Flsim, names: list[str], tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "notes.txt").write_text("no run")
    (tmp_path / "demo").mkdir()
    for name in (names[0], names[2]):  # runs with the same phrases
        (tmp_path / name).rename(tmp_path / "demo" / name)
    matched = sorted(path.name for path in tmp_path.glob("*"))
    code, text, printed = flsim("table", *matched, "--format", "csv")
    assert (code, printed) == (0, "excluded, because the folder has no run: corpus, notes.txt\n")
    assert {*pd.read_csv(io.StringIO(text))["run"]} == {*names}
    assert flsim("plot", *matched, "--out", "figure.pdf") == (0, "", printed)
    assert (tmp_path / "figure.pdf").read_bytes().startswith(b"%PDF")
    code, _, printed = flsim("compare", "demo", "--json")
    assert code == 0, printed
    for arguments, message in (
        (["table", "corpus"], "corpus: not a run folder (it has no run.json); name a folder"),
        (["table", *matched, "missing"], "missing: not a run folder"),
        (["trace", "demo"], f"demo: not a run folder (it has no run.json); name a run in it: demo/{names[0]}, "),
        (["compare", "demo", "demo"], "demo: has 2 runs; name the two runs to compare, e.g. demo"),
    ):
        code, _, printed = flsim(*arguments)
        assert (code, message in printed) == (2, True), printed


@pytest.mark.parametrize("more", [[], ["--each-seed"]])
def test_a_plot_is_written(flsim: Flsim, names: list[str], more: list[str], tmp_path: Path) -> None:
    assert flsim("plot", *names, "--out", "figure.svg", *more) == (0, "", "")
    text = (tmp_path / "figure.svg").read_text()
    assert text.startswith("<?xml")
    assert ("2 seeds" in text, "iid-0" in text) == (more != ["--each-seed"], more == ["--each-seed"])


MakeSweep = Callable[..., Path]
Levels = Mapping[tuple[str, str], Sequence[float | None]]
PUBLISHED = {
    ("fedavg", "iid"): {"data": "IID", "rs": 65, "bs": 58, "canaries": 90},
    ("fedavg", "non-iid"): {"data": "Non-IID", "rs": 26, "bs": 2, "canaries": 90},
}


@pytest.fixture
def make_sweep(sweep_of: MakeSweep) -> MakeSweep:
    """Write a sweep's folder: (grid, partition) -> a level for each seed, None if its run has not begun."""

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
FEDAVG: Levels = {("fedavg", "iid"): IID, ("fedavg", "non-iid"): NON_IID}
TWO: Levels = {**FEDAVG, ("central", "iid"): [2.0, 3.0, 2.5], ("central", "non-iid"): [2.0, 3.5, 1.5]}


def test_twins_have_the_statistics_of_differences_over_seeds(make_sweep: MakeSweep) -> None:
    table = beside_of(twins(read_sweep(make_sweep(TWO))))
    first, second = (row for _, row in table.iterrows())
    differences = [[1, 1.5, 0.5], [0, -0.5, 1]]
    tests = [stats.ttest_1samp(each, 0) for each in differences]
    interval = tests[0].confidence_interval(0.95)
    assert first[["row", "seeds", "over", "canaries_value_a"]].tolist() == ["fedavg cohort=40", 3, "seeds", 9]
    assert first["exposure_difference"] == pytest.approx(1)
    assert (first["exposure_low"], first["exposure_high"]) == pytest.approx((interval.low, interval.high))
    assert table["exposure_p"].tolist() == pytest.approx([test.pvalue for test in tests])
    assert table["exposure_p_holm"].tolist() == pytest.approx(holm([test.pvalue for test in tests]))
    counts = [(count(a + 1, 4), count(b + 1, 4)) for a, b in zip(IID, NON_IID, strict=True)]
    assert first[["rs_value_a", "rs_value_b"]].tolist() == pytest.approx(np.mean(counts, axis=0))
    assert first["rs_p"] == sign_flip_p([a - b for a, b in counts])
    spread = stats.ttest_1samp([a - b for a, b in counts], 0).confidence_interval(0.95)
    assert (first["rs_low"], first["rs_high"]) == pytest.approx((spread.low, spread.high))
    assert (first["perplexity_value_a"], first["perplexity_value_b"]) == pytest.approx((56, 57))
    assert (first["published_rs_value_a"], first["published_bs_value_b"]) == (65, 2)
    assert pd.isna(second["published_rs_value_a"])


def test_missing_runs_and_rows_are_excluded_and_reported(make_sweep: MakeSweep, flsim: Flsim) -> None:
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


def test_unfinished_runs_are_compared_only_at_a_given_point(make_sweep: MakeSweep) -> None:
    pairs = twins(read_sweep(make_sweep(FEDAVG, status="running", reason="stopped")))
    assert "exposure_p" not in beside_of(pairs)
    assert "fedavg-iid-seed0 (running or killed at round 20 of 20: stopped)" in beside_of(pairs)["left_out"].iloc[0]
    assert beside_of(pairs, round=10)["exposure_difference"].tolist() == [1]
    assert beside_of(pairs, epoch=10)["epochs_value_a"].tolist() == [10]


def test_missing_runs_of_a_killed_sweep_are_reported(make_sweep: MakeSweep, flsim: Flsim) -> None:
    levels: Levels = {("fedavg", "iid"): [2.0, None], ("fedavg", "non-iid"): [1.0, None]}
    levels = {**levels, ("central", "iid"): [2.0, None], ("central", "non-iid"): [None, None]}
    make_sweep(levels, status="running")
    code, shown, printed = flsim("compare", "sweep")
    assert (code, shown) == (2, "")
    runs = "fedavg-iid-seed0 (running or killed at round 20 of 20)", "central-non-iid-seed1 (not started)"
    assert all(reason in printed for reason in (*runs, "repeat `flsim sweep` to complete the runs"))
    code, shown, printed = flsim("table", "sweep", "--over-seeds")
    assert (code, printed) == (0, "sweep: 5 of 8 runs have not started; repeat `flsim sweep` to train them\n")
    assert re.search(r"\| *fedavg, b_u=40 *\| *0 *\|", shown.partition("paired by seed:")[2])


def test_two_sweeps_are_matched_by_name(make_sweep: MakeSweep, flsim: Flsim) -> None:
    make_sweep(FEDAVG)
    make_sweep({key: [level - 0.5 for level in levels[:2] if level] for key, levels in FEDAVG.items()}, "other")
    table = beside_of(same_names(*(read_sweep(Path(name)) for name in ("sweep", "other"))))
    assert table["row"].tolist() == [f"fedavg partition={partition} cohort=40" for partition in ("iid", "non-iid")]
    assert table["exposure_difference"].tolist() == pytest.approx([0.5] * 2)
    assert "published_rs_value_a" not in table  # both have the same published row
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
    assert [row["p_holm"] for row in said["rows"] if row["p_holm"]] == table["p_holm"].dropna().tolist()
    assert flsim("compare", "sweep", "--format", "latex", "--out", "table.tex") == (0, "", "")
    assert r"\toprule" in (tmp_path / "table.tex").read_text()


def test_errors_of_comparisons_are_one_line(make_sweep: MakeSweep, flsim: Flsim) -> None:
    make_sweep(FEDAVG)
    make_sweep({("other", "iid"): [2.0]}, "one-partition")
    run = "sweep/runs/fedavg-iid-seed0"
    for arguments, message in (
        ([run], "comparing needs two runs or a sweep"),
        ([run, "sweep"], "a run and a sweep are not comparable"),
        (["one-partition"], "no row of this sweep has both partitions"),
        (["sweep", "one-partition"], "no run has the same name in both"),
        ([run, run, "--round", "7"], "round 7 was not evaluated"),
        (["sweep", "--round", "10", "--epoch", "10"], "--round and --epoch: both set a point in training"),
        (["sweep", "--round", "7"], "sweep: there is no comparison: run fedavg-iid-seed0: round 7 was not evaluated"),
        (["sweep", "--json", "--format", "csv"], "--json and --format csv: choose one of them"),
    ):
        code, shown, said = flsim("compare", *arguments)
        assert (code, shown) == (2, ""), arguments
        assert message in said
        assert said.count("\n") == 1


def test_equal_differences_of_counts_have_no_interval(make_sweep: MakeSweep) -> None:
    """In each of three seeds, RS finds two canaries more. Counts are often equal, which does not make them certain."""
    levels: Levels = {("fedavg", "iid"): [2.0, 2.0, 2.0], ("fedavg", "non-iid"): [1.0, 1.0, 1.0]}
    row = beside_of(twins(read_sweep(make_sweep(levels)))).iloc[0]
    assert row["rs_difference"] == 2
    assert "rs_low" not in row
    assert row["rs_p"] == 2 / 2**3
