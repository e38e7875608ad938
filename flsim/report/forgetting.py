"""Blocks of a report on how fast canaries are forgotten, where runs plant them in some rounds only."""

import math
from collections.abc import Callable, Sequence

import pandas as pd
from markupsafe import Markup

from flsim.base.errors import InputError
from flsim.forgetting import advantage
from flsim.forgetting.measure import Forgetting, curve, measure_forgetting
from flsim.forgetting.text import name_text, planted_text, rounds_text, time_text, window_text
from flsim.report.blocks import Block, Cell, Figure, Group, Prose, Table, left, number
from flsim.report.blocks import Heading as Column
from flsim.report.gather import Gathered
from flsim.report.svg import STYLES, Axis, Panel

Points = list[tuple[float, float, float, float]]
OUT = STYLES - 1  # style of arm OUT
CAPTION = (
    "Exposure against the rounds since a sharer of a canary last took part. Shaded: 95% intervals over seeds, or, of "
    "one seed, over canaries. Arm OUT is the twin run that never plants them."
)
ADVANTAGE = (
    "Log-perplexity of canaries in arm OUT less that in arm IN after the same round, which is what training on them "
    "has added: mean over canaries, then over seeds, with the 95% interval over seeds."
)
NOTE = (
    "T: rounds since last use from which on the upper bound of the accuracy of telling the arms apart is at most "
    "{alpha:g}; > is censored. At best: the least such accuracy that so many canaries can show. "
    "Half by: rounds from the end of the window until half of the canaries have had an evaluated "
    "rank with p > 0.05. Left: share, at the end of training, of the nats by which training on "
    "canaries had lowered their log-perplexity when the window ended. Heuristic epsilon: "
    "ln(TPR / FPR) at a false-positive rate of 10% at the last k, which bounds nothing. Canaries "
    "are treated as independent. "
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
    figures = [_exposures(measured), *_advantages(measured)] if len(measured.success) else []
    return [table_of(measured), *figures, *notes]


def table_of(measured: Forgetting) -> Table:
    """Return the table of forgetting times, a row for each group, with the attacks' precision at its last k."""
    headings = [left("Setting"), left("Rounds"), left("Planted"), Column("Canaries"), Column("Last k"), Column("T")]
    headings += [Column("At best"), Column("Half by"), Column("Left"), Column("Precision"), Column("Heuristic epsilon")]
    last = measured.success.groupby("group").tail(1).set_index("group")  # not `last`, which skips missing values
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


def _exposures(measured: Forgetting) -> Figure:
    y = Axis(0, 1.1 * float(measured.success["bits_in"].max()), "bits")

    def of_in(table: pd.DataFrame) -> Points:
        return curve(table, "in")

    lines = [{OUT: curve(table, "out")} | _by_style(measured, table, of_in) for table in measured.windows()]
    legend = [*enumerate(_names(measured)), (OUT, "arm OUT")]
    return Figure(
        CAPTION,
        [Group(_panels(measured, lines, "rounds since last use", y, "Exposure by rounds since last use"))],
        legend,
    )


def _advantages(measured: Forgetting) -> list[Figure]:
    """Return a figure of what training added, round by round; none without arm OUT."""
    lines = [_by_style(measured, table, advantage.curve) for table in measured.windows()]
    means = [mean for of_window in lines for points in of_window.values() for _, mean, *_ in points]
    if not means or max(means) <= 0:
        return []
    panels = _panels(
        measured, lines, "rounds", Axis(0, 1.1 * max(means), "nats"), "Nats that training added, by rounds"
    )
    return [Figure(ADVANTAGE, [Group(panels)], list(enumerate(_names(measured))))]


def _names(measured: Forgetting) -> list[str]:
    return list(dict.fromkeys(map(name_text, measured.times.to_dict("records"))))[:OUT]


def _by_style(measured: Forgetting, table: pd.DataFrame, points: Callable[[pd.DataFrame], Points]) -> dict[int, Points]:
    """Return the points of each group of a window by its style."""
    names = _names(measured)
    groups = [(name_text(group.iloc[0].to_dict()), group) for _, group in table.groupby("group", sort=False)]
    return {names.index(name): points(group) for name, group in groups if name in names}


def _panels(
    measured: Forgetting, lines: Sequence[dict[int, Points]], label: str, y: Axis, about: str
) -> list[tuple[Cell, Markup]]:
    panels: list[tuple[Cell, Markup]] = []
    for index, (table, of_window) in enumerate(zip(measured.windows(), lines, strict=True)):
        last = max((at for points in of_window.values() for at, *_ in points), default=1.0)
        panel = Panel(Axis(0, last, label, is_whole=True), y)
        for style, points in of_window.items():
            ends = [(at, max(low, y.low), high) for at, _, low, high in points if math.isfinite(low)]
            panel.band([(at, low) for at, low, _ in ends], [(at, high) for at, _, high in ends], style)
            panel.line([(at, min(max(mean, y.low), y.high)) for at, mean, *_ in points], style)
        row = table.iloc[0].to_dict()
        title = f"{row['setting']}: planted in {rounds_text(row)}"
        panels.append((title, panel.render(f"forgetting-{y.label}-{index}", title, f"{about}.")))
    return panels
