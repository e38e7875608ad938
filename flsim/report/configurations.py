"""Groups of canaries by their configuration (p_u, p_e), or by their number of copies."""

import math
from dataclasses import dataclass

import pandas as pd

from flsim.results.tables import user_share


@dataclass(frozen=True, order=True)
class Configuration:
    """The configuration that a group of canaries has in common; configurations sort by expected copies.

    Attributes:
        order: the sort key.
        p_u, p_e: probabilities; NaN if a number of copies was set.
        copies: planned number of copies; None if probabilities were set, or if the number is not known.
    """

    order: tuple[float, ...]
    p_u: float
    p_e: float
    copies: int | None

    @property
    def label(self) -> str:
        if not math.isnan(self.p_u):
            return f"p_u {user_share(self.p_u)}, p_e {percent(self.p_e)}"
        if self.copies == 0:
            return "controls, never planted"
        return "all canaries" if self.copies is None else f"{self.copies:,} cop{'y' if self.copies == 1 else 'ies'}"


def by_configuration(rows: pd.DataFrame) -> dict[Configuration, pd.DataFrame]:
    """Return rows with a roster's columns by configuration, with the fewest expected insertions first."""
    places: dict[Configuration, list[int]] = {}
    for place, row in enumerate(rows.to_dict("records")):
        p_u, p_e = float(row["p_u"]), float(row["p_e"])
        if math.isnan(p_u) or math.isnan(p_e):
            # NaN equals nothing, so that a key needs one NaN for all.
            copies = row.get("planned_insertions", row.get("insertions"))
            known = None if copies is None or pd.isna(copies) else int(copies)
            key = Configuration((known or 0.0,), math.nan, math.nan, known)
            key = next((other for other in places if other.order == key.order and math.isnan(other.p_u)), key)
        else:
            key = Configuration((float(f"{p_u * p_e:.12g}"), p_u), p_u, p_e, None)
        places.setdefault(key, []).append(place)
    return {key: rows.iloc[places[key]] for key in sorted(places, key=lambda configuration: configuration.order)}


def percent(share: float) -> str:
    """Return a share as a percentage with up to six digits."""
    return f"{100 * share:.6g}%"
