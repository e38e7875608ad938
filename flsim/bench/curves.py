"""Curves of cost against size, each with the exponent of the power law that fits it best."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy

CONFIDENCE = 0.95


@dataclass(frozen=True)
class PowerLaw:
    """The law y = factor x^exponent, by least squares of log y on log x.

    Attributes:
        factor: y at x = 1.
        exponent: 1 for linear growth, 0 for none.
        low, high: ends of the 95% interval of the exponent, Student's t with n - 2 degrees of freedom; None for two
            points. The interval holds the scatter of points about a line. A fixed cost, which bends the curve, is not
            in it: look at `Quantity.last`.
    """

    factor: float
    exponent: float
    low: float | None
    high: float | None


def fit(sizes: Sequence[float], values: Sequence[float]) -> PowerLaw | None:
    """Return the power law of points; None below two sizes, or where a size or a value is not above 0."""
    if len(set(sizes)) < 2 or min(*sizes, *values) <= 0:
        return None
    x, y = np.log(np.array([sizes, values], dtype=np.float64))
    spread = ((x - x.mean()) ** 2).sum()
    exponent = float(((x - x.mean()) * (y - y.mean())).sum() / spread)
    intercept = float(y.mean() - exponent * x.mean())
    if len(x) < 3:
        return PowerLaw(math.exp(intercept), exponent, None, None)
    freedom = len(x) - 2
    error = math.sqrt(float(((y - intercept - exponent * x) ** 2).sum()) / freedom / spread)
    half = float(scipy.stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * error
    return PowerLaw(math.exp(intercept), exponent, exponent - half, exponent + half)


@dataclass(frozen=True)
class Quantity:
    """A measured cost, at each size of a curve.

    Attributes:
        name: key in the JSON, which ends with the unit.
        title: heading of its column and its panel.
        values: one value for each size, in the unit of the JSON: seconds or bytes.
        expected: the exponent by design; None where there is none to hold it against.
        scale: factor from `values` to the unit in the title.
    """

    name: str
    title: str
    values: tuple[float, ...]
    expected: float | None
    scale: float = 1.0


@dataclass(frozen=True)
class Curve:
    """Costs of one kind of work at several sizes.

    Attributes:
        name: its name on the command line.
        axis: what a size counts.
        about: what was the same at all sizes.
        sizes: at least two, ascending.
        quantities: what was measured.
    """

    name: str
    axis: str
    about: str
    sizes: tuple[int, ...]
    quantities: tuple[Quantity, ...]

    def law(self, quantity: Quantity) -> PowerLaw | None:
        """Return the power law of a quantity; see `fit`."""
        return fit(self.sizes, quantity.values)

    def values_of(self, name: str) -> tuple[float, ...]:
        """Return the values of a quantity by its name."""
        return next(quantity.values for quantity in self.quantities if quantity.name == name)

    def last(self, quantity: Quantity) -> float | None:
        """Return the exponent between the last two sizes, where a fixed cost weighs least."""
        law = fit(self.sizes[-2:], quantity.values[-2:])
        return None if law is None else law.exponent

    def as_json(self) -> dict[str, Any]:
        """Return what it holds, with ``points`` and, by quantity, ``exponents`` (None where no law can be fitted)."""
        points = [
            {"size": size, **{quantity.name: quantity.values[index] for quantity in self.quantities}}
            for index, size in enumerate(self.sizes)
        ]
        exponents = {}
        for quantity in self.quantities:
            law = self.law(quantity)
            values = {} if law is None else {"value": law.exponent, "low": law.low, "high": law.high}
            exponents[quantity.name] = values | {"last": self.last(quantity), "expected": quantity.expected}
        return {"axis": self.axis, "about": self.about, "points": points, "exponents": exponents}

    def table(self) -> str:
        """Return a table with a row for each size, and below it the exponents."""
        heads = [self.axis, *(quantity.title for quantity in self.quantities)]
        rows = [
            [f"{size:,}", *(_number(quantity.scale * quantity.values[index]) for quantity in self.quantities)]
            for index, size in enumerate(self.sizes)
        ]
        laws = [self.law(quantity) for quantity in self.quantities]
        rows.append(["exponent", *("-" if law is None else f"{law.exponent:.2f}" for law in laws)])
        rows.append(["95% interval", *("-" if law is None else _interval(law) for law in laws)])
        rows.append(["last doubling", *(_exponent(self.last(quantity)) for quantity in self.quantities)])
        rows.append(["expected", *(_exponent(quantity.expected) for quantity in self.quantities)])
        widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
        lines = [
            "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in (heads, *rows)
        ]
        return "\n".join([f"{self.name}: {self.about}", *lines])


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _exponent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _interval(law: PowerLaw) -> str:
    return "-" if law.low is None else f"[{law.low:.2f}, {law.high:.2f}]"
