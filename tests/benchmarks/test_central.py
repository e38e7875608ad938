"""Tests of `python -m benchmarks central` at a small size: what it prints, and that different work is refused."""

from dataclasses import replace

import pytest

from benchmarks.central import CentralBenchHParams, bench_central, describe
from flsim.base.errors import RunFailed
from flsim.models.architectures import ModelHParams
from flsim.training.central import CentralHParams

TINY = CentralBenchHParams(batch_sizes=(2, 8), records=16, turns=2, threads=1, model=ModelHParams(4, 6), users=1)


def test_figures() -> None:
    measured = bench_central(replace(TINY, precisions=("float32", "bf16")))
    for what in ("records_per_second", "ratio", "distance", "products"):
        assert measured[what].keys() == {"2", "8"}
    for size, rates in measured["records_per_second"].items():
        assert measured["ratio"][size] == {name: rates[name] / rates["plain"] for name in ("ours", "ours, bf16")}
    smallest = measured["records_per_second"]["2"]
    assert measured["hours_of_the_paper"] == {
        name: 37.5e6 * 2 / smallest[name] / 3600 for name in ("ours", "ours, bf16")
    }
    assert all(0 <= distances["ours"] < 0.01 for distances in measured["distance"].values())
    assert all(len(line) <= 80 for line in describe(measured).splitlines()[1:])


def test_different_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain loop trains with another learning rate than flsim."""
    rate = CentralHParams.rate
    asked: list[int] = []

    def drifting(self: CentralHParams, step: int, steps: int) -> float:
        asked.append(step)
        return rate(self, step, steps) * (1 if len(asked) == 1 else 2)

    monkeypatch.setattr(CentralHParams, "rate", drifting)
    with pytest.raises(RunFailed, match="the plain loop trained a different model"):
        bench_central(replace(TINY, batch_sizes=(2,)))
