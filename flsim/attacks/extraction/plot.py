"""Figure of the share of strings that sampling extracts against the number of samples."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flsim.attacks.extraction.extract import Extraction
from flsim.attacks.extraction.rates import SAMPLING
from flsim.attacks.extraction.tables import KINDS
from flsim.show.figure import legend_below, line_style, plain, subplots, write_figure

SHOWN_P = 0.5
SIDES = {"": ("trained", "-"), "control_": ("control", ":")}
LINE = "One of n samples is the suffix with probability {:g}\nBand: 95% interval over {}"


def plot(measured: Extraction, path: Path, over_seeds: bool) -> None:
    write_figure(lambda: draw(measured, over_seeds), path)


def draw(measured: Extraction, over_seeds: bool) -> Figure:
    """Return a figure with a column for each run, or setting, and a row for each kind of strings.

    Dotted lines are controls. With `over_seeds`, lines are means over the seeds of a setting, with Student's t
    intervals.
    """
    rates, key = (measured.over_seeds, "series") if over_seeds else (measured.rates, "run")
    rates = rates[(rates["attack"] == SAMPLING) & (rates["p"] == SHOWN_P)]
    kinds, panels = list(dict.fromkeys(rates["kind"])), list(dict.fromkeys(rates[key]))
    width, height, rows, columns = max(5.0, 3.4 * len(panels)), 2.6 * len(kinds) + 1.2, len(kinds), len(panels)
    figure, all_axes = subplots(width, height, rows, columns, sharex=True, sharey="row")
    prefixes = sorted(set(rates["prefix"]))
    for (row, column), axes in np.ndenumerate(all_axes):
        group = rates[(rates["kind"] == kinds[row]) & (rates[key] == panels[column])]
        for prefix, of_prefix in group.groupby("prefix"):
            _draw(axes, of_prefix, prefixes.index(prefix), f"prefix {prefix}")
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
        if row == 0:
            first = rates[rates[key] == panels[column]].iloc[0]
            name = "" if over_seeds else f"\n{Path(str(first['run'])).resolve().name}"
            axes.set_title(plain(f"{first['setting']}{name}"), fontsize=10)
        if row == len(kinds) - 1:
            axes.set_xlabel("n samples")
        if column == 0:
            axes.set_ylabel(f"{KINDS[kinds[row]]}:\n% extracted")
    legend_below(figure, all_axes.flat, 2, LINE.format(SHOWN_P, "seeds (t)" if over_seeds else "strings"))
    return figure


def _draw(axes: Axes, rates: pd.DataFrame, index: int, label: str) -> None:
    for side, (name, dashes) in SIDES.items():
        values = 100 * rates[f"{side}rate"].to_numpy("float64")
        if np.isnan(values).all():
            continue  # canaries without controls
        style: dict[str, Any] = line_style(index) | {"linestyle": dashes, "markersize": 3, "label": f"{label}, {name}"}
        (line,) = axes.plot(rates["n"], values, **style)
        low, high = (100 * rates[f"{side}{end}"].to_numpy("float64") for end in ("low", "high"))
        axes.fill_between(rates["n"], low, high, color=line.get_color(), alpha=0.15, linewidth=0)
