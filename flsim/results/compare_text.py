"""Text of comparisons: p-values, differences with their intervals, and JSON."""

import math
from typing import Any

import pandas as pd

from flsim.measures.quantity import Quantity
from flsim.results.columns import DIFFERENCE, prefix_of
from flsim.results.compare import signed
from flsim.results.formats import formatted
from flsim.results.layout import Column


def p_text(p: float) -> str:
    """Return a p-value in at most five characters, e.g. ``"0.054"`` or ``"2e-08"``; empty for NaN."""
    if pd.isna(p):
        return ""
    return f"{p:.3f}" if p >= 0.001 else f"{p:.0e}" if p > 0 else "0"


def p_texts(p: "pd.Series[float]") -> list[str]:
    """Return the text of each p-value."""
    return [p_text(value) for value in p]


def difference_columns(table: pd.DataFrame, quantity: Quantity) -> list[Column]:
    """Return two columns: the mean difference of a number in each row, and half its interval."""
    mean, low, high = (table[prefix_of(quantity) + name] for name in DIFFERENCE)
    sign = signed(quantity)
    return [
        Column(f"{quantity.heading}, a-b", formatted(mean, f"{{:{sign}}}")),
        Column("CI", formatted((high - low) / 2, f"{{:{sign.removeprefix('+')}}}")),
    ]


def counts_text(table: pd.DataFrame, name: str, template: str) -> list[str]:
    """Return a number in a and in b for each row, e.g. ``"27/14"``."""
    pairs = zip(table[f"{name}_a"], table[f"{name}_b"], strict=True)
    return ["" if pd.isna(a) or pd.isna(b) else f"{template.format(a)}/{template.format(b)}" for a, b in pairs]


def json_rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return one mapping per row; None stands for values that are unknown or not finite."""
    rows = table.astype(object).where(table.notna(), None).to_dict("records")
    return [
        {
            str(name): None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in row.items()
        }
        for row in rows
    ]
