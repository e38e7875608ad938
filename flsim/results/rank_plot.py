"""Figure of how many phrases are at least as likely as a secret, against its estimated exposure.

Carlini et al. (2018), "The Secret Sharer", Figure 6 (appendix E).
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flsim.measures.extrapolation import EXTRAPOLATION
from flsim.measures.space import SPACE
from flsim.results.figures import refuse_other_than_figure, write_figure
from flsim.results.scatter import GREY, draw_points, draw_unique, mark_handles, new_figure, set_legend
from flsim.results.secret_pairs import ESTIMATE, EXACT, FIT_P, PHRASES, secret_pairs
from flsim.results.store import RunResults

MEASURES = (SPACE, EXTRAPOLATION)
POOR = 0.01  # p-value of a fit that is rejected, as in flsim.memorization.extrapolation
NEAR = 10  # times the expected number
NOTE = """A point is a secret and an evaluated model. Ranks are exact, counted over all phrases of the format, the
secret included. {near:,} of {drawn:,} points are within a factor of ten of the expected number, or of 1 where fewer
than one phrase is expected{unique}."""
UNIQUE = "; of {:,} secrets with an estimated exposure above log2 |R|, {:,} have rank 1"
UNKNOWN = " {:,} more points are not drawn, because evaluation.nodes did not suffice to count their rank."


def plot_ranks(runs: Sequence[RunResults], path: Path) -> None:
    """Write the figure of `draw_ranks`, whole or not at all.

    Raises:
        InputError: the path has another ending, its folder does not exist, or no evaluation has the measures "space"
            and "extrapolation".
    """
    refuse_other_than_figure(path)
    pairs = secret_pairs(runs, MEASURES, "ranks")
    write_figure(lambda: draw_ranks(pairs), path)


def draw_ranks(pairs: pd.DataFrame) -> Figure:
    """Return the figure of pairs that `secret_pairs` gives.

    The line is the number of phrases that the estimated exposure says, |R| 2^-exposure. A point is open where the
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
    set_legend(figure, panel, handles, agreement(drawn) + UNKNOWN.format(unknown) * bool(unknown))
    return figure


def agreement(drawn: pd.DataFrame) -> str:
    """Return how many ranks are near the expected number, and how many of the most exposed secrets come first."""
    expected = (drawn[PHRASES] * 2 ** -drawn[ESTIMATE]).clip(lower=1)
    is_near = np.abs(np.log10(drawn[EXACT] / expected)) <= np.log10(NEAR)
    is_unique = drawn[ESTIMATE] > np.log2(drawn[PHRASES])
    first = int((drawn.loc[is_unique, EXACT] == 1).sum())
    unique = UNIQUE.format(int(is_unique.sum()), first) if is_unique.any() else ""
    return NOTE.format(near=int(is_near.sum()), drawn=len(drawn), unique=unique)
