"""Figures of docs/why-models-forget.md: one for each theorem of `experiments.theory`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

from benchmarks.forgetting import BY_COHORT, BY_STEPS, MOVED, POPULATION, RATE, RATES, STAGES
from experiments.theory.deterministic_order import difference, path
from experiments.theory.federated_means import FederatedMeans
from experiments.theory.k_means import KMeansExperiment
from experiments.theory.mean_estimation import MeanEstimation
from flsim.base.errors import InputError
from flsim.base.rng import stream
from flsim.show.figure import INK, LINES, line_style, write_figure

CHANCE: dict[str, Any] = {"color": "#555555", "linestyle": (0, (1, 2)), "linewidth": 1, "zorder": 1}
LATER = 30  # rounds of the curves of federated means
STEPS = 3_000  # steps of the curves of a known order


def write_figures(measured: dict[str, Any], folder: Path) -> list[Path]:
    """Write the three figures into a folder, and return their files.

    Args:
        measured: the results of `benchmarks.forgetting.bench_forgetting`.
        folder: an existing folder; older figures of the same names are replaced.

    Raises:
        InputError: there is no such folder, or a file cannot be written.
    """
    refuse_other_than_folder(folder)
    drawn: dict[str, Callable[[], Figure]] = {
        "forgetting-k-means.png": lambda: draw_k_means(measured["k_means"]),
        "forgetting-order.png": lambda: draw_order(measured["order"]),
        "forgetting-means.png": lambda: draw_means(measured["means"]),
    }
    for name, draw in drawn.items():
        write_figure(draw, folder / name)
    return [folder / name for name in drawn]


def refuse_other_than_folder(folder: Path) -> None:
    """Raise InputError unless the path is an existing folder."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder to write figures into; make it first")


def draw_k_means(rows: Sequence[dict[str, Any]]) -> Figure:
    """Return a figure of one pair of runs, and of the attack's accuracy against the number of later points."""
    figure, (left, right) = _panels(widths=(3, 2))
    experiment = KMeansExperiment()
    everything = {is_in: experiment.centres(1, is_in)[:, 0] for is_in in (True, False)}
    rng, ticks = stream(0, "figure of k-means"), []
    for place, (is_in, stage) in enumerate([(False, 1), (True, 1), (False, 0), (True, 0)]):
        middles = (-1.0, experiment.middle, 1.0) if stage else (-1.0, 1.0)
        count = experiment.later if stage else experiment.first
        x = np.concatenate([rng.normal(middle, experiment.spread, count) for middle in middles])
        if is_in and not stage:
            x = np.append(x, experiment.outlier)
        centres = everything[is_in][stage]
        colours = np.where(x < centres.mean(), LINES[0], LINES[1]).tolist()
        left.scatter(x, place + rng.uniform(-0.22, 0.22, len(x)), s=7, c=colours, linewidths=0)
        left.scatter(centres, [place, place], s=90, marker="X", c=LINES[:2], edgecolors="white", zorder=3)
        ticks.append(f"{'after' if stage else 'before'} later points, {'IN' if is_in else 'OUT'}")
    left.set(title="Two centres (crosses) for three clusters", xlabel="value", yticks=range(4))
    left.set_yticklabels(ticks)
    left.grid(visible=False, axis="y")
    x = np.array([row["points"] for row in rows])
    for index, (name, label) in enumerate({"success": "accuracy of guesses", "false": "false positives"}.items()):
        right.plot(x, [row[name] for row in rows], **line_style(index), label=label, markersize=5, clip_on=False)
    right.set(title="Attack on the outlier", xlabel="points read since (log)", ylim=(-0.02, 1.02))
    right.set_xscale("symlog", linthresh=3 * experiment.later)
    right.set_xlim(left=-experiment.later / 2)
    right.xaxis.set_major_locator(FixedLocator([x[list(STAGES).index(stage)] for stage in (0, 1, 5, 50)]))
    right.xaxis.set_minor_locator(NullLocator())
    right.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    right.yaxis.set_major_formatter(PercentFormatter(1))
    _chance(right)
    right.legend(frameon=False, loc="center right", bbox_to_anchor=(1, 0.3))
    return figure


def draw_order(rows: Sequence[dict[str, Any]]) -> Figure:
    """Return a figure of the difference of two runs in one order, and of attackers with known or unknown order."""
    figure, (left, right) = _panels()
    rate, steps = RATES[0], np.arange(STEPS + 1)
    left.plot(steps, [difference(rate, step, 2) for step in steps.tolist()], color=INK, linestyle=":", label="exact")
    for index, kind in enumerate(("float64", "float32")):
        two_eta = np.dtype(kind).type(2 * rate)
        examples = stream(0, "figure of order").normal(1, 1, STEPS).astype(kind)
        start = np.array([two_eta, -two_eta])
        apart = np.array([start, *path(start, examples, two_eta)]) @ [1.0, -1.0]
        last = int(np.flatnonzero(apart)[-1])
        style = line_style(index) | {"marker": ""}
        left.plot(steps[: last + 1], np.abs(apart[: last + 1]), **style, label=f"{kind}, equal from step {last + 1:,}")
        left.plot(last, abs(apart[last]), **line_style(index), markersize=7, markeredgecolor="white")
    left.set(title="Difference of the two models", xlabel="steps since", ylabel="|theta - theta'| (log)", yscale="log")
    left.legend(frameon=False)
    for index, row in enumerate(row for row in rows if row["rate"] == rate):
        still = [(np.array(row["measured"]) > step).mean() for step in steps]
        style = line_style(index) | {"marker": ""}
        right.plot(steps[1:], (1 + np.array(still)[1:]) / 2, **style, label=f"order known, {row['floats']}")
    for index, size in enumerate((100, 1), 2):
        one = MeanEstimation.injected(size, rate)
        style = line_style(index) | {"marker": ""}
        label = f"order unknown, {size**0.5:g} sd from the mean"
        right.plot(steps[1:], [one.accuracy(step) for step in steps[1:].tolist()], **style, label=label)
    right.set(title="Accuracy of the best attacker", xlabel="steps since (log)", xscale="log", ylim=(0.45, 1.03))
    right.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    right.yaxis.set_major_formatter(PercentFormatter(1))
    _chance(right)
    right.legend(frameon=False, loc="upper center", ncols=2, fontsize=8, bbox_to_anchor=(0.5, -0.16))
    return figure


def draw_means(settings: Sequence[dict[str, Any]]) -> Figure:
    """Return a figure of accuracy over rounds, by cohort and by local steps: lines are formulas, markers are runs."""
    figure, panels = _panels(is_shared=True)
    for panel, chosen, name in zip(panels, (BY_COHORT, BY_STEPS), ("user", "local step"), strict=True):
        for index, (cohort, steps) in enumerate(chosen):
            formula = FederatedMeans(MOVED, RATE, steps, cohort, POPULATION).expected
            style, rounds = line_style(index), np.arange(1, LATER + 1)
            count = cohort if chosen is BY_COHORT else steps
            label = f"{count} {name}{'s' * (count > 1)} a round"
            curve = [formula.accuracy(round_) for round_ in rounds.tolist()]
            panel.plot(rounds, curve, **style | {"marker": ""}, label=label)
            [runs] = [one["rounds"] for one in settings if (one["cohort"], one["steps"]) == (cohort, steps)]
            panel.plot(
                [row["round"] for row in runs],
                [row["measured_success"] for row in runs],
                **style | {"linestyle": "none"},
                markersize=6,
                markeredgecolor="white",
                zorder=3,
                clip_on=False,
            )
        panel.set(xlabel="rounds since the user's only part", ylim=(0.45, 1.02), xlim=(0, LATER))
        panel.yaxis.set_major_formatter(PercentFormatter(1))
        _chance(panel)
        panel.legend(frameon=False)
    panels[0].set(title=f"Cohort ({BY_COHORT[0][1]} local step)", ylabel="accuracy of the best attacker")
    panels[1].set_title(f"Local work ({BY_STEPS[0][0]} users a round)")
    return figure


def _panels(widths: tuple[int, int] = (1, 1), is_shared: bool = False) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(9.5, 3.8), layout=ConstrainedLayoutEngine(wspace=0.05))
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, 2, width_ratios=widths, sharey=is_shared).tolist()


def _chance(panel: Axes) -> None:
    panel.axhline(0.5, **CHANCE)
