"""What runs memorized, over rounds: RS, BS and mean exposure side by side."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from flsim.errors import InputError
from flsim.files import new_file
from flsim.results.compare import t_interval
from flsim.results.store import RunResults

# Okabe and Ito (2008), distinguishable with any colour vision; yellow left out, which is too pale for a line.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
DASHES = ("-", "--", "-.", ":")
FORMATS = {".png": "png", ".svg": "svg"}
STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 10,
    "grid.alpha": 0.3,
    "svg.hashsalt": "flsim",  # the same results give the same bytes
}


def plot_rounds(runs: Sequence[RunResults], path: Path) -> None:
    """Write the figure of `draw_rounds`, whole or not at all.

    Args:
        runs: what was read of each run.
        path: a .png or .svg file to write.

    Raises:
        InputError: another kind of file, no such folder, or no evaluation to show.
    """
    refuse_other_than_figure(path)
    if not any(run.evaluated for run in runs):
        raise InputError(f"{', '.join(run.name for run in runs) or 'no runs'}: not evaluated yet, nothing to plot")
    write_figure(lambda: draw_rounds(runs), path)


def refuse_other_than_figure(path: Path) -> None:
    """Raises InputError where no figure can be written: the path is not a .png or .svg file in a folder."""
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"{path}: plots are written as .png or .svg; name one of these")
    if not path.parent.is_dir():
        raise InputError(f"{path}: no such folder as {path.parent}; make it first")


def write_figure(draw: Callable[[], Figure], path: Path) -> None:
    """Draw in our style and write it, whole or not at all. Raises as `refuse_other_than_figure`."""
    refuse_other_than_figure(path)
    kind = FORMATS[path.suffix.lower()]
    with mpl.rc_context(STYLE), new_file(path) as partial:
        metadata = {"Date": None} if kind == "svg" else None
        draw().savefig(partial, format=kind, dpi=150, metadata=metadata)


def draw_rounds(runs: Sequence[RunResults]) -> Figure:
    """Every run's memorization over rounds, independent of pyplot.

    Three panels: canaries memorized by RS, by BS (counts), and mean exposure (bits) with a 95% band over canaries,
    Student's t. A run that diverged ends at its last finite evaluation, and its label says so; one that has no
    evaluation yet is named and has no line.
    """
    legend_lines = math.ceil(len(runs) / 2)
    figure = Figure(figsize=(11, 3.3 + 0.25 * legend_lines), layout=ConstrainedLayoutEngine(wspace=0.06))
    FigureCanvasAgg(figure)
    rs, bs, exposure = figure.subplots(1, 3, sharex=True)
    counts = sorted({len(run.roster) for run in runs})
    memorized = f"canaries memorized (of {counts[0]})" if len(counts) == 1 else "canaries memorized"
    for panel, title, unit in (
        (rs, "Random Sampling (RS)", memorized),
        (bs, "Beam Search (BS)", memorized),
        (exposure, "Mean exposure", "bits (band: 95% over canaries)"),
    ):
        panel.set(title=title, xlabel="completed rounds (central: steps)", ylabel=unit)
        panel.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    for index, run in enumerate(runs):
        _line(rs, index, *_counts(run, "rs"))
        _line(bs, index, *_counts(run, "bs"))
        _exposure(exposure, index, run)
    for panel in (rs, bs):
        panel.yaxis.set_major_locator(MaxNLocator(integer=True))
        # A flat line at zero is a result: it needs a scale to be seen against.
        panel.set_ylim(0, max(1.0, rs.get_ylim()[1], bs.get_ylim()[1]))
    exposure.set_ylim(bottom=0)
    exposure.set_xlim(left=0)
    figure.legend(rs.get_lines(), _labels(runs), loc="outside lower center", ncols=min(2, len(runs)), frameon=False)
    return figure


def _line(panel: Axes, index: int, rounds: list[int], values: list[float]) -> None:
    [line] = panel.plot(
        rounds,
        values,
        color=COLOURS[index % len(COLOURS)],
        marker=MARKERS[index % len(MARKERS)],
        linestyle=DASHES[index % len(DASHES)],
        markersize=6,
        markeredgecolor="white",
        markeredgewidth=0.7,
        clip_on=False,  # markers at zero stay whole
        zorder=3,  # and lines at zero lie on the axis, not under it
    )
    line.set_in_layout(False)  # an unclipped line without points would take the whole figure


def _counts(run: RunResults, metric: str) -> tuple[list[int], list[float]]:
    measured = [(round_, run.of_canaries(metric, round_)) for round_ in run.evaluated]
    found = [(round_, float((values == 1).sum())) for round_, values in measured if values is not None]
    return [round_ for round_, _ in found], [count for _, count in found]


def _exposure(panel: Axes, index: int, run: RunResults) -> None:
    measured = [(round_, run.of_canaries("exposure", round_)) for round_ in run.evaluated]
    found = [(round_, values.to_numpy()) for round_, values in measured if values is not None]
    rounds = [round_ for round_, _ in found]
    _line(panel, index, rounds, [float(np.mean(values)) for _, values in found])
    band = [t_interval(values) for _, values in found]
    panel.fill_between(
        rounds,
        [low for low, _ in band],
        [high for _, high in band],
        color=COLOURS[index % len(COLOURS)],
        alpha=0.15,
        linewidth=0,
    )


def _labels(runs: Sequence[RunResults]) -> list[str]:
    """Settings; with the run's name where settings repeat, and with the status where a run is not completed."""
    settings = [run.setting for run in runs]
    labels = []
    for run in runs:
        name = f" [{run.name}]" if settings.count(run.setting) > 1 else ""
        status = f" ({run.status}, round {run.round})" if run.status != "completed" else ""
        label = f"{run.setting}{name}{status}"
        labels.append(label.replace("$", r"\$"))  # a pair of dollar signs would be mathematics
    return labels
