"""Section of a report on memorization at like utility: exposure against perplexity, and the worlds compared there."""

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from flsim.base.errors import InputError
from flsim.base.statistics import holm
from flsim.report.blocks import Block, Cell, Figure, Group, Heading, Prose, Table, left, number
from flsim.report.figures import legend_of, style_of
from flsim.report.gather import Gathered, Setting
from flsim.report.svg import STYLES, Axis, Panel, spanning
from flsim.report.worlds import both
from flsim.results.pairs import LikeUtility, left_out_text, like_utility
from flsim.show.differences import signed
from flsim.show.plots import exposure_by_utility

CAPTION = (
    "Mean exposure against perplexity on test text, from one evaluation to the next; both axes are means over seeds. "
    "Training goes from right to left. Where a curve lies below another one, its models memorize less at like utility."
)
NOTE = (
    "The two runs of a seed are compared at the lowest perplexity that both reached; between two evaluations, by "
    "interpolation along its logarithm. The interval and p are Student’s t over seeds, and need two of them. In "
    "brackets: p corrected for the number of rows with a test (Holm)."
)


def at_like_utility(gathered: Gathered) -> list[Block]:
    """Return exposure against perplexity as figures, and the worlds compared at equal perplexity as a table."""
    panels: list[tuple[Cell, Markup]] = []
    drawn: list[Setting] = []
    for index, line in enumerate(gathered.lines):
        begun = [setting for setting in line.settings if setting.shown_runs and len(_path_of(setting)) > 1]
        if begun:
            panels.append((line.label, _panel(begun, [style_of(setting) for setting in begun], f"line-{index}")))
            drawn += begun
    blocks: list[Block] = [Figure(CAPTION, [Group(panels)], legend_of(drawn))] if panels else []
    for world, name in (("iid", "IID"), ("non-iid", "Non-IID")):
        settings = [setting for setting in drawn if setting.world == world]
        if 1 < len(settings) <= STYLES:
            styles = list(range(len(settings)))
            entries = [(place, setting.label) for place, setting in enumerate(settings)]
            panel = _panel(settings, styles, f"world-{world}")
            blocks.append(Figure(f"{name} settings beside each other.", [Group([(name, panel)])], entries))
    return [*blocks, *_compared(gathered)]


def _path_of(setting: Setting) -> NDArray[np.float64]:
    """Return float64 [evaluations, 2]: perplexity, as a geometric mean over seeds, and mean exposure."""
    return exposure_by_utility([run.results for run, _ in setting.shown_runs], over_seeds=True)[:, :2]


def _panel(settings: Sequence[Setting], styles: Sequence[int], id_: str) -> Markup:
    paths = [_path_of(setting) for setting in settings]
    top = max(float(path[:, 1].max()) for path in paths)
    x = spanning([float(value) for path in paths for value in path[:, 0]], "perplexity, log scale")
    panel, descriptions = Panel(x, Axis(0, 1.08 * top or 1.0, "bits")), []
    for setting, path, style in zip(settings, paths, styles, strict=True):
        panel.line([(float(perplexity), float(bits)) for perplexity, bits in path], style)
        (first, begin), (last, end) = path[0], path[-1]
        descriptions.append(
            f"{setting.label}: from {begin:.1f} bits at perplexity {first:.4g} to {end:.1f} bits at {last:.4g}."
        )
    return panel.render(f"like-utility-{id_}", "Exposure against perplexity", " ".join(descriptions))


def _compared(gathered: Gathered) -> list[Block]:
    settings, reasons = list[tuple[Cell, LikeUtility]](), []
    for line, iid, other in both(gathered):
        try:
            a, b = ([run.results for run, _ in setting.shown_runs] for setting in (iid, other))
            settings.append((line.label, like_utility(a, b)))
        except InputError as error:
            reasons.append(f"{line.label}: {error}")
    rows: list[list[Cell]] = [
        [label, str(len(compared.seeds)), _perplexities(compared), *_difference(compared, corrected)]
        for (label, compared), corrected in zip(settings, holm([compared.p for _, compared in settings]), strict=True)
    ]
    headings = [left("Setting"), Heading("Seeds"), Heading("Perplexity"), Heading("bits, IID less non"), Heading("p")]
    blocks: list[Block] = [Table("IID against non-IID at equal perplexity", headings, rows, NOTE)] if rows else []
    lost = [f"{label}: {left_out_text(compared.left_out)}" for label, compared in settings if compared.left_out]
    notes = [f"{words}." for words in lost] + ([f"Not compared: {'; '.join(reasons)}."] if reasons else [])
    return [*blocks, *(Prose(text, is_note=True) for text in notes)]


def _perplexities(compared: LikeUtility) -> str:
    lowest, highest = (f"{bound(compared.perplexities):.4g}" for bound in (min, max))
    return lowest if lowest == highest else f"{lowest} to {highest}"


def _difference(compared: LikeUtility, corrected: float) -> list[Cell]:
    """Return the mean with its interval, and p with its value corrected by Holm."""
    template = f"{{:{signed(compared.quantity)}}}"
    mean, low, high = (
        number(value, template) for value in (compared.mean_difference, compared.ci_low, compared.ci_high)
    )
    if np.isnan(compared.p):
        return [mean, "–"]
    p = Markup("{} <small>({})</small>").format(number(compared.p, "{:.2g}"), number(corrected, "{:.2g}"))
    return [Markup("{} <small>{}</small>").format(mean, f"{low} to {high}"), p]
