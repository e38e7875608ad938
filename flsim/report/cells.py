"""Columns of the report's tables: which columns of a frame are shown, their order, and the text of their cells."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd
from markupsafe import Markup

from flsim.measures.quantity import flags, numbers, of_model, select_for
from flsim.report.blocks import Cell, number
from flsim.results.against_published import AGAINST
from flsim.results.columns import (
    FALSE_POSITIVE,
    columns_of,
    columns_over_seeds,
    is_in,
    mean_of,
    prefix_of,
    quantities_in,
)
from flsim.results.published import ASKED, BESIDE, FORMS, PREFIX, ROW_OF_QUESTION, has_counts
from flsim.show.memorization import text_of_count

Form = tuple[str, str, float]  # heading, format ("count" of memorized canaries, or "canaries") and factor
TRAINED: dict[str, Form] = {"round": ("Round", "{:,.0f}", 1), "epochs": ("Epochs", "{:.3g}", 1)}
PLANTED: dict[str, Form] = {"canaries": ("planted", "canaries", 1), "controls": ("never planted", "{:,.0f}", 1)}
PRIVACY: dict[str, Form] = {
    "epsilon_paper": ("ε, paper’s", "{:.3g}", 1),
    "epsilon_sound": ("ε, sound", "{:.4g}", 1),
    "sound_convention": ("convention", "{}", 1),
    "epsilon": ("ε", "{:.3g}", 1),
    "delta": ("δ", "{:.2g}", 1),
    "record_epsilon": ("ε, record’s", "{:.3g}", 1),
    "record_convention": ("convention", "{}", 1),
    "record_delta": ("δ, record’s", "{:.2g}", 1),
    "references": ("|R|", "{:,.0f}", 1),
    "whole_test_users": ("whole test authors", "{:,.0f}", 1),
    "status": ("Status", "{}", 1),
}
# Columns in the sentences around a table, or elsewhere in the report.
ELSEWHERE = {
    *("setting", "series", "runs", "run", "seeds", "given", "diverged", "left_out", "reason"),
    *(f"{PREFIX}{name}" for name in ("table", "data", "setting", "canaries", "delta", *ROW_OF_QUESTION)),
    *ASKED,
    *AGAINST,
}


class Cells:
    """The columns of one frame that a report shows, and their cells.

    Args:
        frame: a table of `flsim.results.tables`.
    """

    def __init__(self, frame: pd.DataFrame) -> None:
        self._frame = frame
        self.quantities = [quantity for quantity in select_for(quantities_in(frame), "table") if is_in(frame, quantity)]
        self._forms = self._known()
        self._numbers = {mean_of(quantity): quantity for quantity in numbers(self.quantities)}

    def _known(self) -> dict[str, Form]:
        """Return the forms of known columns, in their order; other columns follow under their own names."""
        forms = dict(TRAINED)
        for flag in flags(self.quantities):
            forms[flag.name] = (flag.heading, "count", 1)
            forms[f"{flag.name}_lowest"] = (f"{flag.heading} lowest", "{}", 1)
        forms |= PLANTED
        for flag in flags(self.quantities):
            forms[f"{flag.name}_controls"] = (f"{flag.heading} of these", "{:,.0f}", 1)
        forms[FALSE_POSITIVE] = ("by chance", "{:.2g}", 1)
        for quantity in numbers(self.quantities):
            heading = quantity.title if quantity.beside else quantity.phrase
            forms[mean_of(quantity)] = (heading, _finer(quantity.format), quantity.scale)
        for quantity in of_model(self.quantities):
            forms[quantity.name] = (quantity.phrase, quantity.format, quantity.scale)
        return forms | FORMS | PRIVACY

    @property
    def names(self) -> list[str]:
        """Columns with values: known ones first, each followed by its published values."""
        frame, order = self._frame, {name: place for place, name in enumerate(self._forms)}

        def place(name: str) -> tuple[int, bool]:
            plain = name.removeprefix(PREFIX)
            ours = BESIDE.get(plain, plain) if name != plain else plain
            return order.get(ours if ours in frame else plain, len(order)), name != plain

        hidden = ELSEWHERE | self._within | ({"round"} if frame["epochs"].notna().any() else set())
        names = [str(name) for name in frame.columns if name not in hidden and frame[name].notna().any()]
        kept = [name for name in names if not name.endswith("_lowest") or name.removeprefix(PREFIX) in names]
        return sorted(kept, key=place)

    @property
    def _within(self) -> set[str]:
        """Columns that appear in another column's cell: deviations, and the ends of intervals."""
        names = {
            name for quantity in self.quantities for name in (*columns_of(quantity), *columns_over_seeds(quantity))
        }
        return names - {*self._forms}

    def heading(self, name: str) -> Cell:
        """Return the heading of a column."""
        plain = name.removeprefix(PREFIX)
        text = self._forms[plain][0] if plain in self._forms else plain.replace("_", " ")
        return text if plain == name else Markup("{}, <em>published</em>").format(text)

    def cell(self, name: str, row: Mapping[Any, Any], is_number: bool) -> Cell:
        """Return a value as text, with its spread or its total if the frame has one."""
        value, plain = row[name], name.removeprefix(PREFIX)
        if pd.isna(value):
            return "–"
        _, template, scale = self._forms.get(plain, ("", "{:.4g}", 1.0))
        if not is_number:
            return str(value)
        deviation = row.get(f"{name}_sd")
        spread = "" if deviation is None or pd.isna(deviation) else f" ± {_number(deviation * scale, template)}"
        if template == "count" and has_counts(row):
            canaries = row[f"{PREFIX}canaries" if plain != name else "canaries"]
            share, canaries = number(value / canaries, "{:.0%}"), text_of_count(canaries)
            size = row.get(f"{plain}_size") if plain != name else None
            judged = "" if size is None or pd.isna(size) else f"; {size}"
            return Markup("{} <small>{}{} of {}{}</small>").format(
                share, _number(value, template), spread, canaries, judged
            )
        text = _number(value * scale, template)
        for low, high in self._intervals(name, row):
            return Markup("{} <small>{} to {}</small>").format(text, low, high)
        return Markup("{} <small>{}</small>").format(text, spread) if spread else text

    def _intervals(self, name: str, row: Mapping[Any, Any]) -> Iterator[list[str]]:
        """Yield the ends of intervals of a mean over canaries: over seeds first, then over canaries."""
        quantity = self._numbers.get(name)
        for kind in (f"{prefix_of(quantity)}seeds", quantity.column) if quantity else ():
            ends = [row.get(f"{kind}_{end}") for end in ("low", "high")]
            if quantity and ends[0] is not None and not pd.isna(ends[0]):
                yield [number(end, quantity.format) for end in ends]


def _finer(template: str) -> str:
    """Return the format of a mean, with one decimal more than the format of a value if decimals are fixed."""
    return re.sub(r"\.(\d)f", lambda match: f".{int(match[1]) + 1}f", template)


def _number(value: Any, template: str) -> str:
    """Return a number as text; a mean of counts has a decimal."""
    return number(value).removesuffix(".0") if template in {"count", "canaries"} else number(value, template)
