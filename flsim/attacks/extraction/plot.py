"""Figure of the share of strings that sampling extracts against the number of samples."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from flsim.attacks.extraction.extract import Extraction
from flsim.attacks.extraction.rates import SAMPLING
from flsim.attacks.extraction.tables import KINDS
from flsim.show.figure import line_style, plain, write_figure

SHOWN_P = 0.5
SIDES = {"": ("trained", "-"), "control_": ("control", ":")}
LINE = "One of n samples is the suffix with probability {:g}\nBand: 95% interval over {}"


def plot(measured: Extraction, path: Path, over_seeds: bool) -> None:
    """Write the figure of `draw`, atomically."""
    write_figure(lambda: draw(measured, over_seeds), path)


def draw(measured: Extraction, over_seeds: bool) -> Figure:
    """Return a figure with a column for each run, or setting, and a row for each kind of strings.

    Dotted lines are controls. With `over_seeds`, lines are means over the seeds of a setting, with Student's t
    intervals.
    """
    rates, key = (measured.over_seeds, "series") if over_seeds else (measured.rates, "run")
    rates = rates[(rates["attack"] == SAMPLING) & (rates["p"] == SHOWN_P)]
    kinds, panels = list(dict.fromkeys(rates["kind"])), list(dict.fromkeys(rates[key]))
    figure = Figure(
        figsize=(max(5.0, 3.4 * len(panels)), 2.6 * len(kinds) + 1.2),
        layout=ConstrainedLayoutEngine(wspace=0.05, hspace=0.05),
    )
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(len(kinds), len(panels), sharex=True, sharey="row", squeeze=False)
    prefixes = sorted(set(rates["prefix"]))
    for (row, column), axes in np.ndenumerate(all_axes):
        group = rates[(rates["kind"] == kinds[row]) & (rates[key] == panels[column])]
        for prefix, of_prefix in group.groupby("prefix"):
            _draw(axes, of_prefix, prefixes.index(prefix), f"prefix {prefix}")
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
        if row == 0:
            axes.set_title(plain(_title(rates[rates[key] == panels[column]], over_seeds)), fontsize=10)
        if row == len(kinds) - 1:
            axes.set_xlabel("n samples")
        if column == 0:
            axes.set_ylabel(f"{KINDS[kinds[row]]}:\n% extracted")
    lines = {line.get_label(): line for axes in all_axes.flat for line in axes.get_lines()}
    legend = figure.legend(
        lines.values(), [str(label) for label in lines], loc="outside lower center", ncols=2, frameon=False, fontsize=9
    )
    legend.set_title(LINE.format(SHOWN_P, "seeds (t)" if over_seeds else "strings"))
    legend.get_title().set_fontsize(9)
    return figure


def _title(rates: pd.DataFrame, over_seeds: bool) -> str:
    first = rates.iloc[0]
    return str(first["setting"]) if over_seeds else f"{first['setting']}\n{Path(str(first['run'])).resolve().name}"


def _draw(axes: Axes, rates: pd.DataFrame, index: int, label: str) -> None:
    for side, (name, dashes) in SIDES.items():
        values = 100 * rates[f"{side}rate"].to_numpy("float64")
        if np.isnan(values).all():
            continue  # canaries without controls
        style: dict[str, Any] = line_style(index) | {"linestyle": dashes, "markersize": 3, "label": f"{label}, {name}"}
        (line,) = axes.plot(rates["n"], values, **style)
        low, high = (100 * rates[f"{side}{end}"].to_numpy("float64") for end in ("low", "high"))
        axes.fill_between(rates["n"], low, high, color=line.get_color(), alpha=0.15, linewidth=0)
