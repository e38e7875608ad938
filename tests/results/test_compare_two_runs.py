"""`flsim compare` of two runs as it is typed: at equal perplexity, and without canaries."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from helpers import Flsim
from results.levels import measured
from scipy import stats

from flsim.canaries.roster import SCHEMA

MakeRun = Callable[..., Path]


def test_two_runs_are_also_compared_at_equal_perplexity(flsim: Flsim, make_run: MakeRun) -> None:
    make_run({10: measured(2), 20: measured(3)}, name="a")
    make_run({10: measured(1), 20: measured(2)}, name="b")
    _, text, _ = flsim("compare", "a", "b")
    printed = " ".join(text.split())
    assert (
        "At equal perplexity, 58, the lowest that both reached (a at round 10, b at round 20): mean of a - b:"
        in printed
    )
    like = json.loads(flsim("compare", "a", "b", "--json")[1])["like_utility"]
    assert (like["perplexity"], like["rounds"]) == (pytest.approx(58), [10, 20])
    assert like["mean_difference"] == pytest.approx(0, abs=1e-9)
    assert (like["p_wilcoxon"], like["p_t"]) == (1, 1)
    assert "over these canaries p = 1 (Wilcoxon signed-rank)" in printed
    better = {10: measured(2), 20: measured(3) | {"exposure": [4 + index for index in range(9)]}}
    make_run(better, name="better")
    _, text, _ = flsim("compare", "better", "a", "--json")
    like, gaps = json.loads(text)["like_utility"], [1 + index / 2 for index in range(9)]
    assert (like["perplexity"], like["mean_difference"]) == (pytest.approx(57), pytest.approx(np.mean(gaps)))
    assert like["p_wilcoxon"] == pytest.approx(2 / 2**9)  # all nine are of one sign
    assert like["p_t"] == pytest.approx(stats.ttest_1samp(gaps, 0).pvalue)
    make_run({20: measured(1)}, name="late")
    _, text, _ = flsim("compare", "a", "late")
    assert "Not compared at equal perplexity: run a: its first evaluation is below" in " ".join(text.split())


def test_two_runs_without_canaries_are_compared_in_utility_alone(flsim: Flsim, make_run: MakeRun) -> None:
    for name, perplexity in (("a", 60.0), ("b", 66.0)):
        folder = make_run({10: {"accuracy": 0.2, "perplexity": perplexity}}, name=name)
        pq.write_table(SCHEMA.empty_table(), folder / "planted" / "roster.parquet")
    code, text, printed = flsim("compare", "a", "b")
    assert (code, printed) == (0, "")
    assert text.startswith("Neither run has canaries, so only utility is compared.\n  a: ")
    assert "60.0 | 66.0" in text.replace("60.0|66.0", "60.0 | 66.0")
    assert "plant at least two" not in text
    assert "only a" not in text
    assert "66.0" in flsim("compare", "a", "b", "--format", "latex")[1]
    compared = json.loads(flsim("compare", "a", "b", "--json")[1])
    assert (compared["b"]["perplexity"], compared["all"]["n"], compared["like_utility"]) == (66, 0, None)
    make_run({10: measured(1)}, name="c")
    assert "planted different canaries" in flsim("compare", "a", "c")[2]
