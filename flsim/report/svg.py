"""Small panels as inline SVG: scales, axes and marks.

Marks have classes only. Colours and sizes come from the page's style sheet, which knows of paper, dark screens and
narrow ones. matplotlib is not used, because its SVG has colours and sizes of text in each element, so that no style
sheet could change them, and takes many times as many bytes.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup
from matplotlib.ticker import LogLocator, MaxNLocator

STYLES = 6  # of lines; the style sheet has a colour and dashes for each, `marker` a shape
MARKED = 16  # points of a line that have a marker, at most
Point = tuple[float, float]


@dataclass(frozen=True)
class Size:
    """Size and margins of a panel, in pixels of a phone, where text of 11 pixels is readable."""

    width: int
    height: int
    left: int
    right: int = 10
    top: int = 20
    bottom: int = 34


WIDE = Size(340, 206, 40)
SMALL = Size(168, 124, 24, right=10, top=18, bottom=19)


@dataclass(frozen=True)
class Axis:
    """A scale with ticks at round numbers.

    Attributes:
        low, high: its ends.
        label: the quantity that it counts.
        is_log: whether it is logarithmic.
        most: largest number of ticks.
        is_whole: whether ticks are whole numbers.
    """

    low: float
    high: float
    label: str = ""
    is_log: bool = False
    most: int = 5
    is_whole: bool = False

    def at(self, value: float) -> float:
        """Return where a value lies, 0 to 1 within the ends; in the middle where both ends are one value."""
        if self.low == self.high:
            return 0.5
        if self.is_log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)

    @property
    def ticks(self) -> list[float]:
        if self.is_log and self.high > 3 * self.low:
            decades = math.log10(self.high / self.low)
            subs = (1.0,) if decades > 2 else (1.0, 3.0) if decades > 1 else (1.0, 2.0, 3.0, 5.0)
            candidates = LogLocator(subs=subs).tick_values(self.low, self.high)
        else:
            candidates = MaxNLocator(self.most, steps=[1, 2, 5, 10], integer=self.is_whole).tick_values(
                self.low, self.high
            )
        slack = 1e-9 * (self.high - self.low)
        return [float(value) for value in candidates if self.low - slack <= value <= self.high + slack]


def spanning(values: Iterable[float], label: str = "", most: int = 5) -> Axis:
    """Return a logarithmic axis around values above 0."""
    heights = list(values) or [1.0]
    margin = (max(heights) / min(heights)) ** 0.06 * 1.02
    return Axis(min(heights) / margin, max(heights) * margin, label, is_log=True, most=most)


@dataclass
class Panel:
    """Axes and the marks drawn in them, in the order of the calls."""

    x: Axis
    y: Axis
    size: Size = WIDE
    _marks: list[Markup] = field(default_factory=list)

    def place(self, x: float, y: float) -> Point:
        """Return the pixel position of a point."""
        size = self.size
        wide, high = size.width - size.left - size.right, size.height - size.top - size.bottom
        return size.left + wide * self.x.at(x), size.top + high * (1 - self.y.at(y))

    def line(self, points: Sequence[Point], style: int, has_markers: bool = True) -> None:
        """Draw a line in one of the `STYLES`, with markers at some of its points."""
        placed = [self.place(x, y) for x, y in points]
        if not placed:
            return
        shapes = Markup("")
        if has_markers:
            every = math.ceil(len(placed) / MARKED)
            outline = "".join(marker(style, *point) for point in placed[(len(placed) - 1) % every :: every])
            shapes = Markup('<path class="m" d="{}"/>').format(outline)
        line = Markup('<path class="l" d="{}"/>').format(path(placed))
        self._marks.append(Markup('<g class="s{}">{}{}</g>').format(style % STYLES, line, shapes))

    def threads(self, lines: Iterable[Sequence[Point]], kind: str) -> None:
        """Draw thin lines as one element; the style sheet has a look for each kind."""
        placed = "".join(path([self.place(x, y) for x, y in points]) for points in lines if points)
        if placed:
            self._marks.append(Markup('<path class="thread {}" d="{}"/>').format(kind, placed))

    def band(self, lows: Sequence[Point], highs: Sequence[Point], style: int) -> None:
        """Draw the area between two lines, cut at the ends of the y axis."""
        if len(lows) < 2:
            return
        y = self.y
        cut = [self.place(x, min(max(value, y.low), y.high)) for x, value in (*lows, *reversed(highs))]
        self._marks.append(Markup('<path class="band s{}" d="{}z"/>').format(style % STYLES, path(cut)))

    def rule(self, *, x: float | None = None, y: float | None = None, text: str = "") -> None:
        """Draw a dotted line across the panel, with a name at its end."""
        if y is None:
            (x1, y1), (x2, y2) = self.place(x or 0, self.y.low), self.place(x or 0, self.y.high)
            at, anchor = Markup('x="{:.1f}" y="{:.1f}"').format(x1 - 4, y2 + 9), "end"
        else:
            (x1, y1), (x2, y2) = self.place(self.x.low, y), self.place(self.x.high, y)
            at, anchor = Markup('x="{:.1f}" y="{:.1f}"').format(x2, y2 - 4), "end"
        line = Markup('<path class="rule" d="M{:.1f},{:.1f}L{:.1f},{:.1f}"/>').format(x1, y1, x2, y2)
        name = Markup('<text class="t" {} text-anchor="{}">{}</text>').format(at, anchor, text) if text else ""
        self._marks.append(line + name)

    def text(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        """Draw a word in place of the panel's marks."""
        at = self.place(x, y)
        self._marks.append(
            Markup('<text class="t" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(*at, anchor, text)
        )

    def render(self, id_: str, title: str, description: str) -> Markup:
        """Return the panel as an image with a title, and a description for screen readers."""
        return image(
            id_, title, description, self.size.width, self.size.height, self._axes() + Markup("").join(self._marks)
        )

    def _axes(self) -> Markup:
        size = self.size
        bottom, right = size.height - size.bottom, size.width - size.right
        parts = []
        for tick, label in zip(self.y.ticks, labels(self.y.ticks), strict=True):
            _, y = self.place(self.x.low, tick)
            parts.append(Markup('<path class="g" d="M{},{:.1f}H{}"/>').format(size.left, y, right))
            parts.append(
                Markup('<text class="t" x="{}" y="{:.1f}" text-anchor="end">{}</text>').format(
                    size.left - 5, y + 3.8, label
                )
            )
        parts.append(Markup('<path class="a" d="M{},{}H{}"/>').format(size.left, bottom, right))
        for tick, label in zip(self.x.ticks, labels(self.x.ticks), strict=True):
            x, _ = self.place(tick, self.y.low)
            parts.append(Markup('<path class="a" d="M{:.1f},{}v3.5"/>').format(x, bottom))
            parts.append(
                Markup('<text class="t" x="{:.1f}" y="{}" text-anchor="middle">{}</text>').format(x, bottom + 15, label)
            )
        if self.y.label:
            parts.append(Markup('<text class="t" x="0" y="10">{}</text>').format(self.y.label))
        if self.x.label:
            parts.append(
                Markup('<text class="t" x="{}" y="{}" text-anchor="end">{}</text>').format(
                    right, size.height - 4, self.x.label
                )
            )
        return Markup("").join(parts)


def image(id_: str, title: str, description: str, width: float, height: float, content: Markup) -> Markup:
    """Return an SVG that screen readers read as an image, by its title and description."""
    return Markup(
        '<svg role="img" aria-labelledby="{0}-t" aria-describedby="{0}-d" viewBox="0 0 {3:g} {4:g}" width="{3:g}" '
        'height="{4:g}"><title id="{0}-t">{1}</title><desc id="{0}-d">{2}</desc>{5}</svg>'
    ).format(id_, title, description, width, height, content)


def swatch(style: int) -> Markup:
    """Return a piece of a line for a legend; the words beside it name the line."""
    content = Markup('<g class="s{}"><path class="l" d="M1,7H35"/><path class="m" d="{}"/></g>').format(
        style % STYLES, marker(style, 18, 7)
    )
    return decoration(36, 14, content, "swatch")


def decoration(width: float, height: float, content: Markup, kind: str = "scale") -> Markup:
    """Return an SVG that screen readers leave out, because the words beside it say the same."""
    return Markup(
        '<svg aria-hidden="true" class="{0}" viewBox="0 0 {1:g} {2:g}" width="{1:g}" height="{2:g}">{3}</svg>'
    ).format(kind, width, height, content)


def path(points: Sequence[Point]) -> str:
    """Return points as a joined path."""
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)


def marker(style: int, x: float, y: float) -> str:
    """Return the outline of a style's marker around a point: circle, square, triangles, diamond, cross."""
    match style % STYLES:
        case 0:
            return f"M{x - 3:.1f},{y:.1f}a3,3 0 1,0 6,0a3,3 0 1,0 -6,0z"
        case 1:
            return f"M{x - 2.8:.1f},{y - 2.8:.1f}h5.6v5.6h-5.6z"
        case 2:
            return f"M{x:.1f},{y - 3.8:.1f}l3.6,6.4h-7.2z"
        case 3:
            return f"M{x:.1f},{y - 4:.1f}l4,4l-4,4l-4,-4z"
        case 4:
            return f"M{x:.1f},{y + 3.8:.1f}l3.6,-6.4h-7.2z"
        case _:
            return f"M{x - 1:.1f},{y - 3.6:.1f}h2v2.6h2.6v2h-2.6v2.6h-2v-2.6h-2.6v-2h2.6z"


def labels(ticks: Sequence[float]) -> list[str]:
    """Return numbers with equally many decimals, as few as tell them apart; thousands are K.

    Small shares on logarithmic scales are powers of ten.
    """
    if any(0 < abs(tick) < 0.001 for tick in ticks):
        return [f"{tick:g}" for tick in ticks]
    if ticks and max(map(abs, ticks)) >= 10_000:
        return [f"{tick / 1000:g}K" if tick else "0" for tick in ticks]
    decimals = next((n for n in range(7) if all(abs(tick - round(tick, n)) < 1e-9 for tick in ticks)), 3)
    return [f"{tick:.{decimals}f}" for tick in ticks]
