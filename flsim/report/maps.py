"""What was memorized in each configuration: heat maps over p_u x p_e, or bars over numbers of copies."""

import math
from collections.abc import Mapping

import pandas as pd
from markupsafe import Markup

from flsim.report.blocks import Block, Cell, Group
from flsim.report.configurations import Configuration, by_configuration, percent
from flsim.report.figures import ceiling_of, folded
from flsim.report.gather import Gathered, Setting
from flsim.report.svg import SMALL, image
from flsim.results.tables import user_share

LEVELS = 6  # shades; the style sheet has a colour and a text colour for each
LEFT, CELL, HIGH, BELOW = 48, 38, 27, 18  # pixels
BAR, ROW = 88, 22  # pixels: the longest bar, and from one to the next
TITLES = {"rs": "RS, % memorized", "bs": "BS, % extracted", "exposure": "mean exposure, bits"}


def configurations(of: Gathered) -> list[Block]:
    """Three panels for each setting: shares memorized by RS and by BS, and mean exposure."""
    groups = []
    for index, setting in enumerate(of.settings):
        panels = [(TITLES[metric], drawn) for metric in TITLES if (drawn := _panel(setting, metric, index))]
        if panels:
            groups.append(Group(panels, f"{setting.label} ({setting.seeds})"))
    has_grid = any(_is_grid(setting) for setting in of.settings)
    over = (
        "Rows: p_u, the probability that a user shares a canary; columns: p_e, the probability that a record of a "
        "sharer is replaced by it."
        if has_grid
        else "A bar for each number of copies."
    )
    return folded(f"What was memorized in each configuration, at the last evaluation, over all seeds. {over}", groups)


def _is_grid(setting: Setting) -> bool:
    roster = setting.runs[0].results.roster
    return not bool(roster["p_u"].isna().any() or roster["p_e"].isna().any())


def _panel(setting: Setting, metric: str, index: int) -> Markup | None:
    last = setting.last(metric)
    if last.empty:
        return None
    values = {configuration: _value(rows, metric) for configuration, rows in by_configuration(last).items()}
    highest = 100.0 if metric != "exposure" else ceiling_of(setting) or max(values.values()) or 1.0
    told = "; ".join(f"{configuration.label}: {_text(value, metric)}" for configuration, value in values.items())
    draw = _grid if _is_grid(setting) else _bars
    return draw(f"map-{metric}-{index}", f"{TITLES[metric]}, {setting.label}", f"{told}.", values, metric, highest)


def _value(rows: pd.DataFrame, metric: str) -> float:
    return float(rows["value"].mean() if metric == "exposure" else 100 * (rows["value"] == 1).mean())


def _text(value: float, metric: str) -> str:
    return f"{value:.1f}" if metric == "exposure" else f"{value:.0f}"


def _grid(
    id_: str, title: str, told: str, values: Mapping[Configuration, float], metric: str, highest: float
) -> Markup:
    """Most sharers above, most copies right: numbers in cells, and shades of their share of the highest possible."""
    p_us = sorted({each.p_u for each in values}, reverse=True)
    p_es = sorted({each.p_e for each in values})
    by_pair = {(each.p_u, each.p_e): value for each, value in values.items()}
    parts = [_label(LEFT - 6, HIGH * (row + 0.5) + 4, user_share(p_u), "end") for row, p_u in enumerate(p_us)]
    below = HIGH * len(p_us) + 14
    parts += [_label(LEFT + CELL * (column + 0.5), below, percent(p_e)) for column, p_e in enumerate(p_es)]
    for row, p_u in enumerate(p_us):
        for column, p_e in enumerate(p_es):
            value = by_pair.get((p_u, p_e))
            level = 0 if value is None else _level(value / highest)
            parts.append(
                Markup(
                    '<g class="h{}"><rect x="{}" y="{}" width="{}" height="{}"/><text x="{}" y="{}" '
                    'text-anchor="middle">{}</text></g>'
                ).format(
                    level,
                    LEFT + CELL * column,
                    HIGH * row,
                    CELL,
                    HIGH,
                    LEFT + CELL * (column + 0.5),
                    HIGH * (row + 0.5) + 4,
                    "–" if value is None else _text(value, metric),
                )
            )
    return image(
        id_, title, told, max(SMALL.width, LEFT + CELL * len(p_es) + 1), below + BELOW - 14, Markup("").join(parts)
    )


def _bars(
    id_: str, title: str, told: str, values: Mapping[Configuration, float], metric: str, highest: float
) -> Markup:
    parts = []
    for row, (configuration, value) in enumerate(values.items()):
        y, long = ROW * row, max(1.0, BAR * min(1.0, value / highest))
        copies = "all" if configuration.copies is None else f"{configuration.copies:,}"
        parts += [
            _label(36, y + 14, copies if math.isnan(configuration.p_u) else configuration.label, "end"),
            Markup('<rect class="bar" x="42" y="{}" width="{:.1f}" height="{}"/>').format(y + 3, long, ROW - 7),
            _label(42 + long + 4, y + 14, _text(value, metric), "start"),
        ]
    return image(id_, title, told, SMALL.width, ROW * len(values), Markup("").join(parts))


def _level(share: float) -> int:
    return min(LEVELS - 1, int(share * LEVELS)) if share > 0 else 0


def _label(x: float, y: float, text: Cell, anchor: str = "middle") -> Markup:
    return Markup('<text class="t" x="{:g}" y="{:g}" text-anchor="{}">{}</text>').format(x, y, anchor, text)
