"""The figure of exposure against perplexity: its values over seeds and of one run, and what it refuses."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flsim.base.statistics import t_interval
from flsim.results.store import RunResults, read_run
from flsim.show.plots import draw_against_utility

MakeRun = Callable[..., Path]


def measured(perplexity: float, bits: float) -> dict[str, list[float] | float]:
    return {"perplexity": perplexity, "exposure": [bits - 1, bits, bits + 1] * 3}


@pytest.fixture
def seeds(make_run: MakeRun) -> list[RunResults]:
    """Two seeds of a setting; the first was evaluated once more."""
    trained = [
        {10: measured(80, 1), 20: measured(20, 3), 30: measured(10, 7)},
        {10: measured(20, 2), 20: measured(5, 5)},
    ]
    return [
        read_run(make_run(rounds, name=f"seed-{seed}", seed=seed, series="a")) for seed, rounds in enumerate(trained)
    ]


def test_over_seeds_perplexity_is_a_geometric_mean_at_evaluations_that_all_have(seeds: list[RunResults]) -> None:
    figure = draw_against_utility(seeds, over_seeds=True)
    (panel,) = figure.axes
    (line,) = panel.get_lines()
    assert np.asarray(line.get_data()) == pytest.approx(np.array([[40, 10], [1.5, 4]]))  # sqrt(80 20), sqrt(20 5)
    (bars,) = panel.collections
    ends = [segment[:, 1].tolist() for segment in bars.get_segments()]  # type: ignore[attr-defined]
    assert ends == [pytest.approx(t_interval(np.array(bits))) for bits in ([1.0, 2.0], [3.0, 5.0])]
    assert panel.get_xscale() == "log"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["IID, FedAvg, b_u = 16 (2 seeds)"]


def test_each_run_has_a_line_of_its_own_and_intervals_over_its_canaries(seeds: list[RunResults]) -> None:
    (panel,) = draw_against_utility(seeds).axes
    long, short = (np.asarray(line.get_data()) for line in panel.get_lines())
    assert long == pytest.approx(np.array([[80, 20, 10], [1, 3, 7]]))
    assert short == pytest.approx(np.array([[20, 5], [2, 5]]))
    first = panel.collections[0].get_segments()[0][:, 1].tolist()  # type: ignore[attr-defined]
    assert first == pytest.approx(t_interval(np.array([0.0, 1.0, 2.0] * 3)))
