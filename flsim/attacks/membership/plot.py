"""Figure of ROC curves of attacks on membership."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flsim.attacks.result import Result
from flsim.show.figure import legend_below, plain, subplots, write_figure
from flsim.show.plots import draw_roc


def plot(attacked: Mapping[Path, Result], path: Path) -> None:
    write_figure(lambda: draw(attacked), path)


def draw(attacked: Mapping[Path, Result]) -> Figure:
    """Return a figure with a panel for each run, and a curve for each attack and unit on logarithmic scales."""
    every = pd.concat([result.frame for result in attacked.values()])
    names = list(dict.fromkeys(names_of(every)))
    count = len(attacked)
    figure, (panels,) = subplots(max(5.0, 3.4 * count), 4.4, 1, count, gap=0.02, sharex=True, sharey=True)
    for axes, (folder, result) in zip(panels, attacked.items(), strict=True):
        draw_attacks(axes, result.frame, names)
        setting = result.frame["setting"].iloc[0]
        axes.set_title(plain(f"{setting}\n{folder.resolve().name}"), fontsize=10)
        axes.set_xlabel("false-positive rate")
    panels[0].set_ylabel("true-positive rate")
    legend_below(figure, panels, 3)
    return figure


def names_of(rows: pd.DataFrame) -> list[str]:
    """Return the attack of each row, with the unit if the unit is not a record."""
    units = rows["unit"].map(lambda unit: f" ({unit})" if unit != "record" else "")
    return (rows["attack"] + units).tolist()


def draw_attacks(axes: Axes, rows: pd.DataFrame, names: Sequence[str]) -> None:
    """Draw the curves of one run, with the interval of the largest area, and the curve that its ledger allows."""
    lowest = min(1 / float(rows["n_out"].max()), 0.1)
    curves = [
        (names.index(name), *_floats(row, "fpr", "tpr"), name)
        for name, row in zip(names_of(rows), rows.to_dict("records"), strict=True)
    ]
    best = int(rows["auroc"].to_numpy().argmax())
    row = rows.to_dict("records")[best]
    allowed = _floats(row, "fpr", "allowed") if pd.notna(row["epsilon"]) else None
    draw_roc(axes, curves, (lowest, lowest), (curves[best][0], *_floats(row, "fpr", "low", "high")), allowed)


def _floats(row: Mapping[Any, Any], *names: str) -> tuple[Any, ...]:
    return tuple(np.array(list(row[f"curve_{name}"]), dtype="float64") for name in names)
