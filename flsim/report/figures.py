"""Figures of a report; every panel is an image with a name and a sentence that describes it."""

import math
from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from flsim.measures.built_in import PRIMARY, QUANTITIES
from flsim.measures.quantity import Quantity, flags, panels_first
from flsim.report.blocks import Block, Cell, Figure, Fold, Group
from flsim.report.configurations import by_configuration
from flsim.report.gather import Gathered, Line, RunView, Setting
from flsim.report.svg import SMALL, Axis, Panel, spanning

TOGETHER = 4  # settings that share a panel, at most
POINTS = 40  # of a canary's line
FLAG = flags(QUANTITIES.values())[0]  # by which canaries' lines are told apart
SHOWN = 4  # groups of panels; more are folded
BAND = "Lines are means over seeds, bands from the lowest to the highest seed."


def curves(gathered: Gathered) -> list[Block]:
    """Return figures of every metric over training.

    Few settings share one panel per metric. Otherwise there is one panel per row of the tables.
    """
    drawn = [setting for setting in gathered.settings if setting.shown_runs]
    left = _left_out(gathered)
    if len(drawn) <= TOGETHER:
        styles = {id(setting): index for index, setting in enumerate(drawn)}
        panels = [
            (_title(quantity), _curve(gathered, quantity, drawn, styles, "all"))
            for quantity in panels_first(gathered.quantities)
        ]
        legend = [(styles[id(setting)], _named(setting)) for setting in drawn]
        caption = f"What was memorized, and how well the model predicts, over {_x(gathered)}. {BAND}{left}"
        return [Figure(caption, [Group(panels)], legend)] if drawn else []
    styles = {id(setting): style_of(setting) for setting in drawn}
    legend = legend_of(drawn)
    opened = [next(iter(flags(gathered.quantities)), None), PRIMARY]
    blocks: list[Block] = []
    for quantity in panels_first(gathered.quantities):
        title = _title(quantity)
        panels = [
            (line.label, _curve(gathered, quantity, begun, styles, str(index)))
            for index, line in enumerate(gathered.lines)
            if (begun := [setting for setting in line.settings if setting.shown_runs])
        ]
        figure = Figure(
            f"{title}, over {_x(gathered)}, each panel as long as its training. {BAND}{left}", [Group(panels)], legend
        )
        blocks.append(Fold(title, [figure], is_open=quantity in opened))
    return blocks


def _title(quantity: Quantity) -> str:
    if quantity.is_flag:
        return f"{quantity.title}: canaries {quantity.outcome}"
    return quantity.caption or (f"Mean {quantity.title}" if quantity.of_canaries else quantity.title)


def _told(quantity: Quantity, value: float) -> str:
    """Return a value with its unit, as in a sentence."""
    if quantity.is_flag:
        return f"{value:.1f} canaries"
    if not quantity.of_canaries:
        return f"{value:.3f}" if quantity.is_percentage else quantity.format.format(value)
    return f"{quantity.format.format(value)} {quantity.unit}".strip()


def _curve(
    gathered: Gathered, quantity: Quantity, settings: Sequence[Setting], styles: dict[int, int], id_: str
) -> Markup:
    metric, title = quantity.name, _title(quantity)
    unit = "canaries" if quantity.is_flag else f"{quantity.axis}, log scale" if quantity.is_log else quantity.axis
    every = [setting.curve(metric, gathered.in_epochs) for setting in gathered.settings if setting.shown_runs]
    heights = np.concatenate([curve[:, 1:].ravel() for curve in every if curve.size] or [np.zeros(0)])
    last = max(
        (float(curve[-1, 0]) for setting in settings if (curve := setting.curve(metric, gathered.in_epochs)).size),
        default=1.0,
    )
    top = float(heights.max(initial=0.0))
    ceiling = _ceiling([run for setting in settings for run, _ in setting.shown_runs]) if quantity.is_primary else None
    if quantity.is_log:
        y = spanning([float(height) for height in heights if height > 0], unit)
    else:
        low = min(0.0, float(heights.min(initial=0.0)))
        y = Axis(1.08 * low, 1.08 * top or 1.0, unit)
        if quantity.is_flag:
            y = Axis(0, max(1.0, 1.08 * top), unit, is_whole=True)
    panel = Panel(Axis(0, last, _x(gathered), is_whole=not gathered.in_epochs), y)
    if ceiling is not None and ceiling <= y.high:
        panel.rule(y=ceiling, text="log₂|R|")
    descriptions = []
    for setting in settings:
        curve, style = setting.curve(metric, gathered.in_epochs), styles[id(setting)]
        if not curve.size:
            descriptions.append(f"{setting.label}: not measured.")
            continue
        xs, means, seeds = curve[:, 0], curve[:, 1], curve[:, 2:]
        if seeds.shape[1] > 1:
            panel.band(_pairs(xs, seeds.min(axis=1)), _pairs(xs, seeds.max(axis=1)), style)
        panel.line(_pairs(xs, means), style)
        begin, end = _told(quantity, means[0]), _told(quantity, means[-1])
        descriptions.append(f"{setting.label}: from {begin} at {xs[0]:.3g} to {end} at {xs[-1]:.3g} {_x(gathered)}.")
    return panel.render(f"{metric}-{id_}", f"{title} over {_x(gathered)}", " ".join(descriptions))


def distributions(gathered: Gathered) -> list[Block]:
    """Return the share of canaries with at least each exposure at the last evaluation, with a panel for each row."""
    panels: list[tuple[Cell, Markup]] = []
    drawn: list[Setting] = []
    for index, line in enumerate(gathered.lines):
        measured = [setting for setting in line.settings if not setting.last(PRIMARY.name).empty]
        if measured:
            panels.append((line.label, _distribution(line, measured, index)))
            drawn += measured
    caption = (
        "Share of canaries with at least the given bits of exposure, at the last evaluation, over all seeds. "
        "Dotted: log₂|R|, the largest exposure that ranking among |R| random continuations can show; canaries there "
        f"are ranked before all of them.{_left_out(gathered)}"
    )
    return [Figure(caption, [Group(panels)], legend_of(drawn))] if panels else []


def _distribution(line: Line, settings: Sequence[Setting], index: int) -> Markup:
    ceiling = _ceiling([run for setting in settings for run, _ in setting.shown_runs])
    values = {id(setting): np.sort(setting.last(PRIMARY.name)["value"].to_numpy()) for setting in settings}
    highest = max([float(exposures.max()) for exposures in values.values()] + [ceiling or 1.0])
    panel = Panel(Axis(0, 1.02 * highest, "at least so many bits"), Axis(0, 100, "% of canaries"))
    if ceiling is not None:
        panel.rule(x=ceiling, text="log₂|R|")
    descriptions = []
    for setting in settings:
        bits = values[id(setting)]
        points = [(0.0, 100.0)]
        for place, value in enumerate(bits):
            points += [(float(value), points[-1][1]), (float(value), 100 * (1 - (place + 1) / len(bits)))]
        panel.line(points, style_of(setting), has_markers=False)
        at_most = f", {np.mean(bits >= ceiling - 1e-6):.0%} at the ceiling" if ceiling else ""
        descriptions.append(f"{setting.label}: median {np.median(bits):.1f} bits, highest {bits[-1]:.1f}{at_most}.")
    return panel.render(f"bits-{index}", f"Exposure of canaries, {line.label}", " ".join(descriptions))


def traces(gathered: Gathered) -> list[Block]:
    """Return a panel for each configuration of each setting, in which every canary of one run has a thin line."""
    blocks: list[Block] = []
    for index, setting in enumerate(gathered.settings):
        if not setting.shown_runs or setting.last(PRIMARY.name).empty:
            continue
        run = setting.shown_runs[0][0]
        panels = _traced(run, index, gathered.in_epochs)
        seed = "" if run.results.seed is None else f", seed {run.results.seed}"
        caption = (
            f"{setting.label}{seed}: bits of exposure of each canary over {_x(gathered)}. Solid: {FLAG.outcome} at the "
            f"last evaluation, as {FLAG.title} {FLAG.finds}; dashed: not."
        )
        blocks.append(Fold(setting.label, [Figure(caption, [Group(panels)], is_small=True)], is_open=not blocks))
    return blocks


def _traced(run: RunView, index: int, in_epochs: bool) -> list[tuple[Cell, Markup]]:
    bits, rs = run.of_planted(PRIMARY.name), run.of_planted(FLAG.name)
    kept = bits.index[:: -math.ceil(len(bits) / POINTS)][::-1]
    xs = [(run.results.epochs_of(round_) or 0.0) if in_epochs else float(round_) for round_ in kept]
    ceiling = _ceiling([run])
    top = max(float(bits.to_numpy().max()), ceiling or 1.0)
    panels: list[tuple[Cell, Markup]] = []
    for place, (configuration, rows) in enumerate(by_configuration(run.results.planted).items()):
        panel = Panel(Axis(0, max(xs), most=3, is_whole=not in_epochs), Axis(0, 1.03 * top, "bits", most=3), SMALL)
        if ceiling is not None:
            panel.rule(y=ceiling)
        canaries = rows["canary"].tolist()
        memorized = [canary for canary in canaries if not rs.empty and rs[canary].iloc[-1] == 1]
        for kind, of_kind in (("no", set(canaries) - set(memorized)), ("yes", set(memorized))):
            drawn = [canary for canary in canaries if canary in of_kind]
            panel.threads([list(zip(xs, bits.loc[kept, canary].tolist(), strict=True)) for canary in drawn], kind)
        ends = bits.loc[kept[-1], canaries]
        told = (
            f"{len(memorized)} of {len(canaries)} canaries memorized; exposures end between {ends.min():.1f} and "
            f"{ends.max():.1f} bits."
        )
        image = panel.render(f"trace-{index}-{place}", f"Exposure of each canary, {configuration.label}", told)
        panels.append((f"{configuration.label}: {len(memorized)}/{len(canaries)}", image))
    return panels


def folded(caption: str, groups: Sequence[Group]) -> list[Block]:
    """Return a figure of small panels, with all groups but the first few folded."""
    blocks: list[Block] = [Figure(caption, groups[:SHOWN], is_small=True)] if groups else []
    if len(groups) > SHOWN:
        rest = Figure(f"{caption} (continued)", groups[SHOWN:], is_small=True)
        blocks.append(Fold(f"{len(groups) - SHOWN} more settings", [rest]))
    return blocks


def ceiling_of(setting: Setting) -> float | None:
    """Return log2 (|R| + 1), the most bits that the ranks of its canaries can show; None if |R| is not known."""
    return _ceiling([run for run, _ in setting.shown_runs])


def _ceiling(runs: Sequence[RunView]) -> float | None:
    sizes = [references for run in runs if (references := run.references)]
    return math.log2(max(sizes) + 1) if sizes else None


def style_of(setting: Setting) -> int:
    """Return the number of the line style of a setting's world."""
    return {"iid": 0, "non-iid": 1}.get(setting.world or "", 2)


def legend_of(settings: Sequence[Setting]) -> list[tuple[int, str]]:
    """Return the line styles of the settings' worlds with their names."""
    names = {0: "IID", 1: "Non-IID", 2: "records drawn at random"}
    return [(style, names[style]) for style in sorted({style_of(setting) for setting in settings})]


def _named(setting: Setting) -> str:
    unfinished = f", at round {setting.shown_runs[0][1]:,}, unfinished" if setting.is_unfinished else ""
    return f"{setting.label} ({setting.seeds}{unfinished})"


def _left_out(gathered: Gathered) -> str:
    names = [setting.label for setting in gathered.settings if not setting.shown_runs]
    return f" Not drawn, because no run can be shown: {'; '.join(names)}." if names else ""


def _x(gathered: Gathered) -> str:
    return "epochs" if gathered.in_epochs else "rounds (central: steps)"


def _pairs(xs: np.ndarray, ys: np.ndarray) -> list[tuple[float, float]]:
    return list(zip(xs.tolist(), ys.tolist(), strict=True))
