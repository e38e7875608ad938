"""Figure of runs over epochs, with RS, BS, mean exposure and perplexity side by side."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, ScalarFormatter
from numpy.typing import NDArray

from flsim.base.errors import InputError
from flsim.measures.quantity import Quantity, flags, numbers, select_for
from flsim.results.columns import quantities_of
from flsim.results.seeds import by_series, wants_means
from flsim.results.store import RunResults
from flsim.show.curves import EPOCHS, Curve, averaged, curve, know_epochs, label_of, measured_values
from flsim.show.figures import ROUNDS, line_style, plain, write_figure
from flsim.show.figures import refuse_other_than_figure as refuse_other_than_figure

CEILING = "#555555"
BANDS = {
    False: "Band: 95% interval of {} over canaries",
    True: "Mean over seeds; band: its 95% interval over seeds (t)",
}


def plot_rounds(runs: Sequence[RunResults], path: Path, over_seeds: bool | None = None) -> None:
    """Write the figure of `draw_rounds`, whole or not at all.

    Args:
        runs: the results of each run.
        path: a .png, .svg or .pdf file to write.
        over_seeds: whether a line is a series, otherwise it is a run; None: where one has two seeds to average.

    Raises:
        InputError: the path has another ending, its folder does not exist, no run was evaluated, or `by_series` refuses
            the runs.
    """
    refuse_other_than_figure(path)
    if not any(run.evaluated for run in runs):
        raise InputError(f"{', '.join(run.name for run in runs) or 'no runs'}: not evaluated yet, nothing to plot")
    write_figure(lambda: draw_rounds(runs, wants_means(runs, over_seeds)), path)


def draw_rounds(runs: Sequence[RunResults], over_seeds: bool = False) -> Figure:
    """Return a figure of every run's or series' memorization and utility over epochs, independent of pyplot.

    The x axis has rounds if some run does not know its epochs. Four panels show canaries memorized by RS, by BS
    (counts), mean exposure (bits) and perplexity. Each quantity of a user's own measures has one more. Bands are 95%
    intervals, Student's t: of means over canaries, or, over seeds, of all panels over the seeds' means. An evaluation
    just before the last one is left out. A dotted line is the largest exposure that ranking among the references can
    show. A run that diverged ends at its last finite evaluation, and its label says so. A run without an evaluation is
    named and has no line. Over seeds, a line is over the points that all runs of its series have. Runs that diverged,
    failed, were interrupted or have no evaluation are left out, and the label says how many.
    """
    groups = by_series(runs) if over_seeds else [[run] for run in runs]
    taken = [averaged(group) for group in groups] if over_seeds else groups
    in_epochs = know_epochs(runs)
    quantities = [quantity for quantity in select_for(quantities_of(runs), "plot") if _is_drawn(quantity, runs)]
    columns, rows = min(2, len(groups)), math.ceil(len(quantities) / 2)
    figure = Figure(
        figsize=(9.5, 2.9 * rows + 0.25 * math.ceil(len(groups) / columns)),
        layout=ConstrainedLayoutEngine(wspace=0.05, hspace=0.05),
    )
    FigureCanvasAgg(figure)
    grid: list[Axes] = figure.subplots(rows, 2, sharex=True).ravel().tolist()
    panels = dict(zip(quantities, grid, strict=False))
    for empty in grid[len(quantities) :]:
        empty.set_axis_off()
    counts = sorted({len(run.planted) for run in runs})
    of_all = f" (of {counts[0]})" if len(counts) == 1 else ""
    for quantity, panel in panels.items():
        panel.set(title=plain(_title(quantity)), ylabel=plain(_unit(quantity, of_all)))
        for index, group in enumerate(taken):
            draw_curve(panel, index, curve(group, partial(measured_values, quantity), in_epochs, over_seeds))
    for panel in list(panels.values())[-2:]:
        panel.set_xlabel(EPOCHS if in_epochs else ROUNDS)
        panel.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=not in_epochs))
        if len(quantities) % 2:  # nothing is below the last but one
            panel.tick_params(labelbottom=True)
    _scale(panels, counts[-1])
    for primary in (quantity for quantity in panels if quantity.is_primary):
        draw_ceilings(panels[primary], [run for group in taken for run in group])
    legend = figure.legend(
        grid[0].get_lines(),
        [label_of(group, runs, len(drawn) if over_seeds else None) for group, drawn in zip(groups, taken, strict=True)],
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        handlelength=3.5,  # dashes show whole
    )
    means = ", ".join(_mean_of(number) for number in numbers(quantities))
    legend.set_title(plain(BANDS[over_seeds].format(means)))
    return figure


def _is_drawn(quantity: Quantity, runs: Sequence[RunResults]) -> bool:
    """Return whether a quantity has a panel: always if papers report it, otherwise if it was measured."""
    return quantity.is_standard or any((run.rows["metric"] == quantity.name).any() for run in runs)


def _mean_of(quantity: Quantity) -> str:
    return (quantity.caption or f"Mean {quantity.title}").lower()


def _title(quantity: Quantity) -> str:
    if quantity.caption:
        return quantity.caption
    if quantity.is_flag:
        return f"{quantity.title} ({quantity.heading})"
    return f"Mean {quantity.title}" if quantity.of_canaries else quantity.title


def _unit(quantity: Quantity, of_all: str) -> str:
    if quantity.is_flag:
        return f"canaries memorized{of_all}"
    unit = "%" if quantity.is_percentage else quantity.axis
    return f"{unit} (log)".strip() if quantity.is_log else unit


def draw_ceilings(panel: Axes, runs: Sequence[RunResults]) -> None:
    """Draw the largest exposure that the runs' references can show, if the scale reaches at least half of it."""
    references = {run.references(run.evaluated[-1]) for run in runs if run.evaluated}
    for ceiling in sorted(math.log2(count + 1) for count in references if count):
        _, top = panel.get_ylim()
        if top < ceiling / 2:
            return
        panel.axhline(ceiling, color=CEILING, linestyle=(0, (1, 2)), linewidth=1, zorder=1)
        label = f"most that |R| = {2**ceiling - 1:,.0f} can show"
        panel.annotate(
            label, (0.99, ceiling), (0, 4), xycoords=("axes fraction", "data"), textcoords="offset points", ha="right",
            va="bottom", fontsize=7, color=CEILING,
        )  # fmt: skip
        panel.set_ylim(top=max(top, 1.09 * ceiling))


def draw_curve(panel: Axes, index: int, curve: Curve) -> None:
    [line] = panel.plot(
        curve.x,
        curve.y,
        **line_style(index),
        markersize=6,
        markeredgecolor="white",
        markeredgewidth=0.7,
        clip_on=False,  # markers at zero stay whole
        zorder=3,  # and lines at zero lie on the axis, not under it
    )
    line.set_in_layout(False)  # an unclipped line without points would take the whole figure
    band = panel.fill_between(curve.x, curve.low, curve.high, color=line.get_color(), alpha=0.18, linewidth=0)
    band.set_in_layout(False)


def _scale(panels: Mapping[Quantity, Axes], canaries: int) -> None:
    """Set scales that show the lines whole. Bands are cut, because those of two seeds can be very wide."""
    tops = {quantity: float(np.max(_heights(panel), initial=0.0)) for quantity, panel in panels.items()}
    for quantity, panel in panels.items():
        if quantity.is_flag:
            panel.yaxis.set_major_locator(MaxNLocator(integer=True))
            # A flat line at zero is a result: it needs a scale to be seen against.
            panel.set_ylim(0, min(max(canaries, 1), max(1.0, 1.2 * max(tops[flag] for flag in flags(panels)))))
        elif quantity.is_log:
            _scale_by_logarithm(panel, tops[quantity])
        else:
            lowest = float(np.min(_heights(panel), initial=0.0))
            panel.set_ylim(1.15 * lowest, 1.15 * tops[quantity] or 1.0)
        panel.set_xlim(left=0)


def _scale_by_logarithm(panel: Axes, high: float) -> None:
    """Set a scale on which late differences, small beside the first fall, count as much."""
    if high:
        low = float(_heights(panel).min())
        margin = (high / low) ** 0.08 * 1.01
        panel.set_yscale("log")
        panel.set_ylim(low / margin, high * margin)
        mark_logarithmic(panel.yaxis, low, high)


def mark_logarithmic(axis: Axis, low: float, high: float) -> None:
    """Mark plain numbers on a logarithmic axis, also where it spans less than a factor of ten."""
    axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)) if high > 3 * low else MaxNLocator(6))
    axis.set_major_formatter(ScalarFormatter())
    axis.set_minor_locator(NullLocator())


def _heights(panel: Axes) -> NDArray[np.float64]:
    return np.concatenate([np.asarray(line.get_ydata(), dtype="float64") for line in panel.get_lines()])
