"""Heat maps over p_u x p_e, or bars over numbers of copies, of the canaries memorized in each configuration."""

import math
from collections.abc import Mapping

import pandas as pd
from markupsafe import Markup

from flsim.measures.quantity import Quantity
from flsim.report.blocks import Block, Cell, Group
from flsim.report.configurations import Configuration, by_configuration, percent
from flsim.report.figures import ceiling_of, folded
from flsim.report.gather import Gathered, Setting
from flsim.report.svg import SMALL, image
from flsim.results.tables import user_share

LEVELS = 6  # shades; the style sheet has a colour and a text colour for each
LEFT, CELL, HIGH, BELOW = 48, 38, 27, 18  # pixels
BAR, ROW = 88, 22  # pixels: the longest bar, and from one to the next


def configurations(gathered: Gathered) -> list[Block]:
    """Return panels for each setting: shares memorized by RS and BS, mean exposure, and a user's own numbers."""
    groups = []
    measured = [quantity for quantity in gathered.quantities if quantity.of_canaries]
    for index, setting in enumerate(gathered.settings):
        panels = [panel for quantity in measured for panel in _panels(setting, quantity, index)]
        if panels:
            groups.append(Group(panels, f"{setting.label} ({setting.seeds})"))
    has_grid = any(_is_grid(setting) for setting in gathered.settings)
    over = (
        "Rows: p_u, the probability that a user shares a canary; columns: p_e, the probability that a record of a "
        "sharer is replaced by it."
        if has_grid
        else "A bar for each number of copies."
    )
    return folded(f"What was memorized in each configuration, at the last evaluation, over all seeds. {over}", groups)


def _is_grid(setting: Setting) -> bool:
    roster = setting.runs[0].results.planted
    return not bool(roster["p_u"].isna().any() or roster["p_e"].isna().any())


def _title(quantity: Quantity) -> str:
    if quantity.is_flag:
        return f"{quantity.heading}, % {quantity.outcome}"
    return f"mean {quantity.phrase[0].lower()}{quantity.phrase[1:]}"


def _panels(setting: Setting, quantity: Quantity, index: int) -> list[tuple[str, Markup]]:
    """Return title and drawing for each window of canaries; most runs have one."""
    last = setting.last(quantity.name)
    if last.empty:
        return []
    values = {configuration: _value(rows, quantity) for configuration, rows in by_configuration(last).items()}
    highest = 100.0
    if not quantity.is_flag:
        highest = (ceiling_of(setting) if quantity.is_primary else None) or max(values.values()) or 1.0
    template = "{:.0f}" if quantity.is_flag else quantity.format
    draw = _grid if _is_grid(setting) else _bars
    panels = []
    for place, window in enumerate(dict.fromkeys(configuration.window for configuration in values)):
        within = {configuration: value for configuration, value in values.items() if configuration.window == window}
        told = "; ".join(f"{configuration.label}: {template.format(value)}" for configuration, value in within.items())
        id_ = f"map-{quantity.name}-{index}" + f"-{place}" * bool(place)
        title = ", ".join(filter(None, (_title(quantity), window)))
        panels.append((title, draw(id_, f"{title}, {setting.label}", f"{told}.", within, template, highest)))
    return panels


def _value(rows: pd.DataFrame, quantity: Quantity) -> float:
    """Return the percentage of a configuration's canaries that are memorized, or the mean of a number over them."""
    values = rows["value"]
    return float(100 * (values == 1).mean() if quantity.is_flag else values.mean() * quantity.scale)


def _grid(
    id_: str, title: str, told: str, values: Mapping[Configuration, float], template: str, highest: float
) -> Markup:
    """Draw numbers in cells, shaded by their share of the largest; sharers increase upwards and copies to the right."""
    p_us = sorted({configuration.p_u for configuration in values}, reverse=True)
    p_es = sorted({configuration.p_e for configuration in values})
    by_pair = {(configuration.p_u, configuration.p_e): value for configuration, value in values.items()}
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
                    "–" if value is None else template.format(value),
                )
            )
    return image(
        id_, title, told, max(SMALL.width, LEFT + CELL * len(p_es) + 1), below + BELOW - 14, Markup("").join(parts)
    )


def _bars(
    id_: str, title: str, told: str, values: Mapping[Configuration, float], template: str, highest: float
) -> Markup:
    parts = []
    for row, (configuration, value) in enumerate(values.items()):
        y, long = ROW * row, max(1.0, BAR * min(1.0, value / highest))
        copies = "all" if configuration.copies is None else f"{configuration.copies:,}"
        parts += [
            _label(36, y + 14, copies if math.isnan(configuration.p_u) else configuration.label, "end"),
            Markup('<rect class="bar" x="42" y="{}" width="{:.1f}" height="{}"/>').format(y + 3, long, ROW - 7),
            _label(42 + long + 4, y + 14, template.format(value), "start"),
        ]
    return image(id_, title, told, SMALL.width, ROW * len(values), Markup("").join(parts))


def _level(share: float) -> int:
    return min(LEVELS - 1, int(share * LEVELS)) if share > 0 else 0


def _label(x: float, y: float, text: Cell, anchor: str = "middle") -> Markup:
    return Markup('<text class="t" x="{:g}" y="{:g}" text-anchor="{}">{}</text>').format(x, y, anchor, text)
