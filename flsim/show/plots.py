"""Figures of runs: over epochs, exposure against perplexity, and losses beside exposure; curves over training."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, ScalarFormatter
from numpy.typing import NDArray

from flsim.base.errors import InputError
from flsim.base.statistics import t_interval
from flsim.measures.built_in import FIT_BITS, PERPLEXITY, PRIMARY, QUANTITIES
from flsim.measures.quantity import Quantity, flags, numbers, select_for
from flsim.results.columns import quantities_of
from flsim.results.seeds import by_series, wants_means
from flsim.results.store import RunResults
from flsim.show.figures import COLOURS, ROUNDS, line_style, plain, refuse_other_than_figure, write_figure

EPOCHS = "epochs: records read / records there are"
NEAR = 0.25  # of the distance between the two evaluations before
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """A line of one panel with its band.

    Attributes:
        x: float64 [points], epochs or rounds.
        y: float64 [points], values.
        low: float64 [points], lower end of the band; NaN without a band.
        high: float64 [points], upper end of the band; NaN without a band.
    """

    x: Values
    y: Values
    low: Values
    high: Values


def curve(
    runs: Sequence[RunResults],
    measured: Callable[[RunResults, int], Values | None],
    in_epochs: bool,
    over_seeds: bool,
) -> Curve:
    """Return the mean over runs of what was measured, at the rounds where all runs measured it.

    Args:
        runs: one run, or those of a setting's seeds.
        measured: float64 [canaries], or [1] of a number of the model, of a run after so many rounds; None if it was
            not measured.
        in_epochs: whether x is in epochs, otherwise in rounds.
        over_seeds: whether bands are intervals over the runs' means, otherwise over the canaries of one run.
    """
    points = []
    for round_ in drawn_rounds(sorted(set.intersection(*(set(run.evaluated) for run in runs)) if runs else ())):
        values = [value for run in runs if (value := measured(run, round_)) is not None]
        if len(values) == len(runs):
            means = np.array([value.mean() for value in values])
            x = np.mean([run.epochs_of(round_) if in_epochs else round_ for run in runs])
            points.append((x, means.mean(), *t_interval(means if over_seeds else values[0])))
    return Curve(*np.array(points, dtype="float64").reshape(-1, 4).T)


def exposure_by_utility(runs: Sequence[RunResults], over_seeds: bool) -> Values:
    """Return float64 [evaluations, 4]: perplexity, mean exposure in bits, and both ends of its interval.

    Args:
        runs: one run, or those of a setting's seeds; evaluations that only some of them have are left out.
        over_seeds: whether intervals are over the runs' means, otherwise over the canaries of one run.
    """
    losses = curve(runs, _log_perplexity, in_epochs=False, over_seeds=over_seeds)
    exposures = curve(runs, partial(measured_values, PRIMARY), in_epochs=False, over_seeds=over_seeds)
    _, of_losses, of_exposures = np.intersect1d(losses.x, exposures.x, return_indices=True)
    columns = (
        np.exp(losses.y[of_losses]),
        *(part[of_exposures] for part in (exposures.y, exposures.low, exposures.high)),
    )
    return np.column_stack(columns)


def drawn_rounds(rounds: list[int]) -> list[int]:
    """Return the rounds without the last but one if it is just before the last, as 10.0 epochs before 10.2.

    Two points so near would end the curve in a hook that is noise.
    """
    if len(rounds) < 3 or rounds[-1] - rounds[-2] >= NEAR * (rounds[-2] - rounds[-3]):
        return rounds
    return [*rounds[:-2], rounds[-1]]


def measured_values(quantity: Quantity, run: RunResults, round_: int) -> Values | None:
    """Return float64 [canaries] of a number of canaries, otherwise float64 [1].

    None means that the quantity was not measured or is not finite.
    """
    if not quantity.of_canaries:
        value = run.of_model(quantity.name, round_)
        return None if value is None or not math.isfinite(value) else np.array([value * quantity.scale])
    values = run.of_planted(quantity.name, round_)
    if values is None or values.empty:
        return None
    return np.array([(values == 1).sum()] if quantity.is_flag else values * quantity.scale, dtype="float64")


def know_epochs(runs: Sequence[RunResults]) -> bool:
    """Return whether every run with an evaluation knows its epochs."""
    return all(run.rounds_per_epoch is not None for run in runs if run.evaluated)


def averaged(series: Sequence[RunResults]) -> list[RunResults]:
    """Return the runs of a series that a mean is over: those that were evaluated, and did not end early."""
    return [run for run in series if run.status not in {"diverged", "failed", "interrupted"} and run.evaluated]


def label_of(group: Sequence[RunResults], runs: Sequence[Any], means_over: int | None) -> str:
    """Return the setting, with the number of runs of a series, or with the name of a run if settings are equal.

    Args:
        group: the runs of a line.
        runs: all runs of the figure.
        means_over: number of runs of a series that the line is the mean of; None where the line is one run.
    """
    run = group[0]
    if means_over is not None:
        left_out = len(group) - means_over
        label = f"{run.setting} ({means_over} seed{'s' * (means_over != 1)}{f', {left_out} left out' * (left_out > 0)})"
    else:
        name = f" [{run.name}]" if [other.setting for other in runs].count(run.setting) > 1 else ""
        status = f" ({run.status}, round {run.round})" if run.status != "completed" else ""
        label = f"{run.setting}{name}{status}"
    return plain(label)


def _log_perplexity(run: RunResults, round_: int) -> Values | None:
    perplexity = measured_values(PERPLEXITY, run, round_)
    return None if perplexity is None else np.log(perplexity)


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


UTILITY_BARS = {
    False: "Bars: 95% intervals of mean exposure over the canaries of a run.",
    True: "Means over seeds (of perplexity: geometric), and 95% intervals over seeds of exposure (t).",
}
UTILITY_NOTE = "Training goes from right to left. A lower line memorizes less at like utility."


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
    legend.set_title(plain(f"{UTILITY_BARS[over_seeds]}\n{UTILITY_NOTE}"))
    return figure


BLUE, RED, GREEN = COLOURS[:3]
LOSS_COLUMNS = 2
LOSS_STYLES: dict[str, dict[str, Any]] = {
    "training": {"color": BLUE, "linestyle": "--", "marker": "o", "markersize": 3.5},
    "test": {"color": BLUE, "linestyle": "-", "marker": "s", "markersize": 3.5},
    "bits": {"color": RED, "linestyle": "-.", "marker": "^", "markersize": 4},
}
LOSS_BANDS = {
    False: "Band of exposure: 95% interval over the canaries of a run, where it has two.",
    True: "Lines are means over seeds, and bands their 95% intervals (t).",
}
LOSS_NOTE = "Training loss: mean while training, since the evaluation before."

Losses = Mapping[RunResults, Mapping[int, float]]


def plot_losses(runs: Sequence[RunResults], losses: Losses, path: Path, over_seeds: bool | None = None) -> None:
    """Write the figure of `draw_losses`, whole or not at all.

    Args:
        runs: the results of each run.
        losses: the training loss of each run by evaluated round, nats a token.
        path: a .png, .svg or .pdf file to write.
        over_seeds: whether a panel is a series, otherwise it is a run; None: where one has two seeds to average.

    Raises:
        InputError: the path has another ending, its folder does not exist, no run has an evaluation of canaries or a
            training loss, or `by_series` refuses the runs.
    """
    refuse_other_than_figure(path)
    names = ", ".join(run.name for run in runs) or "no runs"
    if not any(run.evaluated for run in runs):
        raise InputError(f"--kind loss: {names}: not evaluated yet, nothing to plot")
    if not any(losses.get(run) for run in runs):
        raise InputError(f"--kind loss: {names}: rounds.jsonl has no training loss; restore it, or plot without --kind")
    if not any(run.of_planted(PRIMARY.name, round_) is not None for run in runs for round_ in run.evaluated):
        raise InputError(f"--kind loss: {names}: no evaluation has exposure; train without evaluation.decide")
    write_figure(lambda: draw_losses(runs, losses, wants_means(runs, over_seeds)), path)


def draw_losses(runs: Sequence[RunResults], losses: Losses, over_seeds: bool = False) -> Figure:
    """Return a figure with a panel for each run or setting, with losses on the left axis and exposure on the right one.

    Losses are in nats a character, or a word, of corpora of words. Exposure is estimated where all evaluations have the
    measure "extrapolation", otherwise it is by rank. A vertical line is the minimum of the test loss.
    """
    groups = [group for group in (by_series(runs) if over_seeds else [[run] for run in runs]) if averaged(group)]
    in_epochs, is_estimated = know_epochs(runs), _are_estimated(runs)
    columns = min(LOSS_COLUMNS, len(groups))
    rows = math.ceil(len(groups) / columns)
    figure = Figure(figsize=(max(7.0, 5.6 * columns), 3.9 * rows + 0.8), layout=ConstrainedLayoutEngine())
    FigureCanvasAgg(figure)
    grid: list[Axes] = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for empty in grid[len(groups) :]:
        empty.set_axis_off()
    tokens = {token_of(run) for run in runs}
    token = tokens.pop() if len(tokens) == 1 else "token"
    for panel, group in zip(grid, groups, strict=False):
        taken = averaged(group) if over_seeds else group
        exposed = panel.twinx()
        curves = {
            "training": curve(taken, partial(_training_loss, losses), in_epochs, over_seeds),
            "test": curve(taken, _log_perplexity, in_epochs, over_seeds),
            "bits": curve(
                taken,
                partial(measured_values, QUANTITIES[FIT_BITS.name] if is_estimated else PRIMARY),
                in_epochs,
                over_seeds,
            ),
        }
        lines = [_line(exposed if name == "bits" else panel, line, LOSS_STYLES[name]) for name, line in curves.items()]
        panel.set(xlabel=EPOCHS if in_epochs else ROUNDS, ylabel=f"loss (nats per {token})")
        panel.set_title(label_of(group, runs, len(taken) if over_seeds else None), fontsize=10)
        exposed.set_ylabel("estimated exposure (bits)" if is_estimated else "exposure (bits)")
        exposed.spines["right"].set_visible(True)
        exposed.grid(visible=False)
        panel.set_xlim(left=0)
        _scale_losses(panel, [curves["training"], curves["test"]])
        _scale_losses(exposed, [curves["bits"]])
        _draw_minimum(panel, curves, in_epochs)
    names = ["training loss", "test loss", "exposure of the secrets (right axis)"]
    legend = figure.legend(lines, names, loc="outside lower center", ncols=3, frameon=False, handlelength=3.5)
    legend.set_title(plain(f"{LOSS_BANDS[over_seeds]}\n{LOSS_NOTE}"), prop=FontProperties(size=8))
    return figure


def token_of(run: RunResults) -> str:
    """Return what a token of the run's corpus is, by the canaries: "character" if each letter and space is one."""
    roster = run.roster
    if "words" not in roster or roster.empty:
        return "token"
    lengths = zip(roster["words"], roster["tokens"], strict=True)
    return "character" if all(len(" ".join(words)) == len(tokens) for words, tokens in lengths) else "word"


def _are_estimated(runs: Sequence[RunResults]) -> bool:
    return all(run.of_planted(FIT_BITS.name, round_) is not None for run in runs for round_ in run.evaluated)


def _training_loss(losses: Losses, run: RunResults, round_: int) -> Values | None:
    value = losses.get(run, {}).get(round_)
    return None if value is None or not math.isfinite(value) else np.array([value])


def _line(panel: Axes, line: Curve, style: dict[str, Any]) -> Any:
    panel.fill_between(line.x, line.low, line.high, color=style["color"], alpha=0.15, linewidth=0)
    [drawn] = panel.plot(line.x, line.y, zorder=3, **style)
    return drawn


def _scale_losses(panel: Axes, curves: Sequence[Curve]) -> None:
    """Set a scale from 0 that shows the lines whole. Bands are cut, because those of two seeds can be very wide."""
    values = np.concatenate([curve.y for curve in curves])
    panel.set_ylim(min(0.0, 1.1 * values.min(initial=0.0)), 1.25 * values.max(initial=0.0) or 1.0)


def _draw_minimum(panel: Axes, curves: Mapping[str, Curve], in_epochs: bool) -> None:
    """Draw where the test loss is lowest, and say where exposure is highest."""
    test, exposure = curves["test"], curves["bits"]
    if not len(test.y):
        return
    lowest = float(test.x[test.y.argmin()])
    unit = "epoch" if in_epochs else "round"
    panel.axvline(lowest, color=CEILING, linestyle=(0, (1, 2)), linewidth=1, zorder=1)
    text = f"lowest test loss: {unit} {lowest:.3g}"
    if len(exposure.y):
        text += f"\nhighest exposure: {unit} {exposure.x[exposure.y.argmax()]:.3g}"
    is_late = lowest > panel.get_xlim()[1] / 2
    panel.annotate(
        text, (lowest, 0.98), (-5 if is_late else 5, 0), xycoords=("data", "axes fraction"),
        textcoords="offset points", ha="right" if is_late else "left", va="top", fontsize=8, color=CEILING,
    )  # fmt: skip
