"""Figures of runs: over epochs, exposure against perplexity, and losses with exposure.

`flsim plot` writes them as files. A report draws single panels with `draw_quantity` and `draw_utility`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from flsim.base.errors import InputError
from flsim.base.statistics import t_interval
from flsim.measures.built_in import FIT_BITS, PERPLEXITY, PRIMARY
from flsim.measures.quantity import Quantity, flags, numbers, select_for
from flsim.results.rows import RunResults
from flsim.results.sweeps import by_series, distinctions, has_means
from flsim.results.tables import quantities_of
from flsim.show import figure as show

EPOCHS = "epochs: records read / records of the corpus"
NEAR = 0.25  # share of the distance between the two previous evaluations
Values = NDArray[np.float64]
Kind = Literal["rounds", "utility", "loss"]
Losses = Mapping[RunResults, Mapping[int, float]]  # training loss of each run by evaluated round, nats per token


@dataclass(frozen=True)
class Curve:
    """A line of a panel with its band."""

    x: Values  # float64 [points], epochs or rounds
    y: Values  # float64 [points], values
    low: Values  # float64 [points], lower end of the band; NaN without a band
    high: Values  # float64 [points], upper end of the band; NaN without a band


def curve(
    runs: Sequence[RunResults],
    measured: Callable[[RunResults, int], Values | None],
    in_epochs: bool,
    over_seeds: bool,
    band: Callable[[Values], tuple[float, float]] = t_interval,
) -> Curve:
    """Return the mean over runs of a quantity, at the rounds at which all runs have it, in epochs or rounds.

    `measured` returns float64 [canaries], or [1] for a number of the model, of a run after a number of rounds, or None.
    Bands are over the runs' means, or over the canaries of one run; by default their 95% intervals.
    """
    points = []
    for round_ in drawn_rounds(sorted(set.intersection(*(set(run.evaluated) for run in runs)) if runs else ())):
        values = [value for run in runs if (value := measured(run, round_)) is not None]
        if len(values) == len(runs):
            means = np.array([value.mean() for value in values])
            x = np.mean([run.epochs_of(round_) if in_epochs else round_ for run in runs])
            points.append((x, means.mean(), *band(means if over_seeds else values[0])))
    return Curve(*np.array(points, dtype="float64").reshape(-1, 4).T)


def exposure_by_utility(runs: Sequence[RunResults], over_seeds: bool) -> Values:
    """Return float64 [evaluations, 4]: perplexity, mean exposure in bits, and both ends of its interval."""
    losses = curve(runs, _log_perplexity, in_epochs=False, over_seeds=over_seeds)
    exposures = curve(runs, partial(measured_values, PRIMARY), in_epochs=False, over_seeds=over_seeds)
    _, of_losses, of_exposures = np.intersect1d(losses.x, exposures.x, return_indices=True)
    columns = (
        np.exp(losses.y[of_losses]),
        *(part[of_exposures] for part in (exposures.y, exposures.low, exposures.high)),
    )
    return np.column_stack(columns)


def drawn_rounds(rounds: list[int]) -> list[int]:
    """Return the rounds without the penultimate if it is close to the last, which would draw a hook of noise."""
    if len(rounds) < 3 or rounds[-1] - rounds[-2] >= NEAR * (rounds[-2] - rounds[-3]):
        return rounds
    return [*rounds[:-2], rounds[-1]]


def measured_values(quantity: Quantity, run: RunResults, round_: int) -> Values | None:
    """Return float64 [canaries], or [1] for a flag or the model; None if not measured or not finite."""
    if not quantity.of_canaries:
        value = run.of_model(quantity.name, round_)
        return None if value is None or not math.isfinite(value) else np.array([value * quantity.scale])
    values = run.of_planted(quantity.name, round_)
    if values is None or values.empty:
        return None
    return np.array([(values == 1).sum()] if quantity.is_flag else values * quantity.scale, dtype="float64")


def know_epochs(runs: Sequence[RunResults]) -> bool:
    """Return whether every run with an evaluation has known epochs."""
    return all(run.rounds_per_epoch is not None for run in runs if run.evaluated)


def averaged(series: Sequence[RunResults]) -> list[RunResults]:
    """Return the averaged runs of a series: those that were evaluated, and did not end early."""
    return [run for run in series if run.status not in {"diverged", "failed", "interrupted"} and run.evaluated]


def label_of(group: Sequence[RunResults], runs: Sequence[Any], means_over: int | None, word: str) -> str:
    """Return the setting, with the number of runs of a series, or with the name of a run if settings are equal.

    `word` distinguishes the setting of a series from others of the same name.
    """
    run = group[0]
    if means_over is not None:
        left_out = len(group) - means_over
        excluded = f", {left_out} excluded" * (left_out > 0)
        label = f"{run.setting}{word} ({means_over} seed{'s' * (means_over != 1)}{excluded})"
    else:
        name = f" [{run.name}]" if [other.setting for other in runs].count(run.setting) > 1 else ""
        status = f" ({run.status}, round {run.round})" if run.status != "completed" else ""
        label = f"{run.setting}{name}{status}"
    return show.plain(label)


def _log_perplexity(run: RunResults, round_: int) -> Values | None:
    perplexity = measured_values(PERPLEXITY, run, round_)
    return None if perplexity is None else np.log(perplexity)


BANDS = {
    False: "Band: 95% interval of {} over canaries",
    True: "Mean over seeds; band: its 95% interval over seeds (t)",
}


def plot(
    runs: Sequence[RunResults],
    path: Path,
    over_seeds: bool | None = None,
    kind: Kind = "rounds",
    losses: Losses | None = None,
) -> None:
    """Write the figure of `draw_rounds`, `draw_against_utility` or `draw_losses`; InputError if no run has its data."""
    show.refuse_other_than_figure(path)
    if missing := _missing(runs, kind, losses or {}):
        asked = "" if kind == "rounds" else f"--kind {kind}: "
        raise InputError(f"{asked}{', '.join(run.name for run in runs) or 'no runs'}: {missing}")
    over_seeds = has_means(runs)[0] if over_seeds is None else over_seeds
    draw: dict[Kind, Callable[[], Figure]] = {
        "rounds": lambda: draw_rounds(runs, over_seeds),
        "utility": lambda: draw_against_utility(runs, over_seeds),
        "loss": lambda: draw_losses(runs, losses or {}, over_seeds),
    }
    show.write_figure(draw[kind], path)


def _missing(runs: Sequence[RunResults], kind: Kind, losses: Losses) -> str:
    """Return the data that all runs lack for a figure, with the remedy; empty if a run has it."""
    if not any(run.evaluated for run in runs) and kind != "utility":
        return "the run has no evaluation yet; plot it later"
    if kind == "utility" and not any(len(exposure_by_utility([run], over_seeds=False)) for run in runs):
        return "no evaluation has both exposure and perplexity; evaluate again"
    if kind == "loss" and not any(losses.get(run) for run in runs):
        return "rounds.jsonl has no training loss; restore it, or plot without --kind"
    measured = (run.of_planted(PRIMARY.name, round_) for run in runs for round_ in run.evaluated)
    if kind == "loss" and all(values is None for values in measured):
        return "no evaluation has exposure; train without evaluation.decide"
    return ""


def draw_rounds(runs: Sequence[RunResults], over_seeds: bool = False) -> Figure:
    """Return a figure of every run's or series' memorization and utility over epochs, independent of pyplot.

    The x axis has rounds if some run does not know its epochs. Four panels show canaries memorized by RS, by BS
    (counts), mean exposure (bits) and perplexity. Each quantity of custom measures has a further panel. Bands are 95%
    intervals, Student's t: of means over canaries, or, over seeds, of the means of seeds in all panels. An evaluation
    just before the last evaluation is omitted. A dotted line is the largest exposure that ranking among the references
    can show. A run that diverged ends at its last finite evaluation, with a note in its label. A run without an
    evaluation is named and has no line. Over seeds, a line has the points that all runs of its series have. Runs that
    diverged, failed, were interrupted or have no evaluation are excluded, and the label has their number.
    """
    runs_of_lines, labels = _lines(runs, over_seeds)
    in_epochs = know_epochs(runs)
    quantities = [quantity for quantity in select_for(quantities_of(runs), "plot") if is_drawn(quantity, runs)]
    columns, rows = min(2, len(labels)), math.ceil(len(quantities) / 2)
    height = 2.9 * rows + 0.25 * math.ceil(len(labels) / columns)
    figure, all_axes = show.subplots(9.5, height, rows, 2, sharex=True)
    grid: list[Axes] = all_axes.ravel().tolist()
    panels = dict(zip(quantities, grid, strict=False))
    for empty in grid[len(quantities) :]:
        empty.set_axis_off()
    counts = sorted({len(run.planted) for run in runs})
    of_all = f" (of {counts[0]})" if len(counts) == 1 else ""
    curves = {
        quantity: [curve(group, partial(measured_values, quantity), in_epochs, over_seeds) for group in runs_of_lines]
        for quantity in quantities
    }
    of_flags = np.concatenate([np.zeros(1), *(line.y for flag in flags(quantities) for line in curves[flag])])
    runs_drawn = [run for group in runs_of_lines for run in group]
    last = max((line.x[-1] for lines in curves.values() for line in lines if len(line.x)), default=1.0)  # a shared axis
    for quantity, panel in panels.items():
        heights = of_flags if quantity.is_flag else np.concatenate([line.y for line in curves[quantity]])
        panel.set_xlim(0, 1.03 * last or 1.0)
        draw_quantity(panel, quantity, dict(enumerate(curves[quantity])), heights, counts[-1], runs_drawn)
        panel.set(title=show.plain(title_of(quantity)), ylabel=show.plain(unit_of(quantity, of_all)))
    for panel in list(panels.values())[-2:]:
        panel.set_xlabel(EPOCHS if in_epochs else show.ROUNDS)
        panel.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=not in_epochs))
        if len(quantities) % 2:  # no panel is below the penultimate panel
            panel.tick_params(labelbottom=True)
    means = ", ".join((number.caption or f"Mean {number.title}").lower() for number in numbers(quantities))
    _add_legend(figure, grid[0].get_lines(), labels, columns, BANDS[over_seeds].format(means))
    return figure


def _lines(runs: Sequence[RunResults], over_seeds: bool) -> tuple[list[list[RunResults]], list[str]]:
    """Return the runs of each line, which are a series over seeds, and the label of each line."""
    groups = by_series(runs) if over_seeds else [[run] for run in runs]
    taken = [averaged(group) for group in groups] if over_seeds else groups
    words = distinctions([group[0] for group in groups])
    numbers = [len(of) if over_seeds else None for of in taken]
    labels = [label_of(group, runs, of, word) for group, of, word in zip(groups, numbers, words, strict=True)]
    return taken, labels


def _add_legend(
    figure: Figure, lines: Sequence[Line2D], labels: Sequence[str], columns: int, title: str, **look: Any
) -> None:
    most = int(10 * figure.get_figwidth() / max(map(len, labels), default=1)) or 1  # 10 characters in an inch
    place: dict[str, Any] = {"loc": "outside lower center", "ncols": min(columns, most), "frameon": False}
    legend = figure.legend(lines, labels, handlelength=3.5, **place)  # dashes are not cut
    legend.set_title(show.plain(title), **look)


def is_drawn(quantity: Quantity, runs: Sequence[RunResults]) -> bool:
    """Return whether a quantity has a panel: if it was measured, and always if papers report it of canaries."""
    is_reported = quantity.is_standard and quantity.of_canaries
    return is_reported or any((run.rows["metric"] == quantity.name).any() for run in runs)


def title_of(quantity: Quantity) -> str:
    """Return the title of a panel of a quantity."""
    if quantity.is_flag:
        return f"{quantity.title}: canaries {quantity.outcome}"
    return quantity.caption or (f"Mean {quantity.title}" if quantity.of_canaries else quantity.title)


def unit_of(quantity: Quantity, of_all: str = "") -> str:
    """Return the label of a quantity's axis, with the number of all canaries if canaries are counted."""
    if quantity.is_flag:
        return f"canaries {quantity.outcome}{of_all}"
    unit = "%" if quantity.is_percentage else quantity.axis
    return f"{unit} (log)".strip() if quantity.is_log else unit


def draw_quantity(
    axes: Axes,
    quantity: Quantity,
    curves: Mapping[int, Curve],
    heights: Values,
    canaries: int,
    runs: Sequence[RunResults] = (),
) -> None:
    """Draw curves of a quantity, with these numbers of styles, on a scale that contains all lines but can cut bands."""
    low, high = min(0.0, heights.min(initial=0.0)), heights.max(initial=0.0)
    if quantity.is_flag:  # a flat line at zero is a result, and needs a scale
        show.scale(axes.yaxis, 0, min(max(canaries, 1), max(1.0, 1.15 * high)), is_whole=True)
    elif quantity.is_log:  # late differences are small compared to the first decrease, but equally important
        show.scale(axes.yaxis, *show.spanning(heights[heights > 0]), is_log=True)
    else:
        show.scale(axes.yaxis, 1.1 * low, 1.1 * high or 1.0)
    if quantity.is_primary:
        draw_ceilings(axes, runs)
    for style, line in curves.items():
        show.draw_band(axes, line.x, line.low, line.high, style)
    for style, line in curves.items():
        show.draw_line(axes, line.x, line.y, style)


def draw_ceilings(panel: Axes, runs: Sequence[RunResults]) -> None:
    """Draw the largest exposure that the runs' references can show, if the scale reaches at least half of it."""
    references = {run.references(run.evaluated[-1]) for run in runs if run.evaluated}
    for ceiling in sorted(math.log2(count + 1) for count in references if count):
        low, top = panel.get_ylim()
        if top < ceiling / 2:
            return
        panel.set_ylim(low, max(top, 1.09 * ceiling))
        show.draw_rule(panel, y=ceiling, text=f"largest exposure with |R| = {2**ceiling - 1:,.0f}")


UTILITY_BARS = {
    False: "Bars: 95% intervals of mean exposure over the canaries of a run.",
    True: "Means over seeds (geometric for perplexity), and 95% intervals over seeds of exposure (t).",
}
UTILITY_NOTE = "Better models are to the left. A lower line shows less memorization at equal utility."


def draw_against_utility(runs: Sequence[RunResults], over_seeds: bool = False) -> Figure:
    """Return a figure with a line for each run or setting, from one evaluation to the next.

    Perplexity has a logarithmic scale. A dotted line is the largest exposure that the references can show. A run that
    diverged ends at its last finite evaluation. Over seeds, runs that diverged are excluded, and the label has their
    number.
    """
    taken, labels = _lines(runs, over_seeds)
    figure, ((panel,),) = show.subplots(7.5, 5.2, 1, 1, gap=0.02)
    draw_utility(panel, {style: exposure_by_utility(group, over_seeds) for style, group in enumerate(taken)})
    panel.set(xlabel="perplexity of test text (log)", ylabel="mean exposure (bits)")
    lines = [*panel.get_lines()]  # without ceilings
    draw_ceilings(panel, runs)
    _add_legend(figure, lines, labels, min(2, len(lines)), f"{UTILITY_BARS[over_seeds]}\n{UTILITY_NOTE}")
    return figure


def draw_utility(axes: Axes, paths: Mapping[int, Values]) -> None:
    """Draw exposure against perplexity on a logarithmic scale, by line style: paths as of `exposure_by_utility`."""
    every = np.concatenate([np.zeros((0, 4)), *paths.values()])
    show.scale(axes.xaxis, *show.spanning(every[:, 0]), is_log=True)
    show.scale(axes.yaxis, min(0.0, every[:, 1].min(initial=0.0)), 1.08 * every[:, 1].max(initial=0.0) or 1.0)
    for style, (perplexity, bits, low, high) in ((style, path.T) for style, path in paths.items()):
        has_interval = np.isfinite(low)
        ends = (values[has_interval] for values in (perplexity, low, high))
        if has_interval.any():
            axes.vlines(*ends, color=show.line_style(style)["color"], alpha=0.3, linewidth=2)
        show.draw_line(axes, perplexity, bits, style)


def draw_roc(
    axes: Axes,
    curves: Sequence[tuple[int, Values, Values, str]],
    lowest: float,
    band: tuple[int, Values, Values, Values],
    allowed: tuple[Values, Values] | None = None,
) -> None:
    """Draw true-positive rates over false-positive rates on logarithmic scales that begin at the lowest rate.

    Each curve has the number of its style, both rates, and its name; `band` has a style, false-positive rates, and both
    ends of an interval. Dotted: `allowed`, the largest curve that a ledger allows. Dashed: chance.
    """
    show.scale(axes.xaxis, lowest, 1.0, is_log=True)
    show.scale(axes.yaxis, lowest, 1.0, is_log=True)
    axes.plot([lowest, 1.0], [lowest, 1.0], color=show.STRONG, linestyle=(0, (3, 2)), linewidth=1.1, label="chance")
    style, fpr, low, high = band
    show.draw_band(axes, fpr, low, high, style)
    if allowed is not None:
        fpr, tpr = (values[allowed[0] >= lowest] for values in allowed)
        look: dict[str, Any] = {"color": show.SOFT, "linestyle": (0, (1, 1.5)), "clip_on": False}
        axes.plot(fpr, np.maximum(tpr, lowest), linewidth=1.8, label="allowed by the ledger", **look)
    for style, fpr, tpr, name in curves:
        show.draw_line(axes, np.maximum(fpr, lowest), np.maximum(tpr, lowest), style, has_markers=False, label=name)


LOSS_COLUMNS = 2
LOSS_STYLES = {"training": 2, "test": 0, "bits": 1}
LOSS_BANDS = {
    False: "Band of exposure: 95% interval over the canaries of a run, if it has two or more.",
    True: "Lines are means over seeds, and bands their 95% intervals (t).",
}
LOSS_NOTE = "Training loss: mean during training since the previous evaluation."


def draw_losses(runs: Sequence[RunResults], losses: Losses, over_seeds: bool = False) -> Figure:
    """Return a figure with a panel for each run or setting, with losses (left axis) and exposure (right axis).

    Losses are in nats per character, or per word for corpora of words. Exposure is estimated if all evaluations have
    the measure "extrapolation", and otherwise computed from ranks. A vertical line is the minimum of the test loss.
    """
    lines_of_runs = [line for line in zip(*_lines(runs, over_seeds), strict=True) if averaged(line[0])]
    in_epochs, fitted = know_epochs(runs), FIT_BITS.name
    is_estimated = all(run.of_planted(fitted, round_) is not None for run in runs for round_ in run.evaluated)
    columns = min(LOSS_COLUMNS, len(lines_of_runs))
    rows = math.ceil(len(lines_of_runs) / columns)
    figure, all_axes = show.subplots(max(7.0, 5.6 * columns), 3.9 * rows + 0.8, rows, columns, gap=0.02)
    grid: list[Axes] = all_axes.ravel().tolist()
    for empty in grid[len(lines_of_runs) :]:
        empty.set_axis_off()
    tokens = {token_of(run) for run in runs}
    token = tokens.pop() if len(tokens) == 1 else "token"
    for panel, (taken, label) in zip(grid, lines_of_runs, strict=False):
        exposed = panel.twinx()
        measured: dict[str, Callable[[RunResults, int], Values | None]] = {
            "training": partial(_training_loss, losses),
            "test": _log_perplexity,
            "bits": partial(measured_values, FIT_BITS if is_estimated else PRIMARY),
        }
        curves = {name: curve(taken, values, in_epochs, over_seeds) for name, values in measured.items()}
        last = max((line.x[-1] for line in curves.values() if len(line.x)), default=1.0)
        panel.set_xlim(0, 1.03 * last)
        for axes, names_of_axes in ((panel, ["training", "test"]), (exposed, ["bits"])):
            values = np.concatenate([curves[name].y for name in names_of_axes])
            show.scale(axes.yaxis, min(0.0, 1.1 * values.min(initial=0.0)), 1.25 * values.max(initial=0.0) or 1.0)
            for name in names_of_axes:
                line = curves[name]
                show.draw_band(axes, line.x, line.low, line.high, LOSS_STYLES[name])
                show.draw_line(axes, line.x, line.y, LOSS_STYLES[name])
        lines = [*panel.get_lines(), *exposed.get_lines()]
        panel.set(xlabel=EPOCHS if in_epochs else show.ROUNDS, ylabel=f"loss (nats per {token})")
        panel.set_title(label, fontsize=10)
        exposed.set_ylabel("estimated exposure (bits)" if is_estimated else "exposure (bits)")
        exposed.spines["right"].set_visible(True)
        exposed.grid(visible=False)
        _draw_minimum(panel, curves, in_epochs)
    names = ["training loss", "test loss", "exposure of the secrets (right axis)"]
    title = f"{LOSS_BANDS[over_seeds]}\n{LOSS_NOTE}"
    _add_legend(figure, lines, names, 3, title, prop=FontProperties(size=8))
    return figure


def token_of(run: RunResults) -> str:
    """Return the unit of tokens in the corpus of the run: "character" or "word"."""
    roster = run.roster
    if "words" not in roster or roster.empty:
        return "token"
    lengths = zip(roster["words"], roster["tokens"], strict=True)
    return "character" if all(len(" ".join(words)) == len(tokens) for words, tokens in lengths) else "word"


def _training_loss(losses: Losses, run: RunResults, round_: int) -> Values | None:
    value = losses.get(run, {}).get(round_)
    return None if value is None or not math.isfinite(value) else np.array([value])


def _draw_minimum(panel: Axes, curves: Mapping[str, Curve], in_epochs: bool) -> None:
    """Draw a line at the lowest test loss, with a label that also has the point of highest exposure."""
    test, exposure = curves["test"], curves["bits"]
    if len(test.y):
        unit, lowest = "epoch" if in_epochs else "round", float(test.x[test.y.argmin()])
        text = f"lowest test loss: {unit} {lowest:.3g}"
        if len(exposure.y):
            text += f"\nhighest exposure: {unit} {exposure.x[exposure.y.argmax()]:.3g}"
        show.draw_rule(panel, x=lowest, text=text)
