"""The benchmark measures what it says, at a size that a test can afford."""

import json

import pytest

from benchmarks import evaluation
from benchmarks.evaluation import bench_evaluation, describe


def test_figures_of_a_small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tenth of 12 canaries is two. That decisions equal ranks, and ranks scores, is checked inside."""
    monkeypatch.setattr(evaluation, "STRAIGHTFORWARD", 150)
    measured = bench_evaluation(canaries=12, count=400, steps=5, units=8)
    assert measured["device"] == "cpu"
    assert measured["measured_at"] == {
        "rank": {"references": 400, "canaries": 2},
        "decide": {"references": 400, "canaries": 12},
        "straightforward": {"references": 150, "canaries": 2},
    }
    each = {
        name: measured[f"{name}_seconds"] / at["references"] / at["canaries"]
        for name, at in measured["measured_at"].items()
    }
    assert min(each.values()) > 0
    for name in ("rank", "decide"):
        assert measured["speedup"][name] == pytest.approx(each["straightforward"] / each[name])
    assert json.loads(json.dumps(measured)) == measured
    text = describe(measured)
    assert all(f"{name} " in text for name in each)
    assert "partly trained: 5 steps" in text
