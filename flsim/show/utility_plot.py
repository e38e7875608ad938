"""Figure of exposure against perplexity: what runs memorized at like utility."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from flsim.base.errors import InputError
from flsim.results.seeds import by_series, wants_means
from flsim.results.store import RunResults
from flsim.show.curves import averaged, exposure_by_utility, label_of
from flsim.show.figures import line_style, plain, refuse_other_than_figure, write_figure
from flsim.show.plots import draw_ceilings, mark_logarithmic

BARS = {
    False: "Bars: 95% intervals of mean exposure over the canaries of a run.",
    True: "Means over seeds (of perplexity: geometric), and 95% intervals over seeds of exposure (t).",
}
NOTE = "Training goes from right to left. A lower line memorizes less at like utility."


def plot_against_utility(runs: Sequence[RunResults], path: Path, over_seeds: bool | None = None) -> None:
    """Write the figure of `draw_against_utility`, whole or not at all.

    Args:
        runs: the results of each run.
        path: a .png, .svg or .pdf file to write.
        over_seeds: whether a line is a series, otherwise it is a run; None: where one has two seeds to average.

    Raises:
        InputError: the path has another ending, its folder does not exist, no run has an evaluation with exposure and
            perplexity, or `by_series` refuses the runs.
    """
    refuse_other_than_figure(path)
    if not any(len(exposure_by_utility([run], over_seeds=False)) for run in runs):
        names = ", ".join(run.name for run in runs) or "no runs"
        raise InputError(f"--kind utility: {names}: no evaluation has exposure and perplexity, nothing to plot")
    write_figure(lambda: draw_against_utility(runs, wants_means(runs, over_seeds)), path)


def draw_against_utility(runs: Sequence[RunResults], over_seeds: bool = False) -> Figure:
    """Return a figure with a line for each run or setting, from one evaluation to the next.

    Perplexity has a logarithmic scale. A dotted line is the largest exposure that the references can show. A run that
    diverged ends at its last finite evaluation. Over seeds, runs that diverged are left out, and the label says how
    many.
    """
    groups = by_series(runs) if over_seeds else [[run] for run in runs]
    figure = Figure(figsize=(7.5, 5.2), layout=ConstrainedLayoutEngine())
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    panel.set(xscale="log", xlabel="perplexity of test text (log)", ylabel="mean exposure (bits)")
    lines, labels = [], []
    for index, group in enumerate(groups):
        taken = averaged(group) if over_seeds else group
        perplexity, bits, low, high = exposure_by_utility(taken, over_seeds).T
        style = line_style(index)
        panel.vlines(perplexity, low, high, color=style["color"], alpha=0.3, linewidth=2)
        lines += panel.plot(perplexity, bits, **style, markersize=6, markeredgecolor="white", markeredgewidth=0.7)
        labels.append(label_of(group, runs, len(taken) if over_seeds else None))
    x, y = (np.concatenate([np.asarray(line.get_data()[axis]) for line in lines]) for axis in (0, 1))
    if len(x):  # over seeds, all runs may have diverged
        mark_logarithmic(panel.xaxis, x.min(), x.max())
    panel.set_ylim(bottom=0, top=1.08 * y.max(initial=0.0) or 1.0)
    draw_ceilings(panel, runs)
    legend = figure.legend(
        lines, labels, loc="outside lower center", ncols=min(2, len(lines)), frameon=False, handlelength=3.5
    )
    legend.set_title(plain(f"{BARS[over_seeds]}\n{NOTE}"))
    return figure
