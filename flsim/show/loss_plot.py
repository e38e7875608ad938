"""Figure of training loss, test loss and the exposure of secrets over epochs.

Carlini et al. (2018), "The Secret Sharer", Figure 4 (section 6.1).
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.layout_engine import ConstrainedLayoutEngine

from flsim.base.errors import InputError
from flsim.measures.built_in import PRIMARY, QUANTITIES
from flsim.measures.extrapolation import BITS
from flsim.measures.utility import PERPLEXITY
from flsim.results.seeds import by_series, wants_means
from flsim.results.store import RunResults
from flsim.show.curves import EPOCHS, Curve, Values, averaged, curve, know_epochs, label_of, measured_values
from flsim.show.figures import COLOURS, ROUNDS, plain, refuse_other_than_figure, write_figure

GREY = "#555555"
BLUE, RED, GREEN = COLOURS[:3]
COLUMNS = 2
STYLES: dict[str, dict[str, Any]] = {
    "training": {"color": BLUE, "linestyle": "--", "marker": "o", "markersize": 3.5},
    "test": {"color": BLUE, "linestyle": "-", "marker": "s", "markersize": 3.5},
    "bits": {"color": RED, "linestyle": "-.", "marker": "^", "markersize": 4},
}
BANDS = {
    False: "Band of exposure: 95% interval over the canaries of a run, where it has two.",
    True: "Lines are means over seeds, and bands their 95% intervals (t).",
}
NOTE = "Training loss: mean while training, since the evaluation before."

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
    columns = min(COLUMNS, len(groups))
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
            "test": curve(taken, _test_loss, in_epochs, over_seeds),
            "bits": curve(
                taken,
                partial(measured_values, QUANTITIES[BITS.name] if is_estimated else PRIMARY),
                in_epochs,
                over_seeds,
            ),
        }
        lines = [_line(exposed if name == "bits" else panel, line, STYLES[name]) for name, line in curves.items()]
        panel.set(xlabel=EPOCHS if in_epochs else ROUNDS, ylabel=f"loss (nats per {token})")
        panel.set_title(label_of(group, runs, len(taken) if over_seeds else None), fontsize=10)
        exposed.set_ylabel("estimated exposure (bits)" if is_estimated else "exposure (bits)")
        exposed.spines["right"].set_visible(True)
        exposed.grid(visible=False)
        panel.set_xlim(left=0)
        _scale(panel, [curves["training"], curves["test"]])
        _scale(exposed, [curves["bits"]])
        _draw_minimum(panel, curves, in_epochs)
    names = ["training loss", "test loss", "exposure of the secrets (right axis)"]
    legend = figure.legend(lines, names, loc="outside lower center", ncols=3, frameon=False, handlelength=3.5)
    legend.set_title(plain(f"{BANDS[over_seeds]}\n{NOTE}"), prop=FontProperties(size=8))
    return figure


def token_of(run: RunResults) -> str:
    """Return what a token of the run's corpus is, by the canaries: "character" if each letter and space is one."""
    roster = run.roster
    if "words" not in roster or roster.empty:
        return "token"
    lengths = zip(roster["words"], roster["tokens"], strict=True)
    return "character" if all(len(" ".join(words)) == len(tokens) for words, tokens in lengths) else "word"


def _are_estimated(runs: Sequence[RunResults]) -> bool:
    return all(run.of_planted(BITS.name, round_) is not None for run in runs for round_ in run.evaluated)


def _training_loss(losses: Losses, run: RunResults, round_: int) -> Values | None:
    value = losses.get(run, {}).get(round_)
    return None if value is None or not math.isfinite(value) else np.array([value])


def _test_loss(run: RunResults, round_: int) -> Values | None:
    """Return the cross-entropy on test text, nats a token: the logarithm of perplexity."""
    perplexity = measured_values(PERPLEXITY, run, round_)
    return None if perplexity is None else np.log(perplexity)


def _line(panel: Axes, line: Curve, style: dict[str, Any]) -> Any:
    panel.fill_between(line.x, line.low, line.high, color=style["color"], alpha=0.15, linewidth=0)
    [drawn] = panel.plot(line.x, line.y, zorder=3, **style)
    return drawn


def _scale(panel: Axes, curves: Sequence[Curve]) -> None:
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
    panel.axvline(lowest, color=GREY, linestyle=(0, (1, 2)), linewidth=1, zorder=1)
    text = f"lowest test loss: {unit} {lowest:.3g}"
    if len(exposure.y):
        text += f"\nhighest exposure: {unit} {exposure.x[exposure.y.argmax()]:.3g}"
    is_late = lowest > panel.get_xlim()[1] / 2
    panel.annotate(
        text, (lowest, 0.98), (-5 if is_late else 5, 0), xycoords=("data", "axes fraction"),
        textcoords="offset points", ha="right" if is_late else "left", va="top", fontsize=8, color=GREY,
    )  # fmt: skip
