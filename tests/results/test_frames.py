"""Frames have the values of the files by run, round and canary, and the notebook runs on these frames."""

import ast
import json
import os
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import notebooks
import pandas as pd
import pytest
from results.levels import measured as measured_at
from results.levels import write_sweep

from flsim.results.frames import CANARY, RUN, frames
from flsim.results.rows import DIVERGED, Row, read_run, write_rows
from flsim.results.tables import memorization_table

MakeRun = Callable[..., Path]
NOTEBOOK = Path(__file__).parents[2] / "experiments" / "notebook.ipynb"
PARTITIONS = {"iid": "IID, FedAvg, b_u=16", "non-iid": "Non-IID, FedAvg, b_u=16"}


def measured(level: float) -> dict[str, Any]:
    ranks = [1 + index for index in range(9)]
    return measured_at(level) | {"log_perplexity": [20 - level - index / 2 for index in range(9)], "rank": ranks}


@pytest.fixture
def make_partitions(make_run: MakeRun) -> Callable[..., list[Path]]:
    """Write two seeds of both partitions, evaluated after 5 and 10 rounds (1 and 2 epochs); IID has one more bit."""

    def make() -> list[Path]:
        found = []
        for (extra, (partition, setting)), seed in product(zip((1, 0), PARTITIONS.items(), strict=True), (0, 1)):
            rounds = {5: measured(seed + extra), 10: measured(seed + extra + 1)}
            about = {"setting": setting, "seed": seed, "series": partition, "rounds_per_epoch": 5.0}
            found.append(make_run(rounds, name=f"{partition}-{seed}", shift=100 * seed, **about))
        return found

    return make


def test_the_frame_of_runs_has_a_row_per_evaluation(make_partitions: Callable[..., list[Path]], tmp_path: Path) -> None:
    made = make_partitions()
    (tmp_path / "notes.txt").write_text("no run")
    runs, _ = frames(tmp_path / "*")
    assert runs[["folder", "round"]].to_numpy().tolist() == [[str(path), at] for path in made for at in (5, 10)]
    assert runs["partition"].tolist() == ["iid"] * 4 + ["non-iid"] * 4
    assert runs["seed"].tolist() == [0, 0, 1, 1] * 2
    assert runs["epochs"].tolist() == [1.0, 2.0] * 4
    assert runs["is_final"].tolist() == [False, True] * 4
    for at in (5, 10):
        table = memorization_table([read_run(path) for path in made], round=at)
        ours = runs.loc[runs["round"] == at, table.columns].reset_index(drop=True)
        pd.testing.assert_frame_equal(ours, table)
    assert {name: str(kind) for name, kind in runs.dtypes.items() if name in RUN} == RUN
    pd.testing.assert_frame_equal(frames(tmp_path)[0], runs)  # the folder that has the runs, as in other functions


def test_the_frame_of_canaries_has_the_stored_rows_and_the_roster(make_partitions: Callable[..., list[Path]]) -> None:
    made = make_partitions()
    runs, canaries = frames(*made)
    assert {name: str(kind) for name, kind in canaries.dtypes.items()} == CANARY
    assert len(canaries) == 4 * 2 * 9
    for path in made:
        results = read_run(path)
        ours = canaries[canaries["run"] == results.name]
        for at in results.evaluated:
            of = ours[ours["round"] == at].set_index("canary")
            assert of["p_u"].tolist() == results.roster["p_u"].tolist()
            for metric in ("exposure", "rank"):
                stored = results.of_canaries(metric, at)
                assert stored is not None
                assert stored.equals(of[metric].astype(float))
    counted = canaries.groupby(["folder", "round"])[["rs", "bs"]].sum().astype("Int64")
    pd.testing.assert_frame_equal(counted, runs.set_index(["folder", "round"])[["rs", "bs"]].sort_index())


def test_additional_measures_have_columns(make_run: MakeRun) -> None:
    """Measures of only some canaries have columns, and so have measures that are named after what an attacker knows."""
    nine = {"space_exposure": [3.5] * 9, "exposure prefix=5 suffix=6": [2.0] * 9}
    path = make_run({5: measured(1), 10: {**measured(2), **nine, "space_rank": [4, 7]}})
    _, canaries = frames(path)
    early, late = canaries[canaries["round"] == 5], canaries[canaries["round"] == 10]
    for name, values in nine.items():
        assert str(canaries.dtypes[name]) == "Float64"
        assert late[name].tolist() == values
        assert early[name].isna().all()
    assert str(canaries.dtypes["space_rank"]) == "Int64"
    assert late["space_rank"].dropna().tolist() == [4, 7]
    assert late["space_rank"].isna().sum() == 7


def test_runs_without_a_result_have_no_numbers_and_no_final_row(make_run: MakeRun) -> None:
    """A run is not evaluated, has diverged, or is still running; only the last of these has numbers."""
    fresh = make_run(name="fresh", status="running")
    running = make_run({10: measured(0)}, name="running", status="running")
    lost = make_run({10: measured(0)}, name="lost")
    write_rows(lost, 20, [Row("lost", 20, DIVERGED, "", 1.0)])
    runs, canaries = frames(fresh, running, lost)
    assert runs["run"].tolist() == ["fresh", "running", "lost"]
    assert runs["rs"].isna().tolist() == [True, False, True]
    assert runs["status"].tolist() == ["running", "running", "diverged"]
    assert not runs["is_final"].any()
    assert canaries["run"].unique().tolist() == ["running"]
    assert canaries["epochs"].isna().all()


def test_a_sweep_has_its_axes_and_published_rows(make_partitions: Callable[..., list[Path]], tmp_path: Path) -> None:
    (tmp_path / "table1" / "runs").mkdir(parents=True)
    runs = []
    for path in make_partitions():
        path.rename(tmp_path / "table1" / "runs" / path.name)
        partition, _, seed = path.name.rpartition("-")
        axes = {"data.partition": partition, "training.cohort": 40, "canaries.p_u": [0.1, 1.0]}
        published = {"table": "1", "data": "IID", "rs": 65, "mean_exposure": 2.5} if partition == "iid" else None
        about_run = {"name": path.name, "grid": "fedavg", "seed": int(seed), "axes": axes, "published": published}
        runs.append(about_run)
    write_sweep(tmp_path / "table1", runs)
    found, canaries = frames(str(tmp_path / "table1"))
    assert found["sweep"].eq("table1").all()
    assert found["grid"].eq("fedavg").all()
    assert found["training.cohort"].tolist() == [40] * 8
    assert found["canaries.p_u"].tolist() == ["[0.1, 1.0]"] * 8
    assert "data.partition" not in found
    assert found["published_rs"].tolist() == [65] * 4 + [pd.NA] * 4
    assert found["published_exposure"].tolist() == [2.5] * 4 + [pd.NA] * 4
    assert len(canaries) == 72


def test_the_notebook_is_clean_and_runs_from_top_to_bottom(
    make_partitions: Callable[..., list[Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_partitions()
    monkeypatch.setenv("FLSIM_RUNS", f"{tmp_path}/iid-*{os.pathsep}{tmp_path}/non-iid-*")
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells, namespace, outputs = notebooks.code_of(notebook), dict[str, Any](), list[str]()
    assert "flsim." in cells[0]
    assert not any(re.search(r"(from|import) flsim\.", cell) for cell in cells)  # only public names
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook["cells"])
    with plt.rc_context():
        for cell in cells:
            *lines, last = ast.parse(cell).body
            exec(compile(ast.Module(lines, []), "cell", "exec"), namespace)
            if isinstance(last, ast.Expr) and not cell.endswith(";"):
                value = eval(compile(ast.Expression(last.value), "cell", "eval"), namespace)
                outputs += [value._repr_html_()] if hasattr(value, "_repr_html_") else []
            else:
                exec(compile(ast.Module([last], []), "cell", "exec"), namespace)
        figures = len(plt.get_fignums())
        plt.close("all")
    assert (len(outputs), figures) == (2, 2)
    assert all("<table" in text for text in outputs)
    out, err = capsys.readouterr()
    assert out.startswith("4 runs, 8 evaluations, 72 measurements of canaries\n")
    assert "+1.00 bits of exposure; above 0 in 2 of 2 seeds" in out
    assert err == ""
