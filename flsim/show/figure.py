"""Figures drawn by matplotlib, as files and as SVG inside a page; equal results give equal bytes.

Both use the light palette of the style sheet of the page. In a page, each colour becomes a CSS variable, so a drawing
fits light and dark pages. Sizes of panels are CSS pixels at the width of a phone, where text of 11 pixels is legible.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import ArrayLike, NDArray

from flsim.base.errors import InputError
from flsim.base.files import is_device, named_file

WIDTH, HEIGHT = 340, 206  # pixels of a panel
TEXT = 11  # pixels
# The light palette of the style sheet by the names of its variables.
LINES = ("#0b5fa5", "#b84700", "#16704c", "#8c3a78", "#5b5b57", "#7a5b00")
SHADES = ("#f4f4f0", "#dbe8f4", "#b3d0ea", "#7fb0dc", "#1f66a8", "#0a3d70")
INK, PAPER, SOFT, RULE, STRONG, ON_LOW, ON_HIGH = (
    *("#1c1c1a", "#fdfdfb", "#575753", "#d6d6cf", "#8a8a83", "#10100e", "#ffffff"),
)
VARIABLES = {
    **{colour: f"var(--c{place})" for place, colour in enumerate(LINES)},
    **{colour: f"var(--h{place})" for place, colour in enumerate(SHADES)},
    **{PAPER: "var(--paper)", SOFT: "var(--soft)", RULE: "var(--rule)", STRONG: "var(--strong)"},
    **{ON_LOW: "var(--on-low)", ON_HIGH: "var(--on-high)", INK: "currentColor"},
}
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
SYMBOLS = "●■▲◆▼✚✖◀▶"  # the markers as text
DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1.2, 1.5)), (0, (5, 1.7, 1.2, 1.7)))
ROUNDS = "completed rounds (central: steps)"
MARKED = 16  # largest number of markers of a line
STYLE: dict[Any, Any] = {
    "axes.edgecolor": STRONG,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": SOFT,
    "axes.labelsize": TEXT,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": SOFT,
    "axes.titlelocation": "left",
    "axes.titlesize": TEXT,
    "axes.linewidth": 1,
    "font.family": "sans-serif",
    "font.size": TEXT,
    "grid.color": RULE,
    "grid.linewidth": 0.75,
    "path.simplify_threshold": 0.2,
    "svg.fonttype": "none",
    "svg.hashsalt": "flsim",
    "text.parse_math": False,
    "text.color": SOFT,
    "xtick.color": STRONG,
    "xtick.labelcolor": SOFT,
    "xtick.labelsize": TEXT,
    "xtick.major.size": 3.5,
    "ytick.labelcolor": SOFT,
    "ytick.labelsize": TEXT,
    "ytick.major.size": 0,
}
FORMATS = {".png": "png", ".svg": "svg", ".pdf": "pdf"}
FILE_STYLE: dict[Any, Any] = {
    **{name: STYLE[name] for name in ("axes.grid", "axes.spines.right", "axes.spines.top", "svg.hashsalt")},
    **{"font.size": 10, "grid.alpha": 0.3, "pdf.fonttype": 42},  # searchable text in PDF
}


def line_style(index: int) -> dict[str, Any]:
    """Return colour, marker and dashes of a line by its number, which also distinguish lines in grey."""
    return {
        "color": LINES[index % len(LINES)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index % len(DASHES)],
    }


def refuse_other_than_figure(path: Path) -> None:
    """Raise InputError unless the path is a .png, .svg or .pdf file in an existing folder, or a device or a pipe."""
    if is_device(path):
        return
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"{path}: plots have the formats .png, .svg and .pdf; use one of these suffixes")
    if not path.parent.is_dir():
        raise InputError(f"{path}: the folder {path.parent} does not exist; create it first")


def write_figure(draw: Callable[[], Figure], path: Path) -> None:
    """Draw a figure in the style of files, and write it atomically; SVG for a device or a pipe without a suffix."""
    refuse_other_than_figure(path)
    kind = FORMATS.get(path.suffix.lower(), "svg")
    with mpl.rc_context(FILE_STYLE), named_file(path) as partial:
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)  # a date would change the bytes
        draw().savefig(partial, format=kind, dpi=150, metadata=metadata)


def plain(text: str) -> str:
    """Return a text that matplotlib prints literally, because a pair of dollar signs would be mathematics."""
    return text.replace("$", r"\$")


def subplots(
    width: float, height: float, rows: int, columns: int, gap: float = 0.05, **options: Any
) -> tuple[Figure, NDArray[Any]]:
    """Return a figure of a size in inches, outside the state of pyplot, and its axes [rows, columns]."""
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(wspace=gap, hspace=gap))
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def legend_below(figure: Figure, axes: Iterable[Axes], columns: int, title: str = "") -> None:
    """Name the labelled lines of axes, each once, below a figure."""
    lines = {str(line.get_label()): line for one in axes for line in one.get_lines()}
    lines = {label: line for label, line in lines.items() if label[0] != "_"}
    look: dict[str, Any] = {"loc": "outside lower center", "ncols": columns, "frameon": False, "fontsize": 9}
    figure.legend(lines.values(), list(lines), title=title or None, title_fontsize=9, **look)


def page_style() -> AbstractContextManager[None]:
    """Return the context in which all panels of a page are drawn."""
    return mpl.rc_context(STYLE)


def panels(
    width: float = WIDTH,
    height: float = HEIGHT,
    rows: int = 1,
    columns: int = 1,
    margins: tuple[float, float, float, float] = (40, 10, 20, 34),
    gaps: tuple[float, float] = (0, 0),
    **options: Any,
) -> tuple[Figure, list[Axes]]:
    """Return a figure outside the state of pyplot, and its axes by rows."""
    figure = Figure((width / 72, height / 72))
    left, right, top, bottom = margins
    wide, high = (width - left - right - (columns - 1) * gaps[0]), (height - top - bottom - (rows - 1) * gaps[1])
    figure.subplots_adjust(
        left / width, bottom / height, 1 - right / width, 1 - top / height,
        gaps[0] / (wide / columns), gaps[1] / (high / rows),
    )  # fmt: skip
    figure.patch.set_visible(False)
    grid: list[Axes] = figure.subplots(rows, columns, squeeze=False, **options).ravel().tolist()
    for axes in grid:
        axes.patch.set_visible(False)
        axes.set_axisbelow(True)
        axes.tick_params(axis="y", pad=5)
    return figure, grid


def scale(
    axis: Axis, low: float, high: float, label: str = "", *, is_log: bool = False, is_whole: bool = False, most: int = 5
) -> None:
    """Set the ends of an axis, its ticks at round numbers, and its label at its end."""
    axes, is_x = axis.axes, axis is axis.axes.xaxis
    locator: Any = MaxNLocator(most, steps=[1, 2, 5, 10], integer=is_whole)
    if is_log:
        (axes.set_xscale if is_x else axes.set_yscale)("log")
        decades = math.log10(high / low)
        subs = (1.0,) if decades > 2 else (1.0, 3.0) if decades > 1 else (1.0, 2.0, 3.0, 5.0)
        locator = LogLocator(subs=subs) if decades > 0.5 else locator
        axis.set_minor_locator(NullLocator())
    axis.set_major_locator(locator)
    axis.set_major_formatter(FuncFormatter(_tick))
    (axes.set_xlim if is_x else axes.set_ylim)(low, high)
    if is_x and label:
        axes.set_xlabel(label, loc="right", labelpad=2)
    elif label:
        label_above(axes, label)


def label_above(axes: Axes, label: str) -> None:
    """Put the label of the y axis above it, at the left edge of the figure."""
    axes.set_title(label, x=-(axes.bbox.x0 - axes.figure.bbox.x0) / axes.bbox.width, pad=7)


def _tick(value: float, _: object) -> str:
    return (f"{value / 1000:g}K" if value >= 10_000 else f"{value:g}").replace("-", "\N{MINUS SIGN}")


def spanning(values: ArrayLike) -> tuple[float, float]:
    """Return the ends of a logarithmic axis around values above 0."""
    heights = np.asarray(values, dtype="float64").ravel()
    low, high = (float(heights.min()), float(heights.max())) if heights.size else (1.0, 1.0)
    margin = (high / low) ** 0.06 * 1.02
    return low / margin, high * margin


def draw_line(axes: Axes, x: ArrayLike, y: ArrayLike, style: int, has_markers: bool = True, **options: Any) -> None:
    """Draw a line in a `line_style`. Lines at the edge of the panel are not cut."""
    size, every = np.size(x), max(1, math.ceil(np.size(x) / MARKED))
    look = line_style(style) | {"linewidth": 1.8, "zorder": 3}
    if has_markers:
        look |= {"markersize": 6, "markeredgecolor": PAPER, "markeredgewidth": 0.8}
        look["markevery"] = ((size - 1) % every, every) if size else None
    else:
        look["marker"] = ""
    for line in axes.plot(x, y, clip_on=False, **(look | options)):
        line.set_in_layout(False)  # an unclipped line without points would cover the complete figure


def draw_band(axes: Axes, x: ArrayLike, low: ArrayLike, high: ArrayLike, style: int) -> None:
    """Shade the area between two lines, cut at the ends of the y axis."""
    ends = [np.clip(np.asarray(end, dtype="float64"), *axes.get_ylim()) for end in (low, high)]
    if np.isfinite(ends[0]).any():
        look: dict[str, Any] = {"color": line_style(style)["color"], "alpha": 0.16, "linewidth": 0, "clip_on": False}
        axes.fill_between(np.asarray(x), *ends, **look).set_in_layout(False)


def draw_interval(
    axes: Axes, y: float, style: int, mean: float, ends: tuple[float, float], parts: Sequence[float] = ()
) -> None:
    """Draw a mean at a height, its interval, cut at the ends of the x axis, and its single values as hollow markers."""
    colour, (low, high) = line_style(style)["color"], axes.get_xlim()
    if not math.isnan(ends[0]):
        axes.plot(np.clip(ends, low, high), [y, y], color=colour, linewidth=1.8, clip_on=False)
    hollow: dict[str, Any] = {
        "markersize": 3.5,
        "markerfacecolor": PAPER,
        "markeredgecolor": colour,
        "markeredgewidth": 0.8,
    }
    draw_line(axes, parts, [y] * len(parts), style, linestyle="", marker="o", markevery=None, **hollow)
    draw_line(axes, [mean], [y], style, linestyle="")


def draw_threads(axes: Axes, x: Sequence[float], lines: Sequence[Sequence[float]], **options: Any) -> None:
    """Draw thin lines over the same x as one element."""
    look: dict[str, Any] = {"color": INK, "linewidth": 1.1} | options
    gap = [math.nan]
    ys = [value for line in lines for value in [*line, *gap]]
    axes.plot([*x, *gap] * len(lines), ys, clip_on=False, **look)


def draw_rule(axes: Axes, *, x: float | None = None, y: float | None = None, text: str = "") -> None:
    """Draw a dotted line across the panel, with a name at its end, on the side with more space."""
    look: dict[str, Any] = {"color": SOFT, "linestyle": (0, (1, 2.5)), "linewidth": 1, "clip_on": False}
    left, right = axes.get_xlim()
    _, top = axes.get_ylim()
    if y is not None:
        axes.axhline(y, **look)
        axes.annotate(text, (right, y), (0, 4), textcoords="offset points", ha="right", va="bottom")
    if x is not None:
        axes.axvline(x, **look)
        offset, side = (-4, "right") if x > (left + right) / 2 else (4, "left")
        axes.annotate(text, (x, top), (offset, 0), textcoords="offset points", ha=side, va="top")


def inline(figure: Figure, id_: str, title: str, description: str) -> Markup:
    """Return a figure as an SVG element that screen readers present as an image, with its title and description."""
    written = StringIO()
    none = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(written, format="svg", metadata=none)
    width, height = figure.get_size_inches() * 72
    body = _reduced(written.getvalue(), id_)
    return Markup(
        '<svg role="img" aria-labelledby="{0}-t" aria-describedby="{0}-d" viewBox="0 0 {3:g} {4:g}" width="100%">'
        '<title id="{0}-t">{1}</title><desc id="{0}-d">{2}</desc>{5}</svg>'
    ).format(id_, title, description, width, height, Markup(body))  # noqa: S704 (matplotlib escapes all texts)


def swatch(style: int) -> Markup:
    """Return the marker of a line as text for a legend; screen readers skip it, because the adjacent text names it."""
    colour, symbol = style % len(LINES), SYMBOLS[style % len(SYMBOLS)]
    return Markup('<span aria-hidden="true" style="color: var(--c{})">{}</span>').format(colour, symbol)


# Elements that the page does not need: fonts, groups without style, clips, and rotations by zero.
NEEDLESS = re.compile(
    r"""<!--.*?-->|<defs>\s*<style.*?</defs>|<metadata>.*?</metadata>|<defs>\s*<clipPath.*?</defs>|</?g\b[^>]*>"""
    r"""|\ clip-path="[^"]*"|\ transform="rotate\(-0[^"]*"|font-family:[^;"]*;?\ ?|xlink:(?=href)""",
    re.DOTALL | re.VERBOSE,
)


def _reduced(svg: str, id_: str) -> str:
    """Return the elements of an SVG file with unique ids, colours of the page, and without redundant bytes."""
    body = NEEDLESS.sub("", svg[svg.index(">", svg.index("<svg")) + 1 : svg.rindex("</svg>")])
    names = {name: f"{id_}-{place}" for place, name in enumerate(re.findall(r'<path id="([^"]*)"', body))}
    body = re.sub(r'(id="|href="#)(\w+)"', lambda match: f'{match[1]}{names.get(match[2], match[2])}"', body)
    body = re.sub(
        r'style="[^"]*"',
        lambda style: re.sub(r"#[0-9a-f]{6}", lambda colour: VARIABLES.get(colour[0], colour[0]), style[0]),
        body,
    )
    return re.sub(r">\s+<", "><", re.sub(r"\s*\n\s*", " ", body)).strip()
