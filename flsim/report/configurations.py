"""Groups of canaries by configuration: (p_u, p_e) or a number of copies, and the rounds in which they are planted."""

import math
from dataclasses import dataclass

import pandas as pd

from flsim.results.tables import rounds_text, user_share


@dataclass(frozen=True, order=True)
class Configuration:
    """The configuration that a group of canaries has in common; configurations sort by expected copies.

    Attributes:
        order: the sort key.
        p_u, p_e: probabilities; NaN if a number of copies was set.
        copies: planned number of copies; None if probabilities were set, or if the number is not known.
        window: the rounds in which canaries are planted, in words; empty for all rounds.
    """

    order: tuple[float, ...]
    p_u: float
    p_e: float
    copies: int | None
    window: str = ""

    @property
    def label(self) -> str:
        """Return the configuration in words."""
        return ", ".join(filter(None, (self._often, self.window)))

    @property
    def _often(self) -> str:
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
        bounds = row.get("first_round"), row.get("last_round")
        window = rounds_text(*bounds)
        start = 0.0 if pd.isna(bounds[0]) else float(bounds[0])
        if math.isnan(p_u) or math.isnan(p_e):
            # NaN equals nothing, so that a key needs one NaN for all.
            copies = row.get("planned_insertions", row.get("insertions"))
            known = None if copies is None or pd.isna(copies) else int(copies)
            key = Configuration((known or 0.0, start), math.nan, math.nan, known, window)
            alike = (other for other in places if math.isnan(other.p_u))
            key = next((other for other in alike if (other.order, other.window) == (key.order, window)), key)
        else:
            key = Configuration((float(f"{p_u * p_e:.12g}"), p_u, start), p_u, p_e, None, window)
        places.setdefault(key, []).append(place)
    return {key: rows.iloc[places[key]] for key in sorted(places, key=lambda configuration: configuration.order)}


def percent(share: float) -> str:
    """Return a share as a percentage with up to six digits."""
    return f"{100 * share:.6g}%"
