"""Figures 5 and 6 of Carlini et al. (2018), "The Secret Sharer": searches for secrets, and ranks, against exposure.

    python -m experiments.secret_sharer_figures search runs/secret-sharer-figures-smoke --out search.png
    python -m experiments.secret_sharer_figures ranks runs/secret-sharer-figures-smoke --out ranks.png

search (section 7.1) shows how many nodes a shortest-path search reads before it comes to a secret, against the secret's
estimated exposure; ranks (appendix E) shows how many phrases are at least as likely as the secret. Both have a point
for each secret and evaluated model, of runs with evaluation.also = ["space", "path", "extrapolation"]; ranks does
without "path". Figure 4 is `flsim plot --kind loss`.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from flsim.base.errors import InputError
from flsim.measures import built_in
from flsim.measures.built_in import EXTRAPOLATION, PATH, SPACE
from flsim.measures.quantity import Measure
from flsim.results.rows import RunResults
from flsim.results.sweeps import expanded, read_shown
from flsim.show.figure import line_style, plain, refuse_other_than_figure, write_figure

# Columns, named as the metrics that they hold.
ESTIMATE, FIT_P = built_in.FIT_BITS.name, built_in.FIT_P.name
EXACT, NODES = built_in.SPACE_RANK.name, built_in.SPACE_NODES.name
PROVEN, READ = built_in.PATH_PROVEN.name, built_in.PATH_NODES.name
COLUMNS = [ESTIMATE, FIT_P, built_in.SPACE_BITS.name, EXACT, NODES, PROVEN, READ]
PHRASES = "phrases"
# What each measure gives of every canary.
ALWAYS = {EXTRAPOLATION: ESTIMATE, SPACE: built_in.SPACE_BITS.name, PATH: READ}


def secret_pairs(runs: Sequence[RunResults], measures: Sequence[Measure], figure: str) -> pd.DataFrame:
    """Return a row for each planted canary and evaluation that has all the measures.

    Args:
        runs: the results of each run.
        measures: the measures that a pair needs, `flsim.measures.built_in.SPACE` among them.
        figure: kind of the figure, for the error.

    Returns:
        Columns run, setting, round, canary, and those that this module names, NaN if a value is unknown: `ESTIMATE`,
        the estimated exposure, bits; `FIT_P`, the p-value of its fit; `EXACT`, the exact rank; `NODES`, those that a
        shortest-path search reads before it comes to the canary; `PROVEN`, 1 or 0, whether the canary is proven to be
        the most likely continuation; `READ`, nodes that the search read; `PHRASES`, |R|, how many continuations there
        are.

    Raises:
        InputError: no evaluation has all the measures, or none has an exact rank.
    """
    tables = [_pairs_of(run) for run in runs]
    pairs = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=COLUMNS)
    for measure in measures:
        pairs = pairs[pairs[ALWAYS[measure]].notna()]
        if pairs.empty:
            raise InputError(_missing(runs, measures, measure, figure))
    if pairs[EXACT].isna().all():
        raise InputError(
            f"{figure}: no evaluation has an exact rank: it is too old, or `evaluation.nodes` did not suffice; "
            f"measure again with more: {_command(runs, measures)} --nodes 1000000"
        )
    phrases = (pairs[EXACT] * 2 ** pairs[built_in.SPACE_BITS.name]).round()
    return pairs.assign(**{PHRASES: phrases}).reset_index(drop=True)


def _pairs_of(run: RunResults) -> pd.DataFrame:
    planted = run.rows["canary"].isin(run.planted["canary"]) & run.rows["metric"].isin(COLUMNS)
    wide = run.rows[planted].pivot(index=["round", "canary"], columns="metric", values="value")
    return wide.reindex(columns=COLUMNS).reset_index().assign(run=run.name, setting=run.setting)


def _missing(runs: Sequence[RunResults], measures: Sequence[Measure], measure: Measure, figure: str) -> str:
    names = ", ".join(run.name for run in runs[:4]) + ", ..." * (len(runs) > 4) or "no runs"
    also = ", ".join(f'"{needed.name}"' for needed in measures)
    return (
        f"{figure}: {names}: no evaluation has the measure {measure.name}; "
        f"train with evaluation.also = [{also}], or measure a checkpoint again: {_command(runs, measures)}"
    )


def _command(runs: Sequence[RunResults], measures: Sequence[Measure]) -> str:
    round_ = max((run.round for run in runs), default=0)
    also = " ".join(f"--also {measure.name}" for measure in measures)
    return f"flsim evaluate RUN/checkpoints/round-{round_:06d}.safetensors {also}"


GREY = "#555555"
EXPOSURE = "estimated exposure of the secret (bits, skew-normal fit)"
NOTE_WIDTH = 136  # characters of a line below the figure


def new_figure(ylabel: str) -> tuple[Figure, Axes]:
    """Return a figure of one panel, on whose logarithmic y axis phrases or nodes are counted."""
    figure = Figure(figsize=(7.5, 5.6), layout=ConstrainedLayoutEngine())
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    panel.set(xlabel=EXPOSURE, ylabel=ylabel, yscale="log")
    panel.yaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,.0f}" if count >= 1 else ""))
    return figure, panel


def draw_points(panel: Axes, pairs: pd.DataFrame, column: str, is_filled: "pd.Series[bool]") -> list[Line2D]:
    """Draw a column of pairs against exposure, as open circles if not filled, and return a handle for each setting.

    There are no handles if all pairs are of one setting.
    """
    handles = []
    settings = list(dict.fromkeys(pairs["setting"]))
    for index, setting in enumerate(settings):
        style = line_style(index) | {"linestyle": "none", "markersize": 5.5, "alpha": 0.75, "clip_on": False}
        is_of_setting = pairs["setting"] == setting
        for mask, face in ((~is_filled, "none"), (is_filled, style["color"])):
            chosen = pairs[is_of_setting & mask]
            [line] = panel.plot(chosen[ESTIMATE], chosen[column], markerfacecolor=face, zorder=3, **style)
            line.set_in_layout(False)  # an unclipped line without points would take the complete figure
        handles.append(Line2D([], [], label=plain(setting), **style))
    return handles if len(settings) > 1 else []


def mark_handles(filled: str, hollow: str) -> list[Line2D]:
    """Return handles that say what filled and open points are."""
    style: dict[str, Any] = {"color": GREY, "marker": "o", "linestyle": "none", "markersize": 5.5}
    return [Line2D([], [], label=filled, **style), Line2D([], [], markerfacecolor="none", label=hollow, **style)]


def draw_unique(panel: Axes, phrases: float) -> Line2D:
    """Draw the exposure of log2 |R| bits, from which on a secret should be the most likely phrase.

    Return its handle.
    """
    bits = math.log2(phrases)
    style: dict[str, Any] = {"color": GREY, "linestyle": (0, (1, 2)), "linewidth": 1.2}
    panel.axvline(bits, zorder=1, **style)
    panel.set_xlim(left=0, right=max(panel.get_xlim()[1], 1.04 * bits))
    return Line2D([], [], label=f"log2 |R| = {bits:.1f} bits: the most likely of |R| = {phrases:,.0f}", **style)


def set_legend(figure: Figure, panel: Axes, handles: Sequence[Line2D], note: str) -> None:
    """Draw the legend in the corner of exposed secrets that are hard to find, which is empty, and a note below."""
    panel.legend(handles=handles, loc="upper right", fontsize=8, framealpha=0.95, edgecolor="none")
    text = fill(" ".join(note.split()), NOTE_WIDTH)
    figure.supxlabel(plain(text), fontsize=7.5, color=GREY, x=0.02, ha="left", multialignment="left")


SEARCH = (SPACE, PATH, EXTRAPOLATION)
SEARCH_NOTE = """A point is a secret and an evaluated model. A node is the beginning of a phrase, which the model reads;
points count the nodes that are at least as likely as the secret: so many a search reads, one at a time,
before it comes to the secret. Crosses count what the search of flsim read until it proved that no
phrase is more likely: in batches, after a beam search, which is not counted. The paper counts iterations
until a secret is found, and searches for as long again."""
SEARCH_UNKNOWN = (
    " {:,} of {:,} points are not drawn: there the nodes exceed evaluation.nodes, and their number is unknown."
)


def plot_search(runs: Sequence[RunResults], path: Path) -> None:
    """Write the figure of `draw_search` atomically.

    Raises:
        InputError: the path has another suffix, its folder does not exist, or no evaluation has the measures "space",
            "path" and "extrapolation".
    """
    refuse_other_than_figure(path)
    pairs = secret_pairs(runs, SEARCH, "search")
    write_figure(lambda: draw_search(pairs), path)


def draw_search(pairs: pd.DataFrame) -> Figure:
    """Return the figure of pairs that `secret_pairs` gives.

    A filled point is a secret that is proven to be the most likely phrase. An open point is a secret than which another
    phrase is more likely, so that the search finds that one first. A dotted line is |R|, what brute force takes.
    """
    figure, panel = new_figure("nodes that the search reads before it comes to the secret")
    drawn = pairs[pairs[NODES].notna()]
    is_found = drawn[PROVEN] == 1
    handles = draw_points(panel, drawn, NODES, is_found)
    handles += mark_handles("the secret is the most likely phrase: found", "another phrase is more likely")
    proven = drawn[is_found]
    style: dict[str, Any] = {"color": "black", "marker": "x", "linestyle": "none", "markersize": 4.5}
    panel.plot(proven[ESTIMATE], proven[READ], alpha=0.6, zorder=4, **style)
    handles.append(Line2D([], [], label="read by the search of flsim until its proof", **style))
    for phrases in sorted(drawn[PHRASES].unique()):
        handles.append(draw_unique(panel, phrases))
        panel.axhline(phrases, color=GREY, linestyle=(0, (4, 2)), linewidth=1, zorder=1)
        label = f"brute force: |R| = {phrases:,.0f}"
        panel.annotate(
            label, (0.01, phrases), (0, 3), xycoords=("axes fraction", "data"), textcoords="offset points", fontsize=8,
            color=GREY,
        )  # fmt: skip
        panel.set_ylim(bottom=1, top=max(panel.get_ylim()[1], 2 * phrases))
    unknown = len(pairs) - len(drawn)
    set_legend(figure, panel, handles, SEARCH_NOTE + SEARCH_UNKNOWN.format(unknown, len(pairs)) * bool(unknown))
    return figure


RANKS = (SPACE, EXTRAPOLATION)
POOR = 0.01  # p-value of a fit that is rejected, as in flsim.measures.memorization.exposure
NEAR = 10  # times the expected number
RANKS_NOTE = """A point is a secret and an evaluated model. Ranks are exact, counted over all phrases of the format,
with the secret. Of {drawn:,} points {near:,} are within a factor of ten of the expected number, or of 1 if fewer
than one phrase is expected{unique}."""
UNIQUE = "; of {:,} secrets with an estimated exposure above log2 |R|, {:,} have rank 1"
RANKS_UNKNOWN = " {:,} more points are not drawn, because evaluation.nodes did not suffice to count their rank."


def plot_ranks(runs: Sequence[RunResults], path: Path) -> None:
    """Write the figure of `draw_ranks` atomically.

    Raises:
        InputError: the path has another suffix, its folder does not exist, or no evaluation has the measures "space"
            and "extrapolation".
    """
    refuse_other_than_figure(path)
    pairs = secret_pairs(runs, RANKS, "ranks")
    write_figure(lambda: draw_ranks(pairs), path)


def draw_ranks(pairs: pd.DataFrame) -> Figure:
    """Return the figure of pairs that `secret_pairs` gives.

    The line is the number of phrases that the estimated exposure predicts, |R| 2^-exposure. A point is open if the
    skew-normal distribution does not fit the references' scores, so that the estimate has no basis.
    """
    figure, panel = new_figure("phrases at least as likely as the secret")
    drawn = pairs[pairs[EXACT].notna()]
    handles = draw_points(panel, drawn, EXACT, drawn[FIT_P] >= POOR)
    handles += mark_handles(f"the fit is not rejected (p >= {POOR:g})", f"poor fit (p < {POOR:g})")
    for phrases in sorted(drawn[PHRASES].unique()):
        unique = draw_unique(panel, phrases)
        bits = np.linspace(0, panel.get_xlim()[1], 200)
        panel.plot(bits, phrases * 2**-bits, color=GREY, linewidth=1.2, zorder=2)
        handles.append(Line2D([], [], color=GREY, linewidth=1.2, label="expected: |R| 2^-exposure"))
        handles.append(unique)
    panel.set_ylim(0.5, 2 * drawn[PHRASES].max())
    unknown = len(pairs) - len(drawn)
    set_legend(figure, panel, handles, agreement(drawn) + RANKS_UNKNOWN.format(unknown) * bool(unknown))
    return figure


def agreement(drawn: pd.DataFrame) -> str:
    """Return how many ranks are near the expected number, and how many of the most exposed secrets come first."""
    expected = (drawn[PHRASES] * 2 ** -drawn[ESTIMATE]).clip(lower=1)
    is_near = np.abs(np.log10(drawn[EXACT] / expected)) <= np.log10(NEAR)
    is_unique = drawn[ESTIMATE] > np.log2(drawn[PHRASES])
    first = int((drawn.loc[is_unique, EXACT] == 1).sum())
    unique = UNIQUE.format(int(is_unique.sum()), first) if is_unique.any() else ""
    return RANKS_NOTE.format(near=int(is_near.sum()), drawn=len(drawn), unique=unique)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=["search", "ranks"])
    parser.add_argument("runs", nargs="+", type=Path, help="run folders and sweep folders")
    parser.add_argument("--out", type=Path, required=True, help="a .png, .svg or .pdf file to write")
    options = parser.parse_args(arguments)
    plot = plot_search if options.figure == "search" else plot_ranks
    try:
        plot(list(read_shown(expanded(options.runs)).values()), options.out)
    except InputError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
