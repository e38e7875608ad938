"""Tests compare observations of both arms, and the rounds since last use, with rows that were written by hand."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from flsim.attacks.forgetting import measure
from flsim.attacks.forgetting.measure import TYPES, observations
from flsim.base.errors import InputError
from flsim.results.rows import Row, RunResults, frame
from flsim.runs.folder import Run

REFERENCES = 99.0
USES = pd.DataFrame({"round": [2, 5, 5, 14], "canary": ["c0", "c0", "c1", "c1"], "user": [3, 3, 1, 8]})
LOG_PERPLEXITY = {"in": {5: 20.0, 10: 22.0, 15: 24.0}, "out": {5: 30.0, 10: 28.0, 15: 26.0}}


def run(arm: str) -> RunResults:
    """Return results of three canaries (no user used c2) and a control; canary i has i more nats and rank i + 1."""
    names = ["c0", "c1", "c2", "c3"]
    roster = pd.DataFrame(
        {
            "canary": names,
            "tokens": [[1, 2]] * 4,
            "p_u": [math.nan] * 4,
            "p_e": [math.nan] * 4,
            "planned_insertions": [2, 2, 1, 0],
            "first_round": pd.array([1, 4, 4, None], "Int64"),
            "last_round": pd.array([8, None, 14, None], "Int64"),
            "is_planted": [True, True, True, False],
        }
    )
    rows = []
    for round_, nats in LOG_PERPLEXITY[arm].items():
        rows.append(Row("r", round_, "references", "", REFERENCES))
        for index, name in enumerate(names):
            rows.append(Row("r", round_, "log_perplexity", name, nats + index))
            rows.append(Row("r", round_, "rank", name, index + 1.0))
            rows.append(Row("r", round_, "exposure", name, math.log2(100 / (index + 1))))
    about = ("completed", None, 15, 15, frame(rows), roster)
    return RunResults(arm, "FedAvg", *about, seed=3, series="s")


def test_rows_have_both_arms_side_by_side() -> None:
    table = observations(run("in"), run("out"), USES)
    assert list(table.columns) == list(TYPES)
    assert list(table[["round", "canary"]].itertuples(index=False, name=None)) == [
        (round_, canary) for round_ in (5, 10, 15) for canary in ("c0", "c1", "c2")
    ]
    at_15 = table[table["round"] == 15].set_index("canary")
    assert at_15["nats_in"].tolist() == [24, 25, 26]
    assert at_15["nats_out"].tolist() == [26, 27, 28]
    assert at_15["p_in"].tolist() == [0.01, 0.02, 0.03]
    assert at_15["bits_out"].tolist() == pytest.approx([-math.log2(p) for p in (0.01, 0.02, 0.03)])
    assert at_15["copies"].tolist() == [2, 2, 1]
    assert set(table["seed"]) == {3}
    assert table.index.tolist() == [*range(9)]


def test_rounds_since_last_use_are_missing_before_it() -> None:
    """Only the last use in all training counts: c1 is used in rounds 5 and 14, so only round 15 is after it."""
    table = observations(run("in"), run("out"), USES)
    since = {canary: of_canary.tolist() for canary, of_canary in table["since"].fillna(-1).groupby(table["canary"])}
    assert since == {"c0": [0, 5, 10], "c1": [-1, -1, 1], "c2": [-1, -1, -1]}
    assert table.groupby("canary")["uses"].first().to_dict() == {"c0": 2, "c1": 2, "c2": 0}


def test_scores_are_calibrated_by_arm_out_at_the_windows_end() -> None:
    """The nearest evaluation is round 10 for an end in round 8, and 15 for round 14. Without an end, it is the last."""
    table = observations(run("in"), run("out"), USES)
    about = table[table["round"] == 5]
    assert about["clean_round"].tolist() == [10, 15, 15]
    assert about["clean"].tolist() == [28, 27, 28]
    of_c0 = table[table["canary"] == "c0"]
    assert of_c0["score_in"].tolist() == [8, 6, 4]
    assert of_c0["score_out"].tolist() == [-2, 0, 2]


def test_without_arm_out_its_columns_are_missing() -> None:
    table = observations(run("in"), None, USES)
    missing = ["clean", "clean_round", "score_in", "score_out", "nats_out", "bits_out", "p_out"]
    assert table[missing].isna().all().all()
    assert table["bits_in"].notna().all()


def test_runs_are_measured_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes state that one of two runs has text of held-out users, and that it has no arm OUT."""
    paths = [Path("a"), Path("b")]
    runs: list[Any] = [
        SimpleNamespace(path=path, config=SimpleNamespace(canaries=SimpleNamespace(source=source)))
        for path, source in zip(paths, ["random", "heldout"], strict=True)
    ]
    arms = [measure.Arms(runs[0], run("in"), run("out")), measure.Arms(runs[1], run("in"), None)]
    monkeypatch.setattr(measure, "expanded", list)
    monkeypatch.setattr(measure, "arms_of", lambda given: (arms, ["a note"]))
    monkeypatch.setattr(measure, "named_apart", lambda given: {path: {"series": path.name} for path in given})
    monkeypatch.setattr(measure, "participation", lambda run, round_: USES[USES["round"] <= round_])
    found = measure.measure_forgetting(*paths, alpha=0.7, by_hardness=True)
    assert found.observations["run"].unique().tolist() == ["a", "b"]
    assert set(found.times["alpha"]) == {0.7}
    assert found.observations["hardness"].dropna().unique().tolist() == ["hard"]  # each window has one canary
    for words in ("a note", "of in are missing", "Text of held-out users"):
        assert [words in note for note in found.notes].count(True) == 1


@pytest.mark.parametrize(("at", "seen", "time"), [(1, 4, 0), (2, 5, 5)])
def test_a_success_counts_if_at_least_half_of_the_canaries_were_evaluated(at: int, seen: int, time: int) -> None:
    """The attack separates `seen` of ten canaries at k = `at`; at 0 and 5 both arms have equal scores."""
    rows = [
        {"run": "a", "seed": 0, "canary": f"c{canary}", "round": since, "since": since, "last_use": 0, "uses": 1}
        | {"score_in": float(since == at), "score_out": 0.0, "setting": "s", "series": "s"}
        for canary in range(10)
        for since in (0, at, 5)
        if since != at or canary < seen
    ]
    observed = pd.DataFrame(rows).reindex(columns=list(TYPES)).astype(TYPES)
    found = measure.measure(observed, alpha=0.9)
    assert found.success["canaries"].tolist() == [10, seen, 10]
    assert found.success["success_upper"].tolist()[1] == 1
    assert found.times["time"].tolist() == [time]
    assert found.times["is_censored"].tolist() == [False]
    without = measure.measure(observed.assign(score_out=math.nan), alpha=0.9).times
    assert without[["time", "is_censored"]].isna().all().all()


def test_a_run_is_paired_with_its_twin_of_arm_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run b has the twin a, c has none. Notes name d, a twin without a run, e, which diverged, and f, not evaluated."""
    arms = {"a": ("out", 1), "b": ("in", 1), "c": ("in", 2), "d": ("out", 3), "e": ("in", 4), "f": ("in", 5)}
    results = {Path(name): replace(run(arm), name=name) for name, (arm, _) in arms.items()}
    results[Path("e")] = replace(results[Path("e")], status="diverged")
    results[Path("f")] = replace(results[Path("f")], rows=frame([]))
    runs: dict[Path, Any] = {
        path: SimpleNamespace(path=path, config=SimpleNamespace(canaries=SimpleNamespace(arm=arms[path.name][0])))
        for path in results
    }
    monkeypatch.setattr(measure, "read_shown", lambda paths: {path: results[path] for path in paths})
    monkeypatch.setattr(Run, "open", runs.__getitem__)
    monkeypatch.setattr(measure, "_key", lambda run: arms[run.path.name][1])
    found, notes = measure.arms_of([*results])
    assert [(one.run, one.results.name, one.twin and one.twin.name) for one in found] == [
        (runs[Path("b")], "b", "a"),
        (runs[Path("c")], "c", None),
    ]
    assert [note[:5] for note in notes] == ["Run e", "Run f", "Run d"]
    with pytest.raises(InputError, match=r"no evaluated run with canaries\.arm"):
        measure.arms_of([Path("a"), Path("e")])
