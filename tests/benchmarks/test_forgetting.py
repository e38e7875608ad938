"""Tests of `python -m benchmarks forgetting`, its figures, and the numbers of docs/result-forgetting-theory.md."""

import json
from pathlib import Path

import pytest
from helpers import Flsim

from benchmarks.forgetting import MOVED, ROUNDS, TRIALS, clusters, describe, known_order, order_table, settings

PAGE = (Path(__file__).parents[2] / "docs" / "result-forgetting-theory.md").read_text(encoding="utf-8")


def test_the_page_has_the_measured_numbers_of_k_means_and_of_a_known_order() -> None:
    before, *after = [f"{row['success']:.1%}" for row in clusters()]
    assert f"| {TRIALS:,} | {before} | {after[0]} |" in PAGE
    assert set(after) == {after[0]}
    assert order_table(known_order()) in PAGE


def test_the_page_has_the_formulas_numbers_of_federated_means() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if "±" in line]
    expected = [
        [
            *(str(setting.cohort), str(setting.steps), str(round_)),
            *(f"{setting.expected.separation(round_):.2f}", f"{setting.expected.accuracy(round_):.1%}"),
        ]
        for setting in settings()
        for round_ in ROUNDS
    ]
    assert [[*row[:4], row[5]] for row in rows] == expected


@pytest.mark.nightly
def test_the_command_measures_what_the_page_says_and_draws_it(benchmark_command: Flsim, tmp_path: Path) -> None:
    """Measured separations are within four standard errors of the formula, in all 20 rows."""
    code, out, _ = benchmark_command("forgetting", "--figures", tmp_path, "--json")
    assert code == 0
    measured = json.loads(out)
    for table in describe(measured).split("\n\n\n")[1:]:
        assert table in PAGE
    for setting in measured["means"]:
        assert setting["distance"] == pytest.approx(2 * MOVED / 16, rel=1e-3)
        for row in setting["rounds"]:
            assert abs(row["measured_separation"] - row["separation"]) < 4 * row["standard_error"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("forgetting-k-means.png", "forgetting-means.png", "forgetting-order.png")
    ]
