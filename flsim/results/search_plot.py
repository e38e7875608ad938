"""Figure of how many nodes a shortest-path search reads before it comes to a secret, against the secret's exposure.

Carlini et al. (2018), "The Secret Sharer", Figure 5 (section 7.1).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flsim.measures.extrapolation import EXTRAPOLATION
from flsim.measures.path import PATH
from flsim.measures.space import SPACE
from flsim.results.figures import refuse_other_than_figure, write_figure
from flsim.results.scatter import GREY, draw_points, draw_unique, mark_handles, new_figure, set_legend
from flsim.results.secret_pairs import ESTIMATE, NODES, PHRASES, PROVEN, READ, secret_pairs
from flsim.results.store import RunResults

MEASURES = (SPACE, PATH, EXTRAPOLATION)
NOTE = """A point is a secret and an evaluated model. A node is the beginning of a phrase, which the model reads; points
count the nodes that are at least as likely as the secret: so many a search reads, one at a time, before it comes to the
secret. Crosses count what the search of flsim read until it proved that no phrase is likelier: in batches, after a beam
search, which is not counted. The paper counts iterations until a secret is found, and searches for as long again."""
UNKNOWN = " {:,} of {:,} points are not drawn: there the nodes exceed evaluation.nodes, and their number is unknown."


def plot_search(runs: Sequence[RunResults], path: Path) -> None:
    """Write the figure of `draw_search`, whole or not at all.

    Raises:
        InputError: the path has another ending, its folder does not exist, or no evaluation has the measures "space",
            "path" and "extrapolation".
    """
    refuse_other_than_figure(path)
    pairs = secret_pairs(runs, MEASURES, "search")
    write_figure(lambda: draw_search(pairs), path)


def draw_search(pairs: pd.DataFrame) -> Figure:
    """Return the figure of pairs that `secret_pairs` gives.

    A filled point is a secret that is proven to be the likeliest phrase. An open point is a secret than which another
    phrase is likelier, so that the search finds that one first. A dotted line is |R|, what brute force takes.
    """
    figure, panel = new_figure("nodes that the search reads before it comes to the secret")
    drawn = pairs[pairs[NODES].notna()]
    is_found = drawn[PROVEN] == 1
    handles = draw_points(panel, drawn, NODES, is_found)
    handles += mark_handles("the secret is the likeliest phrase: found", "another phrase is likelier")
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
    set_legend(figure, panel, handles, NOTE + UNKNOWN.format(unknown, len(pairs)) * bool(unknown))
    return figure
