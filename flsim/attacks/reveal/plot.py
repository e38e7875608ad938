"""Figure of what a round reveals against the number of users of a sum, by clip and noise."""

import math
from pathlib import Path

from matplotlib.figure import Figure

from flsim.attacks.reveal.records import CANARY, RECORD
from flsim.attacks.reveal.reveal import KEY, RARE_WORDS, Revealed
from flsim.attacks.reveal.tables import sum_name
from flsim.show.figure import legend_below, line_style, plain, subplots, write_figure

LEVEL = 0.05
DETECTED = (f"tpr_at_{LEVEL}", (f"tpr_low_at_{LEVEL}", f"tpr_high_at_{LEVEL}"), None, LEVEL)
PANELS = {  # by subject: label of the y axis, column, its interval, column of the blind line, level of chance
    RARE_WORDS: ("AUROC of rare words", "auroc", ("auroc_low", "auroc_high"), "blind_auroc", 0.5),
    RECORD: (f"records, % with p <= {LEVEL:g}", *DETECTED),
    CANARY: (f"canaries, % with p <= {LEVEL:g}", *DETECTED),
}


def plot(revealed: Revealed, path: Path) -> None:
    write_figure(lambda: draw(revealed), path)


def draw(revealed: Revealed) -> Figure:
    """Return a figure with a column for each run, rows for rare words, records and canaries, and lines for views."""
    frame = revealed.frame.fillna({"noise_multiplier": 0.0})
    runs = list(dict.fromkeys(frame["run"]))
    shown = [subject for subject in PANELS if subject in set(frame["subject"])]
    views = list(dict.fromkeys(zip(frame["view"], frame["noise_multiplier"], strict=True)))
    width, height = max(5.0, 3.4 * len(runs)), 2.6 * len(shown) + 1.2
    figure, all_axes = subplots(width, height, len(shown), len(runs), sharex="col", sharey="row")
    for column, run in enumerate(runs):
        of_run = frame[frame["run"] == run]
        for row, subject in enumerate(shown):
            axes, (label, value, ends, blind, chance) = all_axes[row, column], PANELS[subject]
            rows = of_run[of_run["subject"] == subject]
            scale = 1 if value == "auroc" else 100
            for (view, multiplier), of_view in rows.groupby(KEY[1:], sort=False):
                name = plain(sum_name(str(view), float(multiplier)))
                style = line_style(views.index((view, multiplier))) | {"markersize": 4, "label": name}
                (line,) = axes.plot(of_view["users"], scale * of_view[value], **style)
                band = [scale * of_view[end] for end in ends]
                axes.fill_between(of_view["users"], *band, color=line.get_color(), alpha=0.1, linewidth=0)
            if blind is not None:
                first = rows.drop_duplicates("users")
                axes.plot(first["users"], first[blind], color="#8a8a83", linestyle=(0, (4, 2)), label="blind")
            axes.axhline(scale * chance, color="#555555", linestyle=(0, (1, 2)), linewidth=1)
            axes.set_xscale("log")
            sizes = sorted(set(rows["users"]))  # without those whose label would overlap the next one
            ticks = [size for size, after in zip(sizes, [*sizes[1:], math.inf], strict=True) if after >= 1.5 * size]
            axes.set_xticks(ticks, map(str, ticks))
            axes.minorticks_off()
            if row == 0:
                axes.set_title(plain(f"{of_run['setting'].iloc[0]}\nround {of_run['round'].iloc[0]}"), fontsize=10)
            if row == len(shown) - 1:
                axes.set_xlabel("users in the sum")
            if column == 0:
                axes.set_ylabel(label)
    legend_below(figure, all_axes.flat, 3)
    return figure
