"""Figure of curves of cost against size, with logarithmic axes, so that a power law is a line."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from flsim.bench.curves import Curve, Quantity
from flsim.results.figures import COLOURS, line_style, plain, write_figure

COLUMNS = 3
MEASURED, FITTED, EXPECTED = "measured", "fitted power law", "expected by design"
STYLES: dict[str, dict[str, Any]] = {
    MEASURED: {**line_style(0), "linestyle": "none", "markersize": 6, "markeredgecolor": "white", "zorder": 3},
    FITTED: {"color": COLOURS[0], "linestyle": "--", "linewidth": 1.2},
    EXPECTED: {"color": "#555555", "linestyle": ":", "linewidth": 1},
}


def plot_curves(curves: Sequence[Curve], path: Path) -> None:
    """Write the figure of `draw_curves`, whole or not at all.

    Args:
        curves: at least one.
        path: a .png, .svg or .pdf file to write.

    Raises:
        InputError: the path has another ending, or its folder does not exist.
    """
    write_figure(lambda: draw_curves(curves), path)


def draw_curves(curves: Sequence[Curve]) -> Figure:
    """Return a figure with a panel for each quantity of each curve.

    Markers are measurements, the dashed line is the fitted power law, and the dotted grey line has the exponent that is
    expected by design, through the measurements' middle.
    """
    panels = [(curve, quantity) for curve in curves for quantity in curve.quantities]
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(3.6 * columns, 3.0 * rows), layout=ConstrainedLayoutEngine(wspace=0.05, hspace=0.05))
    FigureCanvasAgg(figure)
    axes: list[Axes] = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for panel, (curve, quantity) in zip(axes, panels, strict=False):
        _draw(panel, curve, quantity)
    for empty in axes[len(panels) :]:
        empty.set_axis_off()
    handles = [Line2D([], [], **style) for style in STYLES.values()]
    figure.legend(handles, list(STYLES), loc="outside lower center", ncols=len(STYLES), frameon=False)
    return figure


def _draw(panel: Axes, curve: Curve, quantity: Quantity) -> None:
    x, y = np.array(curve.sizes, dtype=np.float64), quantity.scale * np.array(quantity.values)
    panel.set(xscale="log", yscale="log", xlabel=plain(curve.axis), ylabel=plain(quantity.title))
    panel.plot(x, y, **STYLES[MEASURED])
    law = curve.law(quantity)
    if law is not None:
        panel.plot(x, quantity.scale * law.factor * x**law.exponent, **STYLES[FITTED])
        low, high = ("", "") if law.low is None or law.high is None else (f" [{law.low:.2f},", f" {law.high:.2f}]")
        panel.set_title(plain(f"{curve.name}: exponent {law.exponent:.2f}{low}{high}"), fontsize=9)
    if quantity.expected is not None and (y > 0).all():
        middle = np.exp(np.log(x).mean()), np.exp(np.log(y).mean())
        panel.plot(x, middle[1] * (x / middle[0]) ** quantity.expected, **STYLES[EXPECTED])
    _scale(panel, y)


def _scale(panel: Axes, y: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> None:
    """Show at least a decade of costs, so that noise of a constant cost does not look like growth."""
    positive = y[y > 0]
    if len(positive):
        room = max(1.0, 10 * positive.min() / positive.max()) ** 0.5
        panel.set_ylim(positive.min() / room / 1.2, positive.max() * room * 1.2)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0), numticks=8))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
