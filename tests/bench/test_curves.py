"""Exponents of curves: exact laws, an independent regression, and what is printed."""

import json
from pathlib import Path

import numpy as np
import pytest
import scipy

from flsim.base.errors import InputError
from flsim.bench.curve_plot import draw_curves, plot_curves
from flsim.bench.curves import Curve, Quantity, fit

SIZES = (1, 2, 4, 8, 16)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0])
def test_an_exact_power_law_is_recovered(exponent: float) -> None:
    law = fit(SIZES, [3.0 * size**exponent for size in SIZES])
    assert law is not None
    assert (law.factor, law.exponent) == pytest.approx((3.0, exponent), abs=1e-12)
    assert (law.low, law.high) == pytest.approx((exponent, exponent), abs=1e-7)


def test_the_interval_is_that_of_an_independent_regression() -> None:
    values = [1.0, 2.3, 3.6, 8.8, 14.9]
    law = fit(SIZES, values)
    line = scipy.stats.linregress(np.log(SIZES), np.log(values))
    half = scipy.stats.t.ppf(0.975, 3) * line.stderr
    assert law is not None
    assert (law.exponent, law.low, law.high) == pytest.approx((line.slope, line.slope - half, line.slope + half))


def test_three_points_by_hand() -> None:
    """Logarithms to base 2 are 0, 1, 2 and 0, 2, 1: slope 1/2, residuals -1/2, 1, -1/2, so its error is sqrt(3/4)."""
    law = fit((1, 2, 4), (1, 4, 2))
    assert law is not None
    assert law.exponent == pytest.approx(0.5)
    assert law.high == pytest.approx(0.5 + 12.7062 * 0.75**0.5, rel=1e-5)


def test_two_points_have_no_interval_and_no_law_has_a_zero() -> None:
    law = fit((1, 2), (5.0, 10.0))
    assert law is not None
    assert law.exponent == pytest.approx(1.0)
    assert (law.low, law.high) == (None, None)
    assert fit((1, 2), (0.0, 1.0)) is None
    assert fit((4, 4), (1.0, 2.0)) is None


CURVE = Curve(
    "shards",
    "shards",
    "a model",
    (1, 2, 4),
    (
        Quantity("round_seconds", "round, s", (0.1, 0.2, 0.4), 1),
        Quantity("own_memory_bytes", "own memory, MB", (2e9, 2e9, 2e9), None, 1e-6),
        Quantity("overhead_seconds", "overhead, s", (0.0, 0.1, 0.3), 1),
    ),
)


def test_table_and_json_have_points_and_exponents() -> None:
    lines = CURVE.table().splitlines()
    assert lines[0] == "shards: a model"
    assert lines[2].split() == ["1", "0.1", "2,000", "0"]
    assert lines[5].split() == ["exponent", "1.00", "0.00", "-"]
    assert lines[6].split("  ")[-1].strip() == "-"
    assert lines[7].split() == ["last", "doubling", "1.00", "0.00", "1.58"]  # log2 of 3
    assert lines[8].split() == ["expected", "1.00", "-", "1.00"]
    measured = CURVE.as_json()
    assert measured["points"][1] == {
        "size": 2,
        "round_seconds": 0.2,
        "own_memory_bytes": 2e9,
        "overhead_seconds": 0.1,
    }
    assert measured["exponents"]["round_seconds"]["value"] == pytest.approx(1.0)
    assert "value" not in measured["exponents"]["overhead_seconds"]
    assert json.loads(json.dumps(measured, allow_nan=False)) == measured


def test_the_figure_has_a_panel_for_each_quantity(tmp_path: Path) -> None:
    figure = draw_curves([CURVE])
    panels = [axes for axes in figure.axes if axes.axison]
    assert [axes.get_ylabel() for axes in panels] == ["round, s", "own memory, MB", "overhead, s"]
    assert {axes.get_xscale() for axes in panels} == {axes.get_yscale() for axes in panels} == {"log"}
    markers, fitted, expected = panels[0].get_lines()
    heights = [np.asarray(line.get_ydata(), np.float64).tolist() for line in (markers, fitted, expected)]
    assert heights == [pytest.approx([0.1, 0.2, 0.4])] * 3
    assert len(panels[1].get_lines()) == 2  # nothing is expected of it
    assert len(panels[2].get_lines()) == 1  # a zero has no logarithm
    plot_curves([CURVE], tmp_path / "curves.svg")
    assert (tmp_path / "curves.svg").stat().st_size > 1_000
    with pytest.raises(InputError, match=r"name one of these"):
        plot_curves([CURVE], tmp_path / "curves.txt")
