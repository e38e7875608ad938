"""Blocks of a report on how fast canaries are forgotten, where runs plant them in some rounds only."""

import math

from markupsafe import Markup

from flsim.base.errors import InputError
from flsim.forgetting.measure import Forgetting, curve, measure_forgetting
from flsim.forgetting.text import name_text, planted_text, rounds_text, time_text, window_text
from flsim.report.blocks import Block, Cell, Figure, Group, Prose, Table, left, number
from flsim.report.blocks import Heading as Column
from flsim.report.gather import Gathered
from flsim.report.svg import STYLES, Axis, Panel

OUT = STYLES - 1  # style of arm OUT
CAPTION = (
    "Exposure against the rounds since a sharer of a canary last took part. Shaded: 95% intervals over seeds, or, of "
    "one seed, over canaries. Arm OUT is the twin run that never plants them."
)
NOTE = (
    "T: rounds since last use from which on the upper bound of the accuracy of telling the arms apart is at most "
    "{alpha:g}; > is censored. At best: the least such accuracy that so many canaries can show. Half by: rounds after "
    "which half of the canaries rank as others do. Left: share, at the end of training, of the nats by which training "
    "on canaries had lowered their log-perplexity when the window ended. Heuristic epsilon: ln(TPR / FPR) at a "
    "false-positive rate of 10% at the last k, which bounds nothing. Canaries are treated as independent. "
    "`flsim forgetting` has every k."
)


def forgetting(gathered: Gathered) -> list[Block]:
    """Return a table of forgetting times and a figure of exposure; nothing where canaries have no windows."""
    windowed = [
        run for run in gathered.runs if "last_round" in run.results.roster or "first_round" in run.results.roster
    ]
    if not windowed:
        return []
    try:
        measured = measure_forgetting(*(run.path for run in windowed))
    except InputError as error:  # no arm IN yet, or a sampler of one's own
        return [Prose(f"Forgetting is not shown: {error}.", is_note=True)]
    notes = [Prose(text, is_note=True) for text in measured.notes]
    return [_table(measured), *([_figure(measured)] if len(measured.success) else []), *notes]


def _table(measured: Forgetting) -> Table:
    headings = [left("Setting"), left("Rounds"), left("Planted"), Column("Canaries"), Column("Last k"), Column("T")]
    headings += [Column("At best"), Column("Half by"), Column("Left"), Column("Precision"), Column("Heuristic epsilon")]
    last = measured.success.groupby("group").last()
    rows: list[list[Cell]] = []
    for about in measured.times.to_dict("records"):
        at_last = last.loc[about["group"]] if about["group"] in last.index else {}
        k_max = about["k_max"]
        rows.append(
            [
                str(about["setting"]),
                window_text(about),
                planted_text(about),
                f"{about['canaries'] - about['never_used']:,}",
                number(k_max, "{:,}"),
                time_text(k_max if about["is_censored"] is True else about["time"], about["is_censored"]),
                number(about["least_alpha"], "{:.2f}"),
                time_text(about["median_time"], about["median_is_censored"]),
                number(about["left"], "{:.0%}"),
                number(at_last.get("precision"), "{:.0%}"),
                number(at_last.get("heuristic_epsilon"), "{:.1f}"),
            ]
        )
    alpha = float(measured.times["alpha"].iloc[0])
    return Table("How fast canaries are forgotten after their last use", headings, rows, NOTE.format(alpha=alpha))


def _figure(measured: Forgetting) -> Figure:
    names = list(dict.fromkeys(map(name_text, measured.times.to_dict("records"))))[:OUT]
    last, highest = float(measured.success["k"].max()), float(measured.success["bits_in"].max())
    panels: list[tuple[Cell, Markup]] = []
    windows = measured.observations.groupby(["series", "first_round", "last_round"], sort=False, dropna=False)
    for index, (_, table) in enumerate(windows):
        panel = Panel(Axis(0, last, "rounds since last use", is_whole=True), Axis(0, 1.1 * highest, "bits"))
        lines = [(OUT, curve(table, "out"))]
        for _, of_group in table.groupby("group", sort=False):
            name = name_text(of_group.iloc[0].to_dict())
            lines += [(names.index(name), curve(of_group, "in"))] if name in names else []
        for style, points in lines:
            ends = [(k, low, high) for k, _, low, high in points if math.isfinite(low)]
            panel.band([(k, low) for k, low, _ in ends], [(k, high) for k, _, high in ends], style)
            panel.line([(k, min(bits, panel.y.high)) for k, bits, *_ in points], style)
        about = table.iloc[0].to_dict()
        title = f"{about['setting']}: planted in {rounds_text(about)}"
        panels.append((title, panel.render(f"forgetting-{index}", title, "Exposure by rounds since last use.")))
    return Figure(CAPTION, [Group(panels)], [*enumerate(names), (OUT, "arm OUT")])
