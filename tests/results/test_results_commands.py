"""`flsim table` and `flsim plot` as they are typed."""

import io
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from helpers import Flsim
from results.levels import write_sweep
from shown import from_csv

from flsim.results.published import ROW_OF_QUESTION, matching, published_rows
from flsim.results.store import RunResults

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
    flsim("table", *names, "--over-seeds", "--out", "table.md")
    at_the_end = (tmp_path / "table.md").read_text()
    assert at_the_end == shown


def test_seeds_are_the_first_reading(flsim: Flsim, names: list[str]) -> None:
    """Where some setting has two seeds people read means over seeds, and files for machines hold runs."""
    for format_ in ("md", "latex"):
        over_seeds = flsim("table", *names, "--over-seeds", "--format", format_)
        assert flsim("table", *names, "--format", format_) == over_seeds
        assert flsim("table", names[0], *names[2:], "--format", format_)[1].count("IID, FedAvg, ") == 2
    assert flsim("table", *names, "--format", "csv") == flsim("table", *names, "--each-seed", "--format", "csv")
    assert flsim("table", *names, "--format", "csv")[1].count("\n") == 1 + len(names)
    text = flsim("table", *names, "--each-seed")[1]
    assert all(f"|{name}|" in text.replace(" ", "") for name in names)
    assert "do not cover other seeds" in " ".join(text.split())


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
    """A sweep's folder with two begun runs of three, which stand for rows of Thakkar et al.'s Table 1."""
    planned = []
    for partition, count in (("IID", 6), ("Non-IID", 2), ("later", 0)):
        name = f"fedavg-{partition.lower()}-seed0"
        row = {"data": "IID" if partition == "later" else partition, "optimizer": "FedAvg", "batch_size": 500}
        published = matching(published_rows("thakkar2020.csv", "1"), row)
        assert published is not None
        for question in ROW_OF_QUESTION:  # as a sweep of an older version
            del published[question]
        planned.append({"name": name, "grid": "fedavg", "seed": 0, "axes": {}, "published": published})
        if count:
            bits = [float(count + index) for index in range(9)]
            measured = {"rs": [float(index < count) for index in range(9)], "exposure": bits, "references": 1000.0}
            make_run(
                {10: measured},
                name=f"table1/runs/{name}",
                setting=f"{partition}, FedAvg, b_u=4",
                seed=0,
                series=partition,
            )
    write_sweep(tmp_path / "table1", planned)
    return "table1"


@pytest.mark.parametrize("more", [[], ["--over-seeds"]])
def test_a_sweep_against_the_paper_in_every_format(flsim: Flsim, sweep: str, more: list[str], tmp_path: Path) -> None:
    code, shown, printed = flsim("table", sweep, "--against", "paper", *more)
    assert (code, printed) == (0, "")
    assert max(map(len, shown.splitlines())) <= 80
    assert "RS, Table 1: 1 of 1 pairs of rows whose published difference exceeds chance" in " ".join(shown.split())
    marked = ["table", sweep, "--against", "paper", *more]
    assert "pairs of rows" not in flsim("table", sweep, *more)[1]
    assert "Paper" in flsim("table", sweep, *more)[1]
    _, csv, _ = flsim(*marked, "--format", "csv")
    table = from_csv(csv)
    assert table["published_rs"].tolist() == [66, 21]
    assert "rs_size" not in table
    assert table["published_references"].tolist() == [2_000_000] * 2
    assert "Sizes are not compared: |R| is 1,000 here and 2,000,000 in the paper" in " ".join(shown.split())
    assert table["rs_twin"].tolist() == ["yes", "yes"]
    flsim(*marked, "--format", "parquet", "--out", "table.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "table.parquet"), table)
    assert "& Twin" in flsim(*marked, "--format", "latex")[1]


def test_what_cannot_be_shown_is_one_line(flsim: Flsim, names: list[str], tmp_path: Path) -> None:
    for arguments, message in (
        (["table", *names, "--epoch", "10", "--round", "10"], "--round and --epoch: both set a point in training"),
        (
            ["table", *names, "--over-seeds", "--epoch", "3"],
            "run iid-0: was not evaluated at 3 epochs; choose one of 10",
        ),
        (["table", *names, "iid-0", "--over-seeds"], "iid-0: named twice, directly or through its sweep; name it once"),
        (
            ["table", *names, "--out", "missing/table.md"],
            "missing/table.md: the folder missing does not exist; create it first",
        ),
        (["table", *names, "--out", "."], ".: this is a folder; name a file in it"),
        (["table", *names, "--format", "parquet", "--out", "missing/t"], "the folder missing does not exist"),
        (["table", *names, "--format", "parquet"], "cannot be printed"),
        (["table", *names, "--against", "paper"], "no run has a published row; name the folder of a sweep"),
        (["plot", *names, "--out", "figure.jpg"], ".png, .svg and .pdf"),
        (["plot", *names, "iid-0", "--over-seeds", "--out", "figure.png"], "iid-0: named twice"),
        (["plot", "nowhere", "--out", "figure.png"], "nowhere: not a run folder"),
    ):
        code, shown, printed = flsim(*arguments)
        assert (code, shown) == (2, "")
        assert message in printed
        assert printed.count("\n") == 1
    assert not list(tmp_path.glob("figure*"))


def test_what_a_pattern_matches_beside_runs_is_left_out_in_one_line(
    flsim: Flsim, names: list[str], tmp_path: Path
) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "notes.txt").write_text("no run")
    (tmp_path / "demo").mkdir()
    for name in (names[0], names[2]):  # over the same phrases
        (tmp_path / name).rename(tmp_path / "demo" / name)
    matched = sorted(path.name for path in tmp_path.glob("*"))
    code, text, printed = flsim("table", *matched, "--format", "csv")
    assert (code, printed) == (0, "excluded, because the folder has no run: corpus, notes.txt\n")
    assert {*pd.read_csv(io.StringIO(text))["run"]} == {*names}
    for command in (["plot", *matched, "--out", "figure.pdf"], ["report", *matched, "--out", "page.html"]):
        assert flsim(*command) == (0, "", printed)
    assert (tmp_path / "figure.pdf").read_bytes().startswith(b"%PDF")
    assert flsim("table", "demo")[1].count("IID, FedAvg") == 2
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


@pytest.mark.parametrize("more", [[], ["--over-seeds"], ["--each-seed"]])
def test_a_plot_is_written(flsim: Flsim, names: list[str], more: list[str], tmp_path: Path) -> None:
    assert flsim("plot", *names, "--out", "figure.svg", *more) == (0, "", "")
    text = (tmp_path / "figure.svg").read_text()
    assert text.startswith("<?xml")
    assert ("2 seeds" in text, "iid-0" in text) == (more != ["--each-seed"], more == ["--each-seed"])
