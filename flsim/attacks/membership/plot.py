"""Figure of ROC curves of attacks on membership."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flsim.attacks.result import Result
from flsim.show.figure import legend_below, line_style, plain, subplots, write_figure


def plot(attacked: Mapping[Path, Result], path: Path) -> None:
    write_figure(lambda: draw(attacked), path)


def draw(attacked: Mapping[Path, Result]) -> Figure:
    """Return a figure with a panel for each run, and a curve for each attack and unit on logarithmic scales."""
    every = pd.concat([result.frame for result in attacked.values()])
    names = list(dict.fromkeys(zip(every["attack"], every["unit"], strict=True)))
    count = len(attacked)
    figure, (panels,) = subplots(max(5.0, 3.4 * count), 4.4, 1, count, gap=0.02, sharex=True, sharey=True)
    for axes, (folder, result) in zip(panels, attacked.items(), strict=True):
        _draw(axes, result.frame, names)
        setting = result.frame["setting"].iloc[0]
        axes.set_title(plain(f"{setting}\n{folder.resolve().name}"), fontsize=10)
        axes.set_xlabel("false-positive rate")
    panels[0].set_ylabel("true-positive rate")
    legend_below(figure, panels, 3)
    return figure


def _draw(axes: Axes, rows: pd.DataFrame, names: list[tuple[str, str]]) -> None:
    lowest = 1 / rows["n_out"].max()
    axes.plot([lowest, 1], [lowest, 1], label="chance", color="0.6", linestyle=":", linewidth=1)
    best = rows.iloc[int(rows["auroc"].to_numpy().argmax())]
    for row in rows.to_dict("records"):
        name = row["attack"], row["unit"]
        look = line_style(names.index(name)) | {"marker": ""}
        label = row["attack"] + f" ({row['unit']})" * (row["unit"] != "record")
        axes.plot(row["curve_fpr"], np.maximum(row["curve_tpr"], lowest), label=label, **look)
        if name == (best["attack"], best["unit"]):
            ends = (np.maximum(row[f"curve_{end}"], lowest) for end in ("low", "high"))
            axes.fill_between(row["curve_fpr"], *ends, color=look["color"], alpha=0.15, linewidth=0)
    if pd.notna(best["epsilon"]):
        axes.plot(best["curve_fpr"], best["curve_allowed"], color="0.4", label="allowed by the ledger")
    axes.set(xscale="log", yscale="log", xlim=(lowest, 1), ylim=(lowest, 1))
